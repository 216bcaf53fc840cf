"""Records of jobs for the tests of verdicts, written by hand or by simulating programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pynccl.bindings.errors import NcclError, outcome_of
from pynccl.watch.layout import ProcessEnd
from pynccl.watch.records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, CallRecord, CommRecord, ProcessRecord
from pynccl.watch.verdict import judge, render

NOW = 1_000_000.0


def call(
    number: int, operation: str = "all_reduce", state: str = COMPLETED, age: float = 12.3, **more: Any
) -> CallRecord:
    """Return a call issued `age` seconds ago."""
    values: dict[str, Any] = {"entry": number, "issued": NOW - age, "state": state}
    if operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv"):
        values |= {"count": 33_554_432, "dtype": "BFLOAT16"}
    if "reduce" in operation:
        values["op"] = "SUM"
    if operation in ("send", "recv", "finalize", "check"):
        values["entry"], number = number or 1, 0
    return CallRecord(number=number, operation=operation, **{**values, **more})


def failed(
    error: BaseException, returned: float, number: int = 41, operation: str = "all_reduce", **more: Any
) -> CallRecord:
    """Return a call that raised `returned` seconds ago."""
    outcome, code = outcome_of(error)
    values = {"error": text_of(error), "outcome": outcome, "code": code, "returned": NOW - returned}
    return call(number, operation, FAILED, **{**values, **more})


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}{': ' if str(error) else ''}{error}"


def ended(by: BaseException | ProcessEnd) -> dict[str, Any]:
    """Return the fields of a process that an exception has ended, or that has ended in this way."""
    values: dict[str, Any] = {"state": DEAD}
    if isinstance(by, ProcessEnd):
        return {**values, "ending": by, "end": "exit" if by == ProcessEnd.CLEAN else ""}
    values["end"] = text_of(by)
    if isinstance(by, NcclError):
        values["outcome"], values["code"] = outcome_of(by)
        return {**values, "ending": ProcessEnd.CALL_FAILED}
    interrupted = isinstance(by, KeyboardInterrupt)
    return {**values, "ending": ProcessEnd.INTERRUPTED if interrupted else ProcessEnd.EXCEPTION}


def comm(
    rank: int, size: int, calls: Sequence[CallRecord] = (), uid: str = "u-tp", name: str = "tp", **more: Any
) -> CommRecord:
    numbered = [record for record in calls if record.number > 0]
    entered = max((record.number for record in numbered), default=0)
    pending = [record.number for record in numbered if record.state in (INSIDE, ISSUED)]
    completed = (
        min(pending) - 1
        if pending
        else max((record.number for record in numbered if record.state == COMPLETED), default=0)
    )
    values: dict[str, Any] = {"entered": entered, "completed": completed, **more}
    return CommRecord(uid, name, rank, size, calls=list(calls), **values)


def process(rank: int, *comms: CommRecord, **more: Any) -> ProcessRecord:
    values: dict[str, Any] = {"pid": 1000 + rank, "host": "a", "machine": "m", "rank": rank, "comms": list(comms)}
    return ProcessRecord(**{**values, "started": NOW - 900, "now": NOW, "heartbeat": NOW - 0.5, **more})


def waiting(rank: int, size: int, number: int = 41, **more: Any) -> ProcessRecord:
    """Return a rank inside collective `number` of 'tp'."""
    site = more.pop("site", "/home/me/model.py:88")
    return process(rank, comm(rank, size, [call(number - 1, age=20), call(number, state=INSIDE, site=site)]), **more)


def behind(rank: int, size: int, number: int = 40, **more: Any) -> ProcessRecord:
    """Return a rank whose last collective of 'tp', `number`, has completed."""
    where = more.pop("where", "/home/me/data.py:41 next_batch")
    return process(rank, comm(rank, size, [call(number, age=20)]), where=where, **more)


def dp(rank: int, *calls: CallRecord, size: int = 2, **more: Any) -> CommRecord:
    return comm(rank, size, calls, uid="u-dp", name="dp", **more)


def in_init(rank: int, uid: str = "u-w") -> ProcessRecord:
    init = call(1, "init", INSIDE, site="/m/train.py:3")
    return process(rank, comm(rank, 4, [init], uid=uid, name="world"))


def ring(size: int) -> list[ProcessRecord]:
    return [
        process(r, comm(r, size, [call(0, "recv", INSIDE, peer=(r - 1) % size, site="/m/ring.py:3")]))
        for r in range(size)
    ]


def three_wait(**more: Any) -> list[ProcessRecord]:
    """Return three of four ranks, which are inside all_reduce #41 of 'tp'."""
    return [waiting(rank, 4, **more) for rank in range(3)]


