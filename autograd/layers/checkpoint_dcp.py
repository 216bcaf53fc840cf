"""A model whose parameters are parts, for torch.distributed.checkpoint: saved on N ranks, loaded on any number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pynccl.bindings.values import instance

from .checkpoint import entries_of
from .shards import Box, Shard

_KEEP_PLACE = ("detach", "clone", "cpu", "to", "contiguous", "pin_memory", "new_empty", "empty_like", "__deepcopy__")


def dcp_state_dict(model: nn.Module) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves of the model and loads into it, each rank its part.

        dcp.save(ad.dcp_state_dict(model), checkpoint_id=folder)
        dcp.load(ad.dcp_state_dict(model), checkpoint_id=folder)     # in place, on any number of ranks

    Names and shapes in the checkpoint are those of the unsharded model: a plain model loads it too. The parts may be
    uneven, which DTensor's Shard can say in one way only. Tensors share memory with the model's; tied parameters are
    stored under their first name. ValueError for parameters on the meta device.
    """
    instance(model, nn.Module, "dcp_state_dict: model", "a torch.nn.Module")
    entries, others = entries_of(model)
    state: dict[str, Any] = dict(others)
    for entry in entries:
        if entry.tensor.is_meta:
            raise ValueError(
                f"dcp_state_dict: {entry.names[0]} is on the meta device: it has no values; use to_empty()"
            )
        tensor, shard = entry.tensor.detach(), entry.shard
        state[entry.names[0]] = tensor if shard is None or shard.dim is None else Part.of(tensor, shard)
    return state


class Part(Tensor):
    """A part that says its place by the methods that torch.distributed.checkpoint's planners ask for.

    They are those of DTensor (`torch/distributed/checkpoint/planner_helpers.py`)."""

    part: Tensor
    shard: Shard

    @classmethod
    def of(cls, part: Tensor, shard: Shard) -> Part:
        made = part.as_subclass(cls)
        made.part, made.shard = part, shard
        return made

    def size(self, dim: Any = None) -> Any:
        """Of the whole: loading compares it with what was saved."""
        whole = torch.Size(self.shard.shape)
        return whole if dim is None else whole[dim]

    def _boxes(self) -> list[Box]:
        return [box for box in self.shard.boxes() if torch.Size(box.size).numel()]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.whole), torch.Size(box.size)) for box in self._boxes()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, size = TensorProperties.create_from_tensor(self.part), torch.Size(self.shard.shape)
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
            if tuple(index.offset) == box.whole:
                part = self.part.t() if self.shard.transposed else self.part
                for dim, (first, size) in enumerate(zip(box.part, box.size, strict=True)):
                    part = part.narrow(dim, first, size)
                return part
        raise ValueError(f"{index.fqn}: this rank has no part at {list(index.offset)}, but {self.shard}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """That of the part. Copies know their place as well, so that none is taken for the whole: `dcp.async_save`
        copies first."""
        name = getattr(function, "__name__", "")
        if name == "copy_" and not isinstance(args[0], Part):
            raise TypeError(f"copy_: the target does not know that it is a part, as the source does: {args[1].shard}")
        if name == "set_":  # by a copy that then sets `part` too, as it does with all attributes
            return args[0]
        made = function(*map(_plain, args), **{key: _plain(value) for key, value in (kwargs or {}).items()})
        of = next((one for one in args if isinstance(one, Part)), None)
        if of is not None and isinstance(made, Tensor) and name in _KEEP_PLACE:
            return Part.of(made, of.shard)
        return made


def _plain(value: Any) -> Any:
    return value.part if isinstance(value, Part) else value
