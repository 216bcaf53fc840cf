"""Run random programs on ranks and compare with their simulation, for scripts/faults/fuzzer.py and its test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from ranks import RankError, RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import progress

from . import collective_steps, exchange_steps, local_steps, partition_steps, rank_side
from .launching import START_SECONDS, run_batches, shortened
from .programs import LOW, TOLERANCE, Leaf, Program, Value, draw, simulate
from .rank_side import Found, Job
from .writing import source

_STEPS = (collective_steps, exchange_steps, local_steps, partition_steps)  # imported because they register their kinds


class Mode(NamedTuple):
    """style: see writing.py; excluded: traits of steps that its programs must not have; compiler: options of
    torch.compile."""

    style: str = "function"
    excluded: frozenset[str] = frozenset({"inplace"})
    batch: int = 8
    exact: bool = False  # double precision only
    compiler: dict[str, Any] | None = None


def _compiled(style: str = "function", excluded: frozenset[str] = frozenset(), **compiler: Any) -> Mode:
    return Mode(style, excluded | {"partition", "layer", "inplace"}, batch=1, exact=True, compiler=compiler)


# The tensors saved for the backward pass decide when a checkpoint is recomputed. If ranks differ in this, they hang.
SAME_SAVED = frozenset({"inplace", "differs"})
MODES: dict[str, Mode] = {
    "plain": Mode(),
    "in place": Mode(excluded=frozenset()),
    "in place start": Mode("start", excluded=frozenset()),
    "start": Mode("start"),
    "module": Mode("module"),
    **({"list": Mode("list"), "double list": Mode("list", exact=True)} if hasattr(ad, "Coalesced") else {}),
    "checkpoint": Mode("checkpoint", excluded=SAME_SAVED),
    "reentrant": Mode("reentrant", excluded=SAME_SAVED),
    "double": Mode(exact=True),
    "double start": Mode("start", exact=True),
    "frozen": Mode(),
    "frozen start": Mode("start"),
    "forward": Mode(exact=True),
    "no_grad": Mode(excluded=frozenset()),
    "no_grad start": Mode("start", excluded=frozenset()),
    "vmap": Mode(excluded=frozenset({"partition", "inplace"}), exact=True),
    "compile": _compiled(backend="aot_eager"),
    "compile start": _compiled("start", backend="aot_eager"),
    "compile checkpoint": _compiled("checkpoint", SAME_SAVED, backend="aot_eager"),
    "inductor": _compiled(),
    "inductor dynamic": _compiled(dynamic=True),
    "inductor checkpoint": _compiled("checkpoint", SAME_SAVED),
    "inductor no_grad": _compiled(),
}


class Failure(NamedTuple):
    mode: str
    seed: int
    n: int
    what: str
    text: str

    def __str__(self) -> str:
        again = f"--modes {self.mode!r} --ranks {self.n} --seed {self.seed} --runs 1"
        return f"=== {self.mode}, {self.n} ranks, seed {self.seed}   (replay: {again})\n{self.text}\n--- {self.what}"


class Trial(NamedTuple):
    """A program, how to run it, and the expected results."""

    program: Program
    job: Job
    expected: list[Found]  # by rank

    def text(self) -> str:
        leaves = "".join(
            f"# v{i}: {'replicated, ' if leaf.replicated else ''}shapes {[tuple(y.shape) for y in leaf.ys]}\n"
            for i, leaf in enumerate(self.program.leaves)
        )
        used = [[w is not None for w in by_rank] for by_rank in self.job.weights]
        frozen = f"# without gradient, by leaf and rank: {self.job.frozen}\n" if self.job.frozen else ""
        head = f"# {self.program.dtype}, backward by {self.job.style!r}, outputs used by rank: {used}\n"
        return head + leaves + frozen + self.job.source


def trial(mode: str, seed: int, n: int) -> Trial:
    """Return the program of this seed in this mode."""
    how = MODES[mode]
    rng = random.Random(seed * 31 + n)
    dtype = rng.choice([torch.float64] * 4 + [torch.complex128]) if how.exact else None
    if mode.startswith("inductor"):
        dtype = torch.float64  # torch 2.13: inductor cannot differentiate some programs of complex numbers
    program = draw(seed, n, excluded=how.excluded, dtype=dtype)
    torch_rng = torch.Generator().manual_seed(seed)
    base = "no_grad" if mode.endswith("no_grad") else mode.partition(" ")[0]
    batch = 3 if base == "vmap" else 0
    leaves = [_batched(leaf, batch, torch_rng) for leaf in program.leaves]
    frozen = None
    if base == "frozen":
        frozen = [[rng.random() < 0.5 for _ in range(n)] for _ in program.leaves]
    job = Job(seed, source(program, how.style), base, leaves, [], [], frozen=frozen, compiler=how.compiler)
    job = job._replace(style=rng.choice(["loss", "loss", "sum", "direct"]) if base != "double" else "loss")
    return _expect(program, job, rng, torch_rng)


def _batched(leaf: Leaf, batch: int, rng: torch.Generator) -> list[Tensor]:
    if not batch:
        return list(leaf.ys)
    made = [torch.stack([y * (1 + 0.25 * i) for i in range(batch)]) for y in leaf.ys]
    return made[:1] * len(made) if leaf.replicated else made


def _like(y: Tensor, rng: torch.Generator) -> Tensor:
    drawn = torch.randint(-8, 9, (2, *y.shape), generator=rng).double() / 4
    return torch.complex(drawn[0], drawn[1]) if y.is_complex() else drawn[0]


def _real(z: Tensor) -> Tensor:
    return z.real if z.is_complex() else z


def variables(program: Program, leaves: Sequence[Sequence[Tensor]]) -> list[Value]:
    """Return all ranks' leaves as simulation variables in double precision; replicated ones share one tensor."""
    made = []
    for leaf, ys in zip(program.leaves, leaves, strict=True):
        grown = [y.detach().clone().requires_grad_() for y in (ys[:1] if leaf.replicated else ys)]
        made.append(Value(tuple(grown) * (program.n if leaf.replicated else 1), leaf.replicated))
    return made


