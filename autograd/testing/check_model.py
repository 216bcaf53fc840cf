"""check_model: compare the gradients of a sharded model with those of the unsharded model, and explain a difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from ..agreement import difference, gathered, run_on_all_ranks
from ..arguments import as_int, check_comm
from ..layers.gradients import finish_gradients
from ..layers.shards import shard_of
from ..names import plain_name
from ..ops.all_gather import all_gather
from .adjoint import check_tolerance
from .model_gradients import ModelError, ModelReport, Pair, compare, max_abs, to_double

Loss = Callable[[nn.Module, Any], Tensor]


def check_model(
    model: nn.Module,
    reference: nn.Module,
    batch: Any,
    comm: Communicator,
    loss: Loss | None = None,
    *,
    batch_dim: int | None = None,
    finish: Callable[[nn.Module], object] | None = None,
    tolerance: float | None = None,
) -> ModelReport:
    """Run one forward and backward pass of a sharded and of an unsharded model, and compare their gradients.

    Returns the same `ModelReport` on every rank, or raises ModelError with the report on every rank if a gradient
    differs. Every rank must call it.

    model      the sharded model. Its parameters have the same names as in the reference, and sharded ones have an
               attribute `shard` (see `Shard`). A rank may lack parameters, e.g. as a pipeline stage
    reference  the unsharded model, equal on all ranks. The values of the parameters are compared first
    batch      a tensor, tuple or dict; the models are called with x, *batch or **batch
    loss       loss(model, batch) -> a real scalar, for both models; None: the output of the model, or its `.loss`
    batch_dim  None: the batch is equal on all ranks. A dimension: each tensor of the batch is this rank's shard along
               it, and the reference gets the shards of all ranks, concatenated
    finish     finish(model) is called after backward(): everything that the training loop does to gradients before the
               optimizer step, such as the all_reduce of data parallelism; None: ad.finish_gradients
    tolerance  largest allowed error of a gradient, relative to its largest element; None: depends on the dtype of the
               parameter: 1e-9 for float64, 1e-4 for float32, 1e-2 for float16, 5e-2 for bfloat16

    The report names the first parameter, in order of definition, whose gradient differs, by how much, and the
    explanation that fits on every rank that has the parameter:

    factor        the gradient is wrong by N, a divisor of N, or the inverse of one: wrong `grad=`
    missing sum   the gradients of the ranks that hold the same shard add up to the correct one, or to a multiple of it
    None          neither

    Use float64, and turn dropout off, because it differs between the models. The gradients of both models are restored;
    buffers may change. The explanation can be wrong if gradients are equal by chance, e.g. if all samples are equal.

    TypeError or ValueError if the models cannot be compared; ranks that find no problem themselves raise RuntimeError.
    """
    check_comm("check_model", comm, model=model, reference=reference, batch=batch)
    run_on_all_ranks(comm, lambda: _check_arguments(model, reference, loss, batch_dim, finish, tolerance))
    pairs = run_on_all_ranks(comm, lambda: _pairs(model, reference))
    _check_start(comm, pairs)
    full_batch = batch if batch_dim is None else _gather_batch(comm, batch, batch_dim)
    saved = [(parameter, parameter.grad) for each in (model, reference) for parameter in each.parameters()]
    try:
        for parameter, _ in saved:
            parameter.grad = None
        reference_losses = _step(comm, reference, full_batch, loss)
        if any(
            not math.isclose(value, reference_losses[0], rel_tol=1e-6) for value in reference_losses if value == value
        ):
            raise ValueError(
                f"check_model: the reference's losses are {reference_losses} on the ranks, expected equal losses; pass "
                "the same batch and reference on all ranks, or batch_dim= if each rank has a shard of the batch"
            )
        losses = _step(comm, model, batch, loss)
        (finish or finish_gradients)(model)
        report = compare(comm, pairs, tolerance)._replace(losses=tuple(losses), reference_loss=reference_losses[0])
    finally:
        for parameter, grad in saved:
            parameter.grad = grad
    if report.wrong:
        raise ModelError(report)
    return report


def _check_arguments(
    model: Any, reference: Any, loss: Any, batch_dim: Any, finish: Any, tolerance: float | None
) -> None:
    instance(model, nn.Module, "check_model: model", "a torch.nn.Module")
    instance(reference, nn.Module, "check_model: reference", "a torch.nn.Module")
    for name, value, call in (("loss", loss, "loss(model, batch) -> number"), ("finish", finish, "finish(model)")):
        if value is not None and not callable(value):
            raise TypeError(f"check_model: {name} is {shown(value)}, expected a function {call}, or None")
    if batch_dim is not None and as_int(batch_dim) is None:
        raise TypeError(f"check_model: batch_dim is {shown(batch_dim)}, expected a dimension of the batch, or None")
    check_tolerance("check_model", tolerance)
    if any(getattr(module, "grad_accumulation_fusion", False) for module in model.modules()):
        raise ValueError(
            "check_model: a layer of the model has grad_accumulation_fusion, which stores gradients in main_grad; pass "
            "a model without it"
        )


def _pairs(model: nn.Module, reference: nn.Module) -> list[Pair]:
    """Pair the parameters by name. ValueError if the models do not match."""
    sharded = {plain_name(model, name): one for name, one in model.named_parameters()}
    of_reference = reference.named_parameters(remove_duplicate=False)
    full = {plain_name(reference, name): one for name, one in of_reference}
    unknown = [name for name in sharded if name not in full]
    if unknown:
        raise ValueError(
            f"check_model: the model has {_few(unknown)}, which the reference does not have (it has "
            f"{_few(list(full))}); use the same names"
        )
    pairs = [Pair(name, parameter, sharded.get(name)) for name, parameter in full.items()]
    shared = {id(parameter) for parameter in sharded.values()} & {id(parameter) for parameter in full.values()}
    if shared:
        both = [name for name, parameter in sharded.items() if id(parameter) in shared]
        raise ValueError(
            f"check_model: {_few(both)} of the model and of the reference are the same parameter, so their gradients "
            "would add up; copy it, e.g. with copy.deepcopy"
        )
    for pair in pairs:
        _check_shape(pair)
    return pairs


def _check_shape(pair: Pair) -> None:
    if pair.local is None:
        return
    shard = shard_of(pair.local)
    try:
        expected = list(pair.take_shard(pair.full).shape)
    except ValueError as error:
        raise ValueError(f"check_model: {pair.name} is {shard}: {error}") from None
    if list(pair.local.shape) != expected:
        of = (
            f"by its {shard}"
            if shard
            else (
                f"as in the reference; if it is a shard, call ad.set_shard(parameter, ad.Shard(comm, dim, {expected}))"
            )
        )
        raise ValueError(f"check_model: {pair.name} has shape {list(pair.local.shape)}, expected {expected}, {of}")


def _check_start(comm: Communicator, pairs: list[Pair]) -> None:
    """Check that all ranks have the same reference, and that together they hold all of its parameters and values."""
    if difference(comm, {"names": [f"{pair.name} {list(pair.full.shape)}" for pair in pairs]}) is not None:
        raise ValueError(
            "check_model: the parameters of the reference differ between ranks; pass the same reference on all"
        )
    row: list[float] = []
    for pair in pairs:
        local, error = pair.local, 0.0
        if local is not None:
            error = max_abs(to_double(local) - to_double(pair.take_shard(pair.full.detach()).to(local)))
        row += [float(local is not None), error]
    table = gathered(comm, row, torch.float64)
    held = {id(pair.full) for at, pair in enumerate(pairs) if any(row[2 * at] for row in table)}
    lost = [pair.name for pair in pairs if id(pair.full) not in held]  # tied: one name is enough
    if lost:
        raise ValueError(f"check_model: no rank's model has {_few(lost)} of the reference; expected the same names")
    for at, pair in enumerate(pairs):
        for rank, row in enumerate(table):
            if row[2 * at + 1] != 0:
                raise ValueError(
                    f"check_model: {pair.name} on rank {rank} differs from its shard of the reference by "
                    f"{row[2 * at + 1]:.3g}; initialize both models equally, e.g. with from_linear or "
                    "parameter.copy_(parameter.shard.local(full))"
                )


def _check_batch(tensors: list[Tensor], dim: int) -> None:
    for x in tensors:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"check_model: batch_dim is {dim}, but a tensor of the batch has shape {list(x.shape)}")


def _gather_batch(comm: Communicator, batch: Any, dim: int) -> Any:
    """Concatenate the batches of all ranks."""
    items = list(batch.values()) if isinstance(batch, Mapping) else batch
    tensors = [x for x in (items if isinstance(items, tuple | list) else [items]) if isinstance(x, Tensor)]
    run_on_all_ranks(comm, lambda: _check_batch(tensors, dim))

    def joined(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        sizes = [size for (size,) in gathered(comm, [x.shape[dim]])]
        return all_gather(x.detach(), comm, dim, grad="sum", splits=sizes)

    if isinstance(batch, Mapping):
        return {name: joined(x) for name, x in batch.items()}
    return tuple(map(joined, batch)) if isinstance(batch, tuple | list) else joined(batch)


def _step(comm: Communicator, model: nn.Module, batch: Any, loss: Loss | None) -> list[float]:
    """Run forward and backward, and return the losses of all ranks."""
    output: Any
    if loss is not None:
        output = loss(model, batch)
    elif isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)

    def check() -> Tensor:
        value = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else shown(output)
            raise ValueError(
                f"check_model: the loss is {what}, expected a real scalar; pass loss=, a function loss(model, batch)"
            )
        return value

    value: Tensor = run_on_all_ranks(comm, check)
    if value.requires_grad:
        value.sum().backward()
    return [number for (number,) in gathered(comm, [float(value.detach())], torch.float64)]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", .." if names[3:] else "")
