"""Parallel linear layers against nn.Linear: outputs, gradients, batch first, shared inputs, whole outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

SEQUENCE, BATCH, WIDTH, HIDDEN = 12, 2, 12, 24
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, **TOLERANCE)


class Block(nn.Module):
    """Two projections of one input, one of what they make."""

    def __init__(self, a: nn.Module, b: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.down = a, b, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.a(x)) * self.b(x))
        return y


def whole_block(bias: bool) -> Block:
    torch.manual_seed(8)
    linear = [
        nn.Linear(*sizes, bias=bias, dtype=torch.float64) for sizes in ((WIDTH, HIDDEN),) * 2 + ((HIDDEN, WIDTH),)
    ]
    linear[1].weight.requires_grad_(False)
    return Block(*linear)


def equals(comm: Communicator, sequence_parallel: bool, seq_dim: int, shared: bool, bias: bool) -> None:
    whole: Any = whole_block(bias)
    shape = [BATCH, BATCH, WIDTH]
    shape[seq_dim] = SEQUENCE
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    g = torch.randn(shape, dtype=torch.float64)
    y = whole(x)
    y.backward(g)

    def part(t: Tensor) -> Tensor:
        return t.chunk(comm.size, seq_dim)[comm.rank] if sequence_parallel else t

    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "seq_dim": seq_dim}
    up = [
        ad.ColumnParallelLinear.from_linear(one, comm, gather_input=not shared, **options) for one in (whole.a, whole.b)
    ]
    block: Any = Block(*up, ad.RowParallelLinear.from_linear(whole.down, comm, **options))
    x_own = part(x.detach()).clone().requires_grad_()
    entered: Tensor = x_own
    if shared:
        entered = ad.all_gather(x_own, comm, seq_dim, grad="sum") if sequence_parallel else ad.copy(x_own, comm)
    y_own = block(entered)
    y_own.backward(part(g))
    close(y_own, part(y.detach()))
    close(x_own.grad, part(x.grad if x.grad is not None else x))
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
    (2, False, 0, True, False),
]


@pytest.mark.parametrize(("n", "sequence_parallel", "seq_dim", "shared", "bias"), PAIRWISE)
def test_layers_made_of_linear_ones_equal_them(
    ranks: RankPool, n: int, sequence_parallel: bool, seq_dim: int, shared: bool, bias: bool
) -> None:
    ranks.run(n, equals, sequence_parallel, seq_dim, shared, bias)


def gathers(comm: Communicator, sequence_parallel: bool) -> None:
    """A classifier's head: each rank goes on with all of its outputs."""
    torch.manual_seed(3)
    whole = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
    x = torch.randn(SEQUENCE, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    y = whole(x)
    y.square().sum().backward()
    layer = ad.ColumnParallelLinear.from_linear(whole, comm, sequence_parallel, gather_output=True)
    x_own = (x.detach().chunk(comm.size)[comm.rank] if sequence_parallel else x.detach()).clone().requires_grad_()
    y_own = layer(x_own)
    y_own.square().sum().backward()
    close(y_own, y)
    assert x.grad is not None and whole.weight.grad is not None
    close(x_own.grad, x.grad.chunk(comm.size)[comm.rank] if sequence_parallel else x.grad)
    close(layer.weight.grad, whole.weight.grad.chunk(comm.size)[comm.rank])


@pytest.mark.parametrize(("n", "sequence_parallel"), [(2, True), (3, False), (4, True)])
def test_an_output_that_is_whole_on_every_rank(ranks: RankPool, n: int, sequence_parallel: bool) -> None:
    ranks.run(n, gathers, sequence_parallel)


def keeps(comm: Communicator) -> None:
    linear = nn.Linear(4, 2 * comm.size, dtype=torch.bfloat16).eval()
    linear.bias.requires_grad_(False)
    layer = ad.ColumnParallelLinear.from_linear(linear, comm)
    assert (layer.training, layer.weight.dtype) == (False, torch.bfloat16)
    assert (layer.weight.requires_grad, layer.bias is not None and layer.bias.requires_grad) == (True, False)
    with torch.no_grad():
        linear.weight.fill_(7)  # it is no view
    assert not (layer.weight == 7).any()
    with torch.device("meta"):
        empty = nn.Linear(4, 2 * comm.size)
    assert ad.RowParallelLinear.from_linear(nn.Linear(2 * comm.size, 4), comm).bias is not None
    assert ad.ColumnParallelLinear.from_linear(empty, comm).weight.is_meta


def test_what_a_linear_layer_is_stays_so(ranks: RankPool) -> None:
    ranks.run(2, keeps)


def drawn(comm: Communicator) -> dict[str, Tensor]:
    """Full parameters of layers drawn from one seed, and the generator's next number."""
    torch.manual_seed(11)
    column = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm)
    row = ad.RowParallelLinear(HIDDEN, WIDTH, comm)
    states = {f"column.{k}": v for k, v in column.full_state().items()}
    states |= {f"row.{k}": v for k, v in row.full_state().items()}
    return {**states, "next": torch.rand(1)}


