"""The targets of fuzzed calls: their parameters, the kinds of these, and which values each kind allows.

A target is called on every rank with the same arguments. If it returns, the result must equal that of `right`, computed
from all ranks' arguments. See call_values.py for the values and call_ranks.py for the rank side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import pynccl
import pynccl_autograd as ad

from .call_values import BUFFERS, SCALARS

Arguments = dict[str, Any]
Right = Callable[[list[Arguments], int, int], Any]  # (all ranks' arguments, rank, world size) -> the result


class Target(NamedTuple):
    """name; call(env, arguments); good: parameter -> (kind, valid value or its name); right: None if unknown."""

    name: str
    call: Callable[[Any, Arguments], Any]
    good: Mapping[str, tuple[str, Any]]
    right: Right | None = None
    words: tuple[str, ...] = ()  # other names of the operation that a message may use


# Kind of parameter -> whether an unusual value is valid. Calls must raise for all others.


def is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer, np.bool_)) or (
        isinstance(value, (np.ndarray, Tensor)) and value.ndim == 0 and not np.issubdtype(np.asarray(value).dtype, "f8")
    )


def _rank_in(value: Any, ranks: int) -> bool:
    return is_integer(value) and 0 <= int(value) < ranks


def _counts(value: Any, ranks: int) -> bool:
    try:
        return len(value) == ranks and all(is_integer(v) and int(v) >= 0 for v in value)
    except TypeError:
        return False


def _number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number, np.bool_))


TEXTS = (str, bytes, bytearray, dict)
VALID: dict[str, Callable[[Any, int], bool]] = {
    "rank": _rank_in,
    "rank or none": lambda value, n: value is None or _rank_in(value, n),
    "dim": lambda value, n: is_integer(value) and -1 <= int(value) < 1,
    "op": lambda value, n: isinstance(value, (str, int, np.integer)) or hasattr(value, "code"),
    "ad op": lambda value, n: isinstance(value, (str, pynccl.RedOp, ad.PreMul)),
    "grad": lambda value, n: value in ("sum", "replicated") if isinstance(value, str) else False,
    "stream": lambda value, n: value is None or is_integer(value) or hasattr(value, "__cuda_stream__"),
    "config": lambda value, n: value is None or isinstance(value, pynccl.CollConfig),
    "comm config": lambda value, n: value is None or isinstance(value, pynccl.CommConfig),
    "counts": _counts,
    # A module converts its argument to a list, so an iterator may be valid.
    "splits": lambda value, n: value is None or _counts(value, n) or isinstance(value, Iterator),
    "no splits": lambda value, n: value is None,  # scatter: only root can check whether splits are valid
    "dtype": lambda value, n: value is None or isinstance(value, (str, torch.dtype, pynccl.DataType, type)),
    "color": lambda value, n: value is None or is_integer(value),
    "key": lambda value, n: is_integer(value),
    "size": lambda value, n: is_integer(value) or isinstance(value, (tuple, list, range, np.ndarray, Tensor, Iterator)),
    "integers": lambda value, n: VALID["size"](value, n) or (isinstance(value, Iterable) and type(value) not in TEXTS),
    "integers or none": lambda value, n: value is None or VALID["integers"](value, n),
    "number": lambda value, n: _number(value) or isinstance(value, (np.ndarray, Tensor, pynccl.Memory)),
    "timeout": lambda value, n: value is None or _number(value),
    "flags": lambda value, n: value is None or is_integer(value),
    "flag": lambda value, n: True,
    "device": lambda value, n: value is None or is_integer(value) or isinstance(value, str),
    "devices": lambda value, n: value is None or is_integer(value) or isinstance(value, (str, tuple, list, range)),
    "priority": lambda value, n: value is None or is_integer(value),
    "library": lambda value, n: value is None or isinstance(value, pynccl.Library),
    "comm": lambda value, n: isinstance(value, pynccl.Communicator),
    "other": lambda value, n: True,  # not known here which values are valid
    "nothing else": lambda value, n: False,
    "no buffer": lambda value, n: False,
    "no rank": lambda value, n: False,
    "no ranks": lambda value, n: False,
    "only 0": lambda value, n: is_integer(value) and int(value) == 0,
    "only 1": lambda value, n: is_integer(value) and int(value) == 1,
    "edges": lambda value, n: isinstance(value, (list, tuple, dict, set, range)) and not value,
    "halo": lambda value, n: is_integer(value) or isinstance(value, (tuple, list, range, np.ndarray, Iterator)),
}
BUFFER_KINDS = ("buffer", "root buffer", "recv", "tensor")


# Values that are valid ranks or no rank: with one as a peer, the call would need the other ranks.
A_RANK = {"0", "1", "True", "False", "np.int64(0)", "np.int64(1)", "np.bool_(True)", "np.array(0)", "torch.tensor(0)"}
A_RANK |= {"None", "0.0", "1.0", "RedOp.SUM", "DataType.FLOAT32"}
SOME_RANKS = {"[0]", "{1}", "{0: 1}", "(0, 1)", "range(2)", "np.array([0, 1])", "generator", "torch.tensor([1., 2.])"}


def values_of_kind(kind: str) -> list[str]:
    """Return the names of the values to try for a parameter of this kind."""
    if kind in BUFFER_KINDS:
        names = [*(f"buffer {name}" for name in BUFFERS), *SCALARS]
        # Only root allocates recv, which it cannot for a Memory.
        return [name for name in names if kind != "root buffer" or not name.endswith("memory")]
    if kind in ("self", "ad comm"):
        return ["destroyed comm", "aborted comm"] if kind == "self" else ["destroyed comm", "aborted comm", *SCALARS]
    if kind == "no buffer":
        return [name for name in SCALARS if not name.startswith(("torch.tensor", "np.array", "memory"))]
    if kind == "no splits":
        return [name for name in SCALARS if name not in SOME_RANKS]
    if kind in ("no rank", "no ranks"):
        return [name for name in SCALARS if name not in A_RANK and not (kind == "no ranks" and name in SOME_RANKS)]
    return list(SCALARS)
