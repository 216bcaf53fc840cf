"""All ranks meet at a store, where rank 0 hands out the id: who never came, came twice, or cannot go on is named.

Keys: `claims/R` counts the processes that are rank R, `rank/R` says who it is, `came` lists the ranks that came,
`arrived/N` counts those that believe in N ranks, `id` is rank 0's. `over` ends the rendezvous for all: they met, or all
raise this error; `ends` counts who says so. How often a rank asks the store does not depend on the number of ranks,
except for the polls while it waits.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..bindings.errors import NcclError, NcclInvalidUsage, NcclRemoteError, NcclTimeout
from ..bindings.workers import Clock, Wait
from ..watch.store import append, lines, read

T = TypeVar("T")

_MET = "met"
_ERRORS: dict[str, type[NcclError]] = {"usage": NcclInvalidUsage, "remote": NcclRemoteError}
_LONGEST_PAUSE = 0.1
_REPORT_SECONDS = 2.0  # a rank that fails tells the others, but does not wait long for a store that is silent
_HURRIED_SECONDS = 0.2  # the same after Ctrl-C, or at the deadline


class Rendezvous:
    """One rank's part in the rendezvous.

    server  what carries the store, for errors
    again   why a rank may have come twice, and what to do
    met     called once all are there"""

    def __init__(
        self,
        store: Any,
        rank: int,
        nranks: int,
        clock: Clock,
        server: str,
        again: str,
        met: Callable[[], None] = lambda: None,
    ) -> None:
        self.store, self.rank, self.nranks, self.clock = store, rank, nranks, clock
        self.server, self.again, self.met = server, again, met

    def join(self, identity: bytes) -> bytes:
        """Wait until all ranks are there; return the id. Raises for ranks that are missing, doubled or failed."""
        return self._ask(lambda wait: self._join(identity, wait))

    def next_part(self, prefixed: Callable[[str, Any], Any]) -> None:
        """Go on in a part of the store that no other call uses. The store counts the calls: it may outlive a group."""
        number = self._ask(lambda _: self.store.add(f"calls/{self.rank}", 1))
        self.store = prefixed(str(number), self.store)

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on."""
        text = could_not_start(self.rank, error)
        seconds = 0.0 if isinstance(error, KeyboardInterrupt) else min(_REPORT_SECONDS, self.clock.left())
        with contextlib.suppress(Exception):  # the error itself is more important
            late = NcclTimeout("the store is silent")
            Wait(Clock(max(seconds, _HURRIED_SECONDS))).beside(lambda: self._end("remote", text), lambda: late)

    def _ask(self, call: Callable[[Wait], T]) -> T:
        """`call(wait)`, in a worker thread, since the store may never answer."""
        wait = Wait(self.clock)
        try:
            return wait.beside(lambda: call(wait), self._silent)
        except NcclError:
            raise
        except RuntimeError as error:  # DistError and its relatives; FileStore raises the bare one
            raise self._lost(error) from error

    # What follows runs in the worker thread.

    def _join(self, identity: bytes, wait: Wait) -> bytes:
        self._come_in(identity)
        self._wait_for_all(wait)
        found: bytes = self.store.get("id")
        self.met()
        return found

    def _come_in(self, identity: bytes) -> None:
        if self.store.add(f"claims/{self.rank}", 1) > 1:
            self._refuse_double()
        self.store.set(f"rank/{self.rank}", f"{self.nranks} {_whoami()}")
        append(self.store, "came", str(self.rank))
        if self.rank == 0:
            self.store.set("id", identity)
        if self.store.add(f"arrived/{self.nranks}", 1) == self.nranks:
            self._end(_MET)

    def _wait_for_all(self, wait: Wait) -> None:
        pause, compared = 0.001, False
        while not self.store.check(["over"]):  # not store.wait(), which would not see an error, and warns
            if not compared and self.store.check(["rank/0"]):
                self._compare_sizes()
                compared = True
            if self.clock.left() <= 0:
                raise self._missing()
            wait.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        kind, _, text = read(self.store, "over").partition("\n")
        if kind != _MET:
            raise _ERRORS.get(kind, NcclRemoteError)(text)

    def _compare_sizes(self) -> None:
        size, _, who = read(self.store, "rank/0").partition(" ")
        if size != str(self.nranks):
            self._end(
                "usage",
                f"rank 0 ({who}) says there are {size} ranks, rank {self.rank} ({_whoami()}) says {self.nranks}: "
                "WORLD_SIZE, or nranks, has to be the same on all ranks",
            )

    def _refuse_double(self) -> None:
        key = f"rank/{self.rank}"
        other = read(self.store, key).partition(" ")[2] if self.store.check([key]) else "another process"
        text = f"two processes say that they are rank {self.rank}: {other}, and {_whoami()}; {self.again}"
        if not self.store.check(["over"]):  # else they have met without this one, which is not to disturb them
            self._end("usage", text)
        raise NcclInvalidUsage(text)

    def _end(self, kind: str, text: str = "") -> None:
        first = self.store.add("ends", 1) == 1
        if first or kind != _MET:  # a rank may have come, and failed, before the last one came
            self.store.set("over", f"{kind}\n{text}")

    def _missing(self) -> NcclTimeout:
        came = set(lines(self.store, "came"))
        missing = [rank for rank in range(self.nranks) if str(rank) not in came]
        if not missing:
            return NcclTimeout(
                f"{self._waited()}: all ranks came, but one ended on the way in; look for its first error"
            )
        return NcclTimeout(
            f"{self._waited()}: ranks {missing} never came\n"
            "  look for their first error; a longer timeout= helps if they are only slow"
        )

    # What the store does not do

    def _silent(self) -> NcclTimeout:
        return NcclTimeout(
            f"{self._waited()}: the store at which the ranks meet does not answer\n"
            f"  {self.server} is stopped, or out of reach"
        )

    def _lost(self, error: Exception) -> NcclRemoteError:
        return NcclRemoteError(
            f"rank {self.rank} of {self.nranks} lost the store at which the ranks meet: "
            f"{self.server} has ended; look for its first error ({first_line(error)})"
        )

    def _waited(self) -> str:
        return f"rank {self.rank} of {self.nranks} waited {self.clock.seconds()}"


def could_not_start(rank: int, error: BaseException) -> str:
    why = f"could not start: {type(error).__name__}: {error}"
    return f"rank {rank} " + ("was interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else why)


def first_line(error: BaseException) -> str:
    """Of an error of torch, which goes on with a trace of C++."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _whoami() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}, {os.path.basename(sys.argv[0] or 'python')}"
