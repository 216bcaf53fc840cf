"""Call: a validated C call as a value, its text for messages, and `issue`, which makes the C call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..bindings.abi import DataType, RedOp
from ..bindings.library import to_pointer
from ..interop.buffers import TORCH, adapter
from ..interop.handles import Handle
from ..interop.streams import hold
from .base import Comm

POINT_TO_POINT = ("send", "recv", "put_signal")


def issue(
    comm: Comm,
    operation: str,
    function: Callable[..., int],
    args: tuple[Any, ...],
    inputs: tuple[int, ...],
    stream: int,
    detail: str = "",
    site: str = "",
    flags: int = 0,
) -> None:
    """Make one C call of a communicator under its lock, record it, and raise if it fails.

    args                         all arguments of the C function, converted
    inputs                       the arguments before the communicator, as numbers, for the flight recorder
    stream, detail, site, flags  also for the flight recorder: see Track.enter
    """
    track = comm._track
    with comm._lock:
        if comm._handle is None:  # another thread ended it after the arguments were checked
            comm.check_alive()
        if track is None:
            code, entry = function(*args), 0
        else:
            head = track.head
            try:
                entry = track.enter(operation, inputs, stream, detail, 0, site, -1, flags)
                code = function(*args)
                track.leave(entry)
            except BaseException as error:  # also Ctrl-C between any two of these
                track.failed_since(head, error)
                raise
    if code:
        comm._check_result(code, detail or call_text(operation, inputs), entry)


class Call(NamedTuple):
    """One validated C call: function(*inputs, comm, stream, *config), with a function of `library.Functions`."""

    comm: Comm
    operation: str
    function: Callable[..., int]
    inputs: tuple[int, ...]  # buffers, count, data type, then operator, root or peer
    stream: int
    config: tuple[Any, ...] = ()
    keep: Any = None  # objects to keep alive until the call has run: buffers, operator
    recv: Any = None  # the buffer that it writes to
    compared: str = ""  # text of the enclosing operation, which the ranks must agree on; "": the call itself
    site: str = ""  # file:line of the user's call: a group issues its calls later
    flags: int = 0  # layout.PLAN

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


def after_launch(calls: Sequence[Call]) -> Callable[[], None]:
    """Return a function to call after each launch: it bumps the version counters of the outputs and keeps the buffers
    alive on their streams."""
    received = {id(call.recv): call.recv for call in calls if call.recv is not None}.values()
    written = tuple(x for x in received if adapter(x) is TORCH)  # only torch tensors have a version counter
    held = [call for call in calls if call.stream or type(call.stream) is Handle]

    def finish() -> None:
        if written:
            TORCH.bump_versions(written)
        for call in held:
            hold(call.stream, call.comm.library, call.keep)

    return finish
