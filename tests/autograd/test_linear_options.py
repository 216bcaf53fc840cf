"""What a parallel linear layer can be made of and told: an nn.Linear, batch first, shared inputs, whole outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPool, each_size
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


@each_size
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("shared", [False, True])
def test_layers_made_of_linear_ones_equal_them(
    ranks: RankPool, n: int, sequence_parallel: bool, seq_dim: int, shared: bool
) -> None:
    for bias in (True, False):
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


@each_size
@pytest.mark.parametrize("sequence_parallel", [False, True])
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


def nonsense(comm: Communicator) -> None:
    column, row = ad.ColumnParallelLinear(4, 8, comm), ad.RowParallelLinear(8, 4, comm, sequence_parallel=True)
    shared = ad.ColumnParallelLinear(4, 8, comm, gather_input=False)
    with pytest.raises(ValueError, match=r"x has shape \[3, 8\], expected a last dimension of 4"):
        shared(torch.ones(3, 8))
    for layer in (column, row):
        with pytest.raises(ValueError, match=r"x has shape \(4, 8\), expected \[\.\., 4\]"):
            layer(torch.ones(4, 8))
    for wrong in (column, row, shared):
        with pytest.raises(TypeError, match=r"x is a str, expected a torch\.Tensor"):
            wrong("x")
    with pytest.raises(ValueError, match=r"seq_dim 1 is the last dimension of \[4, 4\]"):
        ad.RowParallelLinear(8, 4, comm, sequence_parallel=True, seq_dim=1)(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"seq_dim"):
        ad.RowParallelLinear(8, 4, comm, sequence_parallel=True, seq_dim=5)(torch.ones(4, 4))
    with pytest.raises(TypeError, match=r"from_linear: linear is .*, expected a torch.nn.Linear"):
        ad.ColumnParallelLinear.from_linear(nn.Identity(), comm)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out_features is 5, not divisible by 2 ranks"):
        ad.ColumnParallelLinear.from_linear(nn.Linear(4, 5), comm)
    with pytest.raises(ValueError, match=r"grad_accumulation_fusion needs gather_input=True"):
        ad.ColumnParallelLinear(4, 8, comm, grad_accumulation_fusion=True, gather_input=False)


def test_bad_input_is_refused_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, nonsense)
