"""Groups: what is called between start and end is collected, and launched together at the outermost end.

A group is thread-local, as in NCCL. All sends and receives of a communicator progress together; its collectives keep
their order; communicators progress independently, each in a thread of its own if one stream has several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from .algorithms import check_messages_to_itself, works_of
from .comm import Comm, Work
from .failure import HostFailure, invalid_usage
from .operation import Operation
from .stream import HostEvent, HostStream

Job = Callable[[], None]
# An operation, the stream it was issued on, None for the caller, and an event to record when it begins.
Issued = tuple[Operation, HostStream | None, HostEvent | None]
# A job that makes something; the communicator over which it does so, if any, and whose ticket it gets.
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
    """Close the group like `end`, but run no operation: the seconds that they would take on the modelled link.

    Without PYNCCL_HOST_LINK there is no model and the answer is 0. Communicators that the group makes are made.
    """
    group = _close("ncclGroupSimulateEnd")
    if group is None:
        return 0.0
    _init(group.inits)
    busy: dict[int, float] = {}  # by link: communicators of one device queue on it together
    for comm, works in _by_comm(group.operations).items():
        if comm.link is not None:
            seconds = sum(comm.link.seconds(*work.traffic()) for work in works)
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


def refuse(failure: HostFailure) -> None:
    """A call of the current group had wrong arguments: the group must launch nothing."""
    group = _thread.group
    if group.depth and group.failure is None:
        group.failure = failure


def issue(operation: Operation, stream: HostStream | None, started: HostEvent | None = None) -> None:
    """Run or queue one operation; inside a group keep it for the end. `started` is recorded when it begins."""
    group = _thread.group
    if group.depth:
        group.operations.append((operation, stream, started))
    elif stream is not None or started is not None:
        _launch([(operation, stream, started)])
    else:
        comm = operation.comm
        if operation.peer == comm.rank and operation.kind.peer_is == "peer":
            check_messages_to_itself([operation])
        comm.run(comm.ticket(), [operation])


def issue_wait(job: Job) -> None:
    """Run a job that waits for what other ranks do, which may be in this group: inside one after all else in it."""
    group = _thread.group
    if group.depth:
        group.waits.append(job)
    else:
        job()


def init(comm: Comm | None, job: Callable[[int], None]) -> None:
    """Run a job that talks to other ranks to make something; inside a group at its end, with the others of its kind.

    comm  over which it talks: the job gets a ticket of it, taken only now, since a group that launches nothing must not
          leave a place in the order of operations that everybody waits for"""
    group = _thread.group
    if group.depth:
        group.inits.append((comm, job))
    else:
        _init([(comm, job)])


def _init(inits: Sequence[Init]) -> None:
    run_at_once([partial(job, comm.ticket() if comm is not None else -1) for comm, job in inits])


def run_at_once(jobs: Sequence[Job], comms: Iterable[Comm] = ()) -> None:
    """Run jobs that may wait for each other, each in a thread; raises the first one's error.

    comms  are interrupted when Ctrl-C ends the job in this thread: those in others are not waited for then"""
    errors: list[BaseException] = []

    def guarded(job: Job) -> None:
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
        for comm in comms:
            comm.interrupt()
        raise
    except BaseException as error:
        errors.insert(0, error)
        for thread in others:
            thread.join()
    if errors:
        raise errors[0]


def _by_comm(issued: Sequence[Issued]) -> dict[Comm, list[Work]]:
    """What each communicator has to run, checked as a whole."""
    by_comm: dict[Comm, list[Operation]] = {}
    for operation, _, _ in issued:
        by_comm.setdefault(operation.comm, []).append(operation)
    for comm, own in by_comm.items():
        comm.check_usable()
        check_messages_to_itself(own)
    return {comm: works_of(own) for comm, own in by_comm.items()}


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
        # As NCCL does: run on the first stream, which waits for the others before; the others wait for it after.
        for other in others:
            HostEvent().record(other).wait(first)
            if first is not None:  # what runs in the caller is over when the others go on
                joins.append((first, other))
        runs.setdefault(first, []).append(partial(comm.run, comm.ticket(), works))
    in_caller = runs.pop(None, [])
    for stream, jobs in runs.items():
        assert stream is not None
        stream.submit(partial(run_at_once, jobs))
    run_at_once(in_caller, by_comm)
    for first, other in joins:
        first.record().wait(other)
