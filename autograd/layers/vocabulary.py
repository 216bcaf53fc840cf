"""VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy: layers sharded over the vocabulary.

N is the number of ranks, r this rank. V is the size of the vocabulary, of which rank r has V_r rows; if V is not
divisible by N, the first ranks have one more. ids and targets are indices into the full vocabulary, equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import instance, integer, shown

from ..arguments import as_int, check_call, check_comm, check_dense, check_dim, check_splits, check_type, checked
from ..ops.all_gather import all_gather, reduce_scatter
from ..ops.all_reduce import all_reduce, copy
from ..wire import Dtype
from .shard import Shard, checked_size
from .shards import Sharded, checked_seq_dim

_IDS = (torch.int64, torch.int32)


def rows_of_ranks(num_rows: int, ranks: int) -> tuple[int, ...]:
    """Return V_r of each rank."""
    each, more = divmod(num_rows, ranks)
    return tuple(each + (rank < more) for rank in range(ranks))


class _VocabParallel(Sharded):
    """Base class: this rank's rows of a weight [num_embeddings, embedding_dim], one for each token of the vocabulary.

    splits  number of rows of each rank; the first ranks have one more if V is not divisible by N
    first   index of this rank's first row
    """

    def _set_sizes(self, num_embeddings: int, embedding_dim: int, comm: Communicator) -> None:
        check_comm(type(self).__name__, comm, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        comm.check_alive()
        self.num_embeddings = checked_size(f"{type(self).__name__}: num_embeddings", num_embeddings)
        self.embedding_dim = checked_size(f"{type(self).__name__}: embedding_dim", embedding_dim)
        self.comm = comm
        self.splits = rows_of_ranks(self.num_embeddings, comm.size)
        self.first = sum(self.splits[: comm.rank])

    def shards(self) -> dict[str, Shard]:
        return {"weight": Shard(self.comm, 0, (self.num_embeddings, self.embedding_dim), self.splits)}


class VocabParallelEmbedding(_VocabParallel):
    """Embedding sharded over the vocabulary: y = W[ids], where each rank has V/N rows of W [V, D].

                         ids        y               forward           backward
    default              [s, ..]    [s, .., D]      all_reduce        -
    sequence_parallel    [s, ..]    [s/N, .., D]    reduce_scatter    all_gather(dy)

    num_embeddings     size of the vocabulary, V; it does not have to be divisible by N
    embedding_dim      size of each embedding, D
    comm               communicator of the N ranks
    padding_idx        row whose gradient is 0, as for nn.Embedding
    sequence_parallel  True: y is sharded along `seq_dim`, whose size must be divisible by N
    device, dtype      of the weight. Defaults: the communicator's device, torch's default dtype
    reduce_dtype       data type in which to sum over ranks; None: that of the weight

    Without sequence_parallel, y is equal on all ranks, and its gradient must be too. An id outside [0, V) raises
    IndexError on the CPU. On a GPU, where a check would synchronize, it gives a row of zeros.
    """

    @checked
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        comm: Communicator,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        seq_dim: int = 0,
        reduce_dtype: Dtype = None,
    ) -> None:
        super().__init__()
        self._set_sizes(num_embeddings, embedding_dim, comm)
        padding = None if padding_idx is None else as_int(padding_idx)
        if padding_idx is not None and (padding is None or not -self.num_embeddings <= padding < self.num_embeddings):
            raise ValueError(
                f"VocabParallelEmbedding: padding_idx is {shown(padding_idx)}, expected the index of one of the "
                f"{self.num_embeddings} rows, or None"
            )
        self.padding_idx = None if padding is None else int(padding % self.num_embeddings)
        self.sequence_parallel, self.reduce_dtype = sequence_parallel, reduce_dtype
        self.seq_dim = checked_seq_dim(type(self).__name__, seq_dim)
        self._make_parameters(False, device, dtype)

    @classmethod
    def like(
        cls, embedding: nn.Embedding, comm: Communicator, sequence_parallel: bool = False, **options: Any
    ) -> VocabParallelEmbedding:
        """Return a layer of the sizes of an nn.Embedding, on the meta device."""
        instance(embedding, nn.Embedding, f"{cls.__name__}.from_embedding: embedding", "a torch.nn.Embedding")
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, name):
                raise ValueError(
                    f"VocabParallelEmbedding.from_embedding: the embedding has {name}={getattr(embedding, name)!r}, "
                    "which a sharded embedding does not support; make it without"
                )
        num_embeddings, width = embedding.weight.shape
        padding, dtype = embedding.padding_idx, embedding.weight.dtype
        return cls(num_embeddings, width, comm, padding, sequence_parallel, "meta", dtype, **options)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, comm: Communicator, sequence_parallel: bool = False, **options: Any
    ) -> VocabParallelEmbedding:
        """Return a layer with this rank's shard of an nn.Embedding, which must be equal on all ranks.

        options: seq_dim, reduce_dtype. ValueError if the embedding has max_norm, scale_grad_by_freq or sparse, which a
        sharded one does not support."""
        return cls.like(embedding, comm, sequence_parallel, **options).take(embedding)

    def reset_parameters(self) -> None:
        """Initialize the weight as nn.Embedding does."""
        weight = self.weight.detach().new_empty(self.num_embeddings, self.embedding_dim).normal_()
        if self.padding_idx is not None:
            weight[self.padding_idx].zero_()
        self.load_full(weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of the embedding.   ids [s, ..] -> [s, .., D]; sequence_parallel: [s/N, .., D]"""
        _check_ids("VocabParallelEmbedding: ids", ids, self.num_embeddings)
        is_local, local = _local(ids, self.first, len(self.weight))
        if len(self.weight):
            padding = -1 if self.padding_idx is None else self.padding_idx - self.first
            rows = F.embedding(local, self.weight, padding if 0 <= padding < len(self.weight) else None)
            rows = rows.masked_fill(~is_local.unsqueeze(-1), 0)
        else:  # depends on the weight all the same, so that this rank takes part in the backward pass
            rows = self.weight.new_zeros(*ids.shape, self.embedding_dim) + self.weight.sum()
        if not self.sequence_parallel:
            y: Tensor = all_reduce(rows, self.comm, grad="replicated", reduce_dtype=self.reduce_dtype)
            return y
        dim = check_dim("VocabParallelEmbedding", ids, self.seq_dim, "seq_dim")
        y = reduce_scatter(rows, self.comm, dim, reduce_dtype=self.reduce_dtype)
        return y

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, rank {self.comm.rank} of {self.comm.size}: rows "
            f"{self.first} to {self.first + len(self.weight)}, sequence_parallel={self.sequence_parallel}"
        )


