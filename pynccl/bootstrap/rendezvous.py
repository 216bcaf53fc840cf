"""Rendezvous at a store, through which rank 0 distributes the id. Missing, duplicate and failed ranks are named.

A store outlives a rendezvous, and often the processes too, so every rendezvous at it has a number:

- Rank 0 issues the next number. If the last rendezvous is not over, its rank 0 has died; ranks that wait there follow.
- The other ranks take the last number, or wait for the next if that one is over. If it failed without them, since their
  process began, they raise its error; if it timed out without them, they do so only if rank 0 does not try again.
- A process takes the place of an earlier one with its rank. If that one still waits, it reports both.

Keys: `issued` is the last number; `first` counts the ranks, and the first one sets `name`, which with the number is
unique to a rendezvous. Keys of number N start with `N/`: `claims/R` counts the processes with rank R,
`rank/R/I` describes the I-th of them, `came` lists the ranks that joined, `early` those that came before rank 0,
`arrived/S` counts the processes with world size S, `all/S` is set once all ranks of such a world have joined, `differs`
is the error of a rank with another world size than rank 0, `id` is rank 0's id. `over` ends the rendezvous on
all ranks: rank 0 completes it, and any rank can end it with an error that all raise; `ends` counts the ranks that set
it, `in/R` the processes that took part as rank R. Except for polling and for the last rank, which reads `came`, the
number of store operations per rank does not depend on the world size.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..bindings.errors import NcclError, NcclInvalidUsage, NcclRemoteError, NcclTimeout
from ..bindings.workers import Clock, Wait
from ..watch.folder import process_start_time
from ..watch.formatting import ranks_text
from ..watch.store import Prefixed, append, lines, read

_COMPLETE, _FOLLOW, _LATE = "complete", "follow", "late"  # follow: take the next number
_ERRORS: dict[str, type[NcclError]] = {"usage": NcclInvalidUsage, "remote": NcclRemoteError, _LATE: NcclTimeout}
_FAILED = ("usage", "remote")  # a rank that comes later raises the error; after _LATE it waits for another try
_MIN_PAUSE, _MAX_PAUSE = 0.0005, 0.1  # between them a tenth of the time waited, which it may add
_MAX_PAUSE_OF_RANK_0 = 0.02  # all others wait for it
_REPORT_SECONDS = 2.0  # limit for reporting this rank's failure to a store that may not answer
_MIN_REPORT_SECONDS = 0.2  # the same after Ctrl-C or sys.exit, or at the deadline


class Rendezvous:
    """The rendezvous, as seen by one rank.

    store           after `join`, with keys that no other rendezvous uses
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
        self._shared = store
        self._number = 0  # 0: not known yet
        self._named = 0  # the number that `on_name` was called for

    def join(self, identity: bytes) -> bytes:
        """Wait until all ranks have joined and return the id. Raises if ranks are missing, duplicate or failed."""
        wait = Wait(self.clock)
        try:
            return wait.run_in_worker(lambda: self._join(identity, wait), self._no_answer)
        except NcclError:
            raise
        except RuntimeError as error:  # DistError and subclasses; FileStore raises plain RuntimeError
            raise self._lost(error) from error

    def report(self, error: BaseException) -> None:
        """Report to the other ranks that this rank failed."""
        text = could_not_start(self._global(self.rank), error)
        seconds = min(_REPORT_SECONDS, self.clock.left()) if isinstance(error, Exception) else 0.0
        with contextlib.suppress(Exception):  # the original error is more important
            no_answer = NcclTimeout("the store does not answer")
            wait = Wait(Clock(max(seconds, _MIN_REPORT_SECONDS)))
            wait.run_in_worker(lambda: self._fail(text), lambda: no_answer)

    # The methods below run in the worker thread.

    def _join(self, identity: bytes, wait: Wait) -> bytes:
        if self._shared.add("first", 1) == 1:
            self._shared.set("name", secrets.token_hex(16))
        complete = False
        while not complete:
            self._number = self._issue() if self.rank == 0 else self._take(wait)
            self.store = self._keys(self._number)
            complete = self._wait_for_all(self._register(identity), wait)
        found: bytes = self.store.get("id")
        self.on_complete()
        return found

    def _fail(self, text: str) -> None:
        number = self._number or (self._issue() if self.rank == 0 else self._unfinished(max(self._issued(), 1)))
        keys = self._keys(number)
        keys.add(f"claims/{self.rank}", 1)  # so that the next call takes the next number
        _end(keys, "remote", text)

    # The number

    def _keys(self, number: int) -> Any:
        return Prefixed(self._shared, f"{number}/")

    def _issued(self) -> int:
        return int(self._shared.add("issued", 0))

    def _issue(self) -> int:
        """Issue the next number, as rank 0."""
        number = int(self._shared.add("issued", 1))
        for earlier in range(number - 1, 0, -1):
            if (keys := self._keys(earlier)).check(["over"]):
                break
            _end(keys, _FOLLOW, _describe_process())
        # an earlier run's rank may have failed before its rank 0 came
        return number if self._unfinished(number) == number else self._issue()

    def _take(self, wait: Wait) -> int:
        """Return the last number that rank 0 issued; wait for the next if this rank has no place in that one."""
        issued = self._issued()
        number = self._unfinished(max(issued, 1))
        if number > issued:
            append(self._keys(number), "early", str(self.rank))
        while number > issued and not (keys := self._keys(number)).check(["rank/0/1"]) and not keys.check(["over"]):
            self._call_on_name(number)
            if self.clock.left() <= 0:
                raise self._no_next(number)
            self._pause(wait, _MAX_PAUSE)
        return number

    def _no_next(self, number: int) -> NcclError:
        last, text = self._keys(number - 1), _missing(self._waited(), self._absent(self._keys(number), "early"))
        if number > 1 and last.check(["over"]) and not last.check([f"claims/{self.rank}"]):
            kind, _, reason = _read_end(last)
            if kind == _LATE:
                late = f"{self._waited()}: it came too late, and rank 0 has not called again since\n  {reason}"
                return _final(NcclTimeout(late))
            if kind in _FAILED:
                text += f"\n  before this process started, the last call at this store failed: {reason}"
        return NcclTimeout(text)

    def _unfinished(self, number: int) -> int:
        """Return the first number from `number` on which does not belong to an earlier call or run.

        Whether an error is of an earlier run, the clocks of two nodes decide."""
        while (keys := self._keys(number)).check(["over"]):
            kind, ended, _ = _read_end(keys)
            earlier_run = ended < process_start_time()
            if kind in _FAILED and not earlier_run and not keys.check([f"claims/{self.rank}"]):
                break
            number += 1
        return number

    def _pause(self, wait: Wait, longest: float) -> None:
        wait.pause(min(max(self.clock.waited() / 10, _MIN_PAUSE), longest))

    # The ranks

    def _register(self, identity: bytes) -> int:
        """Return how many processes with this rank have joined."""
        claim = int(self.store.add(f"claims/{self.rank}", 1))
        self.store.set(f"rank/{self.rank}/{claim}", f"{self.nranks} {_describe_process()}")
        if self.rank == 0:
            self.store.set("id", identity)
        append(self.store, "came", str(self.rank))
        if self.store.add(f"arrived/{self.nranks}", 1) >= self.nranks and not self._absent(self.store, "came"):
            self.store.set(f"all/{self.nranks}", "1")
        return claim

    def _wait_for_all(self, claim: int, wait: Wait) -> bool:
        """Return whether the rendezvous is complete; False: another follows."""
        longest = _MAX_PAUSE if self.rank else _MAX_PAUSE_OF_RANK_0
        compared = self.rank == 0
        while not self.store.check(["over"]):  # store.wait() would miss an error, and warns
            self._call_on_name(self._number)
            self._check_ranks(claim, wait)
            compared = compared or self._compare_size()
            if self.clock.left() <= 0:
                _end(self.store, _LATE, _missing(self._waited(), self._absent(self.store, "came")))
            self._pause(wait, longest)
        kind, _, text = _read_end(self.store)
        if kind == _FOLLOW and self.rank == 0:
            self._raise_duplicate(self._keys(self._issued()), text)
        if kind == _COMPLETE and self.store.add(f"in/{self.rank}", 1) > 1:
            self._raise_duplicate(self.store, self._process(f"rank/{self.rank}/{2 if claim == 1 else 1}"))
        if kind in (_COMPLETE, _FOLLOW):
            self._call_on_name(self._number)
            return kind == _COMPLETE
        raise _final(_ERRORS.get(kind, NcclRemoteError)(text))

    def _check_ranks(self, claim: int, wait: Wait) -> None:
        """End the rendezvous if all ranks have joined, or if two have the same rank, or another world size."""
        if self.store.check([newer := f"rank/{self.rank}/{claim + 1}"]):
            wait.pause(0)  # not if this call has been given up: then the newer process, or call, replaces it
            self._raise_duplicate(self.store, self._process(newer))
        if self.rank == 0:
            if self.store.check([f"all/{self.nranks}"]):
                _end(self.store, _COMPLETE)
            elif self.store.check(["differs"]):
                _end(self.store, "usage", read(self.store, "differs"))

    def _compare_size(self) -> bool:
        """Compare the world size with rank 0's, once that has joined. If they differ, rank 0 raises it, if it lives."""
        if not self.store.check(["rank/0/1"]):
            return False
        size, _, process = read(self.store, "rank/0/1").partition(" ")
        if size != str(self.nranks):
            text = f"rank {self._global(0)} ({process}) has world size {size}, rank {self._global(self.rank)} "
            hint = "WORLD_SIZE (or nranks) must be the same on all ranks"
            self.store.set("differs", f"{text}({_describe_process()}) has {self.nranks}: {hint}")
        return True

    def _call_on_name(self, number: int) -> None:
        if number != self._named and self._shared.check(["name"]):
            self._named = number
            self.on_name(f"{read(self._shared, 'name')} {number}")

    def _process(self, key: str) -> str:
        """Return the description of a process that has joined."""
        return read(self.store, key).partition(" ")[2]

    def _raise_duplicate(self, keys: Any, other: str) -> None:
        """End the rendezvous with the error that another process has this rank, and raise it."""
        rank = self._global(self.rank)
        text = f"two processes have rank {rank}: {other} and {_describe_process()}; {self.duplicate_hint}"
        if other == _describe_process():
            text = f"rank {rank} called it twice at the same time ({other}); {self.duplicate_hint}"
        _end(keys, "usage", text)
        raise NcclInvalidUsage(text)

    def _absent(self, keys: Any, key: str) -> list[int]:
        came = set(lines(keys, key))
        return [self._global(rank) for rank in range(self.nranks) if str(rank) not in came]

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