def _distinct(value: Value) -> tuple[Tensor, ...]:
    return value.ys[:1] if value.replicated else value.ys


def _expect(program: Program, job: Job, rng: random.Random, torch_rng: torch.Generator) -> Trial:
    if job.mode == "vmap":
        return _expect_vmap(program, job)
    leaves = variables(program, job.leaves)
    values = simulate(program, leaves)
    outputs = [values[i] for i in program.outputs]
    seconds = [_draws(leaf, torch_rng) for leaf in leaves]
    if job.mode == "forward":
        job = job._replace(seconds=seconds)
        return Trial(program, _rounded(job, program.dtype), _expect_tangents(program, job, leaves, outputs))
    weights: list[list[Tensor | None]] = []
    for value in outputs:
        ws: list[Tensor | None] = list(_draws(value, torch_rng))
        if job.style == "sum":
            ws = [torch.ones_like(w) for w in ws if w is not None]
        if not value.replicated and job.compiler is None and rng.random() < 0.3:
            ws = [w if rng.random() < 0.5 else None for w in ws]
        weights.append(ws)
    job = job._replace(weights=weights, seconds=seconds)
    return Trial(program, _rounded(job, program.dtype), _expect_gradients(job, leaves, outputs))


def _draws(value: Value, rng: torch.Generator) -> list[Tensor]:
    if value.replicated:
        return [_like(value.ys[0], rng)] * len(value.ys)
    return [_like(y, rng) for y in value.ys]


def _rounded(job: Job, dtype: torch.dtype) -> Job:
    """Return the job of the ranks, with tensors in the dtype of the program."""
    return job._replace(
        leaves=[[y.to(dtype) for y in ys] for ys in job.leaves],
        weights=[[None if w is None else w.to(dtype) for w in ws] for ws in job.weights],
    )


