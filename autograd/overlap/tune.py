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
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator

from ..agreement import DeferredCheck, gathered_tensor
from .schedules import OFF, Decision, PassKey, Schedule, format_times

STARTS = (0, 12, 32, 52, 76, 104, 136, 172, 212, 256)  # the call with which each round of a race starts
STAY = {2: 3, 4: 2}  # after so many rounds, so many schedules stay in the race, besides the first
GAIN, WINS = 0.97, 2 / 3  # to lead: at most this ratio to "off" in the median, and less than 1 in this share of rounds
ASK, EVERY, ASK_ROUNDS = 2048, 13, 7  # call at which "off" is asked again; calls between its rounds; rounds at most
NOT_TIMED = 1 << 62  # nanoseconds


def mark(like: Tensor) -> Any:
    """Return the present moment: nanoseconds, or on a GPU an event of the current stream of like's device."""
    if not like.is_cuda:
        return time.perf_counter_ns()
    return torch.cuda.current_stream(like.device).record_event(torch.cuda.Event(enable_timing=True))


def nanoseconds_between(begin: Any, end: Any) -> int:
    if isinstance(begin, int):
        return int(end) - begin
    end.synchronize()
    return round(begin.elapsed_time(end) * 1e6)


class Round:
    """The calls from `start` on, in which each of `ways` runs twice. Without ways, it is a call that only exchanges the
    times of earlier ones.

    marks  schedule -> (begin, end) of its second pass, unless that raised"""

    def __init__(self, start: int, ways: Sequence[Schedule] = (), name: str = "") -> None:
        self.start, self.ways, self.name = start, tuple(ways), name
        self.marks: dict[str, Any] = {}


class ScheduledCall(NamedTuple):
    """The decision for one call, and the round that times it. decision None: "off", which needed no decision"""

    decision: Decision | None
    round: Round | None = None

    @contextlib.contextmanager
    def timed(self, run: contextlib.AbstractContextManager[Any], like: Tensor) -> Iterator[Any]:
        """Run a pass, and time it for the round."""
        assert self.round and self.decision
        begin = mark(like)
        with run as p:
            yield p
        self.round.marks[self.decision.schedule] = begin, mark(like)


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
    decision  the leader, for calls between the rounds"""

    def __init__(self, key: PassKey, candidates: Sequence[Schedule]) -> None:
        self.key, self._ways = key, tuple(candidates)  # those that are still in the race
        self.over = self.closed = False
        self._first = self.leader = self._ways[0]
        self._times: dict[Schedule, list[int]] = {way: [] for way in candidates}  # nanoseconds
        self._ask = 0  # call at which "off" was asked again
        self._asked: list[float] = []  # ratios since
        self._calls = 0
        self._unread: Round | None = None  # on a GPU, the last round
        self._read = DeferredCheck()
        self._plan = self._rounds()
        self._round = next(self._plan)
        self.decision = key.decision(self.leader, "the race begins", settled=False)

    def next(self, comm: Communicator) -> ScheduledCall:
        """Count a call, and return its schedule. Collective at the first call after a round."""
        call, self._calls = self._calls, self._calls + 1
        if call >= self._round.start + 2 * len(self._round.ways) and not self.closed:
            self._end_round(comm)
        at, second = divmod(call - self._round.start, 2)
        if self.closed or not 0 <= at < len(self._round.ways):
            return ScheduledCall(self.decision)
        decision = self.key.decision(self._round.ways[at], self._round.name, settled=self.over)
        return ScheduledCall(decision, self._round if second else None)

    def _rounds(self) -> Iterator[Round]:
        for number, start in enumerate(STARTS):
            begin = number % len(self._ways)  # each round begins with another one
            yield Round(start, self._ways[begin:] + self._ways[:begin], f"round {number + 1} of a race")
        for call in itertools.count(STARTS[-1] + EVERY, EVERY):
            if self.over:
                break
            yield Round(call)  # on a GPU, the last times are still to be read
        for doublings in itertools.count():
            self._ask, self._asked = ASK << doublings, []
            for number in itertools.count():
                ways = [self.leader, OFF] if number % 2 else [OFF, self.leader]
                again = "off and the winner of the race are compared again"
                yield Round(self._ask + number * EVERY, ways if number < ASK_ROUNDS else (), again)
                if self._asked and statistics.median(self._asked) < 1:
                    break

    def _end_round(self, comm: Communicator) -> None:
        """Exchange the times of a round; on a GPU of the one before, whose events are complete more often."""
        ended = self._round if self.key.on_cpu else self._unread
        if ended is not None:
            marks = [ended.marks.get(str(way)) for way in ended.ways]
            times = [nanoseconds_between(*pair) if pair else NOT_TIMED for pair in marks]
            rows = gathered_tensor(comm, times or [NOT_TIMED])
            self._read(rows, partial(self._judge, ended))  # on a GPU, those that were exchanged after the last round
        self._unread, self._round = self._round, next(self._plan)

    def _judge(self, ended: Round, rows: list[list[int]]) -> None:
        """Use the times of a round. That of a call is the time of its slowest rank."""
        why, first = "", self._first
        slowest = dict(zip(ended.ways, map(max, zip(*rows, strict=True)), strict=False))
        if not self.over:
            for way, taken in slowest.items():
                self._times[way].append(taken)
            rounds = len(self._times[first])
            stay = sorted(self._ways[1:], key=self._median)[: STAY.get(rounds)]
            self._ways = (first, *(way for way in self._ways if way in stay))
            self.leader = next(filter(self._leads, stay), first)
            self.over = rounds == len(STARTS)
            self.closed = self.over and (self.leader == first or first != OFF)
        elif slowest and ended.start >= self._ask:
            self._asked.append(_ratio(slowest[self.leader], slowest[OFF]))
            if len(self._asked) == ASK_ROUNDS and statistics.median(self._asked) >= 1:
                why = f"{_standing(self.leader, self._asked)} after call {self._ask}: off"
                self.leader, self.closed = OFF, True
        self.decision = self._decided(why)

    def _decided(self, why: str) -> Decision:
        """Return the decision for the leader. why "": how the best of the others compares with the first."""
        if not why:
            best = min(self._ways[1:], key=self._median) if self.leader == self._first else self.leader
            why = _standing(best, self._ratios(best)) + (f": {self._first}" if self.leader == self._first else "")
        timed = {str(way): [one for one in times if one < NOT_TIMED] for way, times in self._times.items()}
        tried = {name: statistics.median(times) / 1e9 for name, times in timed.items() if times}
        return self.key.decision(self.leader, f"{why}; tried: {format_times(tried)}", settled=self.over, tried=tried)

    def _ratios(self, way: Schedule) -> list[float]:
        """Return the ratios of its times to those of the first candidate in the same rounds."""
        return list(map(_ratio, self._times[way], self._times[self._first]))

    def _median(self, way: Schedule) -> float:
        return statistics.median(self._ratios(way))

    def _leads(self, way: Schedule) -> bool:
        """Return whether the schedule would lead before the first candidate."""
        if self._first != OFF:
            return self._median(way) < 1
        ratios = self._ratios(way)
        return statistics.median(ratios) <= GAIN and sum(ratio < 1 for ratio in ratios) >= WINS * len(ratios)


def _ratio(taken: int, base: int) -> float:
    return 1.0 if NOT_TIMED in (taken, base) else taken / base


def _standing(way: Schedule, ratios: Sequence[float]) -> str:
    wins = sum(ratio < 1 for ratio in ratios)
    return f"{way}: median {100 * (statistics.median(ratios) - 1):+.0f}%, faster in {wins} of {len(ratios)} rounds"
