"""Parallel linear layers against nn.Linear: outputs, gradients, batch first, shared inputs, whole outputs, types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

SEQUENCE, BATCH, WIDTH, HIDDEN = 12, 2, 12, 24


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Block(nn.Module):
    """Two projections of one input, one of what they make."""

    def __init__(self, a: nn.Module, b: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.down = a, b, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.a(x)) * self.b(x))
        return y


def equals(comm: Communicator, sequence_parallel: bool, seq_dim: int, shared: bool, bias: bool) -> None:
    torch.manual_seed(8)
    sizes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    whole: Any = Block(*(nn.Linear(*each, bias=bias, dtype=torch.float64) for each in sizes))
    whole.b.weight.requires_grad_(False)
    shape = [BATCH, BATCH, WIDTH]
    shape[seq_dim] = SEQUENCE
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    g = torch.randn(shape, dtype=torch.float64)
    y = whole(x)
    y.backward(g)

    def part(t: Tensor) -> Tensor:
        return t.chunk(comm.size, seq_dim)[comm.rank] if sequence_parallel else t

    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "seq_dim": seq_dim}
    column = partial(ad.ColumnParallelLinear.from_linear, comm=comm, gather_input=not shared, **options)
    down = ad.RowParallelLinear.from_linear(whole.down, comm, **options)
    block: Any = Block(column(whole.a), column(whole.b), down)
    x_own = part(x.detach()).clone().requires_grad_()
    entered: Tensor = x_own
    if shared:
        entered = ad.all_gather(x_own, comm, seq_dim, grad="sum") if sequence_parallel else ad.copy(x_own, comm)
    y_own = block(entered)
    y_own.backward(part(g))
    close(y_own, part(y.detach()))
    assert x.grad is not None
    close(x_own.grad, part(x.grad))
    close(block.a.weight.grad, whole.a.weight.grad.chunk(comm.size, 0)[comm.rank])
    close(block.down.weight.grad, whole.down.weight.grad.chunk(comm.size, 1)[comm.rank])
    assert block.b.weight.grad is None and not block.b.weight.requires_grad
    if bias:
        close(block.b.bias.grad, whole.b.bias.grad.chunk(comm.size, 0)[comm.rank])
        close(block.down.bias.grad, whole.down.bias.grad)


PAIRWISE = [  # ranks, sequence parallel, its dimension, an input that both share, biases
    (2, False, 0, False, True),
    (2, True, 1, True, False),
    (3, True, 0, False, False),
    (3, False, 1, True, True),
    (4, True, 1, False, True),
    (4, True, 0, True, True),
]


@pytest.mark.parametrize(("n", "sequence_parallel", "seq_dim", "shared", "bias"), PAIRWISE)
def test_layers_made_of_linear_ones_equal_them(
    ranks: RankPool, n: int, sequence_parallel: bool, seq_dim: int, shared: bool, bias: bool
) -> None:
    ranks.run(n, equals, sequence_parallel, seq_dim, shared, bias)


def drawn(comm: Communicator) -> None:
    """A seed draws the layers that torch.nn draws, on any number of ranks, and leaves the generator alike."""
    torch.manual_seed(11)
    whole = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Embedding(13, WIDTH, padding_idx=3)
    after = torch.rand(1)
    torch.manual_seed(11)
    cut = (
        ad.ColumnParallelLinear(WIDTH, HIDDEN, comm),
        ad.RowParallelLinear(HIDDEN, WIDTH, comm),
        ad.VocabParallelEmbedding(13, WIDTH, comm, padding_idx=3),
    )
    assert torch.equal(torch.rand(1), after)
    for layer, expected in zip(cut, whole, strict=True):
        torch.testing.assert_close(layer.full_state(), {**expected.state_dict()}, rtol=1e-6, atol=1e-7)


def test_a_seed_draws_the_layer_that_torch_draws_on_any_number_of_ranks(ranks: RankPool) -> None:
    for n in (2, 3):
        ranks.run(n, drawn)


def under_autocast(comm: Communicator) -> None:
    """Types of outputs and gradients, and values, beside those of nn.Linear, of both layers in both modes."""
    size = 2 * comm.size
    torch.manual_seed(1)
    whole_x = torch.randn(size, size)
    kinds: tuple[Any, ...] = (ad.ColumnParallelLinear, ad.RowParallelLinear)
    for kind, sequence_parallel, dtype in product(kinds, (False, True), (torch.bfloat16, torch.float16)):
        plain, row = nn.Linear(size, size), kind is ad.RowParallelLinear
        layer = kind.from_linear(plain, comm, sequence_parallel)
        own_x = whole_x.chunk(comm.size, int(row))[comm.rank] if row or sequence_parallel else whole_x
        found: list[tuple[Tensor, list[Any]]] = []
        for module, given in ((plain, whole_x), (layer, own_x)):
            x = given.clone().requires_grad_()
            with torch.autocast("cpu", dtype=dtype):
                y = module(x)
            y.float().sum().backward()
            grads = [one.grad for one in (x, *module.parameters())]
            found.append((y, [y.dtype, *(one.dtype for one in grads if one is not None)]))
        (expected, types), (y, own_types) = found
        assert own_types == types and types[0] == dtype, (kind, sequence_parallel)
        if not row or sequence_parallel:
            expected = expected.chunk(comm.size, int(not row))[comm.rank]
        torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)


def test_under_autocast_layers_compute_as_nn_linear(ranks: RankPool) -> None:
    ranks.run(2, under_autocast)


def refused(comm: Communicator) -> None:
    column, row = ad.ColumnParallelLinear, ad.RowParallelLinear
    layer, bias = cast(Any, column(4, 4, comm)), torch.zeros(4)
    at_last = row(8, 4, comm, sequence_parallel=True, seq_dim=1)
    shape, sizes = torch.ones(4, 8), r"blocks is .* in 24 outputs, or their sizes"
    rows: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"x has shape \(4, 8\), expected \[\.\., 4\]", partial(layer, shape)),
        (ValueError, r"x has shape \(4, 8\), expected \[\.\., 4\]", partial(row(8, 4, comm), shape)),
        (ValueError, "expected a last dimension of 4", partial(column(4, 8, comm, gather_input=False), shape)),
        (TypeError, r"x is a str, expected a torch\.Tensor", partial(layer, "x")),
        (ValueError, r"seq_dim 1 is the last dimension of \[4, 4\]", partial(at_last, torch.ones(4, 4))),
        (TypeError, "expected a torch.nn.Linear", partial(column.from_linear, nn.Identity(), comm)),  # type: ignore[arg-type]
        (ValueError, "out_features is 5, not divisible by 2", partial(column, 4, 5, comm)),
        (ValueError, "in_features is 5, not divisible by 2", partial(row, 5, 4, comm)),
        (ValueError, "has shape .4, 4., what was passed .2, 4.", partial(layer.load_full, torch.zeros(2, 4), bias)),
        (ValueError, "bias is None, and the layer has one", partial(layer.load_full, torch.zeros(4, 4))),
        *((ValueError, sizes, partial(column, 4, 24, comm, blocks=blocks)) for blocks in (0, 5, "3", (25, -1), None)),  # type: ignore[arg-type]
        (ValueError, "or their sizes, each divisible by 2 ranks", partial(column, 4, 24, comm, blocks=(11, 13))),
    ]
    for error, words, call in rows:
        with pytest.raises(error, match=words):
            call()


def test_bad_input_is_refused_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, refused)
