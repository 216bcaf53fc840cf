"""Transactional groups: calls are recorded, and replayed between ncclGroupStart and ncclGroupEnd on a clean exit.

Recording has two gains over opening NCCL's group at once: an exception in the block launches nothing and leaves no
group open, and everything is validated before anything is launched. Buffers stay referenced until the launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .abi import HEADER_VERSION, SIM_INFO_MAGIC, DataType, RedOp, Result, SimInfo, version_code

if TYPE_CHECKING:
    from .communicator import Communicator

# A Python integer as a finished C value, which a function without argtypes takes as it is. For addresses, handles and
# sizes, which are as wide: ctypes converts to c_void_p three times as fast as to c_size_t.
to_pointer = ctypes.c_void_p.from_param

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
    keep: Any = None  # buffers that must live until the launch

    @property
    def args(self) -> tuple[Any, ...]:
        return (*self.inputs, self.comm._c_handle, to_pointer(self.stream), *self.config)

    def text(self) -> str:
        return call_text(self.operation, self.inputs)


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


class _State(threading.local):
    calls: list[Call] | None = None  # None: no group is open in this thread


state = _State()
open_groups: list[None] = []  # one entry per open group of any thread: empty means that no thread need look at `state`


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Fuse the calls in the block into one launch; needed where several sends and receives must progress together.

    Calls inside validate their arguments and return their `recv` at once; the contents are defined only after the
    block (and, on a stream, in that stream's order). An exception in the block launches nothing. A group inside a
    group joins the outer one. Groups are per thread and may span communicators.
    """
    if state.calls is not None:
        yield
        return
    with recording() as calls:
        yield
    launch(calls)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Record the calls of this thread in the list, instead of launching them or adding them to a group around."""
    outer, state.calls = state.calls, []
    open_groups.append(None)
    try:
        yield state.calls
    finally:
        state.calls = outer
        open_groups.pop()


def launch(calls: list[Call], end: Callable[[], int] | None = None) -> None:
    """Issue `calls` as one NCCL group. Raises the first error, after the group has been closed.

    end  what closes the group; None: ncclGroupEnd"""
    if not calls:
        return
    comms = {id(call.comm): call.comm for call in calls}
    if any(comm.checking for comm in comms.values()):
        from .check import compare

        compare(calls)
    with contextlib.ExitStack() as locks:
        for key in sorted(comms):  # one order in all threads, so that two groups cannot wait for each other
            locks.enter_context(comms[key].lock)
            comms[key].check_alive()
        _replay(calls, end or calls[0].comm.library.ncclGroupEnd, list(comms.values()))


def _replay(calls: list[Call], end: Callable[[], int], comms: list[Communicator]) -> None:
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


class Simulation:
    """What `simulate` found out."""

    estimated_time: float = 0.0  # by NCCL's cost model, in its unit: microseconds


@contextlib.contextmanager
def simulate() -> Iterator[Simulation]:
    """Like `group`, but nothing is launched: NCCL estimates the time that the calls would take (NCCL >= 2.22).

    with pynccl.simulate() as estimate: comm.all_reduce(x, x)
    print(estimate.estimated_time)
    """
    found = Simulation()
    with recording() as calls:
        yield found
    if not calls:
        return
    library = calls[0].comm.library
    info = SimInfo(ctypes.sizeof(SimInfo), SIM_INFO_MAGIC, version_code(min(library.version, HEADER_VERSION)), -1.0)
    # Bound now: what an old library lacks has to be found out before its group is opened.
    launch(calls, partial(library.ncclGroupSimulateEnd, ctypes.byref(info)))
    found.estimated_time = info.estimatedTime
