"""Random programs of overlapped matmuls and layers, on ranks and beside plain F.linear of the whole in float64.

A program is drawn from its seed, the same on every rank: some layers, of each some passes (see `_ACTIONS`). Every rank
computes the reference alone, without communication. No pass is too small for a trial, so that a layer's passes go by
turns. Used by scripts/faults/fuzzer.py and its test.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observers import Observer, observing
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import trials
from pynccl_autograd.overlap.lanes import Lane

# Of a sum of up to some hundred products, of the largest value.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")


class Pattern(NamedTuple):
    """Which dimensions of x, the weight, y and the bias are cut over the ranks, of two-dimensional x; None: equal."""

    function: Any
    layer: Any
    sequence: bool
    x: int | None
    w: int
    y: int | None
    bias: int | None


PATTERNS = {
    "all_gather_matmul": Pattern(ad.all_gather_matmul, ad.ColumnParallelLinear, True, 0, 0, -1, 0),
    "matmul_reduce_scatter": Pattern(ad.matmul_reduce_scatter, ad.RowParallelLinear, True, -1, 1, 0, None),
    "matmul_all_reduce": Pattern(ad.matmul_all_reduce, ad.RowParallelLinear, False, -1, 1, None, None),
    "copy_matmul": Pattern(ad.copy_matmul, ad.ColumnParallelLinear, False, None, 0, -1, 0),
}


class Refuses(Observer):
    """Raises after some collectives were launched: on every rank the same ones, whose matmuls may differ in number."""

    def __init__(self, left: int) -> None:
        self.left = left

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        self.left -= name in COLLECTIVES
        if self.left < 0:
            raise ArithmeticError("refused")


class Drawn(NamedTuple):
    """A layer of a program: what it is, and what is done with it."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]  # of x, without its last dimension
    width: int
    hidden: int
    has_bias: bool
    frozen: str  # "", "w" or "x"
    reduce_dtype: torch.dtype | None
    fused: bool
    as_layer: bool
    seq_dim: int
    overlap: Any  # "auto", "off", an OverlapConfig, or the name of an object with buffers
    actions: tuple[tuple[str, int], ...]


def draw(seed: int, n: int) -> list[Drawn]:
    rng = random.Random(seed * 1009 + n)
    return [_layer(rng, n) for _ in range(rng.randint(1, 4))]


def _config(rng: random.Random, inner: bool = False) -> OverlapConfig:
    method = rng.choice(["slices", "ring", "exchange", "bulk", "off", "auto"])
    return OverlapConfig(
        method,
        chunks=rng.choice([1, 2, 3, 5, 50, None]) if method in ("slices", "exchange") else None,
        aggregate=rng.random() < 0.3,
        deterministic=method in ("exchange", "auto") and rng.random() < 0.3,
        save_gathered=rng.random() < 0.5,
        dgrad=_config(rng, True) if not inner and rng.random() < 0.4 else None,
    )


def _layer(rng: random.Random, n: int) -> Drawn:
    name = rng.choice(list(PATTERNS))
    low = rng.choice([torch.bfloat16, torch.float16])
    dtype = rng.choice([torch.float64, torch.float64, torch.float32, low])
    sizes = (n * rng.choice([1, 1, 2, 3, 5, 9]), *((rng.choice([1, 2, 3]),) if rng.random() < 0.5 else ()))
    as_layer = rng.random() < 0.5
    fused = rng.random() < 0.4
    frozen = "" if fused else rng.choice(["", "", "w", "x"])
    actions = tuple((rng.choice(list(_ACTIONS)), rng.randrange(1 << 30)) for _ in range(rng.randint(1, 5)))
    objects = ["ring", "slices", "exchange"]
    overlap = rng.choice(["auto", "off", *(_config(rng) for _ in range(6)), rng.choice(objects)])
    wider = rng.choice([None, torch.float32]) if dtype.itemsize == 2 else None
    seq_dim = rng.randrange(2) if as_layer and len(sizes) == 2 and PATTERNS[name].sequence else 0
    return Drawn(
        name, dtype, sizes, n * rng.choice([1, 2, 3, 7]), n * rng.choice([1, 2, 3, 5]), rng.random() < 0.5, frozen,
        wider, fused, as_layer, seq_dim, overlap, actions,
    )  # fmt: skip


