"""Transactional groups: calls are recorded, and replayed between ncclGroupStart and ncclGroupEnd on a clean exit.

Recording has two gains over opening NCCL's group at once: an exception in the block launches nothing and leaves no
group open, and everything is validated before anything is launched. Buffers stay referenced until the launch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..bindings.abi import DataType, RedOp, Result
from ..bindings.library import to_pointer
from ..interop.buffers import adapter
from ..interop.streams import Handle, hold
from .recording import Record, owner_of, recorder, records
from .redop import free_unused

if TYPE_CHECKING:
    from .communicator import Communicator

POINT_TO_POINT = ("send", "recv", "put_signal")
UNCOMPARED = (*POINT_TO_POINT, "signal", "wait_signal")  # calls that not every rank of a communicator makes


class Call(NamedTuple):
    """One validated C call: function(*inputs, comm, stream, *config), with a function of `launch.Functions`."""

    comm: Communicator
    operation: str
    function: Callable[..., int]
    inputs: tuple[int, ...]  # buffers, count, data type, then operator, root or peer
    stream: int
    config: tuple[Any, ...] = ()
    keep: Any = None  # what must live until the launch, and until its stream has passed: buffers, an operator
    recv: Any = None  # what it writes to
    compared: str = ""  # what the ranks must agree on, where it is an operation that this call is a part of

    @property
    def args(self) -> tuple[Any, ...]:
        return (*self.inputs, self.comm._c_handle, to_pointer(self.stream), *self.config)

    def text(self) -> str:
        return self.compared or call_text(self.operation, self.inputs)


def call_text(operation: str, inputs: tuple[int, ...]) -> str:
    """ "reduce(count=4, FLOAT32, SUM, root=0)": what the ranks must agree on, for messages."""
    if operation == "signal":
        return "signal(peer={}, signal={}, context={})".format(*inputs)
    if operation == "wait_signal":
        rows: Any = inputs[1]
        return f"wait_signal({', '.join(f'{row.opCnt} of rank {row.peer}' for row in rows)})"
    buffers = 1 if operation in POINT_TO_POINT else 2
    count, dtype, *rest = inputs[buffers:]
    words = [f"count={count}", DataType(dtype).name]
    if "reduce" in operation:
        op = rest.pop(0)
        words.append(RedOp(op).name if op in RedOp._value2member_map_ else "PRE_MUL_SUM")
    role = "peer" if operation in POINT_TO_POINT else "root"
    words += [f"{role}={rank}" for rank in rest[:1]]
    return f"{operation}({', '.join(words)})"


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Fuse the calls in the block into one launch; needed where several sends and receives must progress together.

    Calls inside validate their arguments and return their `recv` at once; the contents are defined only after the
    block (and, on a stream, in that stream's order). An exception in the block launches nothing. A group inside a
    group joins the outer one, unless it is left by an exception, which drops its calls alone. Groups are per thread
    and may span communicators.

    In a generator or a coroutine the group takes the calls of that one and of what it calls. While it is suspended in
    the block, others are launched as if there were no group: those of its consumer, and those of other asyncio tasks.
    """
    outer = recorder()
    with recording_in(Record(*owner_of(sys._getframe(1)))) as record:
        yield
    _close(record, outer)


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """`group` for the operations of this package, which are neither left nor suspended while it is open."""
    outer = recorder()
    with recording() as record:
        yield
    _close(record, outer)


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record the calls of this thread, instead of launching them or adding them to a group around."""
    with recording_in(Record(*owner_of(sys._getframe(1), may_be_suspended=False))) as record:
        yield record


@contextlib.contextmanager
def recording_in(record: Record) -> Iterator[Record]:
    """The same in this record, which knows whose calls are meant."""
    records.append(record)
    try:
        yield record
    finally:
        record.open = False
        if record in records:  # not so in a forked child
            records.remove(record)


def _close(record: Record, outer: Record | None) -> None:
    """A block has ended well: its calls join those of the group around it, if that has not ended before."""
    if outer is not None and outer.open:
        outer.calls += record.calls
        return
    calls, record.calls = record.calls, []
    launch(calls)
    comms = {id(call.comm): call.comm for call in calls}
    calls.clear()  # the last hold on operators that were destroyed meanwhile
    for comm in comms.values():
        if comm._unused_operators:
            free_unused(comm)


def launch(calls: list[Call]) -> None:
    """Issue `calls` as one NCCL group. Raises the first error, after the group has been closed."""
    if not calls:
        return
    comms = {id(call.comm): call.comm for call in calls}
    if any(comm.checking for comm in comms.values()):
        from .consistency import compare

        compare(calls)
    with contextlib.ExitStack() as locks:
        lock(locks, comms.values())
        replay(calls, calls[0].comm.library.ncclGroupEnd, list(comms.values()))
    after_launch(calls)


def lock(locks: contextlib.ExitStack, comms: Iterable[Communicator]) -> None:
    """Take the locks of all of them, which are alive, until the end of the stack."""
    for comm in sorted(comms, key=id):  # one order in all threads, so that two groups cannot wait for each other
        locks.enter_context(comm.lock)
        comm.check_alive()


def replay(calls: list[Call], end: Callable[[], int], comms: list[Communicator]) -> None:
    """The calls, all of them of `comms`, as one group that `end` closes. The caller holds the locks."""
    library = calls[0].comm.library
    library.check(library.ncclGroupStart(), "ncclGroupStart")
    code = 0
    try:
        for call in calls:
            code = call.function(*call.args)
            if code and code != Result.IN_PROGRESS:
                raise library.error(code, call.text(), call.comm._handle)
    except (
        BaseException
    ):  # Ctrl-C too: NCCL launches nothing of a group in which a call failed, but it must not stay open
        end()
        raise
    code = end()
    if code:
        names = ", ".join(call.text() for call in calls[:4]) + (", ..." if len(calls) > 4 else "")
        settle_group(comms, code, f"group of {len(calls)} calls: {names}")


def settle_group(comms: list[Communicator], code: int, what: str) -> None:
    """Raise for the result of ncclGroupEnd; wait for nonblocking communicators until their deadline."""
    for comm in comms if code == Result.IN_PROGRESS else comms[:1]:
        comm._check_result(code, what)


def after_launch(calls: Sequence[Call]) -> None:
    """Tell autograd what is written to, and the streams what they must keep."""
    for written in {id(call.recv): call.recv for call in calls if call.recv is not None}.values():
        adapter(written).received(written)
    for call in calls:
        if call.stream or type(call.stream) is Handle:
            hold(call.stream, call.comm.library, call.keep)
