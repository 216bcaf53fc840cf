"""What the calls of communicators say in a trace: operation, bytes, arguments."""

from __future__ import annotations

import functools
from collections import Counter
from typing import NamedTuple

from pynccl import Communicator
from pynccl.bindings.abi import ITEMSIZE, DataType, RedOp
from pynccl.comm.observing import Observed
from pynccl.watch.layout import ARGUMENTS

# Operations whose buffer has a block per rank: `bytes` is of the whole, as in nccl-tests and `python -m pynccl perf`.
_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "alltoall", "gather", "scatter")
_MESSAGES = ("send", "recv")
_OPERATORS = frozenset(map(int, RedOp))  # others are a PreMulSum's
_INPUTS_OF_MESSAGE = 4  # buffer, count, type, peer


class Said(NamedTuple):
    """What one call says.   message: "send" or "recv", also of an operation that is made of such"""

    text: str
    operation: str
    nbytes: int
    elements: int = -1
    dtype: str = ""
    op: str = ""
    root: int = -1
    peer: int = -1
    message: str = ""


def name_of(comm: Communicator) -> str:
    """What its lanes are called: the axes of a mesh, else its own name."""
    return "x".join(comm.origin.axes) or comm.name


def said(call: Observed) -> Said:
    operation, inputs = call.operation, call.inputs
    message = operation if operation in _MESSAGES else ""
    if operation not in ARGUMENTS and len(inputs) == _INPUTS_OF_MESSAGE:  # of what is made of them: gather_v, scatter_v
        message = "send" if getattr(call, "recv", None) is None else "recv"
    at, names = ARGUMENTS.get(message or operation, (0, ()))
    if not at or not inputs:
        return Said(call.compared or operation, operation, 0)
    return _described(operation, inputs[at : at + 2 + len(names)], call.compared, message, call.comm.size)


@functools.lru_cache(4096)
def _described(operation: str, inputs: tuple[int, ...], compared: str, message: str, ranks: int) -> Said:
    """inputs: the count, the data type and what ARGUMENTS names"""
    count, kind = int(inputs[0]), DataType(inputs[1])
    rest = dict(zip(ARGUMENTS[message or operation][1], inputs[2:], strict=True))
    nbytes = count * ITEMSIZE[kind] * (ranks if operation in _BLOCKS else 1)
    op, root, peer = rest.get("op"), int(rest.get("root", -1)), int(rest.get("peer", -1))
    reduction = "" if op is None else RedOp(op).name if op in _OPERATORS else "PRE_MUL_SUM"
    other = max(root, peer)
    text = compared or f"{operation}({count} {kind.name}{f', rank {other}' if other >= 0 else ''})"
    return Said(text, operation, nbytes, count, kind.name, reduction, root, peer, message)


def operation_of(calls: list[Said], function: str) -> str:
    """ "all_reduce", "2 all_gather + broadcast"; of an autograd function that sends, "HaloExchange: 2 send + recv"."""
    if len(calls) == 1 and not calls[0].message:
        return calls[0].operation
    named = next((one.text.partition("(")[0] for one in calls if one.text.partition("(")[0].endswith("_v")), "")
    if named:
        return named
    counts = Counter(one.operation for one in calls)
    title = " + ".join(f"{number} {name}" if number > 1 else name for name, number in counts.items())
    made_of_messages = function and all(one.message for one in calls)
    return f"{function.partition('.')[0]}: {title}" if made_of_messages else title
