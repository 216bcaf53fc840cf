"""What it takes to fuzz a call: the target, the kinds of its parameters, and what each kind may be.

A target is called on every rank with the same arguments. What it gives where it does not raise must be what `right`
computes from all ranks' arguments. See call_values.py for the values, call_ranks.py for what a rank does.
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
Right = Callable[[list[Arguments], int, int], Any]  # (all ranks' arguments, rank, ranks) -> the logical result


class Target(NamedTuple):
    """name; call(env, arguments); good: parameter -> (kind, name of a good value, or a value); right, None: unknown."""

    name: str
    call: Callable[[Any, Arguments], Any]
    good: Mapping[str, tuple[str, Any]]
    right: Right | None = None
    words: tuple[str, ...] = ()  # other names of the operation that a message may use


# Kind of parameter -> what a valid value of it may be, among the oddities. All others must be refused.


def is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer, np.bool_)) or (
        isinstance(value, (np.ndarray, Tensor)) and value.ndim == 0 and not np.issubdtype(np.asarray(value).dtype, "f8")
    )


def _rank_in(value: Any, ranks: int) -> bool:
    return is_whole(value) and 0 <= int(value) < ranks


def _counts(value: Any, ranks: int) -> bool:
    try:
        return len(value) == ranks and all(is_whole(v) and int(v) >= 0 for v in value)
    except TypeError:
        return False


def _number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number, np.bool_))


TEXTS = (str, bytes, bytearray, dict)
FINE: dict[str, Callable[[Any, int], bool]] = {
    "rank": _rank_in,
    "rank or none": lambda value, n: value is None or _rank_in(value, n),
    "dim": lambda value, n: is_whole(value) and -1 <= int(value) < 1,
    "op": lambda value, n: isinstance(value, (str, int, np.integer)) or hasattr(value, "code"),
    "ad op": lambda value, n: isinstance(value, (str, pynccl.RedOp, ad.PreMul)),
    "grad": lambda value, n: value in ("sum", "replicated") if isinstance(value, str) else False,
    "stream": lambda value, n: value is None or is_whole(value) or hasattr(value, "__cuda_stream__"),
    "config": lambda value, n: value is None or isinstance(value, pynccl.CollConfig),
    "comm config": lambda value, n: value is None or isinstance(value, pynccl.CommConfig),
    "counts": _counts,
    # A module makes a list of what it is given.
    "splits": lambda value, n: value is None or _counts(value, n) or isinstance(value, Iterator),
    "no splits": lambda value, n: value is None,  # of scatter: good ones that are not root's, only root can tell
    "dtype": lambda value, n: value is None or isinstance(value, (str, torch.dtype, pynccl.DataType, type)),
    "color": lambda value, n: value is None or is_whole(value),
    "key": lambda value, n: is_whole(value),
    "size": lambda value, n: is_whole(value) or isinstance(value, (tuple, list, range, np.ndarray, Tensor)),
    "integers": lambda value, n: FINE["size"](value, n) or (isinstance(value, Iterable) and type(value) not in TEXTS),
    "integers or none": lambda value, n: value is None or FINE["integers"](value, n),
    "number": lambda value, n: _number(value) or isinstance(value, (np.ndarray, Tensor, pynccl.Memory)),
    "timeout": lambda value, n: value is None or _number(value),
    "flags": lambda value, n: value is None or is_whole(value),
    "flag": lambda value, n: True,
    "device": lambda value, n: value is None or is_whole(value) or isinstance(value, str),
    "devices": lambda value, n: value is None or is_whole(value) or isinstance(value, (str, tuple, list, range)),
    "priority": lambda value, n: value is None or is_whole(value),
    "library": lambda value, n: value is None or isinstance(value, pynccl.Library),
    "comm": lambda value, n: isinstance(value, pynccl.Communicator),
    "other": lambda value, n: True,  # what may be given cannot be told here
    "nothing else": lambda value, n: False,
    "no buffer": lambda value, n: False,
    "no rank": lambda value, n: False,
    "no ranks": lambda value, n: False,
    "only 0": lambda value, n: is_whole(value) and int(value) == 0,
    "only 1": lambda value, n: is_whole(value) and int(value) == 1,
    "edges": lambda value, n: isinstance(value, (list, tuple, dict, set, range)) and not value,
    "halo": lambda value, n: is_whole(value) or isinstance(value, (tuple, list, range, np.ndarray, Iterator)),
}
BUFFER_KINDS = ("buffer", "recv", "tensor")


# What a peer that is waited for, or left out, would be: the other ranks would have to answer.
A_RANK = {"0", "1", "True", "False", "np.int64(0)", "np.int64(1)", "np.bool_(True)", "np.array(0)", "torch.tensor(0)"}
A_RANK |= {"None", "0.0", "1.0", "RedOp.SUM", "DataType.FLOAT32"}
SOME_RANKS = {"[0]", "{1}", "{0: 1}", "(0, 1)", "range(2)", "np.array([0, 1])", "generator", "torch.tensor([1., 2.])"}


def pool(kind: str) -> list[str]:
    """The names of the values to try for a parameter of this kind."""
    if kind in BUFFER_KINDS:
        return [*(f"buffer {name}" for name in BUFFERS), *SCALARS]
    if kind in ("self", "ad comm"):
        return ["destroyed comm", "aborted comm"] if kind == "self" else ["destroyed comm", "aborted comm", *SCALARS]
    if kind == "no buffer":
        return [name for name in SCALARS if not name.startswith(("torch.tensor", "np.array", "memory"))]
    if kind == "no splits":
        return [name for name in SCALARS if name not in SOME_RANKS]
    if kind in ("no rank", "no ranks"):
        return [name for name in SCALARS if name not in A_RANK and not (kind == "no ranks" and name in SOME_RANKS)]
    return list(SCALARS)
