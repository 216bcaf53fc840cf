"""Generations of an elastic communicator: which ranks are in one, which of them live, and how it ends.

A communicator of `pynccl.init(elastic=True)` and all that were made from it are a generation. It ends on every rank
once the next one is opened in the store, by a rank that calls survivors(), or that has seen a process of its node die.
All of its communicators are then aborted as one group, so that a rank that is blocked in any of them goes on, with an
error. survivors.py makes the next generation.

Keys of the store. `node/MACHINE` lists the processes of a node: "rank pid start"; `left` the ranks whose program has
come to its end. Those of generation N start with
`gen/N/`: `open` says why it was opened; `alive` lists the ranks that have noticed, `gone` those whose process has ended
and how, `came` those that call survivors; `members`, set once, says who is in it and who is lost; `id` is NCCL's id.
Ranks are those of the launch, which never change.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..bindings.errors import NcclError, NcclRemoteError, NcclTimeout, reworded
from ..bindings.library import Library
from ..bindings.structs import CommConfig
from ..bindings.workers import Clock, WorkerCall, begin_exit, ends_before, wait_at_exit
from ..comm.communicator import Communicator
from ..comm.finalize import graph_hint, revoke
from ..watch import exit_hooks
from ..watch.folder import machine, start_ticks, state_of
from ..watch.layout import ENDED_AS, CommEnd
from ..watch.recorder import started
from ..watch.records import DEAD
from ..watch.store import StoreClient, append, lines, read

T = TypeVar("T")

POLL_SECONDS = 0.25  # between two looks at the store and at the processes of this node
_AWAKE_SECONDS = 2.0  # a rank that was not stopped has asked the store within this time
_RETRY_SECONDS = 0.05  # for a store that does not answer
_NO_ANSWER: Any = object()


class Setup(NamedTuple):
    """What a rank needs to make a communicator again.   serves: this process serves the store"""

    library: Library
    ordinal: int | None
    config: CommConfig | None
    timeout: float | None
    serves: bool


class StoreLost(NcclRemoteError):
    """The store is gone, and this rank was awake when it went: no generation can have been opened without it."""


class Launch:
    """A rank of an elastic communicator, in all of its generations.

    rank    of the launch
    uid     of its first communicator
    newest  the last generation that this rank was in
    behind  from `agree` until `sync_state` returns: the newest step, and the one that this rank's state is at"""

    newest: Generation
    uid = ""
    behind: tuple[int, int] | None = None

    def __init__(self, store: Any, rank: int, setup: Setup) -> None:
        self.store, self.rank, self.setup = store, rank, setup
        self.meeting = threading.RLock()  # one thread at a time meets the other ranks
        self.copying = threading.Lock()  # held while sync_state changes the state of this rank
        self._client = StoreClient(store)
        self._heard_at, self._lost_at = time.monotonic(), 0.0  # when the store answered last; when it first did not
        self._processes: dict[int, tuple[int, int]] = {}  # on this node: rank -> pid and start
        self._left: set[int] = set()  # ranks whose program has ended without an error
        line = f"{self.rank} {os.getpid()} {start_ticks()}"
        self.ask(lambda store: append(store, f"node/{machine()}", line), Clock(setup.timeout))

    def begin(self, comm: Communicator, number: int, members: Sequence[int], verdict: str) -> Generation:
        """Begin a generation with its communicator."""
        self.uid = self.uid or comm.uid
        if not self._processes:  # all ranks have made the communicator, and so have appended theirs before
            for line in self.ask(lambda store: lines(store, f"node/{machine()}"), Clock(self.setup.timeout)):
                rank, pid, start = map(int, line.split())
                self._processes[rank] = pid, start
        self.newest = Generation(self, comm, number, members, verdict)
        return self.newest

    def prefix(self, number: int) -> str:
        return f"gen/{number}/"

    def ask(self, call: Callable[[Any], T], clock: Clock) -> T:
        """Return `call(store)`. NcclRemoteError if the store is gone; NcclTimeout if it does not answer in time."""
        began = time.monotonic()
        while (found := self._client.run(call, _NO_ANSWER)) is _NO_ANSWER:
            text = f"{self._client.reason}\n  the ranks of an elastic communicator meet there"
            if self._client.closed:
                self._lost_at = self._lost_at or began
                raise (StoreLost if self._lost_at < self._heard_at + _AWAKE_SECONDS else NcclRemoteError)(
                    f"{text}, so no rank can go on: start the job anew from a checkpoint. Serve the store from a "
                    "process that outlives the ranks: see docs/elastic.md"
                )
            if clock.left() <= 0:
                raise NcclTimeout(f"{text}; waited {clock.seconds()}")
            time.sleep(_RETRY_SECONDS)
        self._heard_at = time.monotonic()
        return found

    def gone(self, members: Iterable[int]) -> dict[int, str]:
        """Return which of these ranks have ended their process on this node, and how."""
        ended = {
            rank: self._processes[rank][0]
            for rank in members
            if rank != self.rank and rank in self._processes and state_of(*self._processes[rank]) == DEAD
        }
        if not ended:
            return {}
        known: dict[int, str] = {}
        with contextlib.suppress(Exception):  # the records are a help; a slow import
            from ..watch.diagnosis import ends

            known = ends(self.newest.comm_uid)
        return {rank: known.get(pid, f"rank {rank}'s process {pid} has ended") for rank, pid in ended.items()}

    def died(self, members: Iterable[int], clock: Clock) -> dict[int, str]:
        """As `gone`, without those whose program has come to its end."""
        found = self.gone(rank for rank in members if rank not in self._left)
        if found:
            self._left |= set(map(int, self.ask(lambda store: lines(store, "left"), clock)))
        return {rank: how for rank, how in found.items() if rank not in self._left}

    def leave(self) -> None:
        """Tell the others that this rank's program has come to its end: its process ends, and that is no death."""
        self.ask(lambda store: append(store, "left", str(self.rank)), Clock(POLL_SECONDS))

    def open(self, number: int, why: str, clock: Clock) -> str:
        """Open this generation, unless it is open. Return why it was."""

        def call(store: Any) -> str:
            store.compare_set(f"{self.prefix(number)}open", "", why)
            return read(store, f"{self.prefix(number)}open")

        return self.ask(call, clock)

    def is_open(self, number: int, clock: Clock) -> str:
        """Return why this generation was opened; "": it was not."""
        key = f"{self.prefix(number)}open"
        return self.ask(lambda store: read(store, key) if store.check([key]) else "", clock)

    def note(self, number: int, what: str, text: str, clock: Clock) -> None:
        """Append a line to a list of this generation."""
        self.ask(lambda store: append(store, self.prefix(number) + what, text), clock)


