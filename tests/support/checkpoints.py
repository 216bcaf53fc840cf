"""A small language model, whole and of parts, for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

WIDTH, HIDDEN, WORDS = 8, 24, 13  # the vocabulary divides by no number of ranks
NAMES = ["embedding.weight", "up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias"]
NAMES += ["norm_scale", "head.weight"]


class Head(nn.Module):
    """Logits of the whole vocabulary from the embedding's own weight."""

    def __init__(self, embedding: Any, comm: Communicator | None = None) -> None:
        super().__init__()
        self.weight, self.comm = embedding.weight, comm
        self.splits = None if comm is None else embedding.splits

    def forward(self, x: Tensor) -> Tensor:
        if self.comm is None:
            return F.linear(x, self.weight)
        y = F.linear(ad.copy(x, self.comm), self.weight)
        return ad.all_gather(y, self.comm, -1, grad="replicated", splits=self.splits)


class Model(nn.Module):
    """A language model of one block; of parts, if there is a communicator."""

    def __init__(self, comm: Communicator | None = None, words: int = WORDS) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": torch.float64}
        if comm is None:
            self.embedding: nn.Module = nn.Embedding(words, WIDTH, **kind)
            self.up: nn.Module = nn.Linear(WIDTH, HIDDEN, **kind)
            self.down: nn.Module = nn.Linear(HIDDEN, WIDTH, **kind)
        else:
            self.embedding = ad.VocabParallelEmbedding(words, WIDTH, comm, **kind)
            self.up = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, **kind)
            self.down = ad.RowParallelLinear(HIDDEN, WIDTH, comm, **kind)
        self.norm = nn.LayerNorm(WIDTH, **kind)
        self.norm_scale: Tensor
        self.register_buffer("norm_scale", torch.tensor(1.5, dtype=torch.float32))
        self.head = Head(self.embedding, comm)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y: Tensor = self.head(self.norm(x + self.down(torch.tanh(self.up(x)))) * self.norm_scale)
        return y


def whole_model(seed: int = 5) -> Model:
    torch.manual_seed(seed)
    model = Model()
    nn.init.normal_(model.norm.weight)
    model.norm_scale.fill_(seed)
    return model


def words() -> Tensor:
    return torch.arange(WORDS).reshape(1, WORDS)


def same_output(model: nn.Module, seed: int = 5) -> None:
    torch.testing.assert_close(model(words()), whole_model(seed)(words()), rtol=1e-12, atol=1e-12)


def loaded(comm: Communicator, seed: int = 5) -> Model:
    """Of parts, with the values of the whole model of that seed."""
    model = Model(comm)
    ad.load_full_state_dict(model, whole_model(seed).state_dict())
    return model


def saves(comm: Communicator, path: str, max_shard_bytes: float, seed: int = 5) -> None:
    ad.save_full_state_dict(loaded(comm, seed), path, max_shard_bytes)


def loads(comm: Communicator, path: str, seed: int = 5) -> None:
    model = Model(comm)
    assert ad.load_full_state_dict(model, path) == ([], [])
    same_output(model, seed)
    with torch.device("meta"):
        empty = Model(comm)
    ad.load_full_state_dict(empty, Path(path))
    assert empty.head.weight is empty.embedding.weight
    assert isinstance(empty.up.weight, nn.Parameter) and isinstance(empty.up.weight.shard, ad.Shard)  # type: ignore[attr-defined]
    same_output(empty, seed)


def steps(model: nn.Module, kind: Any, count: int, optimizer: Any = None) -> Any:
    optimizer = optimizer or kind(model.parameters())
    for _ in range(count):
        optimizer.zero_grad()
        (model(words()) - 1).square().sum().backward()
        optimizer.step()
    return optimizer


KINDS = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
    "groups": lambda parameters: torch.optim.AdamW(
        [{"params": (listed := list(parameters))[:2], "lr": 0.1}, {"params": listed[2:]}], lr=0.05
    ),
}


def with_group(comm: Communicator, store: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    return dist
