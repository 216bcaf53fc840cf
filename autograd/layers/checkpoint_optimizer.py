"""Optimizer states of models with sharded parameters: full ones, as of the unsharded model; and sharded ones, with the
model's, for torch.distributed.checkpoint. Any number of ranks can load both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from ..agreement import difference, raise_on_all_ranks, run_on_all_ranks, try_call
from ..arguments import checked
from ..names import plain_name, plain_names
from .checkpoint import Entry, check_values, comm_of, entries_of, is_first
from .checkpoint_files import Source, source_of
from .dtensors import distribute_like
from .optimizers import hold_shards
from .shard import Shard, ShardTensor, taken
from .shards import shard_of

_SEPARATOR = "\0"  # between a parameter's name and a key of its optimizer state

# ------------------------------------------------------------------------------------------------- full states


@checked
def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator | None = None, rank0_only: bool = True
) -> dict[str, Any]:
    """Return the optimizer state of the unsharded model, on the CPU, by parameter names. Every rank must call it.

        {"state": {name: {"exp_avg": tensor, ..}}, "param_groups": [{"params": [name, ..], "lr": .., ..}]}

    comm, rank0_only: as for `full_state_dict`. State tensors with the shape of this rank's shard are gathered like the
    parameter, one at a time. Numbers and one-element tensors are this rank's. ValueError for other shapes, such as
    Adafactor's rows and columns; if the optimizer has parameters that are not the model's; and if the ranks have state
    for different parameters.
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
                shard = _shard_along_dim(parameter) if value.shape == parameter.shape else None
                value = Entry([], value, shard).gather_to_cpu()
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
    """Load this rank's shard of a state from `full_optimizer_state_dict`, on any number of ranks. Every rank must call
    it.

    state   on every rank; or None on all ranks but 0, which broadcasts one tensor at a time
    comm    as for `full_state_dict`

    Groups are matched by their position, parameters by name. Parameters without saved state get none. ValueError if the
    groups have different parameters. RuntimeError if a tensor of more than one element does not have the shape of the
    full parameter.
    """
    operation = "load_full_optimizer_state_dict"
    comm = comm_of(operation, model, comm)
    names = run_on_all_ranks(comm, lambda: _names_in(operation, model, optimizer))
    flat = run_on_all_ranks(comm, lambda: None if state is None else _flattened(operation, state, model, names))
    source = source_of(operation, comm, flat)
    groups = source.others.pop("")
    run_on_all_ranks(comm, lambda: _check_checkpoint(operation, optimizer, names, groups, source.shapes))
    numbers = {name: number for number, name in enumerate(names.values())}
    parameters = {name: parameter for parameter, name in names.items()}
    local: dict[int, dict[str, Any]] = {}
    problem: Exception | None = None
    for row in (*source.shapes, *source.others):
        name, _, key = row.partition(_SEPARATOR)
        if name in parameters:
            value, wrong = source.others.get(row), None
            if row in source.shapes:
                value, wrong = try_call(partial(_read_local, source, row, parameters[name]))
            problem = problem or wrong
            local.setdefault(numbers[name], {})[key] = value
    raise_on_all_ranks(comm, problem)
    packed = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": local, "param_groups": packed})


def _names_in(operation: str, model: nn.Module, optimizer: Any) -> dict[Tensor, str]:
    """Return the name of each of the optimizer's parameters, in its order, and let its state hold shards."""
    instance(optimizer, torch.optim.Optimizer, f"{operation}: optimizer", "a torch.optim.Optimizer")
    known = {parameter: plain_name(model, name) for name, parameter in model.named_parameters()}
    found: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in known:
                raise ValueError(
                    f"{operation}: the optimizer has a parameter of shape {list(parameter.shape)} that is not the "
                    "model's; make the optimizer after parallelize, and after loading a model of the meta device"
                )
            found[parameter] = known[parameter]
    hold_shards(optimizer)
    return found


def _shard_along_dim(parameter: Tensor) -> Shard | None:
    """Return the parameter's Shard; None: it is replicated, also if its gradients are partial."""
    shard = shard_of(parameter)
    return None if shard is None or shard.dim is None else shard