def _loss(outputs: Sequence[Value], weights: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """Return the sum of the ranks' losses; replicated values count once."""
    loss = torch.zeros((), dtype=torch.float64)
    for value, ws in zip(outputs, weights, strict=True):
        for y, w in zip(_distinct(value), ws, strict=False):
            if w is not None:
                loss = loss + _real((w.conj() * y).sum())
    return loss


def _gradients(loss: Tensor, leaves: Sequence[Value], again: bool = False) -> list[list[Tensor]]:
    """Return the gradients by leaf and rank; zeros where there is none."""
    flat = [y for leaf in leaves for y in _distinct(leaf)]
    found: Sequence[Tensor | None] = [None] * len(flat)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, flat, create_graph=again, allow_unused=True)
    grads = iter([torch.zeros_like(y) if g is None else g for y, g in zip(flat, found, strict=True)])
    made = []
    for leaf in leaves:
        leaf_grads = [next(grads) for _ in _distinct(leaf)]
        made.append(leaf_grads * (len(leaf.ys) // len(leaf_grads)))
    return made


def _expect_gradients(job: Job, leaves: list[Value], outputs: list[Value]) -> list[Found]:
    loss = _loss(outputs, job.weights)
    double = job.mode == "double"
    grads = _gradients(loss, leaves, again=double)
    second: list[list[Tensor]] = [[] for _ in leaves]
    if double:
        made = [Value(tuple(g), leaf.replicated) for g, leaf in zip(grads, leaves, strict=True)]
        second = _gradients(_loss(made, job.seconds), leaves)
    return [
        Found(
            [value.ys[r].detach() for value in outputs],
            [None if job.frozen and job.frozen[i][r] else g[r].detach() for i, g in enumerate(grads)],
            [g[r].detach() for g in second if g],
        )
        if job.mode != "no_grad"
        else Found([value.ys[r].detach() for value in outputs], [], [])
        for r in range(len(leaves[0].ys))
    ]


def _expect_tangents(program: Program, job: Job, leaves: list[Value], outputs: list[Value]) -> list[Found]:
    """Compute the expected tangents by forward mode of the simulation."""
    flat = [y.detach() for leaf in leaves for y in _distinct(leaf)]
    tangents = [job.seconds[i][r] for i, leaf in enumerate(leaves) for r in range(len(_distinct(leaf)))]

    def function(*ys: Tensor) -> tuple[Tensor, ...]:
        rest = iter(ys)
        leaf_values = []
        for leaf in leaves:
            leaf_tensors = tuple(next(rest) for _ in _distinct(leaf))
            leaf_values.append(Value(leaf_tensors * (program.n if leaf.replicated else 1), leaf.replicated))
        values = simulate(program, leaf_values)
        return tuple(y for i in program.outputs for y in values[i].ys)

    found = torch.func.jvp(function, tuple(flat), tuple(tangents))[1]
    n = program.n
    return [
        Found([value.ys[r].detach() for value in outputs], [found[i * n + r] for i in range(len(outputs))], [])
        for r in range(n)
    ]


def _expect_vmap(program: Program, job: Job) -> Trial:
    by_rank: list[list[list[Tensor]]] = [[[] for _ in program.outputs] for _ in range(program.n)]
    for b in range(job.leaves[0][0].shape[0]):
        values = simulate(program, variables(program, [[y[b] for y in ys] for ys in job.leaves]))
        for r in range(program.n):
            for j, i in enumerate(program.outputs):
                by_rank[r][j].append(values[i].ys[r].detach())
    return Trial(program, job, [Found([torch.stack(ys) for ys in outputs], [], []) for outputs in by_rank])


# ---------------------------------------------------------------------------------------------------------- comparing


class Summary:
    """The results of one mode."""

    def __init__(self) -> None:
        self.programs = 0
        self.comparisons = 0
        self.failures: list[Failure] = []


def fuzz(pool: RankPool, mode: str, seeds: Sequence[int], sizes: Sequence[int], *, timeout: float = 60.0) -> Summary:
    """Run the programs of the seeds, each on one of the sizes."""
    summary = Summary()
    pool.run(max(sizes), rank_side.warm_up, timeout=START_SECONDS)
    with progress.Bar(len(seeds), mode, "program") as bar:
        for i, n in enumerate(sizes):
            jobs = [(mode, seed, n) for seed in seeds if seed % len(sizes) == i]
            batch = MODES[mode].batch
            for start in range(0, len(jobs), batch):
                trials = {case.job.seed: case for case in (trial(*job) for job in jobs[start : start + batch])}
                some = [case.job for case in trials.values()]
                load = rank_side.warm_up
                for job, by_rank in run_batches(pool, n, rank_side.run, some, batch=batch, timeout=timeout, load=load):
                    _count(summary, mode, trials[job.seed], by_rank)
                    bar.step()
    return summary


def _count(summary: Summary, mode: str, case: Trial, by_rank: list[Found] | RankError) -> None:
    summary.programs += 1
    wrong: list[str] = []
    if isinstance(by_rank, RankError):
        wrong = [shortened(by_rank)]
    else:
        wrong += _other_order(by_rank)
        for r, found in enumerate(by_rank):
            compared, differing = compare(case, r, found)
            summary.comparisons += compared
            wrong += differing
    if wrong:
        n = case.program.n
        summary.failures.append(Failure(mode, case.job.seed, n, "\n".join(wrong[:12]), case.text()))


def _other_order(by_rank: list[Found]) -> list[str]:
    """Return how the collective calls of a rank differ from those of rank 0."""
    calls = [list(found.calls) for found in by_rank]
    return [f"rank {r}: calls {own}\n    rank 0: {calls[0]}" for r, own in enumerate(calls) if own != calls[0]]


def compare(case: Trial, r: int, found: Found) -> tuple[int, list[str]]:
    """Return (number of tensors compared, differences on rank r)."""
    expected = case.expected[r]
    names = {
        "outputs": [case.program.names[i] for i in case.program.outputs],
        "first": [f"v{i}" for i in range(len(case.program.leaves))],
        "second": [f"v{i}" for i in range(len(case.program.leaves))],
    }
    if case.job.mode.startswith("forward"):
        names["first"] = names["outputs"]
    what = {"outputs": "value of", "first": "derivative of", "second": "second derivative of"}
    everything = [y for ys in expected for y in ys if y is not None and y.numel()]
    scale = max([1.0, *(float(y.abs().max()) for y in everything)])
    atol = LOW.get(case.program.dtype, TOLERANCE) * scale
    wrong = []
    count = 0
    for field in ("outputs", "first", "second"):
        mine, theirs = getattr(found, field), getattr(expected, field)
        if len(mine) != len(theirs):
            wrong.append(f"rank {r}: {len(mine)} {field}, expected {len(theirs)}")
            continue
        for name, got, wanted in zip(names[field], mine, theirs, strict=False):  # empty fields have no entries
            count += 1
            text = difference(got, wanted, case.program.dtype, atol)
            if text:
                wrong.append(f"rank {r}: {what[field]} {name}: {text}")
    return count, wrong


def difference(got: Tensor | None, wanted: Tensor | None, dtype: torch.dtype, atol: float) -> str:
    """Return what differs; "" if nothing. A missing derivative equals zeros."""
    if wanted is None:
        return "" if got is None else f"got {got}, expected none"
    if got is None:
        return "" if not wanted.numel() or not bool(wanted.any()) else f"got none, expected {wanted}"
    if got.shape != wanted.shape:
        return f"got shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    if got.dtype != dtype:
        return f"got {got.dtype}, expected {dtype}"
    wide = got.to(wanted.dtype)
    if torch.allclose(wide, wanted, rtol=0.0, atol=atol):
        return ""
    return f"off by {float((wide - wanted).abs().max()):.3g}\n    got {got.tolist()}\n    expected {wanted.tolist()}"
