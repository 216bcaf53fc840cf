"""Groups: what is called between start and end is collected, and launched together at the outermost end.

A group is thread-local, as in NCCL. All sends and receives of a communicator progress together; its collectives keep
their order; communicators progress independently, each in a thread of its own if one stream has several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from .algorithms import check_messages_to_itself
from .comm import Comm, Turn
from .failure import HostFailure, invalid_usage
from .operation import Operation
from .stream import HostEvent, HostStream

# A communicator's share of a launch: its ticket and what to run.
Run = tuple[Comm, int, Sequence[Operation]]
# An operation and the stream it was issued on, None for the caller.
Issued = tuple[Operation, HostStream | None]
# A job that makes something, and its place in the order of the communicator that it uses.
Birth = tuple[Callable[[], None], Turn | None]
# A job that waits for other ranks without using the communicator, which other operations may use meanwhile.
Wait = tuple[Comm, Callable[[], None], HostStream | None]
# An event to record when what is issued next begins, and the stream of that.
Start = tuple[HostEvent, HostStream | None]


@dataclass
class _Group:
    depth: int = 0
    births: list[Birth] = field(default_factory=list)
    operations: list[Issued] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    failure: HostFailure | None = None


class _ThreadGroups(threading.local):
    def __init__(self) -> None:
        self.group = _Group()


_thread = _ThreadGroups()


def start() -> None:
    _thread.group.depth += 1


def end() -> None:
    group = _close("ncclGroupEnd")
    if group is None:
        return
    _bring_up(group.births)
    if group.operations:
        _launch(group.operations, group.starts)
    for comm, job, stream in group.waits:  # after all else: what the other ranks wait for may be in this group
        _wait(comm, job, stream)


def simulate_end() -> float:
    """Close the group like `end`, but run no operation: the seconds that they would take on the modelled link.

    Without PYNCCL_HOST_LINK there is no model and the answer is 0. Communicators that the group makes are made.
    """
    group = _close("ncclGroupSimulateEnd")
    if group is None:
        return 0.0
    _bring_up(group.births)
    by_comm = _by_comm(group.operations)
    busy: dict[int, float] = {}  # by link: communicators of one device queue on it together
    for comm, own in by_comm.items():
        if comm.link is not None:
            seconds = sum(comm.link.seconds(*traffic) for traffic in comm.traffic(own))
            busy[id(comm.link)] = busy.get(id(comm.link), 0.0) + seconds
    return max(busy.values(), default=0.0)


def _close(name: str) -> _Group | None:
    """The group of this thread if this end is its outermost one."""
    group = _thread.group
    if group.depth == 0:
        raise invalid_usage(f"{name}: no group was started in this thread")
    group.depth -= 1
    if group.depth:
        return None
    _thread.group = _Group()
    if group.failure is not None:
        raise HostFailure(group.failure.code, f"{name}: nothing was launched; {group.failure.text}")
    return group


def announce_start(event: HostEvent, stream: HostStream | None) -> None:
    """Record `event` when the operation that is issued next begins."""
    group = _thread.group
    if group.depth:
        group.starts.append((event, stream))
    else:
        event.record(stream)


def refuse(failure: HostFailure) -> None:
    """A call of the current group had wrong arguments: the group must launch nothing."""
    group = _thread.group
    if group.depth and group.failure is None:
        group.failure = failure


def issue(operation: Operation, stream: HostStream | None) -> None:
    """Run or queue one operation; inside a group keep it for the end."""
    group = _thread.group
    if group.depth:
        group.operations.append((operation, stream))
    elif stream is not None:
        _launch([(operation, stream)], ())
    else:
        comm = operation.comm
        if operation.peer == comm.rank:
            check_messages_to_itself([operation])
        comm.run(comm.ticket(), [operation])


def issue_wait(comm: Comm, job: Callable[[], None], stream: HostStream | None) -> None:
    """Run or queue a job that waits for what other ranks do; inside a group keep it for the end."""
    group = _thread.group
    if group.depth:
        group.waits.append((comm, job, stream))
    else:
        _wait(comm, job, stream)


def _wait(comm: Comm, job: Callable[[], None], stream: HostStream | None) -> None:
    comm.check_usable()
    comm.puts.expect()

    def expected() -> None:
        with comm.puts.expected():
            job()

    if stream is None:
        expected()
    else:
        stream.submit(expected)


def bring_up(birth: Callable[[], None], turn: Turn | None) -> None:
    """Run a job that talks to other ranks to make something; inside a group at its end, with the others of its kind.

    turn  what it needs of the communicator over which it talks"""
    group = _thread.group
    if group.depth:
        group.births.append((birth, turn))
    else:
        _bring_up([(birth, turn)])


def _bring_up(births: Sequence[Birth]) -> None:
    for _, turn in births:
        if turn is not None:
            turn.take()
    together([birth for birth, _ in births])


def together(jobs: Sequence[Callable[[], None]], give_up: Callable[[], None] = lambda: None) -> None:
    """Run jobs that may wait for each other, each in a thread; raises the first one's error.

    give_up  ends those in other threads when Ctrl-C ends the one in this: they are not waited for then"""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised again in the thread that called
            errors.append(error)

    others = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs[1:]]
    for thread in others:
        thread.start()
    try:
        if jobs:
            jobs[0]()
        for thread in others:
            thread.join()
    except KeyboardInterrupt:
        give_up()
        raise
    except BaseException as error:
        errors.insert(0, error)
        for thread in others:
            thread.join()
    if errors:
        raise errors[0]


def _by_comm(issued: Sequence[Issued]) -> dict[Comm, list[Operation]]:
    """The operations of each communicator, checked as a whole."""
    by_comm: dict[Comm, list[Operation]] = {}
    for operation, _ in issued:
        by_comm.setdefault(operation.comm, []).append(operation)
    for comm, own in by_comm.items():
        comm.check_usable()
        check_messages_to_itself(own)
    return by_comm


def _launch(issued: Sequence[Issued], starts: Sequence[Start]) -> None:
    by_comm = _by_comm(issued)
    used: dict[Comm, dict[HostStream | None, None]] = {}
    for operation, stream in issued:
        used.setdefault(operation.comm, {})[stream] = None
    for event, stream in starts:
        event.record(stream)
    runs: dict[HostStream | None, list[Run]] = {}
    joins: list[tuple[HostStream, HostStream | None]] = []
    for comm, own in by_comm.items():
        streams = list(used[comm])
        # As NCCL does: run on the first stream, which waits for the others before; the others wait for it after.
        for other in streams[1:]:
            HostEvent().record(other).wait(streams[0])
            if streams[0] is not None:  # what runs in the caller is over when the others go on
                joins.append((streams[0], other))
        runs.setdefault(streams[0], []).append((comm, comm.ticket(), own))
    in_caller = runs.pop(None, [])
    for stream, own_runs in runs.items():
        assert stream is not None
        stream.submit(partial(_run_all, own_runs))
    together([partial(comm.run, ticket, own) for comm, ticket, own in in_caller], partial(_interrupt, list(by_comm)))
    for first, other in joins:
        first.record().wait(other)


def _interrupt(comms: Sequence[Comm]) -> None:
    for comm in comms:
        comm.interrupt()


def _run_all(runs: Sequence[Run]) -> None:
    together([partial(comm.run, ticket, own) for comm, ticket, own in runs])
