"""check_model: one step of a sharded model beside the unsharded one; the first gradient that differs, and why."""

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
from ..ops.all_gather import all_gather
from .adjoint import check_tolerance
from .model_gradients import ModelError, ModelReport, Pair, compare, largest_of, wide

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
    """Run one step (forward, backward) of `model` and of `reference`; compare each gradient with its part of the whole
    one. Every rank must call it; it returns the same report on all, or raises ModelError, with that text, on all.

    model      its parameters have the reference's names, and those that are parts have a `shard` (see `Shard`). A rank
               may lack some, as a stage of a pipeline does
    reference  the unsharded model, equal on all ranks. The parameters' values are compared first
    batch      tensor, tuple or dict, which the models get as x, *batch or **batch
    loss       loss(model, batch) -> a real number, of either model; None: what the model returns, or its `.loss`
    batch_dim  None: the batch is equal on all ranks. A dimension: it is this rank's part along it, of each tensor, and
               the reference gets all ranks' parts, concatenated
    finish     finish(model) is called after backward(): what the training loop does to gradients before the optimizer's
               step, such as the all_reduce of data parallelism; None: ad.finish_gradients
    tolerance  of the largest error of a gradient, relative to its largest element; None: by the type of the parameter,
               1e-9 for float64, 1e-4 for float32, 1e-2 for float16, 5e-2 for bfloat16

    The report names the first parameter, in the order of definition, whose gradient differs, by how much, and which
    explanation fits on every rank that has it:

    factor        N, a divisor of it, or one over that: the wrong convention of gradient
    missing sum   the gradients of the ranks that have the same part add up to the right one, or to a multiple
    None          neither

    Best in float64, with dropout off: it would differ. The models' gradients are put back; buffers may have changed.
    TypeError and ValueError where the two models cannot be compared, and RuntimeError on ranks where they can. A wrong
    explanation is possible where gradients are equal by chance, as those of a batch of identical samples are.
    """
    check_comm("check_model", comm, model=model, reference=reference, batch=batch)
    run_on_all_ranks(comm, lambda: _check_arguments(model, reference, loss, batch_dim, finish, tolerance))
    pairs = run_on_all_ranks(comm, lambda: _pairs(model, reference))
    _check_start(comm, pairs)
    whole = batch if batch_dim is None else _whole(comm, batch, batch_dim)
    kept = [(parameter, parameter.grad) for each in (model, reference) for parameter in each.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        reference_losses = _step(comm, reference, whole, loss)
        if any(not math.isclose(one, reference_losses[0], rel_tol=1e-6) for one in reference_losses if one == one):
            raise ValueError(
                f"check_model: the reference's losses are {reference_losses} on the ranks, expected one value; pass "
                "the same batch and reference on all ranks, or batch_dim= if each has its part of the batch"
            )
        losses = _step(comm, model, batch, loss)
        (finish or finish_gradients)(model)
        report = compare(comm, pairs, tolerance)._replace(losses=tuple(losses), reference_loss=reference_losses[0])
    finally:
        for parameter, grad in kept:
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
            "check_model: a layer of the model has grad_accumulation_fusion, so that gradients are in main_grad; "
            "expected them in grad: pass a model without it"
        )


def _pairs(model: nn.Module, reference: nn.Module) -> list[Pair]:
    """Of the parameters, by name. ValueError for models that do not match."""
    parts = dict(model.named_parameters())
    wholes = dict(reference.named_parameters(remove_duplicate=False))
    unknown = [name for name in parts if name not in wholes]
    if unknown:
        raise ValueError(
            f"check_model: the model has {_few(unknown)}, which the reference has not (it has {_few(list(wholes))}); "
            "the names must be the same"
        )
    pairs = [Pair(name, whole, parts.get(name)) for name, whole in wholes.items()]
    shared = {id(part) for part in parts.values()} & {id(whole) for whole in wholes.values()}
    if shared:
        both = [name for name, part in parts.items() if id(part) in shared]
        raise ValueError(
            f"check_model: {_few(both)} of the model and of the reference are the same parameter, whose gradients "
            "would add up; give each its own, e.g. by copy.deepcopy"
        )
    for pair in pairs:
        _check_shape(pair)
    return pairs


def _check_shape(pair: Pair) -> None:
    if pair.part is None:
        return
    shard = shard_of(pair.part)
    try:
        expected = list(pair.own(pair.whole).shape)
    except ValueError as error:
        raise ValueError(f"check_model: {pair.name} is {shard}: {error}") from None
    if list(pair.part.shape) != expected:
        of = (
            f"by its {shard}"
            if shard
            else (f"the reference's. If it is a part, say of what: parameter.shard = ad.Shard(comm, dim, {expected})")
        )
        raise ValueError(f"check_model: {pair.name} has shape {list(pair.part.shape)}, expected {expected}, {of}")


def _check_start(comm: Communicator, pairs: list[Pair]) -> None:
    """That the ranks have the same reference, and between them all of its parameters, with its values."""
    if difference(comm, {"names": [f"{pair.name} {list(pair.whole.shape)}" for pair in pairs]}) is not None:
        raise ValueError("check_model: the references differ by rank in their parameters; expected the same on all")
    own = []
    for pair in pairs:
        part = pair.part
        differs = 0.0 if part is None else largest_of(wide(part) - wide(pair.own(pair.whole.detach()).to(part)))
        own += [float(part is not None), differs]
    table = gathered(comm, own, torch.float64)
    held = {id(pair.whole) for at, pair in enumerate(pairs) if any(row[2 * at] for row in table)}
    lost = [pair.name for pair in pairs if id(pair.whole) not in held]  # another name of a tied one will do
    if lost:
        raise ValueError(f"check_model: no rank's model has {_few(lost)} of the reference; expected the same names")
    for at, pair in enumerate(pairs):
        for rank, row in enumerate(table):
            if row[2 * at + 1] != 0:
                raise ValueError(
                    f"check_model: {pair.name} differs on rank {rank} from its part of the reference's, by "
                    f"{row[2 * at + 1]:.3g}; start both from the same values, e.g. by from_linear, or "
                    "parameter.copy_(parameter.shard.own(whole))"
                )


def _check_batch(tensors: list[Tensor], dim: int) -> None:
    for x in tensors:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"check_model: batch_dim is {dim}, but a tensor of the batch has shape {list(x.shape)}")


def _whole(comm: Communicator, batch: Any, dim: int) -> Any:
    """All ranks' parts of the batch in one."""
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
    """Forward and backward; the losses of all ranks."""
    found: Any
    if loss is not None:
        found = loss(model, batch)
    elif isinstance(batch, Mapping):
        found = model(**batch)
    else:
        found = model(*batch) if isinstance(batch, tuple | list) else model(batch)

    def check() -> Tensor:
        value = found if isinstance(found, Tensor) else getattr(found, "loss", None)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else shown(found)
            raise ValueError(
                f"check_model: the loss is {what}, expected one real number; pass loss=, a function loss(model, batch)"
            )
        return value

    value: Tensor = run_on_all_ranks(comm, check)
    if value.requires_grad:
        value.sum().backward()
    return [one for (one,) in gathered(comm, [float(value.detach())], torch.float64)]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", .." if names[3:] else "")
