"""The rank side of random programs: run the source and compute the derivatives. See programs.py and fuzzing.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.watch.reader import read_file
from pynccl.watch.records import CallRecord

from .partition_steps import block


class Job(NamedTuple):
    """One program for the ranks; lists within lists are by variable, then by rank."""

    seed: int
    source: str
    mode: str
    leaves: list[list[Tensor]]
    weights: list[list[Tensor | None]]  # of the outputs in the loss; None: the rank does not use it
    seconds: list[list[Tensor]]  # of the gradients in the second loss; the leaves' tangents in forward mode
    style: str = "loss"  # how the backward pass begins: "loss", "sum" (weights are 1), "direct"
    compiler: Mapping[str, Any] | None = None  # options of torch.compile
    frozen: list[list[bool]] | None = None


class Found(NamedTuple):
    """Results of a rank: values of the outputs, derivatives by leaf (None where there is none), collective calls."""

    outputs: list[Tensor]
    first: list[Tensor | None]
    second: list[Tensor | None]
    calls: Sequence[str] = ()


_modules: dict[Any, Any] = {}


def between(name: str, comm: Communicator, *args: Any) -> Any:
    """Return the module for these partitions. It is created once, since that is a collective."""
    key = (name, id(comm), args)
    if key not in _modules:
        first = ad.CartesianPartition(comm, args[0], args[1])
        if name == "AllSumReduce":
            _modules[key] = ad.AllSumReduce(first, args[2])
        else:
            _modules[key] = getattr(ad.partition, name)(first, ad.CartesianPartition(comm, args[2], args[3]))
    return _modules[key]


def layer(name: str, comm: Communicator, x: Tensor, w: Tensor, b: Tensor | None = None, *, bias: bool) -> Tensor:
    """A parallel layer with this rank's parameters, or a Sequential that runs as one."""
    n, options = comm.size, {"dtype": w.dtype}
    out, width = w.shape
    made: nn.Module
    if name.startswith("column"):
        made = ad.ColumnParallelLinear(width, out * n, comm, False, name.endswith("sequence"), **options)
    elif name.startswith("row"):
        made = ad.RowParallelLinear(width * n, out, comm, bias, name.endswith("sequence"), **options)
    else:
        plain = nn.Linear(width, out, bias=False, **options)
        pairs = {
            "gather linear": (ad.nn.AllGather(comm, grad="sum"), plain),
            "linear reduce": (plain, ad.nn.AllReduce(comm, grad="replicated")),
            "linear scatter": (plain, ad.nn.ReduceScatter(comm)),
        }
        made = ad.nn.Sequential(*pairs[name])
        assert made.fused_pairs() == [(0, 1)]
    parameters = {key: w if key.endswith("weight") else b for key, _ in made.named_parameters()}
    y: Tensor = torch.func.functional_call(made, parameters, (x,))
    return y


def warm_up(comm: Communicator) -> None:
    """Run a checkpoint: the first one takes seconds, since torch loads its compiler."""
    checkpoint(torch.sin, torch.zeros((), requires_grad=True), use_reentrant=False)
    torch._dynamo  # noqa: B018  loaded at the first create_graph=True otherwise


def run(comm: Communicator, jobs: list[Job]) -> list[Found]:
    found = []
    for job in jobs:
        before = recorded_calls(comm)[-1].entry
        one = run_one(comm, job)
        calls = [call for call in recorded_calls(comm) if call.entry > before and call.collective]
        found.append(
            one._replace(
                calls=[
                    f"{call.operation} {call.count} {call.function} {call.forward_site} {call.site}" for call in calls
                ]
            )
        )
    return found


def recorded_calls(comm: Communicator) -> list[CallRecord]:
    """Return the newest calls of the communicator, oldest first, from the flight recorder."""
    track = comm._track
    assert track is not None
    return next(one for one in read_file(track.recorder.path).comms if one.uid == track.uid).calls


def run_one(comm: Communicator, job: Job) -> Found:
    names: dict[str, Any] = {"ad": ad, "torch": torch, "checkpoint": checkpoint, "between": between, "layer": layer}
    names["block"] = block
    exec(job.source, names)
    program = names["program"]
    if job.compiler is not None:
        torch._dynamo.reset()
        program = torch.compile(program, fullgraph=True, **job.compiler)
    leaves = [by_rank[comm.rank].clone() for by_rank in job.leaves]
    if job.mode == "forward":
        return _forward_mode(comm, job, program, leaves)
    if job.mode == "no_grad":
        with torch.no_grad():
            return Found([y.clone() for y in program(comm, leaves)[0]], [], [])
    if job.mode == "vmap":
        # randomness: layers initialize parameters, which are not used.
        batched = torch.vmap(lambda *xs: tuple(program(comm, xs)[0]), randomness="same")
        return Found(list(batched(*leaves)), [], [])
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(job.frozen is None or not job.frozen[i][comm.rank])
    outputs, results = program(comm, leaves)
    values = [y.detach().clone() for y in outputs]
    if job.mode == "double":
        return Found(values, *_twice(comm, job, leaves, outputs, results))
    _backward(comm, job, outputs)
    return Found(values, [leaf.grad for leaf in leaves], [])


def _loss(comm: Communicator, job: Job, outputs: list[Tensor]) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    unused = []
    for y, by_rank in zip(outputs, job.weights, strict=True):
        w = by_rank[comm.rank]
        if w is None:
            unused.append(y)
        else:
            part = y.sum() if job.style == "sum" else (w.conj() * y).sum()
            loss = loss + (part.real if part.is_complex() else part).double()
    return ad.anchor(loss, *unused)


def _backward(comm: Communicator, job: Job, outputs: list[Tensor]) -> None:
    if job.style != "direct":
        loss = _loss(comm, job, outputs)
        if loss.requires_grad:
            loss.backward()
        return
    pairs = []
    for y, by_rank in zip(outputs, job.weights, strict=True):
        w = by_rank[comm.rank]
        if y.requires_grad:
            pairs.append((y, torch.zeros_like(y) if w is None else w))
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def _twice(
    comm: Communicator, job: Job, leaves: list[Tensor], outputs: list[Tensor], results: list[Tensor]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    loss = _loss(comm, job, outputs)
    grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    again = torch.zeros((), dtype=torch.float64)
    for g, by_rank in zip(grads, job.seconds, strict=True):
        if g is not None:
            part = (by_rank[comm.rank].conj() * g).sum()
            again = again + (part.real if part.is_complex() else part)
    again = ad.anchor(
        again, *results
    )  # so that a rank with a constant derivative enters the same collectives as the others
    if again.requires_grad:
        again.backward()
    return [None if g is None else g.detach() for g in grads], [leaf.grad for leaf in leaves]


def _forward_mode(comm: Communicator, job: Job, program: Any, leaves: list[Tensor]) -> Found:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(leaf, job.seconds[i][comm.rank]) for i, leaf in enumerate(leaves)]
        outputs, _ = program(comm, duals)
        pairs = [forward_ad.unpack_dual(y) for y in outputs]
        return Found(
            [pair.primal.detach().clone() for pair in pairs],
            [None if pair.tangent is None else pair.tangent.detach().clone() for pair in pairs],
            [],
        )
