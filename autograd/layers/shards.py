"""Shard: what a parameter of a parallel layer is a part of.

`parameter.shard` is set by the layers; what has none is whole on every rank, with a gradient that is equal on all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import INT_MAX, instance, shown

from ..arguments import as_int
from ..ops.all_gather import all_gather
from ..overlap.routes import decisions_of
from .dtensors import full_tensor, is_dtensor

Layer = TypeVar("Layer", bound="Sharded")


class Box(NamedTuple):
    """Entries of a parameter: where they begin in the whole and in this rank's part, and how many along each dim."""

    whole: tuple[int, ...]
    part: tuple[int, ...]
    size: tuple[int, ...]


class Shard:
    """The place of a parameter in the whole one.

    comm        whose ranks have the parts
    dim         dimension of the parameter that is cut; None: every rank has all of it
    shape       of the whole parameter
    splits      how much of `dim` each rank has
    partial     of a parameter that every rank has: its gradient is a part of the whole one, of which
                `finish_gradients` makes the sum. So it is where a layer sees a part of the sequence alone.
    blocks      blocks that follow one another in `dim` of the whole, of each of which each rank has an equal part:
                their sizes, or how many there are if they are equal: 3 for queries, keys and values in one layer
    transposed  the parameter is a part of the transpose of the whole, whose `shape` this is
    """

    def __init__(
        self,
        comm: Communicator,
        dim: int | None,
        shape: Sequence[int],
        splits: Sequence[int] | None = None,
        *,
        partial: bool = False,
        blocks: int | Sequence[int] = 1,
        transposed: bool = False,
    ) -> None:
        self.comm, self.dim, self.shape, self.partial = comm, dim, tuple(shape), partial
        self.transposed = transposed
        self.splits: tuple[int, ...] = ()
        self.blocks: tuple[int, ...] = ()  # sizes
        if dim is not None:
            size = (self.shape[::-1] if transposed else self.shape)[dim]
            self.splits = tuple(splits) if splits is not None else (size // comm.size,) * comm.size
            if len(self.splits) != comm.size or sum(self.splits) != size:
                raise ValueError(
                    f"Shard: splits is {self.splits}, expected {comm.size} sizes that add up to {size}, that of "
                    f"dimension {dim} of {list(self.shape)}"
                )
            self.blocks = sizes_of_blocks("Shard", blocks, size, comm.size)

    def ranges(self) -> list[tuple[int, int]]:
        """Of what this rank has of each block: its first index in `dim` of the whole, and how long it is."""
        ranks, rank = self.comm.size, self.comm.rank
        if len(self.blocks) == 1:
            return [(sum(self.splits[:rank]), self.splits[rank])]
        starts = accumulate(self.blocks, initial=0)
        return [(start + size // ranks * rank, size // ranks) for start, size in zip(starts, self.blocks, strict=False)]

    @property
    def first(self) -> int:
        """Index in the whole of what this rank has first; in its first block, if there are several."""
        return self.ranges()[0][0]

    @property
    def own_shape(self) -> list[int]:
        """The shape of this rank's part."""
        shape = list(self.shape[::-1] if self.transposed else self.shape)
        if self.dim is not None:
            shape[self.dim] = self.splits[self.comm.rank]
        return shape

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter: a view, where there is one block."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"the whole parameter has shape {list(self.shape)}, what was passed {list(whole.shape)}")
        whole = whole.t() if self.transposed else whole
        if self.dim is None:
            return whole
        parts = [whole.narrow(self.dim, start, size) for start, size in self.ranges()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def gather(self, part: Tensor) -> Tensor:
        """The whole of which `part` is this rank's, on every rank. A collective: every rank must call it. A DTensor, as
        of FSDP2, is made whole over its own mesh first."""
        whole = full_tensor(part)
        if self.dim is not None:
            whole = all_gather(whole, self.comm, self.dim, grad="sum", splits=self.splits)
        if self.dim is not None and len(self.blocks) > 1:
            each = [size // self.comm.size for size in self.blocks]
            ranks = [one.split(each, self.dim) for one in whole.split(self.splits, self.dim)]
            whole = torch.cat([one[block] for block in range(len(each)) for one in ranks], self.dim)
        return whole.t() if self.transposed else whole

    def boxes(self) -> list[Box]:
        """This rank's part as boxes that lie together in the whole, one for each block. What is transposed is laid as
        the whole is."""
        if self.dim is None:
            return [Box((0,) * len(self.shape), (0,) * len(self.shape), self.shape)]
        dim = len(self.shape) - 1 - self.dim if self.transposed else self.dim
        boxes, own = [], 0
        for start, length in self.ranges():
            whole, part, size = [0] * len(self.shape), [0] * len(self.shape), list(self.shape)
            whole[dim], part[dim], size[dim] = start, own, length
            boxes.append(Box(tuple(whole), tuple(part), tuple(size)))
            own += length
        return boxes

    def __repr__(self) -> str:
        of = f"of {list(self.shape)}, rank {self.comm.rank} of {self.comm.size}"
        if self.dim is None:
            return f"Shard(all {of}{', partial gradients' if self.partial else ''})"
        start, length = self.ranges()[0]
        each = f", and so of each of the blocks {list(self.blocks)}," if len(self.blocks) > 1 else ""
        which = f"dimension {self.dim}{' of the transpose' if self.transposed else ''}"
        return f"Shard({start} to {start + length}{each} of {which} {of})"


def sizes_of_blocks(name: str, blocks: Any, size: int, ranks: int) -> tuple[int, ...]:
    """Of `blocks`, how many or of which sizes, that make up `size`; ValueError if several cannot be cut over ranks."""
    count = as_int(blocks)
    sizes: list[Any] = [size // count] * int(count) if count else []
    if count is None and isinstance(blocks, Sequence):
        sizes = list(map(as_int, blocks))
    if count != 1 and (None in sizes or sum(sizes) != size or any(one < 0 or one % ranks for one in sizes)):
        raise ValueError(
            f"{name}: blocks is {shown(blocks)}, expected how many equal blocks there are in {size} outputs, or their "
            f"sizes, each divisible by {ranks} ranks"
        )
    return tuple(map(int, sizes))


def checked_size(what: str, value: Any) -> int:
    """As a number of features or words. ValueError if it is none."""
    size = as_int(value)
    if size is None or not 0 <= size <= INT_MAX:
        raise ValueError(f"{what} is {shown(value)}, expected an integer >= 0, up to {INT_MAX}")
    return int(size)


class Sharded(nn.Module):
    """A module some of whose parameters are parts: it makes and marks them, also in its copies and where it is moved.

    A class says by `shards` what they are parts of, calls `_make_parameters` at the end of __init__, and draws initial
    values in `reset_parameters`. Every rank draws the whole and keeps its part, so the result depends on the seed
    alone, not on N, and the ranks' generators stay in step.
    """

    __call__: Callable[..., Tensor]  # for type checkers, to whom that of nn.Module gives Any
    comm: Communicator
    weight: nn.Parameter
    bias: nn.Parameter | None

    def shards(self) -> dict[str, Shard]:
        """name of a parameter -> what it is a part of."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        raise NotImplementedError

    def _make_parameters(self, bias: bool, device: Any, dtype: torch.dtype | None) -> None:
        if device is None and torch.get_default_device().type != "meta":  # within `with torch.device("meta")`
            device = self.comm.device
        for name, shard in self.shards().items():
            own = None
            if name != "bias" or bias:
                own = nn.Parameter(torch.empty(shard.own_shape, device=device, dtype=dtype))
            self.register_parameter(name, own)
        self._mark()
        self.reset_parameters()

    def _draw_as_linear(self, in_features: int) -> None:
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        drawn: dict[str, Any] = {}
        for name, shard in self.shards().items():
            own: Tensor | None = getattr(self, name)
            drawn[name] = None if own is None else own.detach().new_empty(shard.shape).uniform_(-bound, bound)
        self.load_full(**drawn)

    def take(self: Layer, module: nn.Module) -> Layer:
        """Make the parameters this rank's parts of those of an unsharded module, which are equal on all ranks: on its
        device, of its type, trained or frozen as they are."""
        for name, shard in self.shards().items():
            whole: Tensor | None = getattr(module, name)
            if whole is not None:
                own = shard.own(whole.detach()).clone(memory_format=torch.contiguous_format)
                setattr(self, name, nn.Parameter(own, requires_grad=whole.requires_grad))
        self._mark()
        return self.train(module.training)

    @torch.no_grad()
    def load_full(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's part of the parameters of an unsharded layer."""
        if (bias is None) != (getattr(self, "bias", None) is None):
            raise ValueError(f"load_full: bias is {shown(bias)}, and the layer has {'one' if bias is None else 'none'}")
        shards = self.shards()
        for name, whole in {"weight": weight, "bias": bias}.items():
            if whole is not None:
                getattr(self, name).copy_(shards[name].own(whole))

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor]:
        """The unsharded layer's state_dict, on every rank. A collective: every rank must call it."""
        shards = self.shards()
        return {name: shards[name].gather(one).clone() for name, one in self.named_parameters(recurse=False)}

    def _mark(self) -> None:
        for name, shard in self.shards().items():
            parameter: Any = getattr(self, name, None)
            if isinstance(parameter, nn.Parameter):
                parameter.shard = shard  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:  # of a copy, whose parameters are new ones
        super().__setstate__(state)
        self._mark()

    def _apply(self, *args: Any, **options: Any) -> Any:  # of to(), to_empty(), share_memory(), ...
        module = super()._apply(*args, **options)
        self._mark()
        return module

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, shard in self.shards().items():
            given, own = state_dict.get(prefix + name), getattr(self, name, None)
            if isinstance(own, Tensor) and isinstance(given, Tensor) and own.shape != given.shape == shard.shape:
                args[-1].append(  # to the errors
                    f"{prefix}{name} is the whole parameter, of which this model has a part: load it by "
                    "pynccl_autograd.load_full_state_dict(model, state)."
                )
        self._mark()  # with assign=True they are new ones


def shard_of(parameter: Tensor) -> Shard | None:
    """What the parameter is a part of; None: it is whole. TypeError for a DTensor of which nobody has said it."""
    shard = getattr(parameter, "shard", None)
    if shard is None and not hasattr(parameter, "shard") and is_dtensor(parameter):
        raise TypeError(
            f"a parameter of shape {list(parameter.shape)} is a DTensor that does not know whether it is a part, since "
            "torch's fully_shard has made it anew. Call that within `with pynccl_autograd.keep_shards(model):`"
        )
    return shard if isinstance(shard, Shard) else None


@contextlib.contextmanager
def keep_shards(model: nn.Module) -> Iterator[None]:
    """A block in which parameters of the model are replaced under their names. The new ones are parts of what the old
    ones were, for `finish_gradients`, `clip_grad_norm_` and checkpoints.

        with ad.keep_shards(model):
            for layer in model.layers:
                fully_shard(layer, mesh=device_mesh["dp"])
            fully_shard(model, mesh=device_mesh["dp"])

    For torch's fully_shard (FSDP2), over another axis than that which cuts the layers; for what else makes parameters
    anew, such as load_state_dict(assign=True) of a model with modules that a plan only marks. No communication.
    TypeError if the model has lost its marks before.
    """
    instance(model, nn.Module, "keep_shards: model", "a torch.nn.Module")
    before = {name: shard_of(one) for name, one in model.named_parameters(remove_duplicate=False)}
    try:
        yield
    finally:
        for name, one in model.named_parameters(remove_duplicate=False):
            if name in before:
                parameter: Any = one
                parameter.shard = before[name]  # None says of a DTensor that this is known


def describe(model: nn.Module) -> str:
    """A table of a model's parameters: path, type of the module, shape of the whole, what this rank has of it and in
    which dimension, bytes on this rank; and their sum. Tied parameters count once. `print(ad.describe(model))`.

    Between them, what was decided of each pass that `overlap` is to hide, or how far its trial is."""
    rows = [("parameter", "in a", "whole", "here", "cut in", "bytes")]
    seen: dict[int, str] = {}
    total = whole_total = 0
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            shard = shard_of(parameter)
            whole = list(parameter.shape) if shard is None else list(shard.shape)
            if id(parameter) in seen:
                rows.append((full, type(module).__name__, str(whole), f"is {seen[id(parameter)]}", "", ""))
                continue
            seen[id(parameter)] = full
            cut = "" if shard is None or shard.dim is None else f"{shard.dim} of {shard.comm.size}"
            if shard is not None and len(shard.blocks) > 1:
                cut += f", {len(shard.blocks)} blocks"
            if shard is not None and shard.partial:
                cut = "gradients summed"
            total += parameter.nbytes
            whole_total += torch.Size(whole).numel() * parameter.element_size()
            rows.append(
                (full, type(module).__name__, str(whole), str(list(parameter.shape)), cut, f"{parameter.nbytes:,}")
            )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for path, module in model.named_modules():
        for one in decisions_of(module):
            name = f"{path or 'model'}, {one.pattern} of {one.m} rows"
            lines.append(f"{name}: {one.way if one.settled else 'undecided'}, {one.reason}")
    lines.append(f"{total:,} bytes on this rank, {whole_total:,} in the whole model")
    return "\n".join(lines)
