"""The race that chooses the schedule of a pass, in the steps of the program; every call computes the result.

A round runs each schedule that is still in the race twice, one after the other, and times the second pass: the first
one after a change is slower, by cold buffers and caches. Between the rounds the leader runs. The schedule of a call
depends on the number of earlier calls and on times that all ranks have exchanged, so it is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pynccl import Communicator

from ..agreement import DeferredCheck, gathered_tensor
from .schedules import OFF, Decision, PassKey, Schedule, format_times

T = TypeVar("T")

STARTS = (0, 12, 32, 52, 76, 104, 136, 172, 212, 256)  # the call with which each round of a race starts
STAY = {2: 3, 4: 2}  # after so many rounds, so many schedules stay in the race, besides the first
GAIN, WINS = 0.97, 2 / 3  # to lead: at most this ratio to "off" in the median, and less than 1 in this share of rounds
ASK, EVERY, ASK_ROUNDS = 2048, 13, 7  # call at which "off" is asked again; calls between its rounds; rounds at most
NOT_TIMED = 1 << 62  # nanoseconds


class Clock:
    """Times passes: by the clock on a CPU, by events on a GPU."""

    def mark(self, like: Tensor) -> Any:
        """Return the present moment, of the current stream of like's device."""
        if not like.is_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(like.device))
        return event

    def between(self, begin: Any, end: Any) -> int:
        """Return the nanoseconds between two marks."""
        if isinstance(begin, int):
            return int(end) - begin
        end.synchronize()
        return round(begin.elapsed_time(end) * 1e6)


clock = Clock()  # tests replace it


class Round:
    """The calls from `start` until `end`, in which each of `ways` runs twice.   marks: (begin, end) of second passes"""

    def __init__(self, start: int, ways: Sequence[Schedule] = (), name: str = "") -> None:
        self.start, self.ways, self.end, self.name = start, tuple(ways), start + 2 * len(ways), name
        self.marks: list[Any] = [None] * len(self.ways)

    def times(self) -> list[int]:
        """Return nanoseconds."""
        return [NOT_TIMED if marks is None else clock.between(*marks) for marks in self.marks]


class ScheduledCall(NamedTuple):
    """The decision for one call, and the round that times it. decision None: "off", which needed no decision"""

    decision: Decision | None
    round: Round | None = None
    at: int = 0

    @contextlib.contextmanager
    def timed(self, run: contextlib.AbstractContextManager[T], like: Tensor) -> Iterator[T]:
        """Run a pass, and time it for the round."""
        assert self.round is not None
        begin = clock.mark(like)
        with run as p:
            yield p
        self.round.marks[self.at] = begin, clock.mark(like)


NOT_SCHEDULED = ScheduledCall(None)


