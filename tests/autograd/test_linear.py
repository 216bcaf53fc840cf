"""Parallel linear layers against the unsharded nn.Linear: outputs, gradients of inputs and parameters, state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool, each_size
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

SEQUENCE, BATCH, WIDTH, HIDDEN = 12, 2, 24, 48
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def reference(bias: bool) -> tuple[nn.Linear, nn.Linear, Tensor, Tensor]:
    """The unsharded MLP, its input, and the cotangent of its output: equal on all ranks."""
    torch.manual_seed(3)
    up = nn.Linear(WIDTH, HIDDEN, bias=bias, dtype=torch.float64)
    down = nn.Linear(HIDDEN, WIDTH, bias=bias, dtype=torch.float64)
    x = torch.randn(SEQUENCE, BATCH, WIDTH, dtype=torch.float64)
    g = torch.randn(SEQUENCE, BATCH, WIDTH, dtype=torch.float64)
    return up, down, x, g


def check_mlp(comm: Communicator, sequence_parallel: bool, bias: bool) -> None:
    n, r = comm.size, comm.rank
    up, down, x, g = reference(bias)
    x.requires_grad_()
    y = down(F.gelu(up(x)))
    y.backward(g)

    options = {"bias": bias, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
    column = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, **options)
    row = ad.RowParallelLinear(HIDDEN, WIDTH, comm, **options)
    column.load_full(up.weight, up.bias)
    row.load_full(down.weight, down.bias)

    def part(t: Tensor) -> Tensor:
        return t.chunk(n, 0)[r] if sequence_parallel else t

    x_own = part(x.detach()).clone().requires_grad_()
    y_own = row(F.gelu(column(x_own)))
    y_own.backward(part(g))

    def close(found: Tensor | None, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, **TOLERANCE)

    close(y_own, part(y.detach()))
    close(x_own.grad, part(x.grad))
    close(column.weight.grad, up.weight.grad.chunk(n, 0)[r])
    close(row.weight.grad, down.weight.grad.chunk(n, 1)[r])
    if bias:
        close(column.bias.grad, up.bias.grad.chunk(n, 0)[r])
        close(row.bias.grad, down.bias.grad)


@each_size
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_of_both_layers_equals_the_unsharded_one(
    ranks: RankPool, n: int, sequence_parallel: bool, bias: bool
) -> None:
    ranks.run(n, check_mlp, sequence_parallel, bias)


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


def bad_layers(comm: Communicator) -> list[str]:
    messages = []
    layer = ad.ColumnParallelLinear(4, 2 * comm.size, comm)
    for call in (
        lambda: ad.ColumnParallelLinear(4, 2 * comm.size + 1, comm),
        lambda: ad.RowParallelLinear(2 * comm.size + 1, 4, comm),
        lambda: layer.load_full(torch.zeros(2, 4), torch.zeros(2)),
        lambda: layer.load_full(torch.zeros(2 * comm.size, 4)),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    assert f"rank {comm.rank} of {comm.size}" in repr(layer)
    return messages


def test_sizes_that_do_not_fit_are_named(ranks: RankPool) -> None:
    for column, row, shape, bias in ranks.run(2, bad_layers):
        assert "out_features is 5, not divisible by 2 ranks" in column
        assert "in_features is 5, not divisible by 2 ranks" in row
        assert "has shape [4, 4], what was passed [2, 4]" in shape
        assert "bias is None, and the layer has one" in bias


def autocast_as_nn_linear(comm: Communicator) -> list[tuple[str, torch.dtype]]:
    """Types of outputs and gradients under autocast beside those of nn.Linear, of both layers in both modes."""
    seen = []
    for dtype in (torch.bfloat16, torch.float16):
        for layer_type in (ad.ColumnParallelLinear, ad.RowParallelLinear):
            for sequence_parallel in (False, True):
                for bias in (False, True):
                    layer = layer_type(
                        2 * comm.size, 2 * comm.size, comm, bias=bias, sequence_parallel=sequence_parallel
                    )
                    plain = nn.Linear(2 * comm.size, 2 * comm.size, bias=bias)
                    width = 2 if layer_type is ad.RowParallelLinear else 2 * comm.size
                    found = []
                    for module, size in ((plain, 2 * comm.size), (layer, width)):
                        x = torch.ones(2 * comm.size, size, requires_grad=True)
                        with torch.autocast("cpu", dtype=dtype):
                            y = module(x)
                            nested = module(y.detach()[:, :1].expand(-1, size))
                        (y.float().sum() + nested.float().sum()).backward()
                        grads = [x.grad.dtype, *(p.grad.dtype for p in module.parameters())]
                        found.append([y.dtype, nested.dtype, *grads])
                    assert found[0] == found[1], (layer_type, sequence_parallel, bias, found)
                    seen.append((layer_type.__name__, y.dtype))
    return seen


def test_under_autocast_layers_have_the_types_of_nn_linear(ranks: RankPool) -> None:
    for seen in ranks.run(2, autocast_as_nn_linear):
        assert len(seen) == 16 and {dtype for _, dtype in seen} == {torch.bfloat16, torch.float16}


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