class Running:
    """A layer on this rank, and the whole one in float64."""

    def __init__(self, comm: Communicator, drawn: Drawn, generator: torch.Generator) -> None:
        self.comm, self.drawn, self.pattern, self.generator = comm, drawn, PATTERNS[drawn.name], generator
        self.w, self.bias = self.tensor(drawn.hidden, drawn.width), self.tensor(drawn.hidden)
        self.object = self._object() if drawn.overlap in ("ring", "slices", "exchange") else None
        self.own_w = self.part(self.w, self.pattern.w).clone().requires_grad_(drawn.frozen != "w")
        self.own_bias = self.part(self.bias, self.pattern.bias).clone().requires_grad_() if drawn.has_bias else None
        self.call = self._layer() if drawn.as_layer else self._function
        self.main = torch.zeros_like(self.w.double())  # what main_grad is to be
        if drawn.fused:
            wide = torch.float64 if drawn.dtype is torch.float64 else torch.float32
            self.own_w.main_grad = torch.zeros_like(self.own_w, dtype=wide)  # type: ignore[attr-defined]

    def tensor(self, *shape: int) -> Tensor:
        """The same on every rank."""
        made = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return made.to(self.drawn.dtype)

    def part(self, t: Tensor, dim: int | None) -> Tensor:
        return t if dim is None else t.chunk(self.comm.size, dim)[self.comm.rank].contiguous()

    def dim(self, dim: int | None) -> int | None:
        return self.drawn.seq_dim if dim == 0 else dim

    @property
    def options(self) -> dict[str, Any]:
        drawn = self.drawn
        return {
            "overlap": self.object or drawn.overlap,
            "reduce_dtype": drawn.reduce_dtype,
            "grad_accumulation_fusion": drawn.fused,
        }

    def _object(self) -> Any:
        drawn, helper = self.drawn, ad.CommOverlapHelper(self.comm)
        rows = 1
        for size in drawn.sizes:
            rows *= size
        shape, dtype = (rows, max(drawn.width, drawn.hidden)), drawn.reduce_dtype or drawn.dtype
        if drawn.overlap == "ring":
            return ad.CommOverlapP2P(helper, shape, dtype)
        return ad.CommOverlap(helper, shape, dtype, num_splits=3, deterministic=drawn.overlap == "exchange")

    def _function(self, x: Tensor) -> Tensor:
        y: Tensor = self.pattern.function(x, self.own_w, self.comm, self.own_bias, **self.options)
        return y

    def _layer(self) -> Any:
        drawn = self.drawn
        layer = self.pattern.layer(
            drawn.width, drawn.hidden, self.comm, drawn.has_bias, self.pattern.sequence, dtype=drawn.dtype,
            seq_dim=drawn.seq_dim, **self.options,
        )  # fmt: skip
        layer.load_full(self.w, self.bias if drawn.has_bias else None)
        layer.weight.requires_grad_(drawn.frozen != "w")
        self.own_w, self.own_bias = layer.weight, layer.bias
        return layer

    def input(self) -> tuple[Tensor, Tensor]:
        """x, whole in float64 and this rank's."""
        sizes = self.drawn.sizes[::-1] if self.drawn.seq_dim else self.drawn.sizes
        x = self.tensor(*sizes, self.drawn.width)
        wanted = self.drawn.frozen != "x"
        own = self.part(x, self.dim(self.pattern.x)).clone().requires_grad_(wanted)
        return x.double().requires_grad_(wanted), own

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y of the whole, with the weight and the bias that it was made of."""
        w, bias = (t.double().clone().requires_grad_() for t in (self.w, self.bias))
        return F.linear(x, w, bias if self.drawn.has_bias else None), w, bias

    def close(self, found: Tensor | None, expected: Tensor | None, dim: int | None, what: str) -> None:
        assert found is not None and expected is not None, f"{what}: {found is None} {expected is None}"
        wanted = self.part(expected.detach(), dim)
        scale = max(1.0, float(expected.detach().abs().max()))
        tolerance = TOLERANCE[self.drawn.dtype] * scale * 2
        assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
        off = float((found.detach().double() - wanted).abs().max())
        assert off <= tolerance, f"{what}: off by {off}, where {scale} is the largest"

    def check_gradients(self, own: Tensor, x: Tensor, w: Tensor, bias: Tensor, into: Sequence[Tensor | None]) -> None:
        """into: the gradients of x, w and the bias here; None: not wanted."""
        dims = self.dim(self.pattern.x), self.pattern.w, self.pattern.bias
        for name, found, whole, dim in zip(("dx", "dw", "dbias"), into, (x, w, bias), dims, strict=True):
            if found is not None:
                self.close(found, whole.grad, dim, name)

    def check_main(self, dw: Tensor | None) -> None:
        if self.drawn.fused:
            self.main += 0 if dw is None else dw
            self.close(self.own_w.main_grad, self.main, self.pattern.w, "main_grad")  # type: ignore[attr-defined]
            assert self.own_w.grad is None, "weight.grad beside main_grad"

    def forget(self) -> None:
        """After a pass that an exception has ended, whose gradients are a part of the whole."""
        self.drop_gradients()
        if self.drawn.fused:
            self.own_w.main_grad.zero_()  # type: ignore[attr-defined]
            self.main.zero_()

    def drop_gradients(self) -> None:
        self.own_w.grad = None
        if self.own_bias is not None:
            self.own_bias.grad = None


def _cotangent(running: Running, y: Tensor) -> tuple[Tensor, Tensor]:
    g = running.tensor(*y.shape)
    return g.double(), running.part(g, running.dim(running.pattern.y))


def _train(running: Running, rng: random.Random, run: Callable[[Tensor], Tensor] | None = None) -> None:
    """A pass forwards and backwards, of an output that may be changed in place."""
    run = run or running.call
    x, own = running.input()
    y, w, bias = running.reference(x)
    found = run(own)
    running.close(found, y, running.dim(running.pattern.y), "y")
    changed = rng.choice(["", "mul_", "add_", "relu_"])
    if changed == "relu_" and running.drawn.dtype is torch.float64:
        y, found = y.relu(), found.relu_()
    elif changed == "mul_":
        y, found = y * 2, found.mul_(2)
    elif changed == "add_":
        y, found = y + 1, found.add_(1)
    running.close(found, y, running.dim(running.pattern.y), f"y after {changed}")
    g, own_g = _cotangent(running, y)
    y.backward(g)
    if not found.requires_grad or found.grad_fn is None:
        return
    found.backward(own_g)
    fused, drawn = running.drawn.fused, running.drawn
    grads = [
        own.grad if drawn.frozen != "x" else None,
        None if fused or drawn.frozen == "w" else running.own_w.grad,
        None if running.own_bias is None else running.own_bias.grad,
    ]
    running.check_gradients(own, x, w, bias, grads)
    running.check_main(w.grad)
    running.drop_gradients()


def _checkpoint(running: Running, rng: random.Random) -> None:
    kind = rng.random() < 0.5 and running.drawn.frozen != "x"
    _train(running, rng, lambda x: checkpoint(lambda t: running.call(t) * 1, x, use_reentrant=kind))


def _grad_of(running: Running, rng: random.Random) -> None:
    """torch.autograd.grad of some of x and the weight: of nothing else."""
    if running.drawn.frozen:
        return
    x, own = running.input()
    y, w, _ = running.reference(x)
    g, own_g = _cotangent(running, y)
    names = rng.choice([["x"], ["w"], ["x", "w"]])
    wholes, owns = {"x": x, "w": w}, {"x": own, "w": running.own_w}
    expected = torch.autograd.grad(y, [wholes[name] for name in names], g)
    z = running.call(own)
    again = rng.random() < 0.3
    if again:
        torch.autograd.grad(z, own, own_g, retain_graph=True)
    found = torch.autograd.grad(z, [owns[name] for name in names], own_g)
    dims = {"x": running.dim(running.pattern.x), "w": running.pattern.w}
    for name, mine, whole in zip(names, found, expected, strict=True):
        running.close(mine, whole, dims[name], f"grad of {name}")
    assert own.grad is None and running.own_w.grad is None
    running.check_main(None)


def _penalty(running: Running, rng: random.Random) -> None:
    """A second derivative, which reaches the weight, too."""
    if running.drawn.frozen or running.drawn.dtype is not torch.float64:
        return
    x, own = running.input()
    y, w, _ = running.reference(x)
    mine = running.call(own)
    (dx,) = torch.autograd.grad(y.square().sum() / 2, x, create_graph=True)
    (own_dx,) = torch.autograd.grad(mine.square().sum() / 2, own, create_graph=True)
    running.close(own_dx, dx, running.dim(running.pattern.x), "dx")
    dx.square().sum().backward()
    own_dx.square().sum().backward()
    if not running.drawn.fused:
        running.close(running.own_w.grad, w.grad, running.pattern.w, "dw of a penalty")
        running.own_w.grad = None
    running.check_main(w.grad)
    running.drop_gradients()


def _without_gradient(running: Running, rng: random.Random) -> None:
    inference = rng.random() < 0.7
    x, own = running.input()
    y, *_ = running.reference(x)
    with torch.inference_mode() if inference else torch.no_grad():
        for _ in range(rng.randint(1, 2)):
            found = running.call(own * 1 if rng.random() < 0.5 else own)
            assert found.is_inference() == inference
            found.mul_(2)
            running.close(found, 2 * y, running.dim(running.pattern.y), "y without gradient")


def _changed_input(running: Running, rng: random.Random) -> None:
    """x or the weight changed in place between the passes: right gradients, or torch's error on every rank."""
    if running.drawn.frozen:
        return
    x, own = running.input()
    y, *_ = running.reference(x)
    g, own_g = _cotangent(running, y)
    (dx,) = torch.autograd.grad(y, x, g)
    between = own * 1
    z = running.call(between)
    with torch.no_grad():
        (between if rng.random() < 0.5 else running.own_w).mul_(1)
    try:
        (found,) = torch.autograd.grad(z, own, own_g)
    except RuntimeError as error:
        assert "modified" in str(error) and "inplace" in str(error), error
        return
    running.close(found, dx, running.dim(running.pattern.x), "dx after a change")


