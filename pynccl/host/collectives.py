"""C functions for collectives, send and receive, reduction operators, and groups.

A table maps each function to its operation and arguments. The variants with a configuration per call run as the plain
call: thread blocks and algorithms do not exist on the CPU. Only the event has an effect: it is recorded on the stream
just before the operation begins.
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

# C function -> (operation, arguments before the communicator and the stream); `buffer` is both send and recv buffer.
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
# The order in which `call` unpacks them; peer is the root or the peer.
_ARGUMENTS = ("send_ptr", "recv_ptr", "count", "dtype", "op", "peer", "comm", "stream", "config")
_ABSENT = 0


def _define(name: str, kind: Kind, arguments: str) -> None:
    """Export the C function `name` with these arguments."""
    names = arguments.replace("buffer", "send_ptr").split()
    positions = {argument: position for position, argument in enumerate(names)}
    if "buffer" in arguments:
        positions["recv_ptr"] = positions["send_ptr"]
    pick = itemgetter(*(positions.get(argument, len(names)) for argument in _ARGUMENTS))

    def call(*values: Any) -> None:
        """Check the call and run or queue it."""
        send_ptr, recv_ptr, count, dtype, op, peer, comm, stream, config = pick((*values, _ABSENT))
        started = check_coll_config(name, config) if config else 0
        event = find_event(started) if started else None
        communicator = find(comm)
        communicator.check_usable()
        operation = Operation(kind, communicator, send_ptr or 0, recv_ptr or 0, count, dtype, op, peer)
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
        raise invalid_argument(
            f"ncclRedOpDestroy: op is {op}; expected an operator from ncclRedOpCreatePreMulSum for this comm"
        )


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
        info.contents.estimatedTime = seconds * 1e6  # in microseconds
