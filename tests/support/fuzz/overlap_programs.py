"""Random programs of overlapped matmuls and layers on ranks, compared with unsharded F.linear in float64.

A program is drawn from its seed, the same on every rank: some layers with some passes each (see `_ACTIONS`). Every rank
computes the reference alone, without communication. Trials are enabled for all sizes, so that the passes of a layer
alternate between schedules. Used by scripts/faults/fuzzer.py and its test.
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
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import schedules, tune
from pynccl_autograd.overlap.lanes import Lane, Observer, observing

# Relative to the largest value, for sums of up to some hundred products.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")


class Pattern(NamedTuple):
    """The dimensions of a 2-D x, the weight, y and the bias that are sharded over the ranks; None: replicated."""

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


class RaisesAfter(Observer):
    """Raises after some collectives: the same ones on every rank, although the number of matmuls may differ."""

    def __init__(self, left: int) -> None:
        self.left = left

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        self.left -= name in COLLECTIVES
        if self.left < 0:
            raise ArithmeticError("injected")


class Drawn(NamedTuple):
    """A layer of a program, and its passes."""

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
    """A layer on this rank, and the unsharded reference in float64."""

    def __init__(self, comm: Communicator, drawn: Drawn, generator: torch.Generator) -> None:
        self.comm, self.drawn, self.pattern, self.generator = comm, drawn, PATTERNS[drawn.name], generator
        self.w, self.bias = self.tensor(drawn.hidden, drawn.width), self.tensor(drawn.hidden)
        self.object = self._object() if drawn.overlap in ("ring", "slices", "exchange") else None
        self.w_shard = self.shard(self.w, self.pattern.w).clone().requires_grad_(drawn.frozen != "w")
        self.bias_shard = self.shard(self.bias, self.pattern.bias).clone().requires_grad_() if drawn.has_bias else None
        self.call = self._layer() if drawn.as_layer else self._function
        self.main = torch.zeros_like(self.w.double())  # expected main_grad
        if drawn.fused:
            wide = torch.float64 if drawn.dtype is torch.float64 else torch.float32
            self.w_shard.main_grad = torch.zeros_like(self.w_shard, dtype=wide)  # type: ignore[attr-defined]

    def tensor(self, *shape: int) -> Tensor:
        """Draw a tensor, the same on every rank."""
        made = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return made.to(self.drawn.dtype)

    def shard(self, t: Tensor, dim: int | None) -> Tensor:
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
        y: Tensor = self.pattern.function(x, self.w_shard, self.comm, self.bias_shard, **self.options)
        return y

    def _layer(self) -> Any:
        drawn = self.drawn
        layer = self.pattern.layer(
            drawn.width, drawn.hidden, self.comm, drawn.has_bias, self.pattern.sequence, dtype=drawn.dtype,
            seq_dim=drawn.seq_dim, **self.options,
        )  # fmt: skip
        layer.load_full(self.w, self.bias if drawn.has_bias else None)
        layer.weight.requires_grad_(drawn.frozen != "w")
        self.w_shard, self.bias_shard = layer.weight, layer.bias
        return layer

    def input(self) -> tuple[Tensor, Tensor]:
        """Return the unsharded x in float64 and this rank's shard."""
        sizes = self.drawn.sizes[::-1] if self.drawn.seq_dim else self.drawn.sizes
        x = self.tensor(*sizes, self.drawn.width)
        wanted = self.drawn.frozen != "x"
        x_shard = self.shard(x, self.dim(self.pattern.x)).clone().requires_grad_(wanted)
        return x.double().requires_grad_(wanted), x_shard

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the unsharded y, and the weight and bias that it was computed from."""
        w, bias = (t.double().clone().requires_grad_() for t in (self.w, self.bias))
        return F.linear(x, w, bias if self.drawn.has_bias else None), w, bias

    def check_close(self, found: Tensor | None, expected: Tensor | None, dim: int | None, what: str) -> None:
        assert found is not None and expected is not None, f"{what}: {found is None} {expected is None}"
        wanted = self.shard(expected.detach(), dim)
        scale = max(1.0, float(expected.detach().abs().max()))
        tolerance = TOLERANCE[self.drawn.dtype] * scale * 2
        assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
        off = float((found.detach().double() - wanted).abs().max())
        assert off <= tolerance, f"{what}: off by {off}, where {scale} is the largest"

    def check_gradients(
        self, x_shard: Tensor, x: Tensor, w: Tensor, bias: Tensor, into: Sequence[Tensor | None]
    ) -> None:
        """into: this rank's gradients of x, w and the bias; None: do not compare."""
        dims = self.dim(self.pattern.x), self.pattern.w, self.pattern.bias
        for name, found, full, dim in zip(("dx", "dw", "dbias"), into, (x, w, bias), dims, strict=True):
            if found is not None:
                self.check_close(found, full.grad, dim, name)

    def check_main(self, dw: Tensor | None) -> None:
        if self.drawn.fused:
            self.main += 0 if dw is None else dw
            self.check_close(self.w_shard.main_grad, self.main, self.pattern.w, "main_grad")  # type: ignore[attr-defined]
            assert self.w_shard.grad is None, "weight.grad is set in addition to main_grad"

    def forget(self) -> None:
        """Reset the gradients, which are incomplete after a pass that raised."""
        self.drop_gradients()
        if self.drawn.fused:
            self.w_shard.main_grad.zero_()  # type: ignore[attr-defined]
            self.main.zero_()

    def drop_gradients(self) -> None:
        self.w_shard.grad = None
        if self.bias_shard is not None:
            self.bias_shard.grad = None


