"""State of an optimizer whose parameters are parts: as the unsharded model's has it; and, with the model's, for
torch.distributed.checkpoint, saved on N ranks and loaded on any number."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from ..agreement import caught, difference, raise_on_all_ranks, run_on_all_ranks
from .checkpoint import Entry, check_values, comm_of, entries_of, is_first
from .checkpoint_files import Source, source_of
from .dtensors import cut_like, is_dtensor
from .shards import Box, Shard, shard_of

_BETWEEN = "\0"  # a parameter's name and a key of its optimizer state
_KEEP_PLACE = ("detach", "clone", "cpu", "to", "contiguous", "pin_memory", "new_empty", "empty_like", "__deepcopy__")

# ------------------------------------------------------------------------------------------------- of the whole


def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator | None = None, rank0_only: bool = True
) -> dict[str, Any]:
    """State of the unsharded model's optimizer, on the CPU, by names of parameters. Every rank must call it.

        {"state": {name: {"exp_avg": tensor, ..}}, "param_groups": [{"params": [name, ..], "lr": .., ..}]}

    comm, rank0_only: as of `full_state_dict`. A tensor of the shape of the parameter's part is gathered as the
    parameter is, one at a time; numbers and tensors of one element are this rank's. ValueError for other shapes, such
    as Adafactor's rows and columns; for an optimizer with parameters that are not the model's, or with other state on
    another rank.
    """
    operation = "full_optimizer_state_dict"
    comm = comm_of(operation, model, comm)
    names = run_on_all_ranks(comm, lambda: _names_in(operation, model, optimizer))
    run_on_all_ranks(comm, lambda: _check_state(operation, optimizer, names))
    held = {name: sorted(optimizer.state.get(parameter, {})) for parameter, name in names.items()}
    _check_same_state(operation, comm, held)
    keep = not rank0_only or is_first(comm)
    state: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        for key in held[name]:
            value = optimizer.state[parameter][key]
            if isinstance(value, Tensor):
                value = Entry([], value, _cut_of(parameter) if value.shape == parameter.shape else None).whole()
            if keep:
                state.setdefault(name, {})[key] = value
    groups = [{**group, "params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups} if keep else {}


def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any] | None,
    *,
    comm: Communicator | None = None,
) -> None:
    """Each rank's part of what `full_optimizer_state_dict` made, on any number of ranks. Every rank must call it.

    state: on every rank; or None on all but rank 0, which broadcasts it tensor by tensor. Groups are matched by their
    place, parameters by name. Parameters without state there get none. ValueError if the groups have other parameters,
    RuntimeError for a tensor with more than one element that has not the whole parameter's shape.
    """
    operation = "load_full_optimizer_state_dict"
    comm = comm_of(operation, model, comm)
    names = run_on_all_ranks(comm, lambda: _names_in(operation, model, optimizer))
    flat = run_on_all_ranks(comm, lambda: None if state is None else _flat(operation, state))
    source = source_of(operation, comm, flat)
    groups = source.others.pop("")
    run_on_all_ranks(comm, lambda: _check_given(operation, optimizer, names, groups, source.shapes))
    numbers = {name: number for number, name in enumerate(names.values())}
    parameters = {name: parameter for parameter, name in names.items()}
    parts: dict[int, dict[str, Any]] = {}
    problem: Exception | None = None
    for row in (*source.shapes, *source.others):
        name, _, key = row.partition(_BETWEEN)
        if name in parameters:
            value, wrong = source.others.get(row), None
            if row in source.shapes:
                value, wrong = caught(partial(_own, source, row, parameters[name]))
            problem = problem or wrong
            parts.setdefault(numbers[name], {})[key] = value
    raise_on_all_ranks(comm, problem)
    packed = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": parts, "param_groups": packed})


def _names_in(operation: str, model: nn.Module, optimizer: Any) -> dict[Tensor, str]:
    """parameter -> name, in the optimizer's order."""
    instance(optimizer, torch.optim.Optimizer, f"{operation}: optimizer", "a torch.optim.Optimizer")
    known = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ValueError(
                    f"{operation}: the optimizer has a parameter of shape {list(parameter.shape)} that is not the "
                    "model's; make the optimizer after the model is materialised and cut"
                )
            found[parameter] = known[parameter]
    return found


