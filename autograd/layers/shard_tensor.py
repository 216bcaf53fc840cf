"""ShardTensor: a tensor of a state dict that knows that it is this rank's shard of a larger one.

`state_dict()` of a model with sharded parameters, and of an optimizer that has stepped on them, holds these. Nothing
can take one for the whole by mistake: torch.distributed.checkpoint saves and loads it as a shard, by the methods that
it looks for in DTensors; load_state_dict compares the two shards; torch.save, safetensors and NumPy are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..torch_internals import shape_and_offset, whole_state_is_asked
from .dtensors import is_dtensor, local_tensor

if TYPE_CHECKING:
    from .shards import Box, Shard

# These move entries, so a result of the shard's shape is not the same shard. All others are elementwise, or copies.
_MOVING = {"t", "T", "mT", "H", "mH", "adjoint", "transpose", "swapaxes", "permute", "movedim", "flip", "roll", "mm"}
_LEAVING = {"numpy", "__array__", "__dlpack__", "requires_grad_"}  # they lose that it is a shard


class ShardTensor(Tensor):
    """This rank's shard of a parameter, or of a state tensor of an optimizer. It shares memory with it.

    local  the shard itself
    shard  its Shard
    at     where `local` begins in this rank's shard: fully_shard (FSDP2) may leave a part of it
    part   the DTensor that `local` is the local tensor of, or `local`

    `to_local()` and `full_tensor()` are those of DTensor. `size()` is that of the full tensor, which DCP compares with
    the saved one; `shape` is that of `local`. An elementwise operation on it, or a copy, gives a ShardTensor too.
    """

    local: Tensor
    shard: Shard
    at: tuple[int, ...]
    part: Tensor

    @classmethod
    def of(cls, local: Tensor, shard: Shard, at: tuple[int, ...] | None = None) -> ShardTensor:
        """Return a ShardTensor of `local`, a tensor or a DTensor."""
        part = local
        if is_dtensor(part):
            _, at = shape_and_offset(part)
            local = local_tensor(part)
        made = local.as_subclass(cls)
        made.local, made.part, made.shard, made.at = local, part, shard, at or (0,) * local.dim()
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
        first = next((one for one in args if isinstance(one, ShardTensor)), None)
        if first is not None and (name in _LEAVING or (name == "data_ptr" and _caller().startswith("safetensors"))):
            first._reject(name)
        if name == "copy_":
            return _copy(*args, **(kwargs or {}))
        if name == "set_":  # called by a copy that then also sets the attribute `local`
            return args[0]
        made = function(*map(unwrap, args), **{key: unwrap(value) for key, value in (kwargs or {}).items()})
        if first is None or name in _MOVING or type(made) is not Tensor or made.shape != first.local.shape:
            return made
        return ShardTensor.of(made, first.shard, first.at)

    # For torch.distributed.checkpoint (torch/distributed/checkpoint/planner_helpers.py).

    def _boxes(self) -> list[Box]:
        """Return the blocks of the full tensor that are in `local`, with their places in it."""
        boxes, size = [], tuple(self.local.shape)
        at, size = (self.at[::-1], size[::-1]) if self.shard.transposed else (self.at, size)
        for box in self.shard.boxes():
            first = [max(start, begin) for start, begin in zip(box.shard, at, strict=True)]
            ends = zip(box.shard, box.size, at, size, strict=True)
            length = [min(start + n, begin + m) - low for (start, n, begin, m), low in zip(ends, first, strict=True)]
            if all(one > 0 for one in length):
                full = [there + low - start for there, low, start in zip(box.full, first, box.shard, strict=True)]
                here = [low - begin for low, begin in zip(first, at, strict=True)]
                boxes.append(type(box)(tuple(full), tuple(here), tuple(length)))
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
