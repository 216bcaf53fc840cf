"""Where a checkpoint's tensors come from: a dict, files, or rank 0, which has one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..agreement import broadcast_object, gathered, raise_alike
from .safetensors_files import Files

Path_ = str | os.PathLike[str]


def caught(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """(what it returns, None), or (None, what it raises)."""
    try:
        return function(), None
    except Exception as error:
        return None, error


class Given:
    """Tensors of a dict, as `Files` has them of files."""

    def __init__(self, operation: str, state: Mapping[str, Any]) -> None:
        self.state = state
        for name, value in state.items():
            if isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided or value.is_quantized):
                what = "on the meta device: it has no values" if value.is_meta else f"{value.layout} of {value.dtype}"
                raise ValueError(f"{operation}: {name} of the state is {what}; expected a dense tensor")
        self.shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
        self.dtypes = {name: state[name].dtype for name in self.shapes}
        self.ties: dict[str, str] = {}
        self.others = {name: value for name, value in state.items() if name not in self.shapes}

    def whole(self, name: str) -> Tensor:
        tensor: Tensor = self.state[name]
        return tensor.detach()


class _FromRoot:
    """What rank 0 has, broadcast when it is asked for; every rank must ask for the same."""

    def __init__(self, comm: Communicator, source: Given | Files | None) -> None:
        self.comm, self.source = comm, source
        about = None if source is None else (source.shapes, source.dtypes, source.ties, source.others)
        self.shapes, self.dtypes, self.ties, self.others = broadcast_object(comm, about)

    def whole(self, name: str) -> Tensor:
        wire, problem = torch.empty(self.shapes[name], dtype=self.dtypes[name], device=self.comm.device), None
        if self.source is not None:
            source = self.source
            _, problem = caught(lambda: wire.copy_(source.whole(name)))
        if wire.numel():  # the others wait for it, even if it could not be read
            sent = wire.reshape(-1).view(torch.uint8)
            self.comm.broadcast(sent, sent, 0)
        if problem is not None:
            raise problem
        return wire


Source = Given | Files | _FromRoot


def source_of(operation: str, comm: Communicator | None, state: Any) -> Source:
    """Where the tensors come from; what is wrong with `state` on some rank raises on all."""
    kinds = {
        "nothing": state is None,
        "dict": isinstance(state, Mapping),
        "path": isinstance(state, (str, os.PathLike)),
    }
    kind = next((number for number, fits in enumerate(kinds.values()) if fits), 3)
    problem: Exception | None = None
    if kind == 3:
        problem = TypeError(
            f"{operation}: state is {shown(state)}, expected a state dict, a path, or None where rank 0 alone has it"
        )
    source, wrong = caught(
        lambda: Given(operation, state) if kind == 1 else Files(operation, state) if kind == 2 else None
    )
    raise_alike(comm, problem or wrong)
    rows = [kind] if comm is None else [row[0] for row in gathered(comm, [kind])]
    if rows[0] and not any(rows[1:]) and comm is not None and comm.size > 1:
        return _FromRoot(comm, source)
    if 0 in rows:
        without = [rank for rank, row in enumerate(rows) if row == 0]
        raise ValueError(f"{operation}: state is None on ranks {without}; expected it on none, or on all but rank 0")
    assert source is not None
    return source