def _check_state(operation: str, optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
    for parameter, name in names.items():
        if _shard_along_dim(parameter) is None:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
                raise ValueError(
                    f"{operation}: cannot gather {key} of {name}: it has shape {list(value.shape)}, expected that of "
                    f"this rank's shard, {list(parameter.shape)}, or one element; use an optimizer whose state is "
                    "elementwise"
                )


def _check_same_state(operation: str, comm: Communicator | None, held: dict[str, list[str]]) -> None:
    """Raise ValueError, on all ranks, if one has state that another does not have: gathering it would hang."""
    if comm is None:
        return
    other = difference(comm, {"their parameters": list(held)}) or difference(
        comm, {f"the state of {name}, which is {keys} here": keys for name, keys in held.items()}
    )
    if other is not None:
        raise ValueError(
            f"{operation}: {other}; step the same parameters on every rank (a parameter without a gradient gets no "
            "state: set its .grad to zeros)"
        )


def _read_local(source: Source, row: str, parameter: Tensor) -> Tensor:
    full = source.read(row)
    shard = _shard_along_dim(parameter)
    local = (full if shard is None or tuple(full.shape) != shard.shape else shard.local(full)).clone()
    return distribute_like(local, parameter) if local.shape == parameter.shape else local


def _flattened(operation: str, state: Any, model: nn.Module, known: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return one dict of all values, by plain name and key of the state, with the groups under ""."""
    try:
        saved = [dict(group) for group in state["param_groups"]]
        found = dict.fromkeys([*state["state"], *(name for group in saved for name in group.get("params", ()))])
        names = plain_names(model, [name for name in found if isinstance(name, str)], known.values())
        groups = [{**group, "params": [names.get(one, one) for one in group.get("params", ())]} for group in saved]
        values = {names.get(name, name): row for name, row in state["state"].items()}
        rows = {f"{name}{_SEPARATOR}{key}": one for name, row in values.items() for key, one in row.items()}
        return {"": groups, **rows}
    except Exception:  # of another structure
        raise TypeError(
            f"{operation}: state is {shown(state)}, expected the return value of full_optimizer_state_dict: "
            '{"state": {name: {..}}, "param_groups": [..]}'
        ) from None


def _check_checkpoint(
    operation: str,
    optimizer: torch.optim.Optimizer,
    names: dict[Tensor, str],
    groups: list[dict[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    _check_groups(operation, optimizer, names, [set(group.get("params", ())) for group in groups])
    shards = {name: _shard_along_dim(parameter) for parameter, name in names.items()}
    for row, shape in shapes.items():
        name, _, key = row.partition(_SEPARATOR)
        shard = shards.get(name)
        if shard is not None and torch.Size(shape).numel() != 1 and shape != shard.shape:
            raise RuntimeError(
                f"{operation}: size mismatch for {key} of {name}: found {list(shape)}, expected {list(shard.shape)}, "
                "the shape of the full parameter"
            )


def _check_groups(
    operation: str, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], saved: list[set[str]]
) -> None:
    """Check that the groups of a checkpoint have the same parameters as the optimizer's."""
    groups = [{names[one] for one in group["params"]} for group in optimizer.param_groups]
    found, expected = set().union(*saved), set().union(*groups)
    if found != expected:
        raise ValueError(
            f"{operation}: the state has other parameters than the optimizer: missing {sorted(expected - found)}, "
            f"unexpected {sorted(map(str, found - expected))}; load it into an optimizer of the same model"
        )
    if groups != saved:
        raise ValueError(
            f"{operation}: the parameters are grouped differently: got {saved}, expected {groups}; make the optimizer "
            "with the groups that were saved"
        )


# ------------------------------------------------------------------------------------------------- sharded states


def dcp_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a state dict for torch.distributed.checkpoint (DCP): each rank saves and loads its shards.

        dcp.save(ad.dcp_state_dict(model), checkpoint_id=folder)
        dcp.load(ad.dcp_state_dict(model), checkpoint_id=folder)     # in place, on any number of ranks

    Names and shapes in the checkpoint are those of the unsharded model, so a plain model can load it too. Shards can be
    uneven in ways that DTensor's Shard does not support. The tensors share memory with the model's. Tied parameters are
    stored under their first name. `model.state_dict()` has the same tensors under all their names, with those of
    wrappers ("_orig_mod."). ValueError if a parameter
    is on the meta device.
    """
    instance(model, nn.Module, "dcp_state_dict: model", "a torch.nn.Module")
    entries, others = entries_of(model)
    check_values("dcp_state_dict", entries)
    state: dict[str, Any] = dict(others)
    for entry in entries:
        tensor, shard = entry.tensor.detach(), entry.shard
        state[entry.names[0]] = tensor if shard is None or shard.dim is None else ShardTensor.of(tensor, shard)
    return state


def dcp_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return an optimizer state for torch.distributed.checkpoint (DCP): each rank saves and loads its shards.

        state = {"model": ad.dcp_state_dict(model), "optimizer": ad.dcp_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)                        # in place, on any number of ranks

    It returns a `Stateful`, so pass it as a value of such a dict. State is matched by parameter names, groups by their
    position. Parameters that had no state when saved get none. To find the state of parameters that have none yet, it
    takes an optimizer step and undoes it; an optimizer that needs a closure must have taken a step before. ValueError
    as for `full_optimizer_state_dict`, and on loading groups with different parameters.
    """
    operation = "dcp_optimizer_state_dict"
    instance(model, nn.Module, f"{operation}: model", "a torch.nn.Module")
    return OptimizerState(optimizer, _names_in(operation, model, optimizer))


class OptimizerState:
    """A `torch.distributed.checkpoint.stateful.Stateful` of an optimizer. names: parameter -> its name"""

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
        self.optimizer, self.names = optimizer, names

    def state_dict(self) -> dict[str, Any]:
        """Return the sharded state. Tensors share memory with the optimizer's, except for parameters without state."""
        _check_state("dcp_optimizer_state_dict", self.optimizer, self.names)
        new = _initial_state(self.optimizer, [one for one in self.names if not self.optimizer.state.get(one)])
        rows: dict[str, dict[str, Any]] = {}
        for parameter, name in self.names.items():
            shard = _shard_along_dim(parameter)
            for key, value in (self.optimizer.state.get(parameter) or new.get(parameter, {})).items():
                sharded = isinstance(value, Tensor) and shard is not None and value.shape == parameter.shape
                rows.setdefault(name, {})[key] = ShardTensor.of(value.detach(), shard) if sharded and shard else value
        groups = {
            str(at): {**group, "params": " ".join(self.names[one] for one in group["params"])}
            for at, group in enumerate(self.optimizer.param_groups)
        }
        without = " ".join(self.names[one] for one in new)
        return {"state": rows, "param_groups": groups, "without_state": without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the optimizer's state from a dict of `state_dict` that was loaded in place."""
        groups = [state["param_groups"][str(at)] for at in range(len(self.optimizer.param_groups))]
        saved = [set(group["params"].split()) for group in groups]
        _check_groups("dcp_optimizer_state_dict", self.optimizer, self.names, saved)
        without = set(state["without_state"].split())
        for parameter, name in self.names.items():
            row = {} if name in without else state["state"].get(name, {})
            self.optimizer.state.pop(parameter, None)
            if row:
                self.optimizer.state[parameter] = {key: taken(value, parameter) for key, value in row.items()}
        for group, local in zip(groups, self.optimizer.param_groups, strict=True):
            local.update({key: value for key, value in group.items() if key != "params"})


@torch.no_grad()
def _initial_state(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> dict[Tensor, dict[str, Any]]:
    """Return the state that a step with zero gradients gives these parameters, and undo that step."""
    parameters = [one for one in parameters if one.requires_grad]
    if not parameters:
        return {}
    all_parameters = [one for group in optimizer.param_groups for one in group["params"]]
    grads, values = [one.grad for one in all_parameters], [one.clone() for one in parameters]
    for one in all_parameters:
        one.grad = None
    for one in parameters:
        one.grad = torch.zeros_like(one)
    try:
        optimizer.step()
        return {one: optimizer.state.pop(one) for one in parameters if one in optimizer.state}
    finally:
        for one, grad in zip(all_parameters, grads, strict=True):
            one.grad = grad
        for one, value in zip(parameters, values, strict=True):
            one.copy_(value)
            optimizer.state.pop(one, None)
