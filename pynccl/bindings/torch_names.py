"""What users of torch.distributed write, and what to write here: hints for error messages (docs/coming_from.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from .values import attribute, closest, shown

PAGE = "see docs/coming_from.md"
_GROUP = "comm.send and comm.recv in a `with pynccl.group():`"
_OBJECTS = 'torch.distributed after init_process_group("pynccl"), since NCCL has no Python objects'
_GATHER, _SCATTER = "comm.all_gather(send, recv)", "comm.reduce_scatter(send, recv)"
_CALLS_IN_GROUP = "one call for each tensor in a `with pynccl.group():`"

# Names of torch.distributed that no object has here -> what to use.
CALLS = {
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single", "all_gather_tensor"), _GATHER),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), _SCATTER),
    **dict.fromkeys(("gather_into_tensor", "gather_single"), "comm.gather(send, recv, root)"),
    "all_to_all_single": "comm.all_to_all(send, recv), or all_to_all_v with a count for each rank",
    **dict.fromkeys(("isend", "irecv", "batch_isend_irecv", "P2POp"), _GROUP),
    **dict.fromkeys(("all_reduce_coalesced", "all_gather_coalesced"), _CALLS_IN_GROUP),
    **dict.fromkeys(("all_gather_object", "gather_object"), _OBJECTS),
    **dict.fromkeys(("broadcast_object_list", "scatter_object_list"), _OBJECTS),
    **dict.fromkeys(("send_object_list", "recv_object_list"), _OBJECTS),
    "get_rank": "comm.rank",
    **dict.fromkeys(("get_world_size", "world_size"), "comm.size"),
    "monitored_barrier": "comm.barrier()",
    "init_process_group": "comm = pynccl.init()",
    "destroy_process_group": "comm.destroy()",
    **dict.fromkeys(("new_group", "split_group", "new_subgroups"), "comm.split(color)"),
    "shrink_group": "comm.shrink(exclude)",
    **dict.fromkeys(("ReduceOp", "reduce_op"), 'op="sum", "prod", "min", "max" or "avg"'),
}

# The same for pynccl_autograd.
FUNCTIONS = {
    **CALLS,
    **dict.fromkeys(
        ("all_gather_into_tensor", "all_gather_single", "all_gather_tensor"), "ad.all_gather(x, comm, grad=...)"
    ),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), "ad.reduce_scatter(x, comm)"),
    **dict.fromkeys(("gather_into_tensor", "gather_single"), "ad.gather(x, comm, root)"),
    "all_to_all_single": "ad.all_to_all(x, comm)",
    **dict.fromkeys(("all_gather_v", "reduce_scatter_v"), "splits= of ad.all_gather and ad.reduce_scatter"),
    "all_to_all_v": "send_splits= and recv_splits= of ad.all_to_all",
    **dict.fromkeys(("send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp"), "ad.permute(x, comm, edges)"),
    "permute_tensor": "ad.permute(x, comm, edges)",
    **dict.fromkeys(("all_reduce_coalesced", "all_gather_coalesced"), "a list of tensors as x"),
}

# Words for operators that are not close to ours as strings.
_OPERATORS = {"mean": "avg", "add": "sum", "mul": "prod", "multiply": "prod"}


def no_attribute(owner: Any, name: str, calls: Mapping[str, str] = CALLS, methods: type = object) -> AttributeError:
    """Return the AttributeError for `name`, with what to use if it is one of `calls`, or a method of a communicator.

    Python adds its own "Did you mean" to an error that has the object. So an error has one hint or the other."""
    function, method = same_letters(name, dir(owner)), same_letters(name, dir(methods))
    if name not in calls and method and not function:
        calls = {name: f"comm.{method} of a communicator, as pynccl.init() returns"}
    what = f"module {owner.__name__!r}" if isinstance(owner, ModuleType) else f"{type(owner).__name__!r} object"
    text = f"{what} has no attribute {name!r}"
    if name in calls:
        return AttributeError(f"{text}; use {calls[name]}; {PAGE}", name=name, obj=None)
    if function:  # Python would suggest AllReduce for allreduce
        return AttributeError(f"{text}. Did you mean: {function!r}?", name=name, obj=None)
    return AttributeError(text, name=name, obj=owner)


def same_letters(name: str, names: Collection[str]) -> str:
    """Return that of the public, lower-case `names` which differs from `name` in "_" and capitals at most; "": none."""
    letters = name.replace("_", "").lower()
    return next((each for each in names if each.islower() and each[0] != "_" and each.replace("_", "") == letters), "")


class NotHere:
    """An attribute that is missing, and says what to use. (`__getattr__` would slow every attribute down on Python 3.10
    and 3.11, and hide errors of properties.)"""

    def __init__(self, name: str) -> None:
        self.name, self.__doc__ = name, f"Not here; use {CALLS[name]}."  # for help()

    def __get__(self, instance: Any, owner: type) -> Any:
        raise no_attribute(owner if instance is None else instance, self.name)


def is_operator(x: Any) -> bool:
    """Return whether x is a ReduceOp of torch.distributed, or one of its constants."""
    return type(x).__name__ in ("ReduceOp", "RedOpType")


def operator_hint(op: Any, names: Collection[str]) -> str:
    """Return the text that follows an error about `op`: which of `names` is meant, or what to do; "" if unknown."""
    kind = attribute(op, "op") if type(op).__name__ == "ReduceOp" else op
    word = (op if isinstance(op, str) else shown(attribute(kind, "name", ""), str)).lower()
    if word in ("band", "bor", "bxor"):
        return "; NCCL has no bitwise operators: all_gather the buffers and combine them"
    found = closest(_OPERATORS.get(word, word), names)
    return f'; pass op="{found}"' if found else ""