def _broken(running: Running, rng: random.Random) -> None:
    """An exception in the middle of a pass, forwards or backwards."""
    _, own = running.input()
    refuses = Refuses(rng.randrange(8))
    backwards = rng.random() < 0.5
    try:
        with nullcontext() if backwards else observing(refuses):
            y = running.call(own)
        if y.requires_grad:
            with observing(refuses):
                y.sum().backward()
    except ArithmeticError:
        pass
    running.forget()


def _handed_out(running: Running, rng: random.Random) -> None:
    """Some of the slices of an all-reduce; the others are never asked for."""
    drawn = running.drawn
    if drawn.name != "matmul_all_reduce" or len(drawn.sizes) != 1:
        return
    x, own = running.input()
    y, *_ = running.reference(x)
    slices = running.pattern.function(
        own, running.own_w, running.comm, running.own_bias, hand_off=True, **running.options
    )
    for at in range(rng.randint(0, len(slices))):
        running.close(slices[at], y[slices.rows[at]], None, f"slice {at}")


def _deleted(running: Running, rng: random.Random) -> None:
    """The graph of a pass that never went backwards."""
    _, own = running.input()
    running.call(own)
    gc.collect()


_ACTIONS: dict[str, Callable[[Running, random.Random], None]] = {
    "train": _train,
    "train again": _train,
    "checkpoint": _checkpoint,
    "grad of": _grad_of,
    "penalty": _penalty,
    "without gradient": _without_gradient,
    "changed input": _changed_input,
    "broken": _broken,
    "handed out": _handed_out,
    "deleted": _deleted,
}


def run_one(comm: Communicator, seed: int) -> int:
    """Run the program of a seed; returns how many passes it had. AssertionError that names the pass."""
    generator = torch.Generator().manual_seed(seed)
    passes = 0
    for drawn in draw(seed, comm.size):
        running = Running(comm, drawn, generator)
        for name, number in drawn.actions:
            print(f"seed {seed}: {name} of {drawn}", flush=True)
            try:
                _ACTIONS[name](running, random.Random(number))
            except Exception as error:
                raise AssertionError(f"seed {seed}, {comm.size} ranks: {name} of {drawn}: {error}") from error
            passes += 1
        if running.object is not None:
            running.object.close()
    return passes


@contextmanager
def all_are_tried() -> Iterator[None]:
    """No pass is too small for a trial, in this process."""
    with mock.patch.object(trials, "FEWEST_FLOP", 0.0), mock.patch.dict(trials.FEWEST_ROWS, {"cpu": 1}):
        yield


def run(comm: Communicator, seeds: Sequence[int]) -> list[int]:
    with all_are_tried():
        return [run_one(comm, seed) for seed in seeds]