class Generation:
    """One generation, on one rank.

    comm     its communicator: all others are made from it
    number   0, 1, ..; members: its ranks, in order
    verdict  who was lost before it, at which line, and why
    ended    the error of its calls once it has ended; None: it has not
    agreed   by `agree`: the rank that has the newest step, and the ranks that are behind"""

    def __init__(self, launch: Launch, comm: Communicator, number: int, members: Sequence[int], verdict: str) -> None:
        self.launch, self.number, self.members, self.verdict = launch, number, tuple(members), verdict
        self.ended: NcclError | None = None
        self.agreed: tuple[int, tuple[int, ...]] | None = None
        self.comm, self.comm_uid = weakref.ref(comm), comm.uid
        self._comms: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._looking = threading.Lock()
        _generations.add(self)
        self._abort: WorkerCall[None] | None = None
        self.add(comm)
        self._watching = WorkerCall(self._watch, "elastic", until_exit=True)

    def add(self, comm: Communicator) -> None:
        """Let a communicator end with this generation."""
        comm._generation = self
        with self._lock:
            self._comms.add(comm)
            late = self.ended
        if late is not None:
            revoke([comm], comm.library, late)
            comm.check_alive()

    def check(self) -> None:
        """Raise if it has ended."""
        if self.ended is not None:
            raise reworded(self.ended, str(self.ended))

    def check_calls(self) -> None:
        """Raise if it has ended, or if a call on one of its communicators has failed."""
        self.check()
        for comm in self._all():
            if comm.alive:
                comm.check_async_error()

    def _all(self) -> list[Communicator]:
        with self._lock:
            return list(self._comms)

    def end(self, why: str) -> None:
        """Abort all of its communicators. Their calls raise: who blocks in one goes on."""
        text = f"generation {self.number} has ended: {why}\n  call survivors() on its communicator to go on"
        with self._lock:
            if self.ended is not None:
                return
            self.ended = error = NcclRemoteError(text)
            error.verdict = why
            self._abort = revoke(list(self._comms), self.launch.setup.library, error)
        self._end.set()

    def wait_for_end(self, clock: Clock) -> None:
        """Return once its communicators are aborted."""

        def blocked() -> NcclTimeout:
            return NcclTimeout(
                f"the abort of generation {self.number} has not returned for {clock.seconds()}: a CUDA graph that "
                f"captured a call on it may block it; reset() the graph, and call survivors() again{graph_hint()}"
            )

        with self._lock:
            abort = self._abort
        if abort is not None:
            abort.result(clock.left(), blocked)

    def _watch(self) -> None:
        """Notice that the next generation was opened, or that a process of this node has died, and end this one."""
        while not self._end.wait(POLL_SECONDS) and not ends_before(math.inf):
            if not any(comm.alive for comm in self._all()):
                return
            try:
                with self._looking:
                    if ends_before(math.inf):
                        return
                    self.look(Clock(POLL_SECONDS))
            except NcclTimeout:  # the store is slow
                continue
            except NcclError:  # the store is gone, which survivors() reports
                return

    def look(self, clock: Clock) -> None:
        """End this generation if the next one is open, or is to be opened."""
        launch, following = self.launch, self.number + 1
        why = launch.is_open(following, clock)
        if not why and (died := launch.died(self.members, clock)):
            why = launch.open(following, next(iter(died.values())), clock)
        if why:
            launch.note(following, "alive", str(launch.rank), clock)
            self.end(why)


_generations: weakref.WeakSet[Generation] = weakref.WeakSet()


def _on_end(how: str) -> None:
    """Tell the other ranks that this process ends. If that is with an error, open the next generation: the others need
    not wait until it has ended."""
    for one in list(_generations):
        launch, comm, following = one.launch, one.comm(), one.number + 1
        destroyed = comm is None or comm._end == ENDED_AS[CommEnd.DESTROYED]
        if one is launch.newest and not how:
            launch.leave()
        elif one is launch.newest and len(one.members) > 1 and not destroyed:
            launch.note(following, "gone", f"{launch.rank} rank {launch.rank} {how}", Clock(POLL_SECONDS))
            launch.open(following, f"rank {launch.rank} {how}", Clock(POLL_SECONDS))


exit_hooks.on_end.append(_on_end)


@atexit.register  # runs before that of bindings/workers.py
def _stop_looking() -> None:
    """Let no thread start another operation on the store: one that returns from C++ while the interpreter shuts down
    would abort the process. Without a flight recorder, leave here."""
    if started() is None and not begin_exit(getattr(sys, "last_value", None) is not None):
        with contextlib.suppress(NcclError):
            _on_end("")
    wait_at_exit([partial(one._looking.acquire, True) for one in list(_generations)], 1.0)


os.register_at_fork(after_in_child=_generations.clear)  # the child has none of the threads