def _cut_of(parameter: Tensor) -> Shard | None:
    shard = shard_of(parameter)
    return None if shard is None or shard.dim is None else shard


def _check_state(operation: str, optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
    for parameter, name in names.items():
        if _cut_of(parameter) is None:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"{operation}: {key} of {name} has shape {list(value.shape)}, expected that of this rank's part, "
                    f"{list(parameter.shape)}, or one element: nothing says how to gather it"
                )


def _check_same_state(operation: str, comm: Communicator | None, held: dict[str, list[str]]) -> None:
    """ValueError, on all ranks, if one has state that another has not: who gathers it would wait for ever."""
    if comm is None:
        return
    other = difference(comm, {"which parameters it has": list(held)}) or difference(
        comm, {f"that of {name}: here {keys}": keys for name, keys in held.items()}
    )
    if other is not None:
        raise ValueError(
            f"{operation}: the ranks have other state: {other}; every rank needs a step of the same parameters (one "
            "without gradient has none: give it zeros)"
        )


def _own(source: Source, row: str, parameter: Tensor) -> Tensor:
    whole = source.read(row)
    shard = _cut_of(parameter)
    own = (whole if shard is None or tuple(whole.shape) != shard.shape else shard.own(whole)).clone()
    return cut_like(own, parameter) if own.shape == parameter.shape else own


def _flat(operation: str, state: Any) -> dict[str, Any]:
    """Name and key of the state -> value; "" -> the groups."""
    try:
        groups = [dict(group) for group in state["param_groups"]]
        rows = {f"{name}{_BETWEEN}{key}": one for name, row in state["state"].items() for key, one in row.items()}
        return {"": groups, **rows}
    except (TypeError, KeyError, AttributeError, ValueError):
        raise TypeError(
            f"{operation}: state is {shown(state)}, expected what full_optimizer_state_dict makes: "
            '{"state": {name: {..}}, "param_groups": [..]}'
        ) from None


def _check_given(
    operation: str,
    optimizer: torch.optim.Optimizer,
    names: dict[Tensor, str],
    groups: list[dict[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    _check_groups(operation, optimizer, names, [set(group.get("params", ())) for group in groups])
    shards = {name: _cut_of(parameter) for parameter, name in names.items()}
    for row, shape in shapes.items():
        name, _, key = row.partition(_BETWEEN)
        shard = shards.get(name)
        if shard is not None and torch.Size(shape).numel() != 1 and shape != shard.shape:
            raise RuntimeError(
                f"{operation}: size mismatch for {key} of {name}: found {list(shape)}, expected {list(shard.shape)}, "
                "that of the whole parameter"
            )


def _check_groups(
    operation: str, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], given: list[set[str]]
) -> None:
    """That the groups of a checkpoint have the parameters that those of the optimizer have."""
    own = [{names[one] for one in group["params"]} for group in optimizer.param_groups]
    found, expected = set().union(*given), set().union(*own)
    if found != expected:
        raise ValueError(
            f"{operation}: the state is of other parameters: without {sorted(expected - found)}, and with "
            f"{sorted(map(str, found - expected))}, which this optimizer has not"
        )
    if own != given:
        raise ValueError(f"{operation}: the groups have the parameters in another way; expected {own}, got {given}")


# ------------------------------------------------------------------------------------------------- in parts


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
    check_values("dcp_state_dict", entries)
    state: dict[str, Any] = dict(others)
    for entry in entries:
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
    return OptimizerState(optimizer, _names_in(operation, model, optimizer))


class OptimizerState:
    """A `torch.distributed.checkpoint.stateful.Stateful` of an optimizer. names: parameter -> name."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
        self.optimizer, self.names = optimizer, names

    def state_dict(self) -> dict[str, Any]:
        """Tensors share memory with the optimizer's, but for those of parameters that have no state yet."""
        _check_state("dcp_optimizer_state_dict", self.optimizer, self.names)
        new = _state_to_come(self.optimizer, [one for one in self.names if not self.optimizer.state.get(one)])
        rows: dict[str, dict[str, Any]] = {}
        for parameter, name in self.names.items():
            shard = _cut_of(parameter)
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
        given = [set(group["params"].split()) for group in groups]
        _check_groups("dcp_optimizer_state_dict", self.optimizer, self.names, given)
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
