"""The calls of communicators as a trace shows them: operation, bytes, arguments, keys that match them across ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pynccl import Communicator
from pynccl.bindings.abi import ITEMSIZE, DataType, RedOp
from pynccl.comm.observing import Observed
from pynccl.watch.layout import ARGUMENTS, UNNUMBERED

# Operations whose buffer has one block per rank: `bytes` counts all of them, as nccl-tests does.
_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "alltoall", "gather", "scatter")
_OPERATORS = frozenset(map(int, RedOp))  # any other number is a PreMulSum's
_INPUTS_OF_MESSAGE = 4  # buffer, count, type, peer
_MOST_CALLS = 8  # of a group, that are listed one by one


class Described(NamedTuple):
    """One call.   message: "send", "recv" or "", also of an operation that is made of such"""

    operation: str
    text: str
    nbytes: int
    args: dict[str, Any]
    message: str = ""


def name_of(comm: Communicator) -> str:
    """The axes of a mesh, else the communicator's own name."""
    return "x".join(comm.origin.axes) or comm.name


def described(call: Observed) -> Described:
    operation, inputs = call.operation, call.inputs
    message = operation if operation in ("send", "recv") else ""
    if operation not in ARGUMENTS and len(inputs) == _INPUTS_OF_MESSAGE:  # a message of gather_v or scatter_v
        message = "send" if getattr(call, "recv", None) is None else "recv"
    at, names = ARGUMENTS.get(message or operation, (0, ()))
    if not at or not inputs:
        return Described(operation, call.compared or operation, 0, {})
    count, dtype = int(inputs[at]), DataType(inputs[at + 1])
    rest: dict[str, Any] = dict(zip(names, map(int, inputs[at + 2 :]), strict=False))
    if "op" in rest:
        rest["op"] = RedOp(rest["op"]).name if rest["op"] in _OPERATORS else "PRE_MUL_SUM"
    nbytes = count * ITEMSIZE[dtype] * (call.comm.size if operation in _BLOCKS else 1)
    text = call.compared or f"{operation}({count} {dtype.name})"
    return Described(operation, text, nbytes, {"count": count, "dtype": dtype.name, **rest}, message)


def arguments(calls: Sequence[Described], function: str) -> dict[str, Any]:
    """Of calls that are launched together, the arguments of their slice."""
    args: dict[str, Any] = {"operation": _operation(calls, function), "bytes": sum(one.nbytes for one in calls)}
    if len(calls) == 1:
        return args | calls[0].args
    texts = [one.text for one in calls[:_MOST_CALLS]]
    more = len(calls) - len(texts)
    return args | {"calls": texts + ([f"... {more} more"] if more else [])}


def _operation(calls: Sequence[Described], function: str) -> str:
    """ "all_reduce", "2 all_gather + broadcast"; of an autograd function that sends, "HaloExchange: 2 send + recv"."""
    if len(calls) == 1 and not calls[0].message:
        return calls[0].operation
    names = [one.text.partition("(")[0] for one in calls]
    if named := next((name for name in names if name.endswith("_v")), ""):
        return named
    counts = Counter(one.operation for one in calls)
    title = " + ".join(f"{number} {name}" if number > 1 else name for name, number in counts.items())
    only_messages = function and all(one.message for one in calls)
    return f"{function.partition('.')[0]}: {title}" if only_messages else title


class Keys:
    """Numbers the calls of each communicator, so that ranks find each other's: "UID #3 all_reduce", "UID 0>1 2"."""

    def __init__(self) -> None:
        self._count: Counter[tuple[Any, ...]] = Counter()

    def of(self, call: Observed, one: Described) -> Iterator[str]:
        """No key for a call that this rank makes alone."""
        uid, rank = call.comm.uid, call.comm.rank
        if one.message:
            source, target = (rank, one.args["peer"]) if one.message == "send" else (one.args["peer"], rank)
            yield f"{uid} {source}>{target} {self._next(uid, rank, source, target, one.message)}"
        weight = getattr(call, "weight", None)
        if one.operation not in UNNUMBERED if weight is None else weight:
            yield f"{uid} #{self._next(uid, rank)} {one.operation}"

    def _next(self, *counter: Any) -> int:
        self._count[counter] += 1
        return self._count[counter]
