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
from .comm import Comm
from .failure import HostFailure, invalid_usage
from .operation import Operation
from .stream import HostEvent, HostStream

# A communicator's share of a launch: its ticket and what to run.
Run = tuple[Comm, int, Sequence[Operation]]
# An operation and the stream it was issued on, None for the caller.
Issued = tuple[Operation, HostStream | None]


@dataclass
class _Group:
    depth: int = 0
    births: list[Callable[[], None]] = field(default_factory=list)
    operations: list[Issued] = field(default_factory=list)
    failure: HostFailure | None = None


class _ThreadGroups(threading.local):
    def __init__(self) -> None:
        self.group = _Group()


_thread = _ThreadGroups()


def start() -> None:
    _thread.group.depth += 1


def end() -> None:
    group = _thread.group
    if group.depth == 0:
        raise invalid_usage("ncclGroupEnd: no group was started in this thread")
    group.depth -= 1
    if group.depth:
        return
    _thread.group = _Group()
    if group.failure is not None:
        raise HostFailure(group.failure.code, f"ncclGroupEnd: nothing was launched; {group.failure.text}")
    together(group.births)
    if group.operations:
        _launch(group.operations)


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
        _launch([(operation, stream)])
    else:
        comm = operation.comm
        if operation.peer == comm.rank:
            check_messages_to_itself([operation])
        comm.run(comm.ticket(), [operation])


def bring_up(births: Sequence[Callable[[], None]]) -> None:
    """Run the jobs that create communicators together; inside a group, at its end."""
    group = _thread.group
    if group.depth:
        group.births.extend(births)
    else:
        together(births)


def together(jobs: Sequence[Callable[[], None]]) -> None:
    """Run jobs that may wait for each other, each in a thread; raises the first one's error."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised again in the thread that called
            errors.append(error)

    others = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs[1:]]
    for thread in others:
        thread.start()
    if jobs:
        guarded(jobs[0])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _launch(issued: Sequence[Issued]) -> None:
    by_comm: dict[Comm, list[Operation]] = {}
    used: dict[Comm, dict[HostStream | None, None]] = {}
    for operation, stream in issued:
        by_comm.setdefault(operation.comm, []).append(operation)
        used.setdefault(operation.comm, {})[stream] = None
    for comm, own in by_comm.items():
        comm.check_usable()
        check_messages_to_itself(own)
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
    together([partial(comm.run, ticket, own) for comm, ticket, own in in_caller])
    for first, other in joins:
        first.record().wait(other)


def _run_all(runs: Sequence[Run]) -> None:
    together([partial(comm.run, ticket, own) for comm, ticket, own in runs])