def _cotangent(running: Running, y: Tensor) -> tuple[Tensor, Tensor]:
    g = running.tensor(*y.shape)
    return g.double(), running.shard(g, running.dim(running.pattern.y))


def _train(running: Running, rng: random.Random, run: Callable[[Tensor], Tensor] | None = None) -> None:
    """Run a forward and backward pass; the output may be changed in place in between."""
    run = run or running.call
    x, x_shard = running.input()
    y, w, bias = running.reference(x)
    found = run(x_shard)
    running.check_close(found, y, running.dim(running.pattern.y), "y")
    changed = rng.choice(["", "mul_", "add_", "relu_"])
    if changed == "relu_" and running.drawn.dtype is torch.float64:
        y, found = y.relu(), found.relu_()
    elif changed == "mul_":
        y, found = y * 2, found.mul_(2)
    elif changed == "add_":
        y, found = y + 1, found.add_(1)
    running.check_close(found, y, running.dim(running.pattern.y), f"y after {changed}")
    g, g_shard = _cotangent(running, y)
    y.backward(g)
    if not found.requires_grad or found.grad_fn is None:
        return
    found.backward(g_shard)
    fused, drawn = running.drawn.fused, running.drawn
    grads = [
        x_shard.grad if drawn.frozen != "x" else None,
        None if fused or drawn.frozen == "w" else running.w_shard.grad,
        None if running.bias_shard is None else running.bias_shard.grad,
    ]
    running.check_gradients(x_shard, x, w, bias, grads)
    running.check_main(w.grad)
    running.drop_gradients()


def _checkpoint(running: Running, rng: random.Random) -> None:
    kind = rng.random() < 0.5 and running.drawn.frozen != "x"
    _train(running, rng, lambda x: checkpoint(lambda t: running.call(t) * 1, x, use_reentrant=kind))


def _grad_of(running: Running, rng: random.Random) -> None:
    """torch.autograd.grad with respect to x, the weight or both."""
    if running.drawn.frozen:
        return
    x, x_shard = running.input()
    y, w, _ = running.reference(x)
    g, g_shard = _cotangent(running, y)
    names = rng.choice([["x"], ["w"], ["x", "w"]])
    full_tensors, shards = {"x": x, "w": w}, {"x": x_shard, "w": running.w_shard}
    expected = torch.autograd.grad(y, [full_tensors[name] for name in names], g)
    z = running.call(x_shard)
    again = rng.random() < 0.3
    if again:
        torch.autograd.grad(z, x_shard, g_shard, retain_graph=True)
    found = torch.autograd.grad(z, [shards[name] for name in names], g_shard)
    dims = {"x": running.dim(running.pattern.x), "w": running.pattern.w}
    for name, mine, full in zip(names, found, expected, strict=True):
        running.check_close(mine, full, dims[name], f"grad of {name}")
    assert x_shard.grad is None and running.w_shard.grad is None
    running.check_main(None)


