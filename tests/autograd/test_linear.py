"""Parallel linear layers compared with nn.Linear: outputs, gradients, sequence dimension, shared inputs, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

SEQUENCE, BATCH, WIDTH, HIDDEN = 12, 2, 12, 24


def assert_equal(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Block(nn.Module):
    """Two projections of one input, and a projection of their product."""

    def __init__(self, a: nn.Module, b: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.down = a, b, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.a(x)) * self.b(x))
        return y


def compare_with_linear(comm: Communicator, sequence_parallel: bool, seq_dim: int, shared: bool, bias: bool) -> None:
    torch.manual_seed(8)
    sizes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    unsharded: Any = Block(*(nn.Linear(*size, bias=bias, dtype=torch.float64) for size in sizes))
    unsharded.b.weight.requires_grad_(False)
    shape = [BATCH, BATCH, WIDTH]
    shape[seq_dim] = SEQUENCE
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    g = torch.randn(shape, dtype=torch.float64)
    y = unsharded(x)
    y.backward(g)

    def own_shard(t: Tensor) -> Tensor:
        return t.chunk(comm.size, seq_dim)[comm.rank] if sequence_parallel else t

    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "seq_dim": seq_dim}
    column = partial(ad.ColumnParallelLinear.from_linear, comm=comm, gather_input=not shared, **options)
    down = ad.RowParallelLinear.from_linear(unsharded.down, comm, **options)
    block: Any = Block(column(unsharded.a), column(unsharded.b), down)
    x_own = own_shard(x.detach()).clone().requires_grad_()
    entered: Tensor = x_own
    if shared:
        entered = ad.all_gather(x_own, comm, seq_dim, grad="sum") if sequence_parallel else ad.copy(x_own, comm)
    y_own = block(entered)
    y_own.backward(own_shard(g))
    assert_equal(y_own, own_shard(y.detach()))
    assert x.grad is not None
    assert_equal(x_own.grad, own_shard(x.grad))
    assert_equal(block.a.weight.grad, unsharded.a.weight.grad.chunk(comm.size, 0)[comm.rank])
    assert_equal(block.down.weight.grad, unsharded.down.weight.grad.chunk(comm.size, 1)[comm.rank])
    assert block.b.weight.grad is None and not block.b.weight.requires_grad
    if bias:
        assert_equal(block.b.bias.grad, unsharded.b.bias.grad.chunk(comm.size, 0)[comm.rank])
        assert_equal(block.down.bias.grad, unsharded.down.bias.grad)


PAIRWISE = [  # ranks, sequence_parallel, seq_dim, whether a and b share their input, bias
    (2, False, 0, False, True),
    (2, True, 1, True, False),
    (3, True, 0, False, False),
    (3, False, 1, True, True),
    (4, True, 1, False, True),
    (4, True, 0, True, True),
]


@pytest.mark.parametrize(("n", "sequence_parallel", "seq_dim", "shared", "bias"), PAIRWISE)
def test_layers_from_linear_equal_the_linear_layers(
    ranks: RankPool, n: int, sequence_parallel: bool, seq_dim: int, shared: bool, bias: bool
) -> None:
    ranks.run(n, compare_with_linear, sequence_parallel, seq_dim, shared, bias)


def compare_initialization(comm: Communicator) -> None:
    """The same seed gives the layers of torch.nn on any number of ranks, and the same generator state."""
    torch.manual_seed(11)
    unsharded = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Embedding(13, WIDTH, padding_idx=3)
    after = torch.rand(1)
    torch.manual_seed(11)
    sharded = (
        ad.ColumnParallelLinear(WIDTH, HIDDEN, comm),
        ad.RowParallelLinear(HIDDEN, WIDTH, comm),
        ad.VocabParallelEmbedding(13, WIDTH, comm, padding_idx=3),
    )
    assert torch.equal(torch.rand(1), after)
    for layer, expected in zip(sharded, unsharded, strict=True):
        torch.testing.assert_close(layer.full_state(), {**expected.state_dict()}, rtol=1e-6, atol=1e-7)


def test_initialization_equals_that_of_torch_on_any_number_of_ranks(ranks: RankPool) -> None:
    for n in (2, 3):
        ranks.run(n, compare_initialization)


def under_autocast(comm: Communicator) -> None:
    """Compare values and dtypes of outputs and gradients with nn.Linear, for both layers in both modes."""
    size = 2 * comm.size
    torch.manual_seed(1)
    full_x = torch.randn(size, size)
    kinds: tuple[Any, ...] = (ad.ColumnParallelLinear, ad.RowParallelLinear)
    for kind, sequence_parallel, dtype in product(kinds, (False, True), (torch.bfloat16, torch.float16)):
        plain, row = nn.Linear(size, size), kind is ad.RowParallelLinear
        layer = kind.from_linear(plain, comm, sequence_parallel)
        own_x = full_x.chunk(comm.size, int(row))[comm.rank] if row or sequence_parallel else full_x
        found: list[tuple[Tensor, list[Any]]] = []
        for module, module_input in ((plain, full_x), (layer, own_x)):
            x = module_input.clone().requires_grad_()
            with torch.autocast("cpu", dtype=dtype):
                y = module(x)
            y.float().sum().backward()
            grads = [tensor.grad for tensor in (x, *module.parameters())]
            found.append((y, [y.dtype, *(tensor.dtype for tensor in grads if tensor is not None)]))
        (expected, types), (y, own_types) = found
        assert own_types == types and types[0] == dtype, (kind, sequence_parallel)
        if not row or sequence_parallel:
            expected = expected.chunk(comm.size, int(not row))[comm.rank]
        torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)


def test_under_autocast_layers_equal_nn_linear(ranks: RankPool) -> None:
    ranks.run(2, under_autocast)


def check_default_device(comm: Communicator) -> None:
    """What ranks tell each other is on their device, wherever the program makes its tensors: "auto" compares sizes."""
    x, w = torch.ones(256, 512), torch.ones(512, 512)
    with torch.device("meta"):
        layer = ad.ColumnParallelLinear(4, 8, comm)
        y = ad.matmul_all_reduce(x, w, comm)
    assert layer.weight.is_meta and torch.equal(y, torch.full((256, 512), 512.0 * comm.size))


def test_calls_under_another_default_device(ranks: RankPool) -> None:
    ranks.run(2, check_default_device)


def compare_empty(comm: Communicator) -> None:
    """Layers of 0 features, as nn.Linear has them; the sizes are integers of NumPy and torch."""
    x, empty = torch.ones(4, 2), torch.ones(4, 0)
    to_nothing: Any = ad.ColumnParallelLinear(2, torch.tensor(0), comm)  # type: ignore[arg-type]
    of_nothing: Any = ad.RowParallelLinear(np.array(0), np.uint8(2), comm)  # type: ignore[arg-type]
    to_nothing_row, of_nothing_column = ad.RowParallelLinear(4, 0, comm), ad.ColumnParallelLinear(0, 4, comm)
    unsharded = nn.Linear(0, 2)
    of_nothing.load_full(unsharded.weight, unsharded.bias)
    for layer, given, expected in (
        (to_nothing, x, (4, 0)),
        (of_nothing, empty, (4, 2)),
        (to_nothing_row, x, (4, 0)),
        (of_nothing_column, empty, (4, 2)),
    ):
        y = layer(given.clone().requires_grad_())
        assert y.shape == expected
        y.sum().backward()
        full = layer.full_state()
        assert list(full["weight"].shape) == [layer.out_features, layer.in_features]
        assert "blocks" not in repr(layer.weight.shard)
    assert_equal(of_nothing(empty), unsharded(empty))
    for blocks in (0, (), 3):
        with pytest.raises(ValueError, match=r"blocks is .* in 0 features"):
            ad.ColumnParallelLinear(2, 0, comm, blocks=blocks)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_of_no_features_equal_nn_linear(ranks: RankPool) -> None:
    ranks.run(2, compare_empty)


def check_bad_input(comm: Communicator) -> None:
    column, row = ad.ColumnParallelLinear, ad.RowParallelLinear
    layer, bias = cast(Any, column(4, 4, comm)), torch.zeros(4)
    at_last = row(8, 4, comm, sequence_parallel=True, seq_dim=1)
    shape, sizes = torch.ones(4, 8), r"blocks is .* in 24 features, or their sizes"
    rows: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"x has shape \(4, 8\), expected \[\.\., 4\]", partial(layer, shape)),
        (ValueError, r"x has shape \(4, 8\), expected \[\.\., 4\]", partial(row(8, 4, comm), shape)),
        (ValueError, r"expected \[.., 4\]", partial(column(4, 8, comm, gather_input=False), shape)),
        (TypeError, r"x is a str, expected a torch\.Tensor", partial(layer, "x")),
        (ValueError, r"seq_dim 1 is the last dimension of x \[4, 4\]", partial(at_last, torch.ones(4, 4))),
        (TypeError, r"ColumnParallelLinear.__init__\(\) got an unex.* 'seq'", partial(column, 4, 4, comm, seq=1)),  # type: ignore[call-arg]
        (TypeError, r"RowParallelLinear.__init__\(\) got an unex.* 'seq'", partial(row, 4, 4, comm, seq=1)),  # type: ignore[call-arg]
        (TypeError, r"missing 1 .* argument: 'shared'", partial(cast(Any, ad.KeyValueLinear), 4, 4, comm)),
        (TypeError, "expected a torch.nn.Linear", partial(column.from_linear, nn.Identity(), comm)),  # type: ignore[arg-type]
        (ValueError, "out_features is 5, not divisible by 2", partial(column, 4, 5, comm)),
        (ValueError, "in_features is 5, not divisible by 2", partial(row, 5, 4, comm)),
        (
            ValueError,
            "got a tensor of shape .2, 4., expected the full parameter, .4, 4.",
            partial(layer.load_full, torch.zeros(2, 4), bias),
        ),
        (ValueError, "bias is None, but the layer has one", partial(layer.load_full, torch.zeros(4, 4))),
        *((ValueError, sizes, partial(column, 4, 24, comm, blocks=blocks)) for blocks in (0, 5, "3", (25, -1), None)),  # type: ignore[arg-type]
        (ValueError, "or their sizes, each divisible by 2 ranks", partial(column, 4, 24, comm, blocks=(11, 13))),
    ]
    for error, words, call in rows:
        with pytest.raises(error, match=words):
            call()


def test_bad_input_raises_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, check_bad_input)
