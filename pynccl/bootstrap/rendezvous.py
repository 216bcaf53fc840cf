"""Rendezvous at a store, through which rank 0 distributes the id. Missing, duplicate and failed ranks are named.

Keys: `first` counts the ranks, and the first one sets `name`, which is unique to this rendezvous. `claims/R` counts
the processes with rank R, `rank/R` describes the first one, `came` lists the ranks that joined, `arrived/N` counts the
ranks with world size N, `id` is rank 0's id. `over` ends the rendezvous on all ranks, with
success or an error that all raise; `ends` counts the ranks that set it. The number of store operations per rank does
not depend on the world size, except for polling.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..bindings.errors import NcclError, NcclInvalidUsage, NcclRemoteError, NcclTimeout
from ..bindings.workers import Clock, Wait
from ..watch.formatting import ranks_text
from ..watch.store import append, lines, read

T = TypeVar("T")

_COMPLETE = "met"
_ERRORS: dict[str, type[NcclError]] = {"usage": NcclInvalidUsage, "remote": NcclRemoteError}
_MAX_PAUSE = 0.1
_REPORT_SECONDS = 2.0  # limit for reporting this rank's failure to a store that may not answer
_MIN_REPORT_SECONDS = 0.2  # the same after Ctrl-C, or at the deadline


class Rendezvous:
    """The rendezvous, as seen by one rank.

    server          what serves the store, for messages
    duplicate_hint  for messages: why two processes may have the same rank, and what to do
    on_complete     called once all ranks have joined
    ranks           global rank of each rank, for messages; (): unknown
    on_name         called with the name of this rendezvous, while this rank waits for the others"""

    def __init__(
        self,
        store: Any,
        rank: int,
        nranks: int,
        clock: Clock,
        server: str,
        duplicate_hint: str,
        on_complete: Callable[[], None] = lambda: None,
        ranks: Sequence[int] = (),
    ) -> None:
        self.store, self.rank, self.nranks, self.clock = store, rank, nranks, clock
        self.server, self.duplicate_hint, self.on_complete = server, duplicate_hint, on_complete
        self.ranks = ranks
        self.on_name: Callable[[str], None] = lambda name: None

    def join(self, identity: bytes) -> bytes:
        """Wait until all ranks have joined and return the id. Raises if ranks are missing, duplicate or failed."""
        return self._ask(lambda wait: self._join(identity, wait))

    def use_next_prefix(self, prefixed: Callable[[str, Any], Any]) -> None:
        """Switch to a prefix unique to this call. The store counts the calls, since it may outlive a process group."""
        number = self._ask(lambda _: self.store.add(f"calls/{self.rank}", 1))
        self.store = prefixed(str(number), self.store)

    def report(self, error: BaseException) -> None:
        """Report to the other ranks that this rank failed."""
        text = could_not_start(self._global(self.rank), error)
        seconds = 0.0 if isinstance(error, KeyboardInterrupt) else min(_REPORT_SECONDS, self.clock.left())
        with contextlib.suppress(Exception):  # the original error is more important
            no_answer = NcclTimeout("the store does not answer")
            wait = Wait(Clock(max(seconds, _MIN_REPORT_SECONDS)))
            wait.run_in_worker(lambda: self._finish("remote", text), lambda: no_answer)

    def _ask(self, call: Callable[[Wait], T]) -> T:
        """Make `call(wait)` in a worker thread, since the store may never answer."""
        wait = Wait(self.clock)
        try:
            return wait.run_in_worker(lambda: call(wait), self._no_answer)
        except NcclError:
            raise
        except RuntimeError as error:  # DistError and subclasses; FileStore raises plain RuntimeError
            raise self._lost(error) from error

    # The methods below run in the worker thread.

    def _join(self, identity: bytes, wait: Wait) -> bytes:
        self._register(identity)
        self._wait_for_all(wait)
        found: bytes = self.store.get("id")
        self.on_complete()
        return found

    def _register(self, identity: bytes) -> None:
        if self.store.add("first", 1) == 1:
            self.store.set("name", secrets.token_hex(16))
        if self.store.add(f"claims/{self.rank}", 1) > 1:
            self._raise_duplicate()
        self.store.set(f"rank/{self.rank}", f"{self.nranks} {_describe_process()}")
        append(self.store, "came", str(self.rank))
        if self.rank == 0:
            self.store.set("id", identity)
        if self.store.add(f"arrived/{self.nranks}", 1) == self.nranks:
            self._finish(_COMPLETE)

    def _wait_for_all(self, wait: Wait) -> None:
        pause, compared, named = 0.001, False, False
        while not self.store.check(["over"]):  # store.wait() would miss an error, and warns
            if not compared and self.store.check(["rank/0"]):
                self._compare_sizes()
                compared = True
            named = named or self._is_named()
            if self.clock.left() <= 0:
                raise self._missing_ranks()
            wait.pause(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        kind, _, text = read(self.store, "over").partition("\n")
        if kind != _COMPLETE:
            error = _ERRORS.get(kind, NcclRemoteError)(text)
            error.verdict = first_line(error)  # it says all that the flight recorder could
            raise error
        if not named:
            self._is_named()

    def _is_named(self) -> bool:
        if found := bool(self.store.check(["name"])):
            self.on_name(read(self.store, "name"))
        return found

    def _compare_sizes(self) -> None:
        size, _, process = read(self.store, "rank/0").partition(" ")
        if size != str(self.nranks):
            self._finish(
                "usage",
                f"rank {self._global(0)} ({process}) has world size {size}, "
                f"rank {self._global(self.rank)} ({_describe_process()}) has {self.nranks}: "
                "WORLD_SIZE (or nranks) must be the same on all ranks",
            )

    def _raise_duplicate(self) -> None:
        key = f"rank/{self.rank}"
        other = read(self.store, key).partition(" ")[2] if self.store.check([key]) else "another process"
        both = f"{other} and {_describe_process()}"
        text = f"two processes have rank {self._global(self.rank)}: {both}; {self.duplicate_hint}"
        if not self.store.check(["over"]):  # otherwise the rendezvous completed without this process
            self._finish("usage", text)
        raise NcclInvalidUsage(text)

    def _finish(self, kind: str, text: str = "") -> None:
        first = self.store.add("ends", 1) == 1
        if first or kind != _COMPLETE:  # a rank may have failed after joining, before the last one joined
            self.store.set("over", f"{kind}\n{text}")

    def _missing_ranks(self) -> NcclTimeout:
        came = set(lines(self.store, "came"))
        missing = [self._global(rank) for rank in range(self.nranks) if str(rank) not in came]
        if not missing:
            return NcclTimeout(f"{self._waited()}: all ranks started to join, but one exited; look for its first error")
        return NcclTimeout(
            f"{self._waited()}: ranks {missing} never joined\n"
            "  look for their first error; if they are only slow, pass a longer timeout="
        )

    # Store failures

    def _no_answer(self) -> NcclTimeout:
        return NcclTimeout(
            f"{self._waited()}: the rendezvous store does not answer\n  {self.server} is stopped or unreachable"
        )

    def _lost(self, error: Exception) -> NcclRemoteError:
        return NcclRemoteError(
            f"{self._who()} lost the rendezvous store: "
            f"{self.server} has exited; look for its first error ({first_line(error)})"
        )

    def _waited(self) -> str:
        return f"{self._who()} waited {self.clock.seconds()}"

    def _who(self) -> str:
        """ "rank 1 of 4"; "rank 5 of ranks 3 and 5" if these are not its first ranks."""
        all_first = list(self.ranks) in ([], list(range(self.nranks)))
        return f"rank {self._global(self.rank)} of {self.nranks if all_first else ranks_text(self.ranks)}"

    def _global(self, rank: int) -> int:
        return self.ranks[rank] if self.ranks else rank


def could_not_start(rank: int, error: BaseException) -> str:
    reason = f"could not start: {type(error).__name__}: {error}"
    return f"rank {rank} " + ("was interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else reason)


def first_line(error: BaseException) -> str:
    """Return the first line of an error of torch, which appends a C++ trace."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _describe_process() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}, {os.path.basename(sys.argv[0] or 'python')}"
