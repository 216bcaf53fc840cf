"""The watchdog: a thread that polls all communicators of the process and reports calls that do not complete.

It starts with the first communicator and ends with the process; a forked child gets one when it creates a communicator.
It takes no lock that a call may hold for long, and calls NCCL only to abort. It calls CUDA in another thread: if a peer
is missing, the program may fill the launch queue, and then every CUDA call blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..bindings.library import Library, host_module
from ..bindings.workers import NoAnswer, QueryWorker, WorkerCall
from ..interop.devices import cuda_driver, on_device
from ..interop.events import pooled, relaxed
from . import frames, recorder
from .formatting import at
from .records import ProcessRecord
from .track import Track

if TYPE_CHECKING:  # a single-node job does not import it
    from .cross_node import Exchange

_JOIN_SECONDS = 0.5
_ONE_THREAD_SECONDS = 2.0  # see Watchdog._note_one_thread
ANSWER_SECONDS = 1.0  # timeout of CUDA calls, which take microseconds
_CUDA_SILENT = "the CUDA driver does not answer: the launch queue is full or the device hangs"

T = TypeVar("T")


class OverdueCall(NamedTuple):
    """A call that has not completed since `since`, by time.monotonic().

    inside  its C function has not returned; False: its stream has not completed it
    awaited since when the program waits for it; 0.0: it does not
    note    additional information that only this rank has"""

    track: Track
    entry: int
    since: float
    inside: bool
    awaited: float
    note: str = ""

    @property
    def waited(self) -> float:
        """Seconds that the program has waited."""
        return time.monotonic() - max(self.since, self.awaited) if self.awaited else 0.0


@dataclass
class CommState:
    """The watchdog's state for one communicator between polls."""

    entry: int = 0  # the newest call at the last poll
    since: float = 0.0  # when it was first observed as the newest call
    completed: int = 0
    mark: Mark | None = None
    reported: int = 0  # the newest call that was reported as overdue
    ended: int = 0  # the newest call that exceeded its communicator's call_timeout


