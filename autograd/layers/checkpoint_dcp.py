"""A model whose parameters are parts, and its optimizer, for torch.distributed.checkpoint: saved on N ranks, loaded on
any number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pynccl.bindings.values import instance

from .checkpoint import entries_of
from .checkpoint_optimizer import check_state, cut_of, names_in
from .dtensors import is_dtensor
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
        if is_dtensor(entry.tensor):
            raise NotImplementedError(
                f"dcp_state_dict: {entry.names[0]} is a DTensor, as of torch's fully_shard, of which it cannot say the "
                "place: use full_state_dict or save_full_state_dict"
            )
        tensor, shard = entry.tensor.detach(), entry.shard
        state[entry.names[0]] = tensor if shard is None or shard.dim is None else PartTensor.of(tensor, shard)
    return state


def dcp_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """What torch.distributed.checkpoint saves of an optimizer whose parameters are parts, and loads into it.

        state = {"model": ad.dcp_state_dict(model), "optimizer": ad.dcp_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)                        # in place, on any number of ranks

    A `Stateful`, so it has to be a value of such a dict. State goes by the parameters' names, groups by their place;
    parameters that had no state get none. What state there will be, where there is none yet, a step shows that is
    undone: so an optimizer that needs a closure has to have taken one. ValueError as of `full_optimizer_state_dict`;
    when loading, for groups with other parameters.
    """
    operation = "dcp_optimizer_state_dict"
    instance(model, nn.Module, f"{operation}: model", "a torch.nn.Module")
    return OptimizerState(optimizer, names_in(operation, model, optimizer))


class OptimizerState:
    """A `torch.distributed.checkpoint.stateful.Stateful` of an optimizer. names: parameter -> name."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
        self.optimizer, self.names = optimizer, names

    def state_dict(self) -> dict[str, Any]:
        """Tensors share memory with the optimizer's, but for those of parameters that have no state yet."""
        check_state("dcp_optimizer_state_dict", self.optimizer, self.names)
        new = _state_to_come(self.optimizer, [one for one in self.names if not self.optimizer.state.get(one)])
        rows: dict[str, dict[str, Any]] = {}
        for parameter, name in self.names.items():
            shard = cut_of(parameter)
            for key, value in (self.optimizer.state.get(parameter) or new.get(parameter, {})).items():
                cut = isinstance(value, Tensor) and shard is not None and value.shape == parameter.shape
                rows.setdefault(name, {})[key] = PartTensor.of(value.detach(), shard) if cut and shard else value
        groups = {
            str(at): {**group, "params": " ".join(self.names[one] for one in group["params"])}
            for at, group in enumerate(self.optimizer.param_groups)
        }
        without = " ".join(self.names[one] for one in new)
        return {"state": rows, "param_groups": groups, "without_state": without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was loaded into a dict of `state_dict`."""
        groups = [state["param_groups"][str(at)] for at in range(len(self.optimizer.param_groups))]
        for at, (group, own) in enumerate(zip(groups, self.optimizer.param_groups, strict=True)):
            expected = {self.names[one] for one in own["params"]}
            found = set(group["params"].split())
            if found != expected:
                raise ValueError(
                    f"dcp_optimizer_state_dict: group {at} of the checkpoint is of other parameters: without "
                    f"{sorted(expected - found)}, and with {sorted(found - expected)}"
                )
        without = set(state["without_state"].split())
        for parameter, name in self.names.items():
            row = {} if name in without else state["state"].get(name, {})
            self.optimizer.state.pop(parameter, None)
            if row:
                self.optimizer.state[parameter] = {key: _plain(value) for key, value in row.items()}
        for group, own in zip(groups, self.optimizer.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})


@torch.no_grad()
def _state_to_come(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> dict[Tensor, dict[str, Any]]:
    """What state a step gives these parameters, which are as they were afterwards, as is the optimizer."""
    parameters = [one for one in parameters if one.requires_grad]
    if not parameters:
        return {}
    everyone = [one for group in optimizer.param_groups for one in group["params"]]
    grads, values = [one.grad for one in everyone], [one.clone() for one in parameters]
    for one in everyone:
        one.grad = None
    for one in parameters:
        one.grad = torch.zeros_like(one)
    try:
        optimizer.step()
        return {one: optimizer.state.pop(one) for one in parameters if one in optimizer.state}
    finally:
        for one, grad in zip(everyone, grads, strict=True):
            one.grad = grad
        for one, value in zip(parameters, values, strict=True):
            one.copy_(value)
            optimizer.state.pop(one, None)


class PartTensor(Tensor):
    """A part that says its place by the methods that torch.distributed.checkpoint's planners ask for.

    They are those of DTensor (`torch/distributed/checkpoint/planner_helpers.py`)."""

    part: Tensor
    shard: Shard

    @classmethod
    def of(cls, part: Tensor, shard: Shard) -> PartTensor:
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
        if name == "copy_" and not isinstance(args[0], PartTensor):
            raise TypeError(f"copy_: the target does not know that it is a part, as the source does: {args[1].shard}")
        if name == "set_":  # by a copy that then sets `part` too, as it does with all attributes
            return args[0]
        made = function(*map(_plain, args), **{key: _plain(value) for key, value in (kwargs or {}).items()})
        of = next((one for one in args if isinstance(one, PartTensor)), None)
        if of is not None and isinstance(made, Tensor) and name in _KEEP_PLACE:
            return PartTensor.of(made, of.shard)
        return made


def _plain(value: Any) -> Any:
    return value.part if isinstance(value, PartTensor) else value