class VocabParallelHead(_VocabParallel):
    """Output layer sharded over the vocabulary: y_r = x @ W_r.T + b_r, where each rank has V/N rows of W [V, D].

    x is [.., D], equal on all ranks; so is its gradient, which the backward pass sums with an all_reduce. V does not
    have to be divisible by N, so W can be tied to the weight of a `VocabParallelEmbedding`.

    embedding_dim   size of the input features, D
    num_embeddings  size of the vocabulary, V
    comm            communicator of the N ranks
    bias            whether to add a bias. Default: False
    device, dtype   of the parameters. Defaults: the communicator's device, torch's default dtype
    gather_output   True: y is [.., V] on every rank, and its gradient must be equal on all ranks. False: y is
                    [.., V_r], for `vocab_parallel_cross_entropy(..., splits=head.splits)`
    """

    @checked
    def __init__(
        self,
        embedding_dim: int,
        num_embeddings: int,
        comm: Communicator,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        self._set_sizes(num_embeddings, embedding_dim, comm)
        self.gather_output = gather_output
        self._make_parameters(bias, device, dtype)

    @classmethod
    def like(cls, linear: nn.Linear, comm: Communicator, *, gather_output: bool = False) -> VocabParallelHead:
        """Return a layer of the sizes of an nn.Linear, on the meta device."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"VocabParallelHead.from_linear: linear is {shown(linear)}, expected a torch.nn.Linear")
        weight = linear.weight
        num_embeddings, width = weight.shape
        has_bias, dtype = linear.bias is not None, weight.dtype
        return cls(width, num_embeddings, comm, has_bias, "meta", dtype, gather_output=gather_output)

    @classmethod
    def from_linear(cls, linear: nn.Linear, comm: Communicator, *, gather_output: bool = False) -> VocabParallelHead:
        """Return a layer with this rank's shard of an nn.Linear, which must be equal on all ranks."""
        return cls.like(linear, comm, gather_output=gather_output).take(linear)

    def shards(self) -> dict[str, Shard]:
        return {**super().shards(), "bias": Shard(self.comm, 0, (self.num_embeddings,), self.splits)}

    def reset_parameters(self) -> None:
        """Initialize the parameters as nn.Linear does."""
        self._draw_as_linear(self.embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits.   x [.., D] -> [.., V_r]; gather_output: [.., V]"""
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.embedding_dim:
            raise ValueError(
                f"VocabParallelHead: x is {_describe(x)}, expected a last dimension of {self.embedding_dim}"
            )
        check_call("VocabParallelHead", x, self.comm)
        y = F.linear(copy(x, self.comm), self.weight, self.bias)
        if not self.gather_output:
            return y
        full: Tensor = all_gather(y, self.comm, -1, grad="replicated", splits=self.splits)
        return full

    def extra_repr(self) -> str:
        return (
            f"{self.embedding_dim}, {self.num_embeddings}, bias={self.bias is not None}, rank {self.comm.rank} of "
            f"{self.comm.size}: rows {self.first} to {self.first + len(self.weight)}, "
            f"gather_output={self.gather_output}"
        )


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    comm: Communicator,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    splits: Sequence[int] | None = None,
) -> Tensor:
    """Compute F.cross_entropy of logits that are sharded over the vocabulary, without gathering them.

    logits           [.., V_r], this rank's shard
    target           [..], int64 or int32 indices into the full vocabulary, equal on all ranks
    comm             communicator of the N ranks
    ignore_index     target value that does not contribute to the loss
    label_smoothing  0.0 to 1.0: share of the target that is spread over the full vocabulary
    z_loss           weight of the z-loss: adds z_loss * log(sum exp(logits))^2 for each target that is not ignored
    reduction        "mean" over the targets that are not ignored, "sum" or "none"
    splits           V_r of each rank, such as `VocabParallelHead.splits`; None: equal on all ranks

    Returns the loss, equal on all ranks; in float32 if the logits are half precision. Its gradient must be equal too:
    call backward() on every rank. The forward pass has two all_reduces (a maximum, and a sum of 2 or 3 numbers per
    target), the backward pass none. Source: Megatron-LM, arXiv:1909.08053, section 3.
    """
    name = "vocab_parallel_cross_entropy"
    splits = _check_loss(name, logits, target, comm, label_smoothing, reduction, splits)
    check_type(f"{name}: z_loss", "float", z_loss)
    ignore_index = integer(ignore_index, f"{name}: ignore_index", -(1 << 63), (1 << 63) - 1)
    columns = logits.shape[-1]
    size = columns * comm.size if splits is None else sum(splits)
    first = columns * comm.rank if splits is None else sum(splits[: comm.rank])
    _check_ids(f"{name}: target", target, size, ignore_index)

    x = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    lowest = x.new_full(x.shape[:-1], -math.inf)
    peak = all_reduce(x.detach().amax(-1) if columns else lowest, comm, "max", grad="replicated")
    shifted = x - peak.unsqueeze(-1)
    is_local, local = _local(target, first, columns)
    picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) if columns else shifted.sum(-1)
    terms = [shifted.exp().sum(-1), picked.masked_fill(~is_local, 0)]
    terms += [shifted.sum(-1)] if label_smoothing else []
    sums = all_reduce(torch.stack(terms), comm, grad="replicated")
    log_sum = sums[0].log()
    loss = log_sum - sums[1]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_sum - sums[2] / size)
    if z_loss:
        loss = loss + z_loss * (log_sum + peak) ** 2
    ignored = target == ignore_index
    loss = loss.masked_fill(ignored, 0)
    if reduction == "none":
        return loss
    return loss.sum() / (~ignored).sum() if reduction == "mean" else loss.sum()


def _check_loss(
    name: str,
    logits: Any,
    target: Any,
    comm: Communicator,
    label_smoothing: float,
    reduction: str,
    splits: Sequence[int] | None,
) -> Sequence[int] | None:
    """Check the arguments, and return `splits` as a checked sequence, or None."""
    check_comm(name, comm, logits=logits, target=target)
    splits = check_splits(name, splits, comm)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or not logits.dim():
        raise TypeError(f"{name}: logits is {_describe(logits)}, expected a floating-point tensor [.., V_r]")
    if not torch.compiler.is_compiling():
        check_dense(name, logits, "logits")
    columns = logits.shape[-1]
    if splits is not None and columns != splits[comm.rank]:
        raise ValueError(
            f"{name}: logits has {columns} columns, expected {splits[comm.rank]} on rank {comm.rank} (splits={splits})"
        )
    if isinstance(target, Tensor) and target.device != logits.device:
        raise ValueError(f"{name}: logits is on {logits.device}, target on {target.device}; move one of them")
    if isinstance(target, Tensor) and target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{name}: target has shape {list(target.shape)}, expected {list(logits.shape[:-1])}, that of logits "
            f"{list(logits.shape)} without the vocabulary"
        )
    check_type(f"{name}: label_smoothing", "float", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing is {shown(label_smoothing)}, expected 0.0 to 1.0")
    if not isinstance(reduction, str) or reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction is {shown(reduction)}, expected 'mean', 'sum' or 'none'")
    return splits


def _local(ids: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return (whether each id is one of these rows, its index among them; 0 for the others)."""
    is_local = (ids >= first) & (ids < first + rows)
    return is_local, torch.where(is_local, ids - first, 0).long()


def _check_ids(what: str, ids: Tensor, size: int, ignore_index: int | None = None) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in _IDS:
        raise TypeError(f"{what} is {_describe(ids)}, expected a tensor of int64 or int32")
    if ids.device.type != "cpu" or not ids.numel() or torch.compiler.is_compiling():
        return
    wrong = (ids < 0) | (ids >= size)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if wrong.any():
        raise IndexError(f"{what} has {int(ids[wrong][0])}, expected 0 to {size - 1}: the vocabulary has {size} rows")


def _describe(value: Any) -> str:
    return f"a tensor of {value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else shown(value)
