"""The collectives, send and receive, their operators and groups, as C functions.

A function is a row of a table: which operation it is, and what its arguments mean. The variants that take a
configuration per call run as the plain call. What the fields steer (thread blocks, algorithms) does not exist on the
CPU, so only the event has an effect: it is recorded when the operation is about to begin, after what its stream had
queued before.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from ..bindings.abi import FUNCTIONS, RedOp, ScalarResidence
from . import algorithms, group
from .argcheck import check_coll_config, check_dtype, check_struct
from .comm import Comm, find
from .exports import export
from .failure import invalid_argument
from .operation import Kind, Operation
from .reduction import PreMulSum
from .stream import find as find_stream, find_event

# C function -> its operation, and its arguments up to the communicator and the stream; `buffer` is sent and received.
_CALLS: dict[str, tuple[Kind, str]] = {
    "ncclReduce": (algorithms.REDUCE, "send_ptr recv_ptr count dtype op peer"),
    "ncclBcast": (algorithms.BROADCAST, "buffer count dtype peer"),
    "ncclBroadcast": (algorithms.BROADCAST, "send_ptr recv_ptr count dtype peer"),
    "ncclAllReduce": (algorithms.ALL_REDUCE, "send_ptr recv_ptr count dtype op"),
    "ncclReduceScatter": (algorithms.REDUCE_SCATTER, "send_ptr recv_ptr count dtype op"),
    "ncclAllGather": (algorithms.ALL_GATHER, "send_ptr recv_ptr count dtype"),
    "ncclAlltoAll": (algorithms.ALL_TO_ALL, "send_ptr recv_ptr count dtype"),
    "ncclGather": (algorithms.GATHER, "send_ptr recv_ptr count dtype peer"),
    "ncclScatter": (algorithms.SCATTER, "send_ptr recv_ptr count dtype peer"),
    "ncclSend": (algorithms.SEND, "send_ptr count dtype peer"),
    "ncclRecv": (algorithms.RECV, "recv_ptr count dtype peer"),
}
# In the order in which a call takes them; peer is the root or the peer.
_ARGUMENTS = ("send_ptr", "recv_ptr", "count", "dtype", "op", "peer", "comm", "stream", "config")
_ABSENT = 0


def _define(name: str, kind: Kind, arguments: str) -> None:
    """Export the C function `name` with these arguments."""
    given = arguments.replace("buffer", "send_ptr").split()
    places = {argument: place for place, argument in enumerate(given)}
    if "buffer" in arguments:
        places["recv_ptr"] = places["send_ptr"]
    pick = itemgetter(*(places.get(argument, len(given)) for argument in _ARGUMENTS))

    def call(*values: Any) -> None:
        """Check the call and run or queue it."""
        send_ptr, recv_ptr, count, dtype, op, peer, comm, stream, config = pick((*values, _ABSENT))
        started = check_coll_config(name, config) if config else 0
        event = find_event(started) if started else None
        own = find(comm)
        own.check_usable()
        operation = Operation(kind, own, send_ptr or 0, recv_ptr or 0, count, dtype, op, peer)
        operation.check()
        group.issue(operation, find_stream(stream) if stream else None, event)

    export(call, name)


for _name, (_kind, _arguments) in _CALLS.items():
    _define(_name, _kind, f"{_arguments} comm stream")
    if f"{_name}Config" in FUNCTIONS:
        _define(f"{_name}Config", _kind, f"{_arguments} comm stream config")


# Reduction operators


@export
def ncclRedOpCreatePreMulSum(op: Any, scalar: int | None, dtype: int, residence: int, comm: Comm) -> None:
    check_dtype("ncclRedOpCreatePreMulSum", dtype)
    if not scalar:
        raise invalid_argument("ncclRedOpCreatePreMulSum: scalar is NULL; expected the address of one element")
    if residence not in tuple(ScalarResidence):
        raise invalid_argument(f"ncclRedOpCreatePreMulSum: residence is {residence}; expected 0 or 1")
    number = next(n for n in range(RedOp.AVG + 1, 2**31) if n not in comm.premul)
    comm.premul[number] = PreMulSum(scalar, dtype, residence == ScalarResidence.HOST_IMMEDIATE)
    op[0] = number


@export
def ncclRedOpDestroy(op: int, comm: Comm) -> None:
    if comm.premul.pop(op, None) is None:
        raise invalid_argument(f"ncclRedOpDestroy: op {op} is not one that ncclRedOpCreatePreMulSum made for this comm")


# Groups


@export
def ncclGroupStart() -> None:
    group.start()


@export
def ncclGroupEnd() -> None:
    group.end()


@export
def ncclGroupSimulateEnd(info: Any) -> None:
    if info:
        check_struct(info.contents)
    seconds = group.simulate_end()
    if info:
        info.contents.estimatedTime = seconds * 1e6  # NCCL's unit is a microsecond
