"""A simulator of distributed programs, which shares no code with the verdict: who waits for whom follows from playing.

A job has ranks with threads, and communicators. A thread runs its steps: calls (several form a group), which block it
or go to a stream, waits for streams, and what a fault makes of it (asleep, killed, ...). As in NCCL:

    collective    completes once all ranks of the communicator have called the same one with the same number
    send, recv    the n-th send from s to t meets the n-th recv of t from s, of the same size
    wait_signal   the n-th one completes after the peer's n-th signal
    init, split, shrink, grow, finalize, destroy   complete once all ranks that are not excluded have called them
    order         a call begins once all earlier calls of its rank on its stream and on its communicator are complete;
                  calls of one group begin together; on the host, a wait_signal is ordered by its stream only

`Job.play` runs until nothing moves. truth.py then says who waits for whom.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from watched import NOW

MESSAGES = ("send", "recv")
SIGNALS = ("signal", "wait_signal")
MEETINGS = ("init", "split")
BY_ALL = ("finalize", "destroy", "shrink", "grow")  # by all ranks, without a number
BY_NAME = ("barrier", *MEETINGS, *BY_ALL)  # only the operation must match

START = NOW - 500.0
ITEMSIZE = {"FLOAT32": 4, "BFLOAT16": 2, "": 1}


@dataclass(frozen=True)
class Comm:
    """A communicator.   ranks: global ranks; listed: whether its records list them; made: it exists from the start;
    route: the messages of two ranks in one direction, each of which goes on by itself; side: second threads use it"""

    name: str
    ranks: tuple[int, ...]
    parent: str = ""
    listed: bool = True
    made: bool = True
    route: bool = False
    side: bool = False


@dataclass(frozen=True)
class Op:
    """A call of a program.   root, peer: ranks in the communicator; makes: the communicators that a split makes"""

    comm: str
    operation: str
    line: int = 0
    count: int = -1
    dtype: str = ""
    op: str = ""
    root: int = -1
    peer: int = -1
    makes: tuple[str, ...] = ()
    excluded: tuple[int, ...] = ()

    @property
    def numbered(self) -> bool:
        return self.operation not in (*MESSAGES, *SIGNALS, *BY_ALL, "init")

    @property
    def signature(self) -> tuple[str | int, ...]:
        """What must be the same on all ranks."""
        if self.operation in BY_NAME:
            return (self.operation,)
        return self.operation, self.count, self.dtype, self.op, self.root


@dataclass(frozen=True)
class Step:
    """A step of a thread.

    ops     calls, of one group if there are several
    stream  that they are issued on; 0: the thread blocks until they are complete
    act     instead of calls: "wait" for `streams`, or the fault: "sleep", "freeze" (all threads of the rank sleep),
            "kill", "kill inside" (a moment after issuing the calls), "stop", "raise", "exit" (the process ends),
            "fail" (the calls raise), "fail in NCCL", "end" (the process ends by the error of the call that raised),
            "abort" (the communicator of the calls ends)"""

    ops: tuple[Op, ...] = ()
    stream: int = 0
    act: str = ""
    streams: tuple[int, ...] = ()
    line: int = 0


@dataclass(eq=False)
class Call:
    """A call that was issued.

    done     when it completed; message: its number among the sends to its peer, or the recvs from it
    outcome  how it failed, and error, code: see `Job.fail`"""

    rank: int
    op: Op
    entry: int
    number: int
    stream: int
    group: int
    issued: float
    returned: float = 0.0
    done: float = 0.0
    active: bool = False
    message: int = 0
    outcome: str = ""
    error: str = ""
    code: int = -1


@dataclass(eq=False)
class Unit:
    """The calls of one step, and the queues that it is in: of its stream, and of its communicators, which go on as soon
    as their own calls are complete."""

    calls: list[Call]
    queues: dict[int | str, deque[Unit]] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        return not any(self.ahead())

    def ahead(self) -> Iterator[Unit]:
        """Yield the units that must be complete first."""
        yield from (queue[0] for queue in self.queues.values() if self in queue and queue[0] is not self)

    @property
    def done(self) -> bool:
        return all(call.done for call in self.calls)


@dataclass(eq=False)
class Thread:
    """A thread of a rank.   blocked: the calls that it waits for; since: since when"""

    rank: int
    steps: Sequence[Step]
    side: bool = False
    at: int = 0
    blocked: list[Call] = field(default_factory=list)
    in_wait: bool = False
    since: float = 0.0
    asleep: bool = False

    @property
    def waits(self) -> bool:
        return any(not call.done for call in self.blocked)

    @property
    def finished(self) -> bool:
        return self.at >= len(self.steps) and not self.waits and not self.asleep


@dataclass
class Rank:
    """The state of a process.   state: "running", "stopped", "dead"; ending: how it ended, as in layout.ProcessEnd;
    outcome, code: of the call whose error ended it"""

    state: str = "running"
    ending: str = ""
    end: str = ""
    end_at: float = 0.0
    outcome: str = ""
    code: int = -1
    where: str = ""
    recorded: bool = True
    heartbeat: float = NOW - 0.5


@dataclass
class Membership:
    """A communicator as one rank has it.

    completed  the newest call that its watchdog knows to have completed; waits_at, awaited_at: see CommRecord"""

    made: float
    completed: int = 0
    waits_at: float = 0.0
    awaited_at: float = 0.0
    calls: list[Call] = field(default_factory=list)
    numbers: int = 0
    groups: int = 0
    ended: str = ""
    ended_at: float = 0.0
    excluded: tuple[int, ...] = ()


class Job:
    """A job of ranks that run programs.

    threads   rank, whether it is a second thread, steps
    cuda      calls on streams are observed as with CUDA, else as with the host library
    broken    (communicator, number): a collective that never completes although all ranks have entered it
    """

    def __init__(
        self, comms: Iterable[Comm], threads: Iterable[tuple[int, bool, Sequence[Step]]], seed: int, cuda: bool = False
    ) -> None:
        self.comms = {comm.name: comm for comm in comms}
        self.threads = [Thread(rank, steps, side) for rank, side, steps in threads]
        self.size = 1 + max(thread.rank for thread in self.threads)
        self.cuda, self.rng, self.clock = cuda, random.Random(seed), START
        self.broken: tuple[str, int] = ("", 0)
        self.exits = False  # a rank exits once its program is done
        self.ranks = [Rank() for _ in range(self.size)]
        self.members: dict[tuple[str, int], Membership] = {}
        for comm in self.comms.values():
            for rank in comm.ranks if comm.made else ():
                self.members[comm.name, rank] = Membership(START)
        self._queues: dict[tuple[int, int | str], deque[Unit]] = {}  # by rank, and stream or communicator
        self._met: dict[tuple[str, str, int], dict[int, Call]] = {}  # by communicator, operation or "", number
        self._messages: dict[tuple[str, int, int], tuple[list[Call], list[Call]]] = {}  # communicator, source, target
        self._unit_of: dict[int, Unit] = {}  # by id() of the call

    # Play

    def play(self) -> bool:
        """Run until no thread can progress. Return whether all have finished their programs."""
        moved = True
        while moved:
            moved = False
            self.rng.shuffle(self.threads)
            for thread in self.threads:
                moved |= self._advance(thread)
        self.clock = max(self.clock, START + 1.0)
        for rank, process in enumerate(self.ranks):
            own = [thread for thread in self.threads if thread.rank == rank]
            if self.exits and process.state == "running" and all(thread.finished for thread in own):
                process.state, process.ending, process.end, process.end_at = "dead", "CLEAN", "exit", self._tick()
        for (name, rank), member in self.members.items():
            self._observe(name, rank, member)
        return all(thread.finished for thread in self.threads)

    def _observe(self, name: str, rank: int, own: Membership) -> None:
        """Note what the watchdog of a rank sees. A mark on the streams passes only as a whole, so some calls before one
        that hangs may not be known to have completed."""
        process = self.ranks[rank]
        before = min((call.entry for call in own.calls if not call.done), default=len(own.calls) + 1) - 1
        streams = {call.stream for call in own.calls if not call.done and call.stream}
        own.completed = self.rng.randint(0, before) if streams and self.rng.random() < 0.5 else before
        if streams:
            own.waits_at = process.heartbeat if process.state == "dead" else NOW - 1.0
        if not self.cuda or self.comms[name].route:
            waits = [thread for thread in self.threads if thread.rank == rank and thread.waits and thread.in_wait]
            waits = [thread for thread in waits if streams & {call.stream for call in thread.blocked}]
            own.awaited_at = min((thread.since for thread in waits), default=0.0)

    def _tick(self) -> float:
        self.clock += self.rng.uniform(0.002, 0.02)
        return self.clock

    def _advance(self, thread: Thread) -> bool:
        process = self.ranks[thread.rank]
        if process.state != "running" or thread.asleep or thread.waits or thread.at >= len(thread.steps):
            return False
        step = thread.steps[thread.at]
        thread.at, thread.blocked, thread.in_wait, thread.since = thread.at + 1, [], False, self._tick()
        if step.act == "wait":
            units = [unit for stream in step.streams for unit in self._queue(thread.rank, stream)]
            thread.blocked, thread.in_wait = [call for unit in units for call in unit.calls], True
        elif step.act:
            self._fault(thread, step)
        else:
            self._issue(thread, step)
        return True

    def _queue(self, rank: int, of: int | str) -> deque[Unit]:
        return self._queues.setdefault((rank, of), deque())

    def _record(self, rank: int, step: Step) -> list[Call]:
        """Issue the calls of a step, so far only as records."""
        calls, groups = [], {}
        for op in step.ops:
            if op.operation == "init":
                self.members[op.comm, rank] = Membership(self.clock)
            own = self.members[op.comm, rank]
            if len(step.ops) > 1 and op.comm not in groups:
                groups[op.comm] = own.groups = own.groups + 1
            own.numbers += op.numbered
            number = own.numbers if op.numbered else int(op.operation == "init")
            if op.operation == "shrink":
                own.excluded = op.excluded
            call = Call(rank, op, len(own.calls) + 1, number, step.stream, groups.get(op.comm, 0), self.clock)
            if op.operation in (*MESSAGES, *SIGNALS):
                call.message = 1 + sum((it.op.operation, it.op.peer) == (op.operation, op.peer) for it in own.calls)
            own.calls.append(call)
            calls.append(call)
        return calls

    def _issue(self, thread: Thread, step: Step) -> None:
        rank = thread.rank
        calls = self._record(rank, step)
        if step.stream:
            for call in calls:
                call.returned = 0.0 if self.comms[call.op.comm].route else self._tick()
        else:
            thread.blocked = calls
        unit = Unit(calls)
        # The host library's wait_signal is in the order of its stream only.
        ordered = [op.comm for op in step.ops if self.cuda or op.operation != "wait_signal"]
        keys: list[int | str] = list(dict.fromkeys(ordered))
        for key in [*([step.stream] if step.stream else []), *keys]:
            queue = self._queue(rank, key)
            queue.append(unit)
            unit.queues[key] = queue
        for call in calls:
            self._unit_of[id(call)] = unit
            self._meet(call)
        self._begin(unit)

    def _meet(self, call: Call) -> None:
        op = call.op
        rank = self.comms[op.comm].ranks.index(call.rank)
        if op.operation in MESSAGES:
            pair = (rank, op.peer) if op.operation == "send" else (op.peer, rank)
            self._messages.setdefault((op.comm, *pair), ([], []))[op.operation == "recv"].append(call)
        elif op.operation in SIGNALS:
            pair = (rank, op.peer) if op.operation == "signal" else (op.peer, rank)
            self._messages.setdefault((f"signals of {op.comm}", *pair), ([], []))[op.operation != "signal"].append(call)
        else:
            self.meeting(call)[call.rank] = call

    def meeting(self, call: Call) -> dict[int, Call]:
        """Return the calls of all ranks that belong to this one, which is not a message."""
        kind = "" if call.op.numbered else call.op.operation
        return self._met.setdefault((call.op.comm, kind, call.number), {})

    def partner(self, call: Call) -> Call | None:
        """Return the other half of a message, if it was issued; for a wait_signal, its signal."""
        op, rank = call.op, self.comms[call.op.comm].ranks.index(call.rank)
        sends = op.operation in ("send", "signal")
        pair = (rank, op.peer) if sends else (op.peer, rank)
        name = f"signals of {op.comm}" if op.operation in SIGNALS else op.comm
        halves = self._messages[name, pair[0], pair[1]]
        at = halves[not sends].index(call)
        others = halves[sends]
        return others[at] if at < len(others) else None

    def _begin(self, first: Unit) -> None:
        """Begin a unit if its turn has come, and all those that can go on because of it."""
        ready = deque([first])
        while ready:
            unit = ready.popleft()
            if unit.done or not unit.active:
                continue
            for call in unit.calls:
                call.active = True
            for call in unit.calls:
                for other in self._completes(call):
                    other.done = self._tick()
                    self._made(other)
                    whole = self._unit_of[id(other)]
                    for each in whole.calls if whole.done else ():  # a group returns as a whole
                        each.returned = each.returned or self.clock
                    ready += self._passed(whole)

    def _passed(self, unit: Unit) -> Iterator[Unit]:
        """Take a unit out of the queues that need not wait for the rest of it. Yield those behind it."""
        for key, queue in unit.queues.items():
            mine = [call for call in unit.calls if not isinstance(key, str) or call.op.comm == key]
            if all(call.done for call in mine) and unit in queue:
                queue.remove(unit)
                if queue:
                    yield queue[0]

    def _completes(self, call: Call) -> Sequence[Call]:
        """Return the calls that complete because this one has begun."""
        op = call.op
        if call.done:
            return ()
        if op.operation == "signal":
            other = self.partner(call)
            return [call, other] if other is not None and other.active else [call]
        if op.operation in (*MESSAGES, "wait_signal"):
            other = self.partner(call)
            if other is None or not other.active or (op.operation in MESSAGES and nbytes(call) != nbytes(other)):
                return ()
            return [call, other] if op.operation in MESSAGES else [call]
        calls = self.meeting(call)
        if (op.comm, call.number) == self.broken or len({other.op.signature for other in calls.values()}) > 1:
            return ()
        here = {rank for rank, other in calls.items() if other.active}
        return [*calls.values()] if here >= self.needed(call) else ()

    def needed(self, call: Call) -> set[int]:
        """Return the ranks that a call needs."""
        comm, op = self.comms[call.op.comm], call.op
        if op.operation in (*MESSAGES, "wait_signal"):
            return {call.rank, comm.ranks[op.peer]}
        needed = set(comm.ranks) - {comm.ranks[rank] for rank in op.excluded}
        if op.operation in ("finalize", "destroy"):
            needed = {rank for rank in needed if not ((own := self.members.get((op.comm, rank))) and own.ended)}
        return needed

    def _made(self, call: Call) -> None:
        """A call has completed that makes or ends communicators."""
        for name in call.op.makes:
            if call.rank in self.comms[name].ranks and (name, call.rank) not in self.members:
                self.members[name, call.rank] = Membership(self._tick())
        if call.op.operation == "init":
            call.number = 0  # its first collective is number 1
        if call.op.operation == "destroy":
            self.end_comm(call.op.comm, call.rank, "DESTROYED")

    def end_comm(self, name: str, rank: int, how: str, at: float = 0.0) -> None:
        own = self.members[name, rank]
        if not own.ended:
            own.ended, own.ended_at = how, at or self._tick()

    def revoke(self, rank: int, at: float) -> None:
        """A rank ends all its communicators, and meets the others again. What it waits for fails."""
        for (_, owner), own in self.members.items():
            if owner == rank and not own.ended:
                own.ended, own.ended_at = "REVOKED", at
        for call in [call for thread in self.threads if thread.rank == rank for call in thread.blocked]:
            if not (call.done or call.outcome):
                self.fail(call, "PEER_LOST", "NcclRemoteError: a peer was lost")
                call.returned, call.active = at + 0.01, False

    def _left(self, name: str) -> None:
        """A rank has ended a communicator: others need not wait for it in finalize and destroy."""
        for operation in ("finalize", "destroy"):
            for call in [*self._met.get((name, operation, 0), {}).values()][:1]:
                if not call.done:
                    self._begin(self.unit_of(call))

    # Faults

    def _fault(self, thread: Thread, step: Step) -> None:
        process, rank = self.ranks[thread.rank], thread.rank
        if step.act in ("sleep", "freeze"):
            for other in self.threads:
                other.asleep |= other is thread or (step.act == "freeze" and other.rank == rank)
            process.where = "/job/data.py:7 next_batch"
        elif step.act.startswith("fail"):
            failure = self.rng.choice(FAILURES if step.act == "fail" else [row for row in FAILURES if "NCCL" in row[0]])
            for call in self._record(rank, step):
                call.returned = self._tick()
                self.fail(call, *failure)
        elif step.act == "end":
            of = next(call for call in self.pending(rank) if call.outcome)
            ending = {"RAISED": "EXCEPTION", "NCCL_FAILED": "CALL_FAILED", "INTERRUPTED": "INTERRUPTED"}[of.outcome]
            if ending == "CALL_FAILED":
                process.outcome = of.outcome
            process.code = of.code
            self.end_process(rank, ending, of.error)
        elif step.act == "abort":
            self.end_comm(step.ops[0].comm, rank, "ABORTED")
            self._left(step.ops[0].comm)
        elif step.act == "stop":
            process.state, process.where = "stopped", "/job/data.py:7 next_batch"
            if not self.cuda:
                self._vanish(rank)
        else:  # it ends
            if step.act == "kill inside":
                for call in self._record(rank, step):
                    call.returned = self._tick() if step.stream and not self.comms[call.op.comm].route else 0.0
            process.where = "/job/data.py:7 next_batch"
            self.end_process(rank, *ENDS[step.act])

    def end_process(self, rank: int, ending: str, end: str, at: float = 0.0) -> None:
        process = self.ranks[rank]
        process.state, process.ending, process.end = "dead", ending, end
        process.end_at = 0.0 if ending == "KILLED" else at or self._tick()
        process.heartbeat = (at or self.clock) - self.rng.uniform(0.0, 0.5)
        self._vanish(rank)
        for (name, owner), own in self.members.items():
            if owner == rank and ending not in ("KILLED", "CLEAN") and not own.ended:
                self.end_comm(name, rank, "AT_EXIT", at)
                self._left(name)

    def _vanish(self, rank: int) -> None:
        """The unfinished calls of a rank will never complete."""
        for (owner, _), queue in self._queues.items():
            if owner == rank:
                for unit in queue:
                    for call in unit.calls:
                        call.active = False

    def fail(self, call: Call, outcome: str, error: str, code: int = -1) -> None:
        """A call has raised.   outcome: name of an Outcome; code: its detail"""
        call.outcome, call.error, call.code = outcome, error, code

    def returned_to_caller(self, call: Call) -> bool:
        """Return whether a call completed with its return, not on a stream."""
        route = self.comms[call.op.comm].route
        return bool(call.returned) and (route or (not self.cuda and not call.stream))

    # The state at the end

    def unit_of(self, call: Call) -> Unit:
        return self._unit_of[id(call)]

    def units(self) -> Iterator[Unit]:
        """Yield the calls that are not complete, by group."""
        yield from (unit for queue in self._queues.values() for unit in queue)

    def pending(self, rank: int) -> Iterator[Call]:
        """Yield the calls of a rank that are not complete."""
        for (_, owner), own in self.members.items():
            if owner == rank:
                yield from (call for call in own.calls if not call.done)


def nbytes(call: Call) -> int:
    return call.op.count * ITEMSIZE[call.op.dtype]


FAILURES = (
    ("RAISED", "RuntimeError: a hook of the user", -1),
    ("NCCL_FAILED", "NcclSystemError: ncclAllReduce: the link broke", 2),
    ("NCCL_FAILED", "NcclInternalError: ncclAllReduce", 3),
    ("INTERRUPTED", "KeyboardInterrupt: by hand", 2),
)
ENDS = {
    "kill": ("KILLED", ""),
    "kill inside": ("KILLED", ""),
    "raise": ("EXCEPTION", "ValueError: no such file"),
    "exit": ("EXIT", "exit(3)"),
}
