"""A small language model, unsharded and parallelized, for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

WIDTH, HIDDEN, WORDS = 8, 24, 13  # a vocabulary size that no number of ranks divides
PLAN: dict[str, Any] = {"embedding": "vocab_embedding", "head": "vocab_head", "norm": "replicated"}
PLAN |= {"up": "column", "down": "row"}


class Model(nn.Module):
    """A language model of one block whose head shares the embedding's weight."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.up, self.down, self.norm = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
        self.norm_scale: Tensor
        self.register_buffer("norm_scale", torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.embedding.weight
        for module in (self.embedding, self.up, self.down, self.norm):
            module.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y: Tensor = self.head(self.norm(x + self.down(torch.tanh(self.up(x)))) * self.norm_scale)
        return y


def full_model(seed: int = 5, words: int = WORDS) -> Model:
    torch.manual_seed(seed)
    model = Model(words)
    nn.init.normal_(model.norm.weight)
    model.norm_scale.fill_(seed)
    return model


def sharded_model(comm: Communicator, seed: int = 5, words: int = WORDS) -> Any:
    """Return the parallelized model with the values of full_model(seed, words)."""
    return ad.parallelize(full_model(seed, words), comm, PLAN, sequence_parallel=False)


def words() -> Tensor:
    return torch.arange(WORDS).reshape(1, WORDS)


def check_output(model: nn.Module, seed: int = 5) -> None:
    torch.testing.assert_close(model(words()), full_model(seed)(words()), rtol=1e-12, atol=1e-12)


def save(comm: Communicator, path: str, max_shard_bytes: float = 5e9, seed: int = 5) -> None:
    ad.save_full_state_dict(sharded_model(comm, seed), path, max_shard_bytes)


def check_load(comm: Communicator, path: str, seed: int = 5) -> None:
    """Load into a model with different values and into one on the meta device, and check both."""
    model = sharded_model(comm, seed + 1)
    assert ad.load_full_state_dict(model, path) == ([], [])
    check_output(model, seed)
    with torch.device("meta"):
        empty: Any = Model()
    ad.load_full_state_dict(ad.parallelize(empty, comm, PLAN, False), Path(path))
    assert empty.head.weight is empty.embedding.weight
    assert isinstance(empty.up.weight, nn.Parameter) and isinstance(empty.up.weight.shard, ad.Shard)  # type: ignore[attr-defined]
    check_output(empty, seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Run `count` steps and return the loss before each."""
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = (model(words()) - 1).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def init_gloo(comm: Communicator, store: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    return dist
