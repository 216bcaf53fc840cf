"""Vocabulary-sharded embedding and loss compared with nn.Embedding and F.cross_entropy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool, each_size
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

SEQUENCE, BATCH, WIDTH = 12, 2, 5


def assert_close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


EMBEDDINGS = [  # words, padding_idx, sequence_parallel, seq_dim
    (12, 1, False, 0),
    (13, -2, False, 0),
    (2, None, False, 0),
    (13, None, True, 0),
    (2, 1, True, 1),
]


def compare_unusual_sizes(comm: Communicator) -> None:
    """A vocabulary of no rows, and sizes and an index that are unsigned integers of NumPy."""
    padded = ad.VocabParallelEmbedding(np.uint8(13), np.uint8(4), comm, np.uint8(2))  # type: ignore[arg-type]
    assert torch.equal(padded(torch.tensor([2])), torch.zeros(1, 4)) and sum(padded.splits) == 13
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    embedding, head = ad.VocabParallelEmbedding(0, 4, comm), ad.VocabParallelHead(4, 0, comm, True)
    y = head(embedding(nothing))
    y.sum().backward()
    assert y.shape == (2, 0, 0) and embedding.full_state()["weight"].shape == head.full_state()["weight"].shape == (
        0,
        4,
    )


def compare_embeddings(comm: Communicator) -> None:
    for words, padding, sequence_parallel, seq_dim in EMBEDDINGS:
        torch.manual_seed(words)
        full = nn.Embedding(words, WIDTH, padding_idx=padding, dtype=torch.float64)
        shape = (SEQUENCE, BATCH) if seq_dim == 0 else (BATCH, SEQUENCE)
        ids = torch.randint(words, shape)
        g = torch.randn(*shape, WIDTH, dtype=torch.float64)
        y, y_own_g = full(ids), g
        y.backward(g)
        if sequence_parallel:
            y, y_own_g = (t.chunk(comm.size, seq_dim)[comm.rank] for t in (y.detach(), g))
        layer = ad.VocabParallelEmbedding.from_embedding(full, comm, sequence_parallel, seq_dim=seq_dim)
        assert len(layer.weight) == layer.splits[comm.rank] and sum(layer.splits) == words
        y_own = layer(ids)
        y_own.backward(y_own_g)
        assert_close(y_own, y)
        assert full.weight.grad is not None
        assert_close(layer.weight.grad, full.weight.grad.split(layer.splits)[comm.rank])
        assert_close(layer.full_state()["weight"], full.weight.detach())


LOSSES: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.3},
    {"ignore_index": 4, "label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"z_loss": 0.5, "label_smoothing": 1.0, "reduction": "sum"},
]


def reference(logits: Tensor, target: Tensor, z_loss: float = 0.0, ignore_index: int = -100, **options: Any) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    reduction = options.get("reduction", "mean")
    loss = F.cross_entropy(flat, target.reshape(-1), ignore_index=ignore_index, **options)
    counted = (target != ignore_index).reshape(-1)
    extra = z_loss * flat.logsumexp(-1) ** 2 * counted
    if reduction == "none":
        return (loss + extra).reshape(target.shape)
    return loss + (extra.sum() / counted.sum() if reduction == "mean" else extra.sum())


def compare_losses(comm: Communicator) -> None:
    for options, (words, scale) in itertools.product(LOSSES, ((13, 1.0), (7, 1e3), (2, 1.0))):
        torch.manual_seed(words)
        logits = (scale * torch.randn(SEQUENCE, BATCH, words, dtype=torch.float64)).requires_grad_()
        target = torch.randint(words, (SEQUENCE, BATCH))
        target[3, 1] = options.get("ignore_index", -100)
        expected = reference(logits, target, **options)
        g = torch.randn(expected.shape, dtype=torch.float64)
        expected.backward(g)
        splits = [words // comm.size + (rank < words % comm.size) for rank in range(comm.size)]
        own = logits.detach().split(splits, -1)[comm.rank].clone().requires_grad_()
        loss = ad.vocab_parallel_cross_entropy(own, target, comm, splits=splits, **options)
        loss.backward(g)
        assert_close(loss, expected)
        assert logits.grad is not None
        assert_close(own.grad, logits.grad.split(splits, -1)[comm.rank])


@each_size
@pytest.mark.parametrize("compare", [compare_embeddings, compare_losses])
def test_embedding_and_loss_equal_the_unsharded_ones(ranks: RankPool, n: int, compare: Callable[..., None]) -> None:
    ranks.run(n, compare)


def compare_half_precision(comm: Communicator) -> None:
    """bfloat16 logits are summed in float32."""
    logits = torch.randn(8, 18, generator=torch.Generator().manual_seed(2)).bfloat16()
    target = torch.arange(8) * 2
    loss = ad.vocab_parallel_cross_entropy(logits.chunk(comm.size, -1)[comm.rank], target.int(), comm)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target))


def check_bad_input(comm: Communicator) -> None:
    logits, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
    loss, embedding = partial(ad.vocab_parallel_cross_entropy, comm=comm), partial(ad.VocabParallelEmbedding, comm=comm)
    layer: Any = embedding(8, 2)
    limited = nn.Embedding(8, 2, max_norm=1.0)
    rows: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"target has shape \[2\], expected \[3\], that of logits", partial(loss, logits, target[:2])),
        (IndexError, r"target has 8, expected 0 to 7", partial(loss, logits, torch.tensor([0, 1, 8]))),
        (TypeError, r"target is .*, expected a tensor of int64 or int32", partial(loss, logits, torch.ones(3))),
        (TypeError, r"logits is .*int64.*, expected a floating-point tensor", partial(loss, target, target)),
        (ValueError, r"logits has 4 columns, expected 5", partial(loss, logits, target, splits=[5, 5])),
        (ValueError, r"label_smoothing is 1.5, expected 0", partial(loss, logits, target, label_smoothing=1.5)),
        (ValueError, r"reduction is 'max'", partial(loss, logits, target, reduction="max")),
        (IndexError, r"ids has -1, expected 0 to 7", partial(layer, torch.tensor([-1]))),
        (TypeError, r"ids is a tensor of .*float32", partial(layer, torch.ones(2))),
        (ValueError, r"padding_idx is 8, expected .* one of the 8 rows", partial(embedding, 8, 2, padding_idx=8)),
        (ValueError, r"num_embeddings is -1", partial(embedding, -1, 2)),
        (ValueError, r"has max_norm=1.0", partial(ad.VocabParallelEmbedding.from_embedding, limited, comm)),
    ]
    for error, words, call in rows:
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("function", [compare_half_precision, compare_unusual_sizes, check_bad_input])
def test_half_precision_unusual_sizes_and_bad_input(ranks: RankPool, function: Callable[..., None]) -> None:
    ranks.run(2, function)