def _penalty(running: Running, rng: random.Random) -> None:
    """A gradient penalty: a second derivative, with respect to the weight too."""
    if running.drawn.frozen or running.drawn.dtype is not torch.float64:
        return
    x, x_shard = running.input()
    y, w, _ = running.reference(x)
    mine = running.call(x_shard)
    (dx,) = torch.autograd.grad(y.square().sum() / 2, x, create_graph=True)
    (dx_shard,) = torch.autograd.grad(mine.square().sum() / 2, x_shard, create_graph=True)
    running.check_close(dx_shard, dx, running.dim(running.pattern.x), "dx")
    dx.square().sum().backward()
    dx_shard.square().sum().backward()
    if not running.drawn.fused:
        running.check_close(running.w_shard.grad, w.grad, running.pattern.w, "dw of a penalty")
        running.w_shard.grad = None
    running.check_main(w.grad)
    running.drop_gradients()


def _without_gradient(running: Running, rng: random.Random) -> None:
    inference = rng.random() < 0.7
    x, x_shard = running.input()
    y, *_ = running.reference(x)
    with torch.inference_mode() if inference else torch.no_grad():
        for _ in range(rng.randint(1, 2)):
            found = running.call(x_shard * 1 if rng.random() < 0.5 else x_shard)
            assert found.is_inference() == inference
            found.mul_(2)
            running.check_close(found, 2 * y, running.dim(running.pattern.y), "y without gradient")


def _changed_input(running: Running, rng: random.Random) -> None:
    """Change x or the weight in place between the passes: gradients are right, or every rank raises torch's error."""
    if running.drawn.frozen:
        return
    x, x_shard = running.input()
    y, *_ = running.reference(x)
    g, g_shard = _cotangent(running, y)
    (dx,) = torch.autograd.grad(y, x, g)
    between = x_shard * 1
    z = running.call(between)
    with torch.no_grad():
        (between if rng.random() < 0.5 else running.w_shard).mul_(1)
    try:
        (found,) = torch.autograd.grad(z, x_shard, g_shard)
    except RuntimeError as error:
        assert "modified" in str(error) and "inplace" in str(error), error
        return
    running.check_close(found, dx, running.dim(running.pattern.x), "dx after a change")


def _broken(running: Running, rng: random.Random) -> None:
    """An exception in the middle of a forward or backward pass."""
    _, x_shard = running.input()
    raiser = RaisesAfter(rng.randrange(8))
    backwards = rng.random() < 0.5
    try:
        with nullcontext() if backwards else observing(raiser):
            y = running.call(x_shard)
        if y.requires_grad:
            with observing(raiser):
                y.sum().backward()
    except ArithmeticError:
        pass
    running.forget()


def _handed_out(running: Running, rng: random.Random) -> None:
    """Read only some of the slices of an all-reduce."""
    drawn = running.drawn
    if drawn.name != "matmul_all_reduce" or len(drawn.sizes) != 1:
        return
    x, x_shard = running.input()
    y, *_ = running.reference(x)
    slices = running.pattern.function(
        x_shard, running.w_shard, running.comm, running.bias_shard, hand_off=True, **running.options
    )
    for at in range(rng.randint(0, len(slices))):
        running.check_close(slices[at], y[slices.rows[at]], None, f"slice {at}")


def _deleted(running: Running, rng: random.Random) -> None:
    """Drop the graph of a pass without a backward pass."""
    _, x_shard = running.input()
    running.call(x_shard)
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
    """Run the program of a seed and return its number of passes. Raises AssertionError with the name of the pass."""
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
def tune_all_sizes() -> Iterator[None]:
    """Context manager that enables short races for passes of any size in this process."""
    any_size = mock.patch.object(schedules, "MIN_FLOP", 0.0), mock.patch.dict(schedules.MIN_ROWS, {"cpu": 1})
    with any_size[0], any_size[1], mock.patch.object(tune, "STARTS", (0, 12)):
        yield


def run(comm: Communicator, seeds: Sequence[int]) -> list[int]:
    with tune_all_sizes():
        return [run_one(comm, seed) for seed in seeds]
