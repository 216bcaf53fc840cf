"""Shard: how a parameter is sharded over the ranks of a communicator. ShardTensor: a tensor that is such a shard.

`state_dict()` of a model with sharded parameters, and of an optimizer that has stepped on them, holds ShardTensors.
torch's ways of saving do not take one for the whole: torch.distributed.checkpoint saves and loads it as a shard, by
methods that DTensor has too; load_state_dict compares the two shards; torch.save, safetensors and NumPy are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import add, sub
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import INT_MAX, instance, ordered, shown

from ..arguments import as_int, as_list, check_comm, check_splits, check_type
from ..ops.all_gather import all_gather
from ..torch_internals import offset_of, whole_state_is_asked
from .dtensors import from_local_like, full_tensor, is_dtensor, local_tensor


class Box(NamedTuple):
    """A block of entries of a parameter: its offsets in the full parameter and in this rank's shard, and its sizes."""

    full: tuple[int, ...]
    shard: tuple[int, ...]
    size: tuple[int, ...]


class Shard:
    """Describes how this rank's parameter is a shard of a full parameter. Set it with `ad.set_shard`.

    comm        communicator whose ranks hold the shards
    dim         dimension of the parameter that is sharded; None: every rank has all of it
    shape       shape of the full parameter
    splits      size of each rank's shard along `dim`; None: equal sizes
    partial     for a replicated parameter (dim=None): each rank has only a part of the gradient, because its layer sees
                a part of the sequence or of the heads. `finish_gradients` sums it over `comm`
    blocks      consecutive blocks along `dim` of the full parameter, each split equally over the ranks: their number,
                if they are equal (3 for queries, keys and values in one layer), or their sizes
    transposed  the parameter is a shard of the transpose of the full one; `shape` is that of the full one

    ValueError if `dim` is not a dimension, if `splits` or `blocks` do not fit its size, or if `partial` has a `dim`.
    """

    exist = False  # whether any was made in this process

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
        Shard.exist = True
        check_comm("Shard", comm, dim=dim, shape=shape)
        sizes = [checked_size("Shard: shape", size) for size in ordered(shape, "Shard: shape", "a sequence of sizes")]
        check_type("Shard: partial", "bool", partial)
        check_type("Shard: transposed", "bool", transposed)
        self.comm, self.dim, self.shape, self.partial = comm, dim, tuple(sizes), partial
        self.transposed = transposed
        self.splits: tuple[int, ...] = ()
        self.blocks: tuple[int, ...] = ()  # sizes
        if dim is not None:
            index, local = as_int(dim), self.shape[::-1] if transposed else self.shape
            if index is None or not -len(local) <= index < len(local):
                raise ValueError(f"Shard: dim is {shown(dim)}, expected a dimension of shape {list(local)}, or None")
            if partial:
                raise ValueError(f"Shard: partial=True is for replicated parameters; pass dim=None, not {dim}")
            self.dim = dim = int(index % len(local))
            size = local[dim]
            if splits is None and size % comm.size:
                raise ValueError(
                    f"Shard: dimension {dim} of shape {list(local)} is not divisible by {comm.size} ranks; pass splits="
                )
            self.splits = check_splits("Shard", splits, comm) or (size // comm.size,) * comm.size
            if sum(self.splits) != size:
                raise ValueError(
                    f"Shard: splits is {self.splits}, expected {comm.size} sizes that add up to {size}, the size of "
                    f"dimension {dim} of {list(self.shape)}"
                )
            self.blocks = sizes_of_blocks("Shard", blocks, size, comm.size)
            if len(self.blocks) > 1 and len(set(self.splits)) > 1:
                raise ValueError(
                    f"Shard: splits is {self.splits}, expected equal sizes, since blocks is {shown(blocks)}"
                )
        elif splits is not None or as_int(blocks) != 1:
            what = f"splits is {shown(splits)}" if splits is not None else f"blocks is {shown(blocks)}"
            raise ValueError(f"Shard: {what}, but dim is None: the parameter is replicated; pass dim=")
        if transposed and len(sizes) != 2:
            raise ValueError(f"Shard: transposed is {shown(transposed)}, expected shape {sizes} to have 2 dimensions")

    def ranges(self) -> list[tuple[int, int]]:
        """Return (start, length) of this rank's shard of each block, along `dim` of the full parameter."""
        ranks, rank = self.comm.size, self.comm.rank
        if len(self.blocks) == 1:
            return [(sum(self.splits[:rank]), self.splits[rank])]
        starts = accumulate(self.blocks, initial=0)
        return [(start + size // ranks * rank, size // ranks) for start, size in zip(starts, self.blocks, strict=False)]

    @property
    def first(self) -> int:
        """Index in the full parameter at which this rank's shard starts (with several blocks, that of the first)."""
        return self.ranges()[0][0]

    @property
    def local_shape(self) -> list[int]:
        """The shape of this rank's shard."""
        shape = list(self.shape[::-1] if self.transposed else self.shape)
        if self.dim is not None:
            shape[self.dim] = self.splits[self.comm.rank]
        return shape

    def local(self, full: Tensor) -> Tensor:
        """Return this rank's shard of the full parameter: a view, if there is one block."""
        self.check_full("Shard: full", full)
        full = full.t() if self.transposed else full
        if self.dim is None:
            return full
        parts = [full.narrow(self.dim, start, size) for start, size in self.ranges()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def check_full(self, name: str, full: Any) -> None:
        """Check that it is a full parameter."""
        instance(full, Tensor, name, "the full parameter, a torch.Tensor")
        if tuple(full.shape) != self.shape or full.layout is not torch.strided:
            found = f"a tensor of shape {list(full.shape)}" + f", {full.layout}" * (full.layout is not torch.strided)
            raise ValueError(f"{name}: got {found}, expected the full parameter, {list(self.shape)}, dense")

    def gather(self, part: Tensor) -> Tensor:
        """Return the full parameter, on every rank, from each rank's shard. A collective: every rank must call it. A
        DTensor (FSDP2) is gathered over its own mesh first."""
        instance(part, Tensor, "Shard.gather: part", "this rank's shard, a torch.Tensor")
        full = full_tensor(part)
        if self.dim is not None:
            full = all_gather(full, self.comm, self.dim, grad="sum", splits=self.splits)
        if self.dim is not None and len(self.blocks) > 1:
            each = [size // self.comm.size for size in self.blocks]
            ranks = [one.split(each, self.dim) for one in full.split(self.splits, self.dim)]
            full = torch.cat([one[block] for block in range(len(each)) for one in ranks], self.dim)
        return full.t() if self.transposed else full

    def boxes(self) -> list[Box]:
        """Return this rank's shard as boxes that are contiguous ranges of the full parameter, one for each block. A
        transposed shard is described in the layout of the full parameter."""
        if self.dim is None:
            return [Box((0,) * len(self.shape), (0,) * len(self.shape), self.shape)]
        dim = len(self.shape) - 1 - self.dim if self.transposed else self.dim
        boxes, offset = [], 0
        for start, length in self.ranges():
            full, shard, size = [0] * len(self.shape), [0] * len(self.shape), list(self.shape)
            full[dim], shard[dim], size[dim] = start, offset, length
            boxes.append(Box(tuple(full), tuple(shard), tuple(size)))
            offset += length
        return boxes

    @property
    def is_part(self) -> bool:
        """Whether this rank has less than the full parameter."""
        return self.dim is not None and self.comm.size > 1

    def __repr__(self) -> str:
        of = f"of {list(self.shape)}, rank {self.comm.rank} of {self.comm.size}"
        if self.dim is None:
            return f"Shard(all {of}{', partial gradients' if self.partial else ''})"
        start, length = self.ranges()[0]
        each = f", and likewise in each of the blocks {list(self.blocks)}," if len(self.blocks) > 1 else ""
        which = f"dimension {self.dim}{' of the transpose' if self.transposed else ''}"
        return f"Shard({start} to {start + length}{each} of {which} {of})"


def sizes_of_blocks(name: str, blocks: Any, size: int, ranks: int) -> tuple[int, ...]:
    """Return the sizes of `blocks` (a number of equal blocks, or sizes) that add up to `size`. ValueError if they do
    not, or if the size of one of several blocks is not divisible by the number of ranks."""
    count = as_int(blocks)
    if count == 1:  # also of 0 features
        return (size,)
    if count is None:
        sizes: list[Any] = list(map(as_int, as_list(blocks) or ()))
    else:
        sizes = [size // count] * int(count) if 0 < count <= size else []
    if not sizes or None in sizes or sum(sizes) != size or any(one < 0 or one % ranks for one in sizes):
        raise ValueError(
            f"{name}: blocks is {shown(blocks)}, expected the number of equal blocks in {size} features, or their "
            f"sizes, each divisible by {ranks} ranks"
        )
    return tuple(map(int, sizes))


def checked_size(what: str, value: Any) -> int:
    """Return `value` as a number of features or rows. ValueError if it is not one."""
    size = as_int(value)
    if size is None or not 0 <= size <= INT_MAX:
        raise ValueError(f"{what} is {shown(value)}, expected an integer >= 0, up to {INT_MAX}")
    return int(size)


# These move entries, so that a result of the shard's shape is not the same shard. All others count as elementwise.
_MOVING = {
    *("t", "T", "mT", "H", "mH", "adjoint", "transpose", "swapaxes", "permute", "movedim", "flip", "fliplr", "flipud"),
    *("roll", "rot90", "mm", "matmul", "__getitem__", "index_select", "take_along_dim", "gather", "sort", "argsort"),
}
_LEAVING = {"numpy", "__array__", "__dlpack__", "requires_grad_"}  # they lose that it is a shard


class ShardTensor(Tensor):
    """This rank's shard of a parameter, or of a state tensor of an optimizer. It shares memory with it.

    local  the shard itself
    shard  its Shard
    at     where `local` begins in this rank's shard: fully_shard (FSDP2) may leave a part of it

    `to_local()` and `full_tensor()` are those of DTensor. `size()` is that of the full tensor, which DCP compares with
    the saved one; `shape` is that of `local`. Elementwise operations on it, and copies, give a ShardTensor too.
    """

    local: Tensor
    shard: Shard
    at: tuple[int, ...]

    @classmethod
    def of(cls, local: Tensor, shard: Shard, at: tuple[int, ...] | None = None) -> ShardTensor:
        """Return a ShardTensor of `local`, a tensor or a DTensor."""
        if is_dtensor(local):
            at, local = offset_of(local), local_tensor(local)
        made = local.as_subclass(cls)
        made.local, made.shard, made.at = local, shard, at or (0,) * local.dim()
        return made

    def to_local(self) -> Tensor:
        """Return this rank's shard, a plain tensor that shares memory with it."""
        return self.local

    def full_tensor(self) -> Tensor:
        """Return the full tensor, on every rank. A collective: every rank must call it."""
        if list(self.local.shape) != self.shard.local_shape:
            raise NotImplementedError(
                f"full_tensor: fully_shard left {list(self.local.shape)} of {self.shard} here; call "
                "pynccl_autograd.full_state_dict(model)"
            )
        return self.shard.gather(self.local)

    def size(self, dim: Any = None) -> Any:
        """Return the size of the full tensor."""
        full = torch.Size(self.shard.shape)
        return full if dim is None else full[dim]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardTensor({self.shard}, {self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._reject("torch.save, or pickle,")

    def _reject(self, operation: str) -> NoReturn:
        raise TypeError(
            f"{operation} would take a shard for the whole: this is {self.shard}. Save full_state_dict(model), or "
            "dcp_state_dict(model) with torch.distributed.checkpoint (full_optimizer_state_dict and "
            "dcp_optimizer_state_dict for an optimizer); x.to_local() is this rank's shard, a plain tensor"
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name_of(function)
        first = next((one for one in (*args, *(kwargs or {}).values()) if isinstance(one, ShardTensor)), None)
        if first is not None and (name in _LEAVING or (name == "data_ptr" and _caller().startswith("safetensors"))):
            first._reject(name)
        if name == "copy_":
            return _copy(*args, **(kwargs or {}))
        if name == "set_":  # called by a copy that then also sets the attribute `local`
            return args[0]
        made = function(*map(unwrap, args), **{key: unwrap(value) for key, value in (kwargs or {}).items()})
        if first is None or type(made) is not Tensor:
            return made
        keeps = name == "new_empty" or (name not in _MOVING and made.shape == first.local.shape)
        return ShardTensor.of(made, first.shard, first.at) if keeps else made

    # For torch.distributed.checkpoint (torch/distributed/checkpoint/planner_helpers.py).

    def _boxes(self) -> list[Box]:
        """Return the blocks of the full tensor that are in `local`, with their places in it."""
        step = -1 if self.shard.transposed else 1  # boxes are in the layout of the full tensor
        starts, sizes = self.at[::step], self.local.shape[::step]
        boxes = []
        for box in self.shard.boxes():
            begin = tuple(map(max, box.shard, starts))
            end = map(min, map(add, box.shard, box.size), map(add, starts, sizes))
            size = tuple(map(sub, end, begin))
            if min(size, default=1) > 0:
                full = map(add, box.full, map(sub, begin, box.shard))
                boxes.append(Box(tuple(full), tuple(map(sub, begin, starts)), size))
        return boxes

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.full), torch.Size(box.size)) for box in self._boxes()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, size = TensorProperties.create_from_tensor(self.local), torch.Size(self.shard.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for box in self._boxes():
            if tuple(index.offset) == box.full:
                block = self.local.t() if self.shard.transposed else self.local
                for dim, (first, size) in enumerate(zip(box.shard, box.size, strict=True)):
                    block = block.narrow(dim, first, size)
                return block
        raise ValueError(f"{index.fqn}: this rank has no shard at offset {list(index.offset)}; it has {self.shard}")


def held(value: Tensor, shard: Shard) -> Tensor:
    """Return what a state dict holds of this rank's shard: itself, as a ShardTensor; or the full tensor, gathered, if
    torch's get_model_state_dict or get_optimizer_state_dict was called with full_state_dict=True."""
    if not shard.is_part:
        return value
    return shard.gather(value).clone() if whole_state_is_asked() else ShardTensor.of(value, shard)


def taken(value: Any, parameter: Tensor) -> Any:
    """Return what a parameter or its optimizer holds of a value of a state dict: the shard itself; for a DTensor, one
    that is sharded like it."""
    if not isinstance(value, ShardTensor):
        return value
    shard = getattr(parameter, "shard", None)
    if repr(value.shard) != repr(shard):
        raise ValueError(f"load_state_dict: the state has {value.shard}, but the parameter is {shard or 'not sharded'}")
    return from_local_like(value.local, parameter)


def unwrap(value: Any) -> Any:
    """Return the shard itself, also of ShardTensors in lists and tuples."""
    if type(value) in (list, tuple):
        return type(value)(map(unwrap, value))
    return value.local if isinstance(value, ShardTensor) else value


def _copy(target: Any, source: Any, *args: Any, **options: Any) -> Any:
    """Copy between shards, and to and from a parameter that is the same shard."""
    if isinstance(source, ShardTensor):
        shard = getattr(target, "shard", None)
        if shard is None or repr(shard) != repr(source.shard):
            raise TypeError(
                f"copy_: the source is {source.shard}, but the target is {shard or 'a plain tensor'}; expected the same"
                " shard (load_full_state_dict loads any full state)"
            )
    unwrap(target).copy_(unwrap(source), *args, **options)
    return target


def _caller() -> str:
    """Return the name of the module that called a method of a ShardTensor."""
    return str(sys._getframe(2).f_globals.get("__name__"))


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    return getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else name
