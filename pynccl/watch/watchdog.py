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
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..bindings.workers import Helper, Silent
from . import frames, progress, recorder
from .records import ProcessRecord
from .track import Track

if TYPE_CHECKING:  # with one machine it is not needed
    from .cross_node import Exchange

_JOIN_SECONDS = 0.5
ANSWER_SECONDS = 1.0  # for CUDA, which takes microseconds
_SILENT = "the CUDA driver does not answer: the launch queue is full or the device hangs"

T = TypeVar("T")


class Stuck(NamedTuple):
    """A call that has been under way since then, by time.monotonic().

    inside  its C function has not returned; else its stream has not passed it
    note    what this rank alone knows about it"""

    track: Track
    entry: int
    since: float
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
    ended: int = 0  # the newest call that took longer than its communicator's call_timeout


class Watchdog:
    """The thread."""

    def __init__(self, own: recorder.Recorder) -> None:
        self.recorder, self.settings = own, own.settings
        self._watched: dict[Track, Watched] = {}
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
        self._watched = {track: self._watched.get(track) or Watched() for track in tracks}
        verdicts: dict[Exchange, str] = {}  # one for all that are stuck at a store
        for stuck, ends in self._overdue():
            with contextlib.suppress(Exception):  # what goes wrong with one must not hide the others
                self._report(stuck, self._verdict(stuck, verdicts), ends)
        for exchange in {track.exchange for track in tracks} - {None}:
            if exchange.due:
                with contextlib.suppress(Exception):
                    exchange.answer(partial(self._records, exchange))

    def _overdue(self) -> list[tuple[Stuck, bool]]:
        """Calls that have been under way for longer than the timeout, each once; and whether they are to end."""
        found = []
        for track, watched in self._watched.items():
            with contextlib.suppress(Exception):
                stuck = self._look_at(track, watched)
                if stuck is None:
                    continue
                waited, comm = time.monotonic() - stuck.since, track.comm()
                limit = comm.call_timeout if comm is not None else None
                if limit is not None and waited > limit and watched.ended < stuck.entry:
                    watched.ended = watched.reported = stuck.entry
                    found.append((stuck, True))
                elif self.settings.timeout and waited > self.settings.timeout and watched.reported < stuck.entry:
                    watched.reported = stuck.entry
                    found.append((stuck, self.settings.raises))
        return found

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
            return Stuck(track, head, watched.since, True)
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
            return Stuck(track, watched.entry, time.monotonic() - silence.seconds, False, _SILENT)
        mark = watched.mark
        if passed is False:
            track.waits()
            return Stuck(track, mark.entry, max(mark.made, watched.since), False)
        watched.mark = None
        if passed:
            watched.completed = mark.entry
            track.completed(mark.entry)
        return None

    def _mark(self, track: Track, watched: Watched) -> progress.Mark | None:
        streams = track.streams(watched.completed)
        if track.library.is_host:
            streams.discard(0)  # the caller's, who has returned
        return self._ask_streams(track, partial(progress.mark, track.library, track.ordinal, watched.entry, streams))

    def _ask_streams(self, track: Track, call: Callable[[], T]) -> T:
        """What `call()` returns, which asks CUDA; Silent if that does not answer."""
        return call() if track.library.is_host else self._cuda.ask(call, ANSWER_SECONDS)

    def _verdict(self, stuck: Stuck, known: dict[Exchange, str]) -> str:
        """Who is missing: from the files of this machine, or from the records of all machines."""
        from . import diagnosis  # what it imports takes long: not before it is needed

        track, exchange = stuck.track, stuck.track.exchange
        self._tell_where(stuck)
        if exchange is None or diagnosis.all_here(track):
            return diagnosis.report(track)
        if exchange not in known:
            records, judge = partial(self._records, exchange), partial(diagnosis.report, track)
            known[exchange] = exchange.verdict(stuck.since, records, judge)
        return known[exchange]

    def _records(self, exchange: Exchange) -> list[ProcessRecord]:
        """What this process answers, for itself and for those of its machine that cannot."""
        from . import diagnosis

        self._tell_where()
        return diagnosis.own_answer(exchange.uid, self.recorder.path)

    def _tell_where(self, stuck: Stuck | None = None) -> str:
        """Write down where the main thread is, and the stack of the one that makes the call that is stuck, else its
        own. Returns that stack."""
        threads = frames.take()
        main = frames.of_main(threads)
        chosen = frames.of_call(threads, stuck.track.thread) if stuck is not None and stuck.inside else main
        stack = frames.users_stack(chosen)
        self.recorder.write_where(frames.users_line(main), stack)
        return stack

    def _report(self, stuck: Stuck, text: str, ends: bool) -> None:
        """Say who is missing, on stderr; with PYNCCL_WATCH_ACTION=raise, or past the communicator's call_timeout, abort
        it, too."""
        track, comm = stuck.track, stuck.track.comm()
        if stuck.inside and (track.head != stuck.entry or track.has_returned(stuck.entry)):
            return  # it has gone on meanwhile
        text = f"{text}\n{stuck.note}" if stuck.note else text
        waited = f"waited {time.monotonic() - stuck.since:.1f} s"
        aborts, limit = ends and comm is not None, comm.call_timeout if comm is not None else None
        why = "PYNCCL_WATCH_ACTION=raise" if self.settings.raises else "its timeout"
        who = f"rank {track.rank} of {track.size} (comm {track.name!r})"
        lines = [
            f"pynccl watchdog: {who} has {waited}",
            *text.splitlines(),
            "this rank's stack, innermost line last:",
            *self._tell_where(stuck).splitlines(),
            *([f"the communicator is aborted ({why})"] if aborts else []),
        ]
        print("\n  ".join(lines), file=sys.stderr, flush=True)
        if aborts:
            comm._abort_late(f"rank {track.rank} {waited}{f', timeout {limit:g} s' if limit else ''}: {text}")


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