class Race:
    """The race of one pass on one communicator, of all layers whose passes have the same key.

    The leader is the schedule with the lowest median ratio to the first candidate in the same rounds. The first is
    "off", unless a method was requested; another schedule leads before "off" only if it fulfills GAIN and WINS. Who
    leads after the last round has won.

    If "off" wins, it stays, and so does any winner without it. Another winner meets "off" again at calls 2048, 4096,
    8192, ..: in rounds of these two, until its median ratio is below 1. If it is not after 7 rounds, "off" wins.

    over      whether there is a winner
    closed    whether the winner stays
    decision  the leader, for calls between the rounds

    read  gets the times of a round from all ranks, and calls a function with them"""

    def __init__(self, key: PassKey, candidates: Sequence[Schedule], read: DeferredCheck | None = None) -> None:
        self.key, self.candidates = key, tuple(candidates)
        self.over = self.closed = False
        self.leader = self.candidates[0]
        self._ways = self.candidates  # still in the race
        self._times: dict[Schedule, list[int]] = {way: [] for way in candidates}  # nanoseconds
        self._ask = 0  # call at which "off" was asked again
        self._asked: list[float] = []  # ratios since
        self._calls = 0
        self._unread: list[Round] = []
        self._read = read or DeferredCheck()
        self._plan = self._rounds()
        self._round = next(self._plan)
        self.decision = self._decided()

    def next(self, comm: Communicator) -> ScheduledCall:
        """Count a call, and return its schedule. Collective at the first call after a round."""
        call, self._calls = self._calls, self._calls + 1
        if call >= self._round.end and not self.closed:
            self._end_round(comm)
        at, second = divmod(call - self._round.start, 2)
        if self.closed or not 0 <= at < len(self._round.ways):
            return ScheduledCall(self.decision)
        decision = self.key.decision(self._round.ways[at], self._round.name, settled=self.over)
        return ScheduledCall(decision, self._round if second else None, at)

    def _rounds(self) -> Iterator[Round]:
        for number, start in enumerate(STARTS):
            first = number % len(self._ways)  # each round begins with another one
            yield Round(start, self._ways[first:] + self._ways[:first], f"round {number + 1} of a race")
        for call in itertools.count(STARTS[-1] + EVERY, EVERY):
            if self.over:
                break
            yield Round(call)  # on a GPU, the last times are still to be read
        for doublings in itertools.count():
            self._ask, self._asked = ASK << doublings, []
            for number in itertools.count():
                ways = (OFF, self.leader)[:: -1 if number % 2 else 1] if number < ASK_ROUNDS else ()
                yield Round(self._ask + number * EVERY, ways, "off and the winner of the race are compared again")
                if self._asked and statistics.median(self._asked) < 1:
                    break

    def _end_round(self, comm: Communicator) -> None:
        """Exchange the times of a round; on a GPU of the one before, whose events are complete more often."""
        unread = [*self._unread, self._round]
        if self.key.on_cpu or len(unread) > 1:
            ended = unread.pop(0)
            rows = gathered_tensor(comm, ended.times() or [NOT_TIMED])
            self._read(rows, partial(self._judge, ended))  # on a GPU, those that were exchanged after the last round
        self._unread = unread
        self._round = next(self._plan)

    def _judge(self, ended: Round, rows: list[list[int]]) -> None:
        """Use the times of a round. That of a call is the time of its slowest rank."""
        why = ""
        slowest = dict(zip(ended.ways, map(max, zip(*rows, strict=True)), strict=False))
        if not self.over:
            self._race(slowest)
        elif ended.start >= self._ask and ended.ways:
            self._asked.append(_ratio(slowest[self.leader], slowest[OFF]))
            if len(self._asked) == ASK_ROUNDS and statistics.median(self._asked) >= 1:
                why = f"{_standing(self.leader, self._asked)} after call {self._ask}: off"
                self.leader, self.closed = OFF, True
        self.decision = self._decided(why)

    def _race(self, times: Mapping[Schedule, int]) -> None:
        for way, taken in times.items():
            self._times[way].append(taken)
        first, *others = self._ways
        rounds = len(self._times[first])
        stay = sorted(others, key=self._median)[: STAY.get(rounds, len(others))]
        self._ways = (first, *(way for way in others if way in stay))
        leading = [way for way in stay if self._leads(way)]
        self.leader = leading[0] if leading else first
        self.over = rounds == len(STARTS)
        self.closed = self.over and (self.leader == first or first != OFF)

    def _ratios(self, way: Schedule) -> list[float]:
        """Return the ratios of its times to those of the first candidate in the same rounds."""
        return list(map(_ratio, self._times[way], self._times[self.candidates[0]]))

    def _median(self, way: Schedule) -> float:
        return statistics.median(self._ratios(way))

    def _leads(self, way: Schedule) -> bool:
        """Return whether the schedule would lead before the first candidate."""
        if self.candidates[0] != OFF:
            return self._median(way) < 1
        ratios = self._ratios(way)
        return statistics.median(ratios) <= GAIN and sum(ratio < 1 for ratio in ratios) >= WINS * len(ratios)

    def _decided(self, why: str = "") -> Decision:
        """Return the decision for the leader, with the reason: how the best of the others compares with the first."""
        first, *others = self._ways
        timed = {way: [one for one in times if one < NOT_TIMED] for way, times in self._times.items()}
        tried = {str(way): statistics.median(times) / 1e9 for way, times in timed.items() if times}
        if not why and self._times[first]:
            best = min(others, key=self._median) if self.leader == first else self.leader
            why = _standing(best, self._ratios(best)) + (f": {first}" if self.leader == first else "")
        reason = f"{why}; tried: {format_times(tried)}" if why else "the race begins"
        return self.key.decision(self.leader, reason, settled=self.over, tried=tried)


def _ratio(taken: int, base: int) -> float:
    return 1.0 if NOT_TIMED in (taken, base) else taken / base


def _standing(way: Schedule, ratios: Sequence[float]) -> str:
    wins = sum(ratio < 1 for ratio in ratios)
    return f"{way}: median {100 * (statistics.median(ratios) - 1):+.0f}%, faster in {wins} of {len(ratios)} rounds"
