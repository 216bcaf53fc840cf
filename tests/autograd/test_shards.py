"""Parameters that know what they are parts of: kept in copies, gathered, their gradients finished and clipped."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

import pynccl_autograd as ad
from pynccl import Communicator

SEQUENCE, BATCH, WIDTH, HIDDEN, WORDS = 12, 2, 12, 24, 13


def close(found: Tensor | None, expected: Tensor | None, rtol: float = 1e-10) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)


class Model(nn.Module):
    """A block of a language model, sequence first; the norm is inside what sequence parallelism cuts."""

    def __init__(self, embedding: nn.Module, up: nn.Module, down: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.embedding, self.up, self.down, self.norm = embedding, up, down, norm

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def whole_model() -> Model:
    torch.manual_seed(9)
    norm = nn.LayerNorm(WIDTH)
    nn.init.normal_(norm.weight)
    return Model(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), norm).double()


def cut_model(whole: Model, comm: Communicator, sequence_parallel: bool) -> Model:
    norm = copy.deepcopy(whole.norm)
    for parameter in norm.parameters():
        parameter.shard = ad.Shard(comm, None, parameter.shape, partial=sequence_parallel)  # type: ignore[attr-defined]
    assert isinstance(whole.embedding, nn.Embedding)
    assert isinstance(whole.up, nn.Linear) and isinstance(whole.down, nn.Linear)
    return Model(
        ad.VocabParallelEmbedding.from_embedding(whole.embedding, comm, sequence_parallel),
        ad.ColumnParallelLinear.from_linear(whole.up, comm, sequence_parallel),
        ad.RowParallelLinear.from_linear(whole.down, comm, sequence_parallel),
        norm,
    )


def clips(comm: Communicator, norm_type: float) -> None:
    for sequence_parallel in (False, True):
        for max_norm in (0.1, 1e6):
            whole = whole_model()
            ids = torch.randint(WORDS, (SEQUENCE, BATCH))
            whole(ids).square().sum().backward()
            model = cut_model(whole, comm, sequence_parallel)
            model(ids).square().sum().backward()
            ad.finish_gradients(model, bucket_bytes=100)
            pairs = list(zip(model.parameters(), whole.parameters(), strict=True))
            for parameter, other in pairs:
                close(parameter.grad, parameter.shard.own(other.grad))  # type: ignore[attr-defined]
            expected = clip_grad_norm_(whole.parameters(), max_norm, norm_type)
            close(ad.clip_grad_norm_(model.parameters(), max_norm, norm_type), expected)
            for parameter, other in pairs:
                close(parameter.grad, parameter.shard.own(other.grad))  # type: ignore[attr-defined]
                close(parameter.shard.gather(parameter.detach()), other.detach())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("n", "norm_type"), [(2, 1.0), (3, 2.0), (2, 3.5), (4, math.inf)])
def test_gradients_and_their_norm_equal_those_of_the_whole_model(ranks: RankPool, n: int, norm_type: float) -> None:
    ranks.run(n, clips, norm_type)


def without_gradients(comm: Communicator) -> list[float]:
    """A rank whose part of the vocabulary does not occur, and that froze it, comes to the sum all the same."""
    layer = ad.VocabParallelEmbedding(4, 2, comm)
    if comm.rank == 0:
        layer(torch.tensor([0, 1, 1]))[1:].sum().backward()
    else:
        layer(torch.tensor([0, 1, 1]))
    ad.finish_gradients(layer)
    return [ad.clip_grad_norm_(layer, 10.0).item(), ad.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item()]


def test_a_rank_without_gradients_counts_as_zero(ranks: RankPool) -> None:
    for found in ranks.run(2, without_gradients):
        assert found == [pytest.approx(math.sqrt(8)), 0.0]


def stays(comm: Communicator) -> None:
    linear = ad.ColumnParallelLinear(4, 2 * comm.size, comm)

    def marked(layer: nn.Module) -> bool:
        shards = [getattr(parameter, "shard", None) for parameter in layer.parameters()]
        return all(isinstance(shard, ad.Shard) and shard.comm is comm for shard in shards) and len(shards) == 2

    assert marked(linear)
    assert marked(copy.deepcopy(linear)) and marked(copy.copy(linear))
    assert marked(AveragedModel(linear).module)
    assert marked(linear.double()) and marked(linear.to(torch.bfloat16))
    with torch.device("meta"):
        empty = ad.ColumnParallelLinear(4, 2 * comm.size, comm)
    assert marked(empty)
    assert empty.weight.device.type == "meta"
    empty.load_state_dict({name: torch.ones(p.shape) for name, p in empty.named_parameters()}, assign=True)
    assert marked(empty)
    assert empty.weight.device.type == "cpu"
    assert marked(ad.ColumnParallelLinear(4, 2 * comm.size, comm, device="meta").to_empty(device="cpu"))
    first = 2 * comm.rank
    assert repr(linear.weight.shard) == (  # type: ignore[attr-defined]
        f"Shard({first} to {first + 2} of dimension 0 of [4, 4], rank {comm.rank} of 2)"
    )
    assert repr(ad.Shard(comm, None, (3,), partial=True)) == (
        f"Shard(all of [3], rank {comm.rank} of 2, partial gradients)"
    )


def test_copies_and_moved_parameters_still_know(ranks: RankPool) -> None:
    ranks.run(2, stays)


def nonsense(comm: Communicator) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([math.nan, 1.0])
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        ad.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match=r"norm_type is 0, expected a number above 0"):
        ad.clip_grad_norm_(parameter, 1.0, 0)
    with pytest.raises(TypeError, match=r"finish_gradients: expected a module or its parameters, got 'weight'"):
        ad.finish_gradients(["weight"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"splits is \(1, 1\), expected 2 sizes that add up to 4, that of dimension 0"):
        ad.Shard(comm, 0, (4, 2), (1, 1))
    with pytest.raises(ValueError, match=r"the whole parameter has shape \[4, 2\], what was passed \[2, 2\]"):
        ad.Shard(comm, 0, (4, 2)).own(torch.ones(2, 2))


def test_bad_input_is_refused(ranks: RankPool) -> None:
    ranks.run(2, nonsense)
