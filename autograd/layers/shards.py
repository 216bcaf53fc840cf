"""Shard: what a parameter of a parallel layer is a part of.

`parameter.shard` is set by the layers; what has none is whole on every rank, with a gradient that is equal on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..arguments import as_int
from ..ops.all_gather import all_gather
from .dtensors import full_tensor, is_dtensor


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

    @property
    def first(self) -> int:
        """Index in the whole of what this rank has first; in its first block, if there are several."""
        if len(self.blocks) > 1:
            return self.blocks[0] // self.comm.size * self.comm.rank
        return sum(self.splits[: self.comm.rank])

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter: a view, where there is one block."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"the whole parameter has shape {list(self.shape)}, what was passed {list(whole.shape)}")
        whole = whole.t() if self.transposed else whole
        if self.dim is None:
            return whole
        if len(self.blocks) == 1:
            return whole.narrow(self.dim, self.first, self.splits[self.comm.rank])
        return own_of_blocks(whole, self.dim, self.blocks, self.comm)

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
        ranks, rank = self.comm.size, self.comm.rank
        many = len(self.blocks) > 1
        boxes, start, own = [], 0, 0
        for length in self.blocks:
            whole, part, size = [0] * len(self.shape), [0] * len(self.shape), list(self.shape)
            each = length // ranks if many else self.splits[rank]
            whole[dim], part[dim], size[dim] = start + (each * rank if many else self.first), own, each
            boxes.append(Box(tuple(whole), tuple(part), tuple(size)))
            start, own = start + length, own + each
        return boxes

    def __repr__(self) -> str:
        of = f"of {list(self.shape)}, rank {self.comm.rank} of {self.comm.size}"
        if self.dim is None:
            return f"Shard(all {of}{', partial gradients' if self.partial else ''})"
        many = len(self.blocks) > 1
        each = f", and so of each of the blocks {list(self.blocks)}," if many else ""
        last = self.first + (self.blocks[0] // self.comm.size if many else self.splits[self.comm.rank])
        which = f"dimension {self.dim}{' of the transpose' if self.transposed else ''}"
        return f"Shard({self.first} to {last}{each} of {which} {of})"


def sizes_of_blocks(name: str, blocks: Any, size: int, ranks: int) -> tuple[int, ...]:
    """Of `blocks`, how many or of which sizes, that make up `size`; ValueError if several cannot be cut over ranks."""
    count = as_int(blocks)
    if count == 1:
        return (size,)
    sizes = () if isinstance(blocks, str) or not isinstance(blocks, Sequence) else tuple(map(as_int, blocks))
    if count is not None and count > 0 and size % count == 0:
        sizes = (size // count,) * count
    if not sizes or any(one is None or one < 0 for one in sizes) or sum(one or 0 for one in sizes) != size:
        raise ValueError(
            f"{name}: blocks is {shown(blocks)}, expected how many equal blocks there are in {size} outputs, or their "
            "sizes"
        )
    if len(sizes) > 1 and any((one or 0) % ranks for one in sizes):
        raise ValueError(f"{name}: blocks of {list(sizes)} outputs are not all divisible by {ranks} ranks")
    return tuple(int(one or 0) for one in sizes)


def own_of_blocks(whole: Tensor, dim: int, blocks: Sequence[int], comm: Communicator) -> Tensor:
    """This rank's part of each, one after the other."""
    parts = []
    for block in whole.split(list(blocks), dim):
        size = block.shape[dim] // comm.size
        parts.append(block.narrow(dim, size * comm.rank, size))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class Sharded(nn.Module):
    """A module some of whose parameters are parts: it marks them, also in its copies and where it is moved."""

    __call__: Callable[..., Tensor]  # for type checkers, to whom that of nn.Module gives Any

    def shards(self) -> dict[str, Shard]:
        """name of a parameter -> what it is a part of."""
        raise NotImplementedError

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

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        lists = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        for name, shard in self.shards().items():
            given, own = state_dict.get(prefix + name), getattr(self, name, None)
            if isinstance(own, Tensor) and isinstance(given, Tensor) and own.shape != given.shape == shard.shape:
                error_msgs.append(
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