class Watchdog:
    """The watchdog thread of a process."""

    def __init__(self, own: recorder.Recorder) -> None:
        self.recorder, self.settings = own, own.settings
        self._states: dict[Track, CommState] = {}
        self._cuda = QueryWorker()
        self._stop = threading.Event()
        self.polls = 0  # number of polls so far
        self._printed: set[str] = set()  # messages from other ranks already printed
        self._noted = not self.settings.timeout  # whether `_note_one_thread` has printed, or must not
        self._running = WorkerCall(self._work, "watchdog", until_exit=True)

    def stop(self) -> None:
        """Stop polling. Wait up to half a second for the last poll."""
        self._stop.set()
        self._running.done.wait(_JOIN_SECONDS)

    def _work(self) -> None:
        while not self._stop.wait(self.settings.poll) and self.recorder.mine:
            with contextlib.suppress(Exception):  # an error must not end the watchdog
                self.poll()

    def poll(self) -> None:
        """Poll everything once."""
        self.polls += 1
        self._poll_process()
        tracks = list(self.recorder.tracks)
        self._states = {track: self._states.get(track) or CommState() for track in tracks}
        verdicts: dict[Exchange, str] = {}  # one per store, for all of its overdue calls
        for overdue, abort in self._overdue():
            with contextlib.suppress(Exception):  # an error with one must not hide the others
                self._report(overdue, self._verdict(overdue, verdicts), abort)
        for exchange in {track.exchange for track in tracks} - {None}:
            if exchange.due:
                with contextlib.suppress(Exception):
                    exchange.answer(partial(self._records, exchange))

    def _overdue(self) -> list[tuple[OverdueCall, bool]]:
        """Return the calls that have exceeded their timeout, each once, and whether to abort them."""
        found = []
        for track, state in self._states.items():
            with contextlib.suppress(Exception):
                overdue = self._poll_comm(track, state)
                if overdue is None:
                    continue
                runs, comm = time.monotonic() - overdue.since, track.comm()
                new = state.reported < overdue.entry
                if overdue.inside and runs > _ONE_THREAD_SECONDS and new and not self._noted:
                    self._note_one_thread(track)
                limit = comm._call_timeout if comm is not None else None
                if limit is not None and runs > limit and state.ended < overdue.entry:
                    state.ended = state.reported = overdue.entry
                    found.append((overdue, True))
                elif self.settings.timeout and overdue.waited > self.settings.timeout and new:
                    state.reported = overdue.entry
                    found.append((overdue, self.settings.raises))
        return found

    def _note_one_thread(self, track: Track) -> None:
        """Print, once, what to type if the main thread waits in a call for other ranks whose calls it makes itself.

        The program that needs it: a notebook with `a, b = pynccl.init_all(2)`, where a.all_reduce(x) never returns.
        That no other thread will make the calls of `b` cannot be known, so this is a note and no error."""
        ranks = [other for other in self.recorder.tracks if other.uid == track.uid]
        threads = {other.thread for other in ranks} - {0}  # 0: no call yet
        if len(ranks) < track.size or track.size == 1 or threads != {threading.main_thread().ident}:
            return
        inside = [other for other in ranks if other.head and not other.has_returned(other.head)]
        if len(inside) > 1:  # the calls of a group, which takes long
            return
        self._noted = True
        line = re.sub(r"(:\d+).*", r"\1", frames.place(frames.main_stack(frames.all_stacks())))
        _print(
            [
                f"pynccl: rank {track.rank} of {track.size} (comm {track.name!r}) waits{at(line)} for other ranks, "
                "which are in this process too",
                "if one thread makes the calls of all ranks, put them into one group:",
                "    with pynccl.group():",
                "        for comm, x in zip(comms, xs): comm.all_reduce(x)",
                "barrier, split and pynccl_autograd need a thread for each rank, such as of a ThreadPoolExecutor",
            ]
        )

    def _poll_process(self) -> None:
        """Write the heartbeat, write the stacks if another process wants them, and print messages of other ranks."""
        self.recorder.beat()
        if self.recorder.stack_requested():
            self._write_stack()
        if text := self.recorder.take_message():
            first, *rest = text.splitlines()
            what = first.partition(";")[0]  # without the waiting time, which changes
            if what not in self._printed:
                self._printed.add(what)
                lines = ["pynccl watchdog: other ranks wait for this rank", first, *rest]
                _print(lines)

    def _poll_comm(self, track: Track, state: CommState) -> OverdueCall | None:
        head = track.head
        if head != state.entry:
            state.entry, state.since = head, time.monotonic()
            return None
        if not head:
            return None
        inside = not track.has_returned(head)
        awaited = self._awaited_since(track, state, inside)
        if inside:
            return OverdueCall(track, head, state.since, True, awaited)
        return self._poll_streams(track, state, awaited)

    def _awaited_since(self, track: Track, state: CommState, inside: bool) -> float:
        """Return since when the program waits for the unfinished calls; 0.0: it has posted them and does not. It waits
        for those that it made itself, and for those on CUDA streams, as far as is known."""
        on_host = track.library is not None and track.library.is_host
        if not (track.is_posted(state.entry) if inside else on_host):
            return state.since
        since = awaited_since(set(track.streams(state.completed, state.entry)))
        track.mark_awaited(since)
        return since

    def _poll_streams(self, track: Track, state: CommState, awaited: float) -> OverdueCall | None:
        """Check whether the streams have completed the calls so far. No call was issued since the last poll."""
        if track.library is None or state.completed == state.entry or track.explains:
            return None  # after a failure, streams pass calls that did not succeed
        try:
            if state.mark is None:
                state.mark = self._mark(track, state)
                if state.mark is None:
                    return None
            passed = self._ask_streams(track, state.mark.passed)
        except NoAnswer as silence:
            track.mark_waiting()
            since = time.monotonic() - silence.seconds
            return OverdueCall(track, state.entry, since, False, since, _CUDA_SILENT)
        mark = state.mark
        if passed is False:
            track.mark_waiting()
            return OverdueCall(track, mark.entry, max(mark.made, state.since), False, awaited)
        state.mark = None
        if passed:
            state.completed = mark.entry
            track.completed(mark.entry)
        return None

    def _mark(self, track: Track, state: CommState) -> Mark | None:
        streams = track.streams(state.completed, state.entry)
        for synchronous in {0, track.posts_on} if track.library.is_host else {track.posts_on} - {0}:
            streams.pop(synchronous, None)  # its calls have returned
        details = (track.library, track.ordinal, state.entry, streams, track.recorded)
        return self._ask_streams(track, partial(mark, *details))

    def _ask_streams(self, track: Track, call: Callable[[], T]) -> T:
        """Return `call()`, which calls CUDA. Raise NoAnswer if CUDA does not answer in time."""
        return call() if track.library.is_host else self._cuda.query(call, ANSWER_SECONDS)

    def _verdict(self, overdue: OverdueCall, known: dict[Exchange, str]) -> str:
        """Return which rank is missing, from the files of this node, or from the records of all nodes."""
        from . import diagnosis  # a slow import, rarely needed

        track, exchange = overdue.track, overdue.track.exchange
        self._write_stack(overdue)
        if exchange is None or diagnosis.all_here(track):
            return diagnosis.report(track)
        if exchange not in known:
            records, judge = partial(self._records, exchange), partial(diagnosis.report, track)
            known[exchange] = exchange.verdict(overdue.since, records, judge)
        return known[exchange]

    def _records(self, exchange: Exchange) -> list[ProcessRecord]:
        """Return this process's answer to a query: its record, and those of processes here that cannot."""
        from . import diagnosis

        self._write_stack()
        return diagnosis.own_answer(exchange.uid, self.recorder.path)

    def _write_stack(self, overdue: OverdueCall | None = None) -> str:
        """Write the line of the main thread, and the stack of the thread inside the overdue call, else of the main
        thread. Return that stack."""
        threads = frames.all_stacks()
        main = frames.main_stack(threads)
        chosen = frames.stack_of_call(threads, overdue.track.thread) if overdue is not None and overdue.inside else main
        stack = frames.user_stack(chosen)
        self.recorder.write_where(frames.place(main), stack)
        return stack

    def _report(self, overdue: OverdueCall, text: str, abort: bool) -> None:
        """Report on stderr which rank is missing. With PYNCCL_WATCH_ACTION=raise, or past the communicator's
        call_timeout, also abort the communicator."""
        track, comm = overdue.track, overdue.track.comm()
        if overdue.inside and (track.head != overdue.entry or track.has_returned(overdue.entry)):
            return  # it has returned meanwhile
        text = f"{text}\n{overdue.note}" if overdue.note else text
        waited = f"waited {time.monotonic() - overdue.since if abort else overdue.waited:.1f} s"
        aborts, limit = abort and comm is not None, comm._call_timeout if comm is not None else None
        why = "PYNCCL_WATCH_ACTION=raise" if self.settings.raises else "its timeout"
        who = f"rank {track.number}{f' of {track.size}' if track.number == track.rank else ''} (comm {track.name!r})"
        lines = [
            f"pynccl watchdog: {who} has {waited}",
            *text.splitlines(),
            "this rank's stack, innermost line last:",
            *self._write_stack(overdue).splitlines(),
            *([f"the communicator is aborted ({why})"] if aborts else []),
        ]
        _print(lines)
        if aborts:
            comm._abort_late(f"rank {track.number} {waited}{f', timeout {limit:g} s' if limit else ''}: {text}")