class Case:
    """Records and the expected verdict.

    expected  kind, culprits and the beginning of the text: "missing tp3 dp0: ranks ..." names rank 3 of 'tp' and rank 0
              of 'dp'
    also      other texts that must occur
    lines     the culprits' lines of code; None: not compared
    more      passed to judge()"""

    def __init__(
        self,
        records: Sequence[ProcessRecord],
        expected: str,
        *also: str,
        lines: Sequence[str] | None = None,
        **more: Any,
    ) -> None:
        self.records, self.expected, self.also, self.lines, self.more = [*records], expected, also, lines, more

    def check(self) -> None:
        verdict = judge(self.records, **self.more)
        text = render(verdict)
        head, _, beginning = self.expected.partition(": ")
        kind, *culprits = head.split()
        assert text.startswith(beginning), text
        named = [f"{uid.removeprefix('u-')}{rank}" for uid, rank in verdict.culprits]
        assert (verdict.kind, sorted(named)) == (kind, sorted(culprits)), text
        for part in self.also:
            assert part in text, text
        assert self.lines is None or sorted(verdict.lines) == sorted(self.lines), verdict.lines


@dataclass
class ProgramStep:
    """One step of a program: a collective of a communicator."""

    comm: str
    operation: str
    line: int
    count: int = 1024


@dataclass
class SimulatedJob:
    """A simulated job of several ranks that run programs. Each rank may issue up to `ahead` calls before they complete.

    As in NCCL, a collective completes once all ranks of its communicator have issued the same call, with the same
    number, as the oldest pending call of their stream. Calls still pending when no rank can progress hang."""

    comms: dict[str, list[int]]
    programs: list[list[ProgramStep]]
    ahead: int = 1
    halted: dict[int, int] = field(default_factory=dict)  # rank -> the step that it never reaches
    issued: list[list[tuple[ProgramStep, int, float]]] = field(default_factory=list)  # per rank: step, number, time
    done: list[int] = field(default_factory=list)

    def play(self) -> bool:
        """Run until no rank can progress. Return whether all ranks finished their programs."""
        size = len(self.programs)
        self.issued, self.done = [[] for _ in range(size)], [0] * size
        clock, progressed = NOW - 500.0, True
        while progressed:
            progressed = False
            for rank in range(size):
                clock += 0.01
                progressed |= self._issue(rank, clock)
            for rank in range(size):
                progressed |= self._complete(rank)
        return all(self.done[rank] == len(program) for rank, program in enumerate(self.programs))

    def _issue(self, rank: int, clock: float) -> bool:
        at = len(self.issued[rank])
        if at >= len(self.programs[rank]) or at - self.done[rank] >= self.ahead or at >= self.halted.get(rank, at + 1):
            return False
        step = self.programs[rank][at]
        number = 1 + sum(other.comm == step.comm for other, _, _ in self.issued[rank])
        self.issued[rank].append((step, number, clock))
        return True

    def _head(self, rank: int) -> tuple[ProgramStep, int] | None:
        if self.done[rank] >= len(self.issued[rank]):
            return None
        step, number, _ = self.issued[rank][self.done[rank]]
        return step, number

    def _complete(self, rank: int) -> bool:
        own = self._head(rank)
        if own is None:
            return False
        ranks = self.comms[own[0].comm]
        heads = [self._head(other) for other in ranks]
        same = all(
            head is not None
            and (head[0].comm, head[0].operation, head[0].count, head[1])
            == (own[0].comm, own[0].operation, own[0].count, own[1])
            for head in heads
        )
        for other in ranks if same else ():
            self.done[other] += 1
        return same

    def records(self) -> list[ProcessRecord]:
        return [self._record(rank) for rank in range(len(self.programs))]

    def _record(self, rank: int) -> ProcessRecord:
        comms = []
        for name, ranks in self.comms.items():
            if rank not in ranks:
                continue
            calls = []
            for index, (step, number, when) in enumerate(self.issued[rank]):
                if step.comm != name:
                    continue
                pending = INSIDE if self.ahead == 1 else ISSUED
                state = COMPLETED if index < self.done[rank] else pending
                more = {"count": step.count, "site": f"/job/train.py:{step.line}"}
                calls.append(call(number, step.operation, state, issued=when, **more))
            comms.append(comm(ranks.index(rank), len(ranks), calls[-32:], uid=f"u-{name}", name=name))
        return process(
            rank, *comms, where="/job/data.py:7 next_batch" if rank in self.halted else "/job/train.py:1 step"
        )
