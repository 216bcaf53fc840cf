"""Groups: collect the calls between start and end, and launch them together at the outermost end.

As in NCCL, a group is thread-local. All sends and receives of a communicator progress together. Its collectives keep
their order. Communicators progress independently, each in a separate thread if several use the same stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from .algorithms import check_self_messages, works_of
from .comm import Comm, Work
from .failure import HostFailure, TransportFailure, invalid_usage
from .operation import Operation
from .stream import HostEvent, HostStream

Job = Callable[[], None]
# (operation, its stream or None for the caller's, event to record when it begins)
Issued = tuple[Operation, HostStream | None, HostEvent | None]
# (communicator that the job uses or None, job that creates something with a ticket of that communicator)
Init = tuple[Comm | None, Callable[[int], None]]


@dataclass
class _Group:
    depth: int = 0
    inits: list[Init] = field(default_factory=list)
    operations: list[Issued] = field(default_factory=list)
    waits: list[Job] = field(default_factory=list)
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
    if group.inits:
        _init(group.inits)
    if group.operations:
        _launch(group.operations)
    for wait in group.waits:
        wait()


def simulate_end() -> float:
    """Close the group without running its operations; return their duration in seconds on the simulated link.

    The result is 0 without PYNCCL_HOST_LINK. Communicators are still created.
    """
    group = _close("ncclGroupSimulateEnd")
    if group is None:
        return 0.0
    _init(group.inits)
    busy: dict[int, float] = {}  # per link: communicators of one device share it
    for comm, works in _by_comm(group.operations).items():
        if comm.link is not None:
            seconds = sum(comm.link.seconds(*work.traffic()) for work in works)
            busy[id(comm.link)] = busy.get(id(comm.link), 0.0) + seconds
    return max(busy.values(), default=0.0)


def _close(name: str) -> _Group | None:
    """End one level; return the group of this thread if this was the outermost level."""
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


def mark_failed(failure: HostFailure) -> None:
    """Mark the current group as failed, because a call had wrong arguments. It then launches nothing."""
    group = _thread.group
    if group.depth and group.failure is None:
        group.failure = failure


def issue(operation: Operation, stream: HostStream | None, started: HostEvent | None = None) -> None:
    """Run or queue one operation; inside a group, at its end. `started` is recorded when it begins."""
    group = _thread.group
    if group.depth:
        group.operations.append((operation, stream, started))
        return
    comm = operation.comm
    if operation.peer == comm.rank and operation.kind.peer_is == "peer":
        check_self_messages([operation])
    if started is not None:
        started.record(stream)
    if stream is None:
        comm.run(comm.ticket(), [operation])
    else:
        stream.submit(partial(comm.run, comm.ticket(), [operation]))


def issue_wait(job: Job) -> None:
    """Run a job that waits for other ranks; inside a group, at its end, since those calls may be in the same group."""
    group = _thread.group
    if group.depth:
        group.waits.append(job)
    else:
        job()


def init(comm: Comm | None, job: Callable[[int], None]) -> None:
    """Run a job that creates something together with other ranks; inside a group, concurrently at its end.

    comm  used by the job, which receives a ticket of it. The ticket is taken only at the launch, since an unused ticket
          would block all later operations."""
    group = _thread.group
    if group.depth:
        group.inits.append((comm, job))
    else:
        _init([(comm, job)])


def _init(inits: Sequence[Init]) -> None:
    run_at_once([partial(job, comm.ticket() if comm is not None else -1) for comm, job in inits])


def run_at_once(jobs: Sequence[Job], comms: Iterable[Comm] = ()) -> None:
    """Run jobs concurrently in threads, since they may wait for each other. Raises the first error.

    comms  fail if an exception of a signal handler ends the job in this thread; the other threads are not joined then
    """
    errors: list[BaseException] = []

    def guarded(job: Job) -> None:
        try:
            job()
        except BaseException as error:  # raised in the calling thread
            errors.append(error)

    others = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs[1:]]
    for thread in others:
        thread.start()
    try:
        if jobs:
            jobs[0]()
        for thread in others:
            thread.join()
    except (HostFailure, TransportFailure) as failure:
        errors.insert(0, failure)
        for thread in others:
            thread.join()
    except BaseException as error:
        for comm in comms:
            comm.interrupt(error)
        raise
    if errors:
        raise errors[0]


def _by_comm(issued: Sequence[Issued]) -> dict[Comm, list[Work]]:
    """Check the operations of each communicator, and return the work of each."""
    by_comm: dict[Comm, list[Operation]] = {}
    for operation, _, _ in issued:
        by_comm.setdefault(operation.comm, []).append(operation)
    for comm, operations in by_comm.items():
        comm.check_usable()
        check_self_messages(operations)
    return {comm: works_of(operations) for comm, operations in by_comm.items()}


def _launch(issued: Sequence[Issued]) -> None:
    by_comm = _by_comm(issued)
    used: dict[Comm, dict[HostStream | None, None]] = {}
    for operation, stream, started in issued:
        used.setdefault(operation.comm, {})[stream] = None
        if started is not None:
            started.record(stream)
    runs: dict[HostStream | None, list[Job]] = {}
    joins: list[tuple[HostStream, HostStream | None]] = []
    for comm, works in by_comm.items():
        first, *others = used[comm]
        # As NCCL does: run on the first stream. It first waits for the other streams; they wait for it afterwards.
        for other in others:
            HostEvent().record(other).wait(first)
            if first is not None:  # on the caller's stream, the work has completed by then
                joins.append((first, other))
        runs.setdefault(first, []).append(partial(comm.run, comm.ticket(), works))
    in_caller = runs.pop(None, [])
    for stream, jobs in runs.items():
        assert stream is not None
        stream.submit(partial(run_at_once, jobs))
    run_at_once(in_caller, by_comm)
    for first, other in joins:
        first.record().wait(other)
