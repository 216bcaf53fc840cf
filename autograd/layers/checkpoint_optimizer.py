"""State of the unsharded model's optimizer, of an optimizer whose parameters are parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from ..agreement import alike, caught, difference, raise_alike
from .checkpoint import Entry, comm_of, is_first
from .checkpoint_files import Source, source_of
from .dtensors import cut_like
from .shards import Shard, shard_of

_BETWEEN = "\0"  # a parameter's name and a key of its optimizer state


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
    names = alike(comm, lambda: names_in(operation, model, optimizer))
    alike(comm, lambda: check_state(operation, optimizer, names))
    held = {name: sorted(optimizer.state.get(parameter, {})) for parameter, name in names.items()}
    _check_same_state(operation, comm, held)
    keep = not rank0_only or is_first(comm)
    state: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        for key in held[name]:
            value = optimizer.state[parameter][key]
            if isinstance(value, Tensor):
                value = Entry([], value, cut_of(parameter) if value.shape == parameter.shape else None).whole()
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
    names = alike(comm, lambda: names_in(operation, model, optimizer))
    flat = alike(comm, lambda: None if state is None else _flat(operation, state))
    source = source_of(operation, comm, flat)
    groups = source.others.pop("")
    alike(comm, lambda: _check_given(operation, optimizer, names, groups, source.shapes))
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
    raise_alike(comm, problem)
    packed = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": parts, "param_groups": packed})


def names_in(operation: str, model: nn.Module, optimizer: Any) -> dict[Tensor, str]:
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


def cut_of(parameter: Tensor) -> Shard | None:
    shard = shard_of(parameter)
    return None if shard is None or shard.dim is None else shard


def check_state(operation: str, optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
    for parameter, name in names.items():
        if cut_of(parameter) is None:
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
    shard = cut_of(parameter)
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
    own = [{names[one] for one in group["params"]} for group in optimizer.param_groups]
    given = [set(group.get("params", ())) for group in groups]
    if own != given:
        found, expected = set().union(*given), set().union(*own)
        if found == expected:
            raise ValueError(f"{operation}: the groups have the parameters in another way; expected {own}, got {given}")
        raise ValueError(
            f"{operation}: the state is of other parameters: without {sorted(expected - found)}, and with "
            f"{sorted(map(str, found - expected))}, which this optimizer has not"
        )
    shards = {name: cut_of(parameter) for parameter, name in names.items()}
    for row, shape in shapes.items():
        name, _, key = row.partition(_BETWEEN)
        shard = shards.get(name)
        if shard is not None and torch.Size(shape).numel() != 1 and shape != shard.shape:
            raise RuntimeError(
                f"{operation}: size mismatch for {key} of {name}: found {list(shape)}, expected {list(shard.shape)}, "
                "that of the whole parameter"
            )