def _end(keys: Any, kind: str, text: str = "") -> None:
    """End the rendezvous with these keys. An error replaces another end: a rank may fail after all have joined."""
    first = keys.add("ends", 1) == 1
    if first or kind not in (_COMPLETE, _LATE):
        keys.set("over", f"{kind}\n{time.time()}\n{text}")


def _read_end(keys: Any) -> tuple[str, float, str]:
    """Return how the rendezvous ended: the kind, the time, the error."""
    kind, _, rest = read(keys, "over").partition("\n")
    ended, _, text = rest.partition("\n")
    return kind, float(ended), text


def _final(error: NcclError) -> NcclError:
    """Return the error, marked as saying all that the flight recorder could say."""
    error.verdict = first_line(error)
    return error


def _missing(waited: str, ranks: list[int]) -> str:
    if not ranks:
        return f"{waited}: all ranks started to join, but one exited; look for its first error"
    return (
        f"{waited}: ranks {ranks} never joined\n"
        "  look for their first error; if they are only slow, pass a longer timeout="
    )


def could_not_start(rank: int, error: BaseException) -> str:
    if isinstance(error, Exception):
        return f"rank {rank} could not start: {type(error).__name__}: {error}"
    return f"rank {rank} {'was interrupted (Ctrl-C)' if isinstance(error, KeyboardInterrupt) else f'raised {error!r}'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error of torch, which appends a C++ trace."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _describe_process() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}, {os.path.basename(sys.argv[0] or 'python')}"
