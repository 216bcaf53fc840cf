"""The watchdog: a thread of the process that looks at all its communicators, and speaks up when a call does not return.

It starts with the first communicator and ends with the process; a forked child has none until it makes a communicator
of its own. It takes no lock that a call may hold for long, never calls into NCCL but to abort, and asks CUDA in another
thread: where a peer is missing, the program fills the launch queue, and then all calls into CUDA block.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..bindings.workers import Helper, Silent
from . import frames, progress, recorder
from .settings import RAISE
from .track import Track

_JOIN_SECONDS = 0.5
ANSWER_SECONDS = 1.0  # for CUDA, which takes microseconds
_SILENT = "the CUDA driver does not answer: the launch queue is full or the device hangs"

T = TypeVar("T")


@dataclass
class Stuck:
    """A call that has been under way for too long.

    inside  its C function has not returned; else its stream has not passed it
    note    what this rank alone knows about it"""

    track: Track
    entry: int
    seconds: float
    inside: bool
    note: str = ""


@dataclass
class Watched:
    """What the watchdog remembers of a communicator from look to look."""

    entry: int = 0  # the newest call, at the last look
    since: float = 0.0  # it has been the newest one for so long
    completed: int = 0
    mark: progress.Mark | None = None
    reported: int = 0  # the newest call that was reported as stuck
    asked: Stuck | None = None  # of which the ranks on other machines were asked


class Watchdog:
    """The thread."""

    def __init__(self, own: recorder.Recorder) -> None:
        self.recorder, self.settings = own, own.settings
        self._watched: dict[int, Watched] = {}
        self._cuda = Helper()
        self._stop = threading.Event()
        self.looks = 0  # so far
        self._told: set[str] = set()  # what others have told this process of itself
        self._thread = threading.Thread(target=self._work, name="pynccl watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; at most half a second."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        while not self._stop.wait(self.settings.poll) and self.recorder.mine:
            with contextlib.suppress(Exception):  # a watchdog that dies tells nothing
                self.look()

    def look(self) -> None:
        """One look at everything."""
        self.looks += 1
        self._look_at_program()
        tracks = list(self.recorder.tracks)
        for gone in self._watched.keys() - {track.number for track in tracks}:
            del self._watched[gone]
        for track in tracks:
            watched = self._watched.setdefault(track.number, Watched())
            with contextlib.suppress(Exception):  # what goes wrong with one must not hide the others
                stuck = self._look_at(track, watched)
                if stuck is not None and self.settings.timeout and watched.reported < stuck.entry:
                    watched.reported = stuck.entry
                    self._ask(stuck, watched)
        for exchange in list(dict.fromkeys(track.exchange for track in tracks if track.exchange is not None)):
            if exchange.due:
                self._poll(exchange)

    def _look_at_program(self) -> None:
        """That it lives; where its threads are, if another process asks; and whether others wait for it."""
        self.recorder.look()
        if self.recorder.is_asked():
            self._tell_where()
        if text := self.recorder.told():
            first, *rest = text.splitlines()
            what = first.partition(";")[0]  # then comes how long they have waited
            if what not in self._told:
                self._told.add(what)
                lines = ["pynccl watchdog: other ranks wait for this one", first, *rest]
                print("\n  ".join(lines), file=sys.stderr, flush=True)

    def _look_at(self, track: Track, watched: Watched) -> Stuck | None:
        head = track.head
        if head != watched.entry:
            watched.entry, watched.since = head, time.monotonic()
            return None
        if not head:
            return None
        if not track.has_returned(head):
            seconds = time.monotonic() - watched.since
            return Stuck(track, head, seconds, True) if seconds > self.settings.timeout else None
        return self._look_at_streams(track, watched)

    def _look_at_streams(self, track: Track, watched: Watched) -> Stuck | None:
        """Nothing was issued since the last look: have the streams passed what was issued before?"""
        if track.library is None or watched.completed == watched.entry or track.explains:
            return None  # of one that has failed, the streams pass what came to nothing
        try:
            if watched.mark is None:
                watched.mark = self._mark(track, watched)
                if watched.mark is None:
                    return None
            passed = self._ask_streams(track, watched.mark.passed)
        except Silent as silence:
            track.waits()
            late = silence.seconds > self.settings.timeout
            return Stuck(track, watched.entry, silence.seconds, False, _SILENT) if late else None
        if passed is None:
            watched.mark = None
            return None
        if passed:
            watched.completed = watched.mark.entry
            track.completed(watched.completed)
            watched.mark = None
            return None
        track.waits()
        seconds = time.monotonic() - max(watched.mark.made, watched.since)
        return Stuck(track, watched.mark.entry, seconds, False) if seconds > self.settings.timeout else None

    def _mark(self, track: Track, watched: Watched) -> progress.Mark | None:
        streams = track.streams(watched.completed)
        if track.library.is_host:
            streams.discard(0)  # the caller's, who has returned
        return self._ask_streams(
            track, lambda: progress.mark(track.library, track.ordinal, watched.entry, streams), bool(streams)
        )

    def _ask_streams(self, track: Track, call: Callable[[], T], asks: bool = True) -> T:
        """What `call()` returns, which asks CUDA; Silent if that does not answer."""
        return call() if track.library.is_host or not asks else self._cuda.ask(call, ANSWER_SECONDS)

    def _ask(self, stuck: Stuck, watched: Watched) -> None:
        """Find out who is missing: from the files of this machine, or from all machines, whose answer comes later."""
        from . import diagnosis  # what it imports takes long: not before it is needed

        track = stuck.track
        self._tell_where(stuck)
        if track.exchange is None or diagnosis.all_here(track):
            self._report(stuck, diagnosis.report(track))
        elif track.exchange.ask(watched.since):
            watched.asked = stuck
        else:
            self._report(stuck, diagnosis.report(track, why_alone=track.exchange.out_of_reach))

    def _poll(self, exchange: Any) -> None:
        """Answer what ranks on other machines ask, and hear what they have answered."""
        from . import diagnosis

        if exchange.poll():
            self._tell_where()
            exchange.answer(diagnosis.own_answer(exchange.job, self.recorder.path))
        answered = exchange.answers()
        if answered is None:
            return
        for watched in self._watched.values():
            stuck = watched.asked
            if stuck is None or stuck.track.exchange is not exchange:
                continue
            watched.asked = None
            if watched.entry != stuck.entry:
                continue  # it has gone on meanwhile
            stuck.seconds = time.monotonic() - watched.since
            if exchange.out_of_reach:
                self._report(stuck, diagnosis.report(stuck.track, why_alone=exchange.out_of_reach))
                continue
            if not isinstance(answered, str):  # one verdict for all that are stuck, here and elsewhere
                answered = diagnosis.report(stuck.track, answered)
                exchange.share(answered)
            self._report(stuck, answered)

    def _tell_where(self, stuck: Stuck | None = None) -> str:
        """Write down where the main thread is, and the stack of the one that makes the call that is stuck, else its
        own. Returns that stack."""
        threads = frames.take()
        main = frames.of_main(threads)
        chosen = frames.of_call(threads, stuck.track.thread) if stuck is not None and stuck.inside else main
        stack = frames.users_stack(chosen)
        self.recorder.write_where(frames.users_line(main), stack)
        return stack

    def _report(self, stuck: Stuck, text: str) -> None:
        """Say who is missing, on stderr; with PYNCCL_WATCH_ACTION=raise abort the communicator, too."""
        text = f"{text}\n{stuck.note}" if stuck.note else text
        track, comm = stuck.track, stuck.track.comm()
        aborts = self.settings.action == RAISE and comm is not None
        who = f"rank {track.rank} of {track.size} (comm {track.name!r})"
        lines = [
            f"pynccl watchdog: {who} has waited {stuck.seconds:.1f} s",
            *text.splitlines(),
            "this rank's stack, innermost line last:",
            *self._tell_where(stuck).splitlines(),
            *(["the communicator is aborted (PYNCCL_WATCH_ACTION=raise)"] if aborts else []),
        ]
        print("\n  ".join(lines), file=sys.stderr, flush=True)
        if aborts:
            comm._abort_late(f"rank {track.rank} waited {stuck.seconds:.1f} s: {text}")


_watchdog: Watchdog | None = None


def prepare() -> None:
    """A communicator is there, or is about to be: the watchdog runs from now on."""
    global _watchdog
    own = recorder.started()
    if own is None or (_watchdog is not None and _watchdog.recorder is own):
        return
    with own.sharing, contextlib.suppress(RuntimeError):  # the interpreter is ending, and starts no more threads
        if _watchdog is None or _watchdog.recorder is not own:  # another thread was faster
            _watchdog = Watchdog(own)


def stop() -> None:
    """At the end of the process."""
    global _watchdog
    if _watchdog is not None and _watchdog.recorder.mine:
        _watchdog.stop()
    _watchdog = None