def test_a_seed_draws_the_layer_that_nn_linear_draws_on_any_number_of_ranks(ranks: RankPool) -> None:
    torch.manual_seed(11)
    up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    expected = {"column.weight": up.weight, "column.bias": up.bias, "row.weight": down.weight, "row.bias": down.bias}
    expected["next"] = torch.rand(1)
    for n in (2, 3):
        for states in ranks.run(n, drawn):
            assert states.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(states[name], value.detach(), rtol=1e-6, atol=1e-7)


def autocast_as_nn_linear(comm: Communicator) -> None:
    """Types of outputs and gradients under autocast beside those of nn.Linear, of both layers in both modes."""
    size = 2 * comm.size
    dtypes, layer_types = (torch.bfloat16, torch.float16), (ad.ColumnParallelLinear, ad.RowParallelLinear)
    for dtype, layer_type, sequence_parallel, bias in product(dtypes, layer_types, (False, True), (False, True)):
        layer = layer_type(size, size, comm, bias=bias, sequence_parallel=sequence_parallel)
        plain = nn.Linear(size, size, bias=bias)
        found = []
        for module, width in ((plain, size), (layer, 2 if layer_type is ad.RowParallelLinear else size)):
            x = torch.ones(size, width, requires_grad=True)
            with torch.autocast("cpu", dtype=dtype):
                y = module(x)
                nested = module(y.detach()[:, :1].expand(-1, width))
            (y.float().sum() + nested.float().sum()).backward()
            found.append([y.dtype, nested.dtype, x.grad.dtype, *(one.grad.dtype for one in module.parameters())])
        assert found[0] == found[1] and found[0][0] == dtype, (layer_type, sequence_parallel, bias, found)


def test_under_autocast_layers_have_the_types_of_nn_linear(ranks: RankPool) -> None:
    ranks.run(2, autocast_as_nn_linear)


def autocast_values(comm: Communicator) -> None:
    """The bias is added in the type of the sum, its gradient summed over the ranks in its own."""
    for sequence_parallel in (False, True):
        row = ad.RowParallelLinear(4 * comm.size, 4, comm, sequence_parallel=sequence_parallel)
        plain = nn.Linear(4 * comm.size, 4)
        state = row.full_state()
        plain.load_state_dict(state)
        x = torch.randn(4 * comm.size, 4 * comm.size, generator=torch.Generator().manual_seed(2))
        part = x.chunk(comm.size, 1)[comm.rank]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, y = plain(x), row(part)
            if sequence_parallel:
                expected = expected.chunk(comm.size)[comm.rank]
        torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)
        y.float().sum().backward()
        assert row.bias.grad.tolist() == [4.0 * comm.size] * 4


def test_under_autocast_the_row_layer_computes_as_nn_linear(ranks: RankPool) -> None:
    ranks.run(2, autocast_values)


def refused(comm: Communicator) -> None:
    column, row = ad.ColumnParallelLinear, ad.RowParallelLinear
    whole_input = column(4, 8, comm, gather_input=False)
    layers = column(4, 8, comm), row(8, 4, comm, sequence_parallel=True)
    length, third = r"x has shape \(4, 8\), expected \[\.\., 4\]", torch.ones(4, 8)
    bad_dim = row(8, 4, comm, sequence_parallel=True, seq_dim=1), row(8, 4, comm, sequence_parallel=True, seq_dim=5)
    layer: Any = column(4, 4, comm)
    rows: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"x has shape \[3, 8\], expected a last dimension of 4", lambda: whole_input(torch.ones(3, 8))),
        *((ValueError, length, partial(one, third)) for one in layers),
        *((TypeError, r"x is a str, expected a torch\.Tensor", partial(one, "x")) for one in (*layers, whole_input)),
        (ValueError, r"seq_dim 1 is the last dimension of \[4, 4\]", lambda: bad_dim[0](torch.ones(4, 4))),
        (ValueError, "seq_dim", lambda: bad_dim[1](torch.ones(4, 4))),
        (TypeError, "linear is .*, expected a torch.nn.Linear", lambda: column.from_linear(nn.Identity(), comm)),  # type: ignore[arg-type]
        (ValueError, "out_features is 5, not divisible by 2", lambda: column.from_linear(nn.Linear(4, 5), comm)),
        (ValueError, "out_features is 5, not divisible by 2", lambda: column(4, 5, comm)),
        (ValueError, "in_features is 5, not divisible by 2", lambda: row(5, 4, comm)),
        (
            ValueError,
            "grad_accumulation_fusion needs gather_input=True",
            lambda: column(4, 8, comm, grad_accumulation_fusion=True, gather_input=False),
        ),
        (
            ValueError,
            r"has shape \[4, 4\], what was passed \[2, 4\]",
            lambda: layer.load_full(torch.zeros(2, 4), torch.zeros(2)),
        ),
        (ValueError, "bias is None, and the layer has one", lambda: layer.load_full(torch.zeros(4, 4))),
    ]
    for error, words, call in rows:
        with pytest.raises(error, match=words):
            call()
    assert f"rank {comm.rank} of {comm.size}" in repr(layer)


def test_bad_input_is_refused_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, refused)
