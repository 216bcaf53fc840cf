"""Overlapped matmuls in users' programs: outputs changed in place, inference mode, gradients of inputs alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from test_overlap import CASES, part
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig

ROWS, BATCH, WIDTH, HIDDEN = 12, 3, 12, 24
OVERLAPS: dict[str, Any] = {
    "off": "off",
    "auto": "auto",
    **{name: OverlapConfig(name) for name in ("ring", "bulk")},
    **{name: OverlapConfig(name, chunks=3) for name in ("slices", "exchange")},
}


def whole_tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and bias, equal on all ranks."""
    generator = torch.Generator().manual_seed(3)
    shapes = (ROWS, BATCH, WIDTH), (HIDDEN, WIDTH), (HIDDEN,)
    x, w, bias = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return x, w, bias


def leaf(t: Tensor) -> Tensor:
    return t.clone().requires_grad_()


def close(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert found is not None and expected is not None, what
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-4}.get(found.dtype, 4e-2)
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=0, atol=tolerance * scale, msg=lambda text: f"{what}: {text}"
    )


# ------------------------------------------------------------------------------------------- what a pass was asked for


def passes(x: Tensor, w: Tensor, run: Callable[[Tensor], Tensor]) -> list[tuple[str, int]]:
    """Passes over `run`, and how often each adds the gradient of the weight to what is there."""

    def loss() -> Tensor:
        return run(x).square().sum() / 2

    grad = torch.autograd.grad
    penalized = grad(loss(), x, create_graph=True)[0].square().sum()
    kept = loss()
    reentrant = checkpoint(run, x, use_reentrant=True).square().sum() / 2
    asked: list[tuple[str, Callable[[], Any], int]] = [
        ("grad of x", lambda: grad(loss(), x), 0),
        ("grad of w", lambda: close(grad(loss(), w)[0], w.expected, "grad of w"), 0),  # type: ignore[attr-defined]
        ("grad of both", lambda: close(grad(loss(), [x, w])[1], w.expected, "grad of both"), 0),  # type: ignore[attr-defined]
        ("backward", lambda: loss().backward(), 1),
        ("backward into x", lambda: loss().backward(inputs=[x]), 0),
        ("backward into w", lambda: loss().backward(inputs=[w]), 1),
        ("backward into both", lambda: loss().backward(inputs=[x, w]), 1),
        ("retained", lambda: kept.backward(retain_graph=True), 1),
        ("and grad", lambda: grad(kept, x, retain_graph=True), 0),
        ("and again", kept.backward, 1),
        ("checkpoint", (checkpoint(run, x, use_reentrant=False).square().sum() / 2).backward, 1),
        ("grad of checkpoint", lambda: grad(checkpoint(run, x, use_reentrant=False).square().sum() / 2, x), 0),
        ("reentrant", reentrant.backward, 1),
        ("create_graph", lambda: grad(loss(), x, create_graph=True), 0),
    ]
    found = []
    for name, call, times in asked:
        w.main_grad.zero_()  # type: ignore[attr-defined]
        call()
        close(w.main_grad, times * w.expected, f"main_grad after {name}")  # type: ignore[attr-defined]
        assert w.grad is None, name
        found.append((name, times))
    w.main_grad.zero_()  # type: ignore[attr-defined]
    penalized.backward()
    close(w.main_grad, w.second, "main_grad of a penalty")  # type: ignore[attr-defined]
    assert w.grad is None
    return found


def asked_for(comm: Communicator, name: str, method: str) -> None:
    case, (x, w, bias) = CASES[name], whole_tensors()
    whole = [leaf(t) for t in (x, w)]
    y = F.linear(*whole, bias)
    dx, dw = torch.autograd.grad(y.square().sum() / 2, whole, create_graph=True)
    second = torch.autograd.grad(dx.square().sum(), whole[1])[0]
    mine, own = leaf(part(x, case.x_dim, comm)), leaf(part(w, case.w_dim, comm))
    own.main_grad = torch.zeros_like(own)  # type: ignore[attr-defined]
    own.expected, own.second = part(dw.detach(), case.w_dim, comm), part(second, case.w_dim, comm)  # type: ignore[attr-defined]
    bias = part(bias, case.bias_dim, comm)
    options = {"overlap": OVERLAPS[method], "grad_accumulation_fusion": True}
    passes(mine, own, lambda x: case.function(x, own, comm, bias, **options))