def _print(lines: list[str]) -> None:
    """Print a report in one write, since other ranks may print theirs to the same terminal at the same time."""
    print("\n  ".join(lines) + "\n", end="", file=sys.stderr, flush=True)


_watchdog: Watchdog | None = None


def prepare() -> None:
    """Start the watchdog, if it is not running: a communicator exists or is about to be created."""
    global _watchdog
    own = recorder.started()
    if own is None or (_watchdog is not None and _watchdog.recorder is own):
        return
    with own.sharing:
        if _watchdog is None or _watchdog.recorder is not own:  # another thread was faster
            _watchdog = Watchdog(own)


def stop() -> None:
    """Stop the watchdog at the end of the process."""
    global _watchdog
    if _watchdog is not None and _watchdog.recorder.mine:
        _watchdog.stop()
    _watchdog = None


# The progress of a communicator's streams. Calls record no events. One is recorded only once no call was issued for a
# while: a program that keeps issuing calls makes progress, and one that waits, even for a hanging stream, issues none.
# An event would invalidate a CUDA graph capture on its stream, but only if the capture began between the check of the
# stream and the recording of the event.


def awaited_since(streams: set[int]) -> float:
    """Return since when the program waits for one of these host streams; 0.0: it does not."""
    return float(host_module().awaited_since(streams))


class Mark(NamedTuple):
    """Events recorded on the streams after the calls up to `entry`."""

    entry: int
    made: float
    events: list[Any]

    def passed(self) -> bool | None:
        """Return whether all of those calls have completed; None: this mark cannot tell and never will."""
        try:
            passed = all(event.query() for event in self.events)
            return None if passed and any(getattr(event, "failed", False) for event in self.events) else passed
        except Exception:  # a capture, or an error of an earlier launch, which is reported elsewhere
            return None


def mark(
    library: Library, ordinal: int, entry: int, streams: Iterable[int], recorded: tuple[int, int, Any] = (0, 0, None)
) -> Mark | None:
    """Record a mark on these streams; None if one of them does not accept an event yet. Closed streams are skipped.

    recorded  see Track: on that stream, its event does if no later call was made"""
    events = []
    for handle in streams:
        if recorded[:2] == (entry, handle):
            events.append(recorded[2])
            continue
        try:
            event = _host_event(handle) if library.is_host else _cuda_event(handle, ordinal)
        except LookupError:
            continue
        except Exception:  # the program may be closing the stream, or capturing a graph, right now
            return None
        if event is None:
            return None
        events.append(event)
    return Mark(entry, time.monotonic(), events)


def _host_event(handle: int) -> Any:
    stream = host_module().stream_from_handle(handle)
    if stream is None:
        raise LookupError("the stream is gone: closed, or dropped")
    return stream.record()


def _cuda_event(handle: int, ordinal: int) -> Any:
    driver = cuda_driver()
    with on_device(ordinal), relaxed():
        code, status = driver.cuStreamIsCapturing(driver.CUstream(handle))[:2]
        if int(code) in _INVALID_STREAM:
            raise LookupError("the stream is gone: another library has destroyed it")
        if code or status:
            return None
        event = pooled(ordinal)
        event.record(ctypes.c_void_p(handle))
        return event


_INVALID_STREAM = (400, 709)  # CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_CONTEXT_IS_DESTROYED
