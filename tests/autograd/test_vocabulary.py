"""The vocabulary cut over ranks: the embedding and the loss against nn.Embedding and F.cross_entropy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool, each_size
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

TOLERANCE = {"rtol": 1e-11, "atol": 1e-13}
SEQUENCE, BATCH, WIDTH = 12, 2, 5


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, **TOLERANCE)


def embeds(comm: Communicator, words: int, padding: int | None, sequence_parallel: bool, seq_dim: int) -> None:
    torch.manual_seed(words)
    whole = nn.Embedding(words, WIDTH, padding_idx=padding, dtype=torch.float64)
    shape = (SEQUENCE, BATCH) if seq_dim == 0 else (BATCH, SEQUENCE)
    ids = torch.randint(words, shape)
    g = torch.randn(*shape, WIDTH, dtype=torch.float64)
    y = whole(ids)
    y.backward(g)

    def part(t: Tensor) -> Tensor:
        return t.chunk(comm.size, seq_dim)[comm.rank] if sequence_parallel else t

    layer = ad.VocabParallelEmbedding.from_embedding(whole, comm, sequence_parallel, seq_dim=seq_dim)
    assert len(layer.weight) == layer.splits[comm.rank] and sum(layer.splits) == words
    y_own = layer(ids)
    y_own.backward(part(g))
    close(y_own, part(y.detach()))
    assert whole.weight.grad is not None
    close(layer.weight.grad, whole.weight.grad.split(layer.splits)[comm.rank])
    close(layer.full_state()["weight"], whole.weight.detach())


@each_size
def test_an_embedding_equals_the_whole_one(ranks: RankPool, n: int) -> None:
    """Words, one of padding, whether its output is cut along the sequence, and in which dimension."""
    for case in ((12, 1, False, 0), (13, -2, False, 0), (2, None, False, 0), (13, None, True, 0), (2, 1, True, 1)):
        ranks.run(n, embeds, *case)


def drawn(comm: Communicator) -> tuple[Tensor, float]:
    torch.manual_seed(7)
    layer = ad.VocabParallelEmbedding(13, WIDTH, comm, padding_idx=3)
    return layer.full_state()["weight"], torch.rand(()).item()


def test_parameters_depend_on_the_seed_alone(ranks: RankPool) -> None:
    torch.manual_seed(7)
    expected, after = nn.Embedding(13, WIDTH, padding_idx=3).weight.detach(), torch.rand(()).item()
    for n in (1, 2, 3):
        for weight, number in ranks.run(n, drawn):
            assert torch.equal(weight, expected) and number == after


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


def loses(comm: Communicator, options: dict[str, Any], words: int, scale: float) -> None:
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
    close(loss, expected)
    assert logits.grad is not None
    close(own.grad, logits.grad.split(splits, -1)[comm.rank])


@each_size
def test_the_loss_equals_that_of_whole_logits(ranks: RankPool, n: int) -> None:
    sizes = itertools.cycle(((12, 1.0), (13, 1.0), (7, 1e3), (2, 1.0)))
    for options, (words, scale) in zip(2 * LOSSES, sizes, strict=False):
        ranks.run(n, loses, options, words, scale)


def second_order(comm: Communicator) -> None:
    torch.manual_seed(1)
    whole = torch.randn(4, 6, dtype=torch.float64)
    target, v = torch.tensor([0, 5, 2, 3]), torch.randn(4, 6, dtype=torch.float64)

    def own(t: Tensor) -> Tensor:
        return t.chunk(comm.size, -1)[comm.rank]

    def curvature(x: Tensor, loss: Tensor, along: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        # The inner product is the sum over all ranks' columns.
        product = (first * along).sum()
        if x.shape != whole.shape:
            product = ad.all_reduce(product, comm, grad="replicated")
        (second,) = torch.autograd.grad(product, x)
        return second

    x = whole.clone().requires_grad_()
    expected = curvature(x, F.cross_entropy(x, target), v)
    x = own(whole).clone().requires_grad_()
    found = curvature(x, ad.vocab_parallel_cross_entropy(x, target, comm), own(v))
    close(found, own(expected))


def test_second_derivatives(ranks: RankPool) -> None:
    ranks.run(3, second_order)


def half(comm: Communicator) -> None:
    torch.manual_seed(2)
    logits, target = torch.randn(8, 16).bfloat16(), torch.randint(16, (8,))
    loss = ad.vocab_parallel_cross_entropy(logits.chunk(comm.size, -1)[comm.rank], target.int(), comm)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target))


def test_half_precision_is_summed_in_single(ranks: RankPool) -> None:
    ranks.run(2, half)


def refused(comm: Communicator) -> None:
    loss, logits, target = ad.vocab_parallel_cross_entropy, torch.randn(3, 4), torch.tensor([0, 1, 2])
    embedding: Any = ad.VocabParallelEmbedding
    layer = embedding(8, 2, comm)
    many, short = torch.tensor([0, 1, 8]), target[:2]
    rows: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (
            ValueError,
            r"target has shape \[2\], expected \[3\], that of logits \[3, 4\]",
            lambda: loss(logits, short, comm),
        ),
        (IndexError, r"target has 8, expected 0 to 7: the vocabulary has 8 words", lambda: loss(logits, many, comm)),
        (
            TypeError,
            r"target is .*float32.*, expected a tensor of int64 or int32",
            lambda: loss(logits, torch.ones(3), comm),
        ),
        (TypeError, r"logits is .*int64.*, expected a floating-point tensor", lambda: loss(target, target, comm)),
        (ValueError, r"logits has 4 columns, expected 5", lambda: loss(logits, target, comm, splits=[5, 5])),
        (
            ValueError,
            r"label_smoothing is 1.5, expected 0.0 to 1.0",
            lambda: loss(logits, target, comm, label_smoothing=1.5),
        ),
        (ValueError, r"reduction is 'max'", lambda: loss(logits, target, comm, reduction="max")),  # type: ignore[arg-type]
        (IndexError, r"ids has -1, expected 0 to 7", lambda: layer(torch.tensor([-1]))),
        (TypeError, r"ids is a tensor of .*float32", lambda: layer(torch.ones(2))),
        (ValueError, r"padding_idx is 8, expected .* one of the 8 rows", lambda: embedding(8, 2, comm, padding_idx=8)),
        (ValueError, r"num_embeddings is -1", lambda: embedding(-1, 2, comm)),
        (ValueError, r"has shape \[8, 2\], what was passed \[2, 8\]", lambda: layer.load_full(torch.ones(2, 8))),
        (ValueError, r"has max_norm=1.0", lambda: embedding.from_embedding(nn.Embedding(8, 2, max_norm=1.0), comm)),
    ]
    for error, words, call in rows:
        with pytest.raises(error, match=words):
            call()


def test_bad_input_is_refused_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, refused)


def tied(comm: Communicator) -> None:
    """One weight at both ends of a model, cut once."""
    torch.manual_seed(5)
    words, ids = 11, torch.randint(11, (6,))
    whole = nn.Embedding(words, WIDTH, dtype=torch.float64)
    F.cross_entropy(torch.tanh(whole(ids)) @ whole.weight.T, ids.roll(1)).backward()
    layer = ad.VocabParallelEmbedding.from_embedding(whole, comm)
    hidden = ad.copy(torch.tanh(layer(ids)), comm)
    loss = ad.vocab_parallel_cross_entropy(hidden @ layer.weight.T, ids.roll(1), comm, splits=layer.splits)
    loss.backward()
    assert whole.weight.grad is not None
    close(layer.weight.grad, whole.weight.grad.split(layer.splits)[comm.rank])


def test_a_tied_weight_has_both_gradients(ranks: RankPool) -> None:
    ranks.run(3, tied)