def asked_of_all(comm: Communicator) -> None:
    """Each way with two of the functions."""
    methods = list(OVERLAPS)
    for at, name in enumerate(CASES):
        for method in methods[(at + at // 2) % 2 :: 2]:
            asked_for(comm, name, method)


@pytest.mark.parametrize("n", [2, 3])
def test_main_grad_gets_what_the_pass_was_asked_for(ranks: RankPool, n: int) -> None:
    ranks.run(n, asked_of_all)


def marked(comm: Communicator) -> None:
    for name, method in itertools.product(CASES, ("off", "slices", "ring")):
        check_mark(comm, name, method)


def check_mark(comm: Communicator, name: str, method: str) -> None:
    case, (x, w, _) = CASES[name], whole_tensors()
    mine, own = leaf(part(x, case.x_dim, comm)), leaf(part(w, case.w_dim, comm))
    own.main_grad, own.grad_added_to_main_grad = torch.zeros_like(own), False  # type: ignore[attr-defined]
    loss = case.function(mine, own, comm, overlap=OVERLAPS[method], grad_accumulation_fusion=True).square().sum()
    torch.autograd.grad(loss, mine, retain_graph=True)
    assert not own.grad_added_to_main_grad  # type: ignore[attr-defined]
    loss.backward()
    assert own.grad_added_to_main_grad and own.grad is not None and not own.grad.any()  # type: ignore[attr-defined]


def test_a_weight_is_not_told_of_a_gradient_that_was_not_asked_for(ranks: RankPool) -> None:
    ranks.run(2, marked)


# -------------------------------------------------------------------------------------------------- outputs in place


def in_place(comm: Communicator, dtype: torch.dtype) -> None:
    """relu_ and mul_ of the output, as of F.linear's."""
    x, w, bias = whole_tensors(dtype)
    for (name, case), (method, overlap), with_bias in itertools.product(CASES.items(), OVERLAPS.items(), (False, True)):
        what = f"{name} by {method}, bias {with_bias}"
        whole = [leaf(t.double()) for t in (x, w, bias)]
        y = F.linear(whole[0], whole[1], whole[2] if with_bias else None).relu() * 3
        y.sum().backward()
        mine = [leaf(part(t, dim, comm)) for t, dim in ((x, case.x_dim), (w, case.w_dim), (bias, case.bias_dim))]
        found = case.function(mine[0], mine[1], comm, mine[2] if with_bias else None, overlap=overlap)
        found = torch.nn.ReLU(inplace=True)(found.mul_(3))
        close(found, part(y, case.y_dim, comm), what)
        found.sum().backward()
        for own, reference, dim in zip(mine, whole, (case.x_dim, case.w_dim, case.bias_dim), strict=True):
            if reference.grad is not None:
                close(own.grad, part(reference.grad, dim, comm), f"gradient of {what}")
        with torch.no_grad():
            again = case.function(mine[0], mine[1], comm, mine[2] if with_bias else None, overlap=overlap)
            close(again.relu_().mul_(3), part(y, case.y_dim, comm), f"{what}, no_grad")
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(mine[0].detach(), mine[0].detach())
            tangent = forward_ad.unpack_dual(
                case.function(dual, mine[1].detach(), comm, overlap=overlap).mul_(2)
            ).tangent
            close(tangent, 2 * part(F.linear(x.double(), w.double()), case.y_dim, comm), f"{what}, forward mode")


@pytest.mark.parametrize(("n", "dtype"), [(3, torch.float64), (2, torch.bfloat16)])
def test_outputs_are_changed_in_place(ranks: RankPool, n: int, dtype: torch.dtype) -> None:
    ranks.run(n, in_place, dtype)


def gathered_in_place(comm: Communicator) -> None:
    x, w, _ = whole_tensors()
    for (method, overlap), kept in itertools.product(OVERLAPS.items(), (True, False)):
        if isinstance(overlap, OverlapConfig) and not kept:
            overlap = OverlapConfig(overlap.method, chunks=overlap.chunks, save_gathered=False)
        mine, own = leaf(part(x, 0, comm)), part(w, 0, comm)
        y, gathered = ad.all_gather_matmul(mine, own, comm, overlap=overlap, return_gathered=True)
        y.relu_()
        gathered.mul_(2)
        (y.sum() + gathered.sum()).backward()
        whole = leaf(x)
        (F.linear(whole, w).relu().sum() + comm.size * 2 * whole.sum()).backward()
        close(mine.grad, part(whole.grad, 0, comm), method)  # type: ignore[arg-type]


def test_what_was_gathered_is_changed_in_place(ranks: RankPool) -> None:
    ranks.run(3, gathered_in_place)


def layers_in_place(comm: Communicator) -> None:
    torch.manual_seed(0)
    up, down = torch.nn.Linear(WIDTH, HIDDEN).double(), torch.nn.Linear(HIDDEN, WIDTH).double()
    x, _, _ = whole_tensors()
    for (method, overlap), sequence, seq_dim in itertools.product(OVERLAPS.items(), (False, True), (0, 1)):
        options: dict[str, Any] = {"overlap": overlap, "sequence_parallel": sequence, "seq_dim": seq_dim}
        column = ad.ColumnParallelLinear.from_linear(up, comm, **options)
        row = ad.RowParallelLinear.from_linear(down, comm, **options)
        for t in (up, down):
            t.zero_grad()
        whole = leaf(x.movedim(0, seq_dim).contiguous())
        expected = down(up(whole).relu()).relu()
        expected.sum().backward()
        own = leaf(part(whole.detach(), seq_dim if sequence else None, comm))
        y = row(column(own).relu_()).relu_()
        close(y, part(expected, seq_dim if sequence else None, comm), method)
        y.sum().backward()
        what = f"{method}, sequence {sequence}, seq_dim {seq_dim}"
        close(own.grad, part(whole.grad, seq_dim if sequence else None, comm), what)  # type: ignore[arg-type]
        close(row.weight.grad, part(down.weight.grad, 1, comm), what)  # type: ignore[arg-type]
        close(row.bias.grad, down.bias.grad, what)  # type: ignore[union-attr]
        close(column.weight.grad, part(up.weight.grad, 0, comm), what)  # type: ignore[arg-type]


def test_outputs_of_layers_are_changed_in_place(ranks: RankPool) -> None:
    ranks.run(2, layers_in_place)


# ------------------------------------------------------------------------------------------------------ inference mode


def both_modes(comm: Communicator, dtype: torch.dtype) -> None:
    """Inference and training in turn, in the same workspaces, which grow in between."""
    x, w, bias = whole_tensors(dtype)
    for (name, case), (method, overlap), with_bias in itertools.product(CASES.items(), OVERLAPS.items(), (False, True)):
        training_first = with_bias
        child = comm.split(0, comm.rank)  # with workspaces of its own
        assert child is not None
        for rows, training in (
            (ROWS, training_first),
            (ROWS, not training_first),
            (2 * ROWS, training_first),
            (ROWS, not training_first),
        ):
            what = f"{name} by {method}, bias {with_bias}, training {training}, {rows} rows"
            x_here = torch.cat([x] * (rows // ROWS))
            whole = [leaf(t.double()) for t in (x_here, w, bias)]
            y = F.linear(whole[0], whole[1], whole[2] if with_bias else None)
            mine = [
                leaf(part(t, dim, comm)) for t, dim in ((x_here, case.x_dim), (w, case.w_dim), (bias, case.bias_dim))
            ]
            arguments = (mine[0], mine[1], child, mine[2] if with_bias else None)
            if not training:
                with torch.inference_mode():
                    found = case.function(*arguments, overlap=overlap)
                    assert found.is_inference()
                    close(found.add_(1), part(y.detach() + 1, case.y_dim, comm), what)
                    close(
                        case.function(mine[0] * 1, *arguments[1:], overlap=overlap),
                        part(y.detach(), case.y_dim, comm),
                        what,
                    )
                continue
            found = case.function(*arguments, overlap=overlap)
            close(found, part(y, case.y_dim, comm), what)
            found.sum().backward()
            y.sum().backward()
            for own, reference, dim in zip(mine, whole, (case.x_dim, case.w_dim, case.bias_dim), strict=True):
                if reference.grad is not None:
                    close(own.grad, part(reference.grad, dim, comm), f"gradient of {what}")
        child.destroy()


@pytest.mark.parametrize(("n", "dtype"), [(2, torch.float64), (2, torch.bfloat16)])
def test_inference_and_training_take_turns(ranks: RankPool, n: int, dtype: torch.dtype) -> None:
    ranks.run(n, both_modes, dtype)


def buffers_of_inference(comm: Communicator, ring: bool) -> None:
    """Objects with buffers of their own, made in one mode and used in both; slices handed out."""
    x, w, bias = whole_tensors()
    flat = x.flatten(0, 1).contiguous()
    expected = F.linear(flat, w, bias)
    for made_in_inference in (True, False):
        with torch.inference_mode(made_in_inference):
            kind: Any = ad.CommOverlapP2P if ring else ad.CommOverlap
            overlap = kind(ad.CommOverlapHelper(comm), (ROWS * BATCH, HIDDEN), torch.float64)
        for inference in (True, False, True):
            mine = [leaf(part(flat, 1, comm)), leaf(part(w, 1, comm)), leaf(bias)]
            with torch.inference_mode(inference):
                scattered = overlap.matmul_reduce_scatter(*mine)
                close(scattered, part(expected, 0, comm), "reduce_scatter")
                summed = overlap.matmul_all_reduce(*mine, hand_off=True)
                close(summed.whole(), expected, "all_reduce")
                gathered = overlap.all_gather_matmul(part(flat, 0, comm), part(w, 0, comm), part(bias, 0, comm))
                close(gathered, part(expected, 1, comm), "all_gather")
            if not inference:
                scattered.sum().backward()
                close(mine[1].grad, part(flat.sum(0).expand(HIDDEN, WIDTH), 1, comm), "gradient")
        overlap.close()


@pytest.mark.parametrize(("n", "ring"), [(2, False), (3, True)])
def test_buffers_of_their_own_serve_both_modes(ranks: RankPool, n: int, ring: bool) -> None:
    ranks.run(n, buffers_of_inference, ring)
