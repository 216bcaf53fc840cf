"""What torch's optimizers do to sharded parameters: checked when one steps, by torch's hook of all optimizers.

An optimizer whose update of an element depends on other elements, such as Muon, would take a shard for the whole
matrix. One that steps in the backward pass may see gradients before they are averaged or summed over the ranks.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..torch_internals import backward_pass
from .data_parallel import averages_later
from .dtensors import distribute_like
from .gradients import is_summed_in_backward, partial_comm
from .shard import Shard, held, taken, unwrap

# Names of optimizers whose step is not elementwise: they orthogonalize or factor matrices, or take norms or inner
# products of all elements of a parameter, or of all parameters.
_WHOLE = re.compile(
    "muon|adafactor|lbfgs|shampoo|soap|lamb(?!da)|lars|galore|prodigy|dadapt|adam_?mini|^came(?!ra)|novograd",
    re.IGNORECASE,
)
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # -> number of parameters
_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook before every step. A step that is compiled breaks its graph here, if there are shards at all."""
    if Shard.exist or not torch.compiler.is_compiling():
        _check(optimizer)


@torch.compiler.disable
def _check(optimizer: Optimizer) -> None:
    """Check that an optimizer's step is right for the parameters that it has."""
    if backward_pass() >= 0:
        _check_gradients(optimizer)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == count:
        return
    part = next(_sharded(optimizer), None)
    name = next((kind.__name__ for kind in type(optimizer).__mro__ if _WHOLE.search(kind.__name__)), None)
    if part is not None and name is not None:
        raise TypeError(
            f"{type(optimizer).__name__}.step: a parameter is {part[1]}, but {name} needs whole parameters: its update "
            "of one element depends on the others. Use an optimizer that steps each element by itself, such as AdamW, "
            "and this one at most for parameters that are not sharded"
        )
    hold_shards(optimizer)
    _checked[optimizer] = count


def _check_gradients(optimizer: Optimizer) -> None:
    """Check that the gradients are complete, within a backward pass."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one.grad is None:
                continue
            if averages_later(one):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: called in the backward pass, but DataParallelGradients averages "
                    f"the gradient of a parameter of shape {list(one.shape)} at its end, so each rank would step by "
                    "its own; call step() after backward()"
                )
            if hasattr(one, "shard") and partial_comm(one) is not None and not is_summed_in_backward(one):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: called in the backward pass, but the gradient of a parameter of "
                    f"shape {list(one.shape)} is partial until it is summed over the ranks; call "
                    "finish_gradients_in_backward(model) once, before training"
                )


def _sharded(optimizer: Optimizer) -> Iterator[tuple[Tensor, Shard]]:
    for group in optimizer.param_groups:
        for one in group["params"]:
            shard = getattr(one, "shard", None)  # not shard_of: other models may have DTensors
            if isinstance(shard, Shard) and shard.is_part:
                yield one, shard


def hold_shards(optimizer: Optimizer) -> None:
    """Let the optimizer's state dicts hold its shards as ShardTensors from now on, and its state the shards."""
    if optimizer not in _hooked and any(True for _ in _sharded(optimizer)):
        _hooked.add(optimizer)
        _take_shards(optimizer)  # it may have loaded others before
        optimizer.register_state_dict_post_hook(_hold_shards)
        optimizer.register_load_state_dict_post_hook(_take_shards)


def _hold_shards(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Replace state tensors of shards by ShardTensors, in a state dict: a hook of the optimizer."""
    numbers: dict[int, int] = {}
    for group, packed in zip(optimizer.param_groups, state["param_groups"], strict=True):
        numbers.update(zip(map(id, group["params"]), packed["params"], strict=True))
    rows = state["state"] = dict(state["state"])
    for one, shard in _sharded(optimizer):
        if (row := rows.get(numbers[id(one)])) is not None:  # None: it has not been stepped
            like = [key for key, value in row.items() if isinstance(value, Tensor) and value.shape == one.shape]
            rows[numbers[id(one)]] = {**row, **{key: held(unwrap(row[key]), shard) for key in like}}


def _take_shards(optimizer: Optimizer) -> None:
    """Put this rank's shards into the state, after ShardTensors or full tensors were loaded."""
    for one, shard in _sharded(optimizer):
        row = optimizer.state.get(one, {})
        for key, value in row.items():
            row[key] = taken(value, one)
            if isinstance(value, Tensor) and value.shape != one.shape and tuple(value.shape) == shard.shape:
                row[key] = distribute_like(shard.local(value).clone(), one)


def check_steps() -> None:
    """Check the steps of all optimizers from now on."""
    register_optimizer_step_pre_hook(_check_step)
