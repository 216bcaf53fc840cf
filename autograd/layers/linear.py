"""ColumnParallelLinear, RowParallelLinear, KeyValueLinear: linear layers sharded over the ranks of a communicator.

A column-parallel layer followed by a row-parallel one computes an MLP or an attention block, and communicates at its
start and its end only. N is the number of ranks, r this rank; x is [s, .., in] with the sequence in dimension 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import attribute, shown

from ..arguments import check_comm, check_dim, check_linear, checked
from ..ops.all_gather import all_gather
from ..ops.all_reduce import copy
from ..overlap.functions import all_gather_matmul, copy_matmul, matmul_all_reduce, matmul_reduce_scatter
from ..overlap.keys import Overlap, as_config
from ..overlap.limits import prepare
from ..wire import Dtype
from .shard import Shard, checked_size, sizes_of_blocks
from .shards import Sharded, checked_seq_dim

Layer = TypeVar("Layer", bound="_ParallelLinear")


class _ParallelLinear(Sharded):
    """Base class: a linear layer of which this rank keeps a slice of the weight along dimension `dim`."""

    dim: int  # sharded dimension of the weight [out, in]
    kind: str  # which of TransformerEngine's defaults apply
    transposed = False  # whether the weight of the unsharded layer is [in, out]

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        overlap: Overlap = "auto",
        reduce_dtype: Dtype = None,
        grad_accumulation_fusion: bool = False,
        seq_dim: int = 0,
        blocks: int | Sequence[int] = 1,
    ) -> None:
        super().__init__()
        check_comm(type(self).__name__, comm, in_features=in_features, out_features=out_features)
        comm.check_alive()
        in_features = checked_size(f"{type(self).__name__}: in_features", in_features)
        out_features = checked_size(f"{type(self).__name__}: out_features", out_features)
        name, size = ("out_features", out_features) if self.dim == 0 else ("in_features", in_features)
        if size % comm.size:
            raise ValueError(f"{type(self).__name__}: {name} is {size}, not divisible by {comm.size} ranks; pad it")
        self.blocks = sizes_of_blocks(type(self).__name__, blocks, size, comm.size)
        self.in_features, self.out_features = in_features, out_features
        self.comm, self.sequence_parallel = comm, sequence_parallel
        self.seq_dim = checked_seq_dim(type(self).__name__, seq_dim)
        config = as_config(type(self).__name__, overlap, self.kind)
        self.overlap: Overlap = config if attribute(overlap, "buffers") is None else overlap
        if self.overlap is config:
            prepare(comm, config)
        self.reduce_dtype, self.grad_accumulation_fusion = reduce_dtype, grad_accumulation_fusion
        self._make_parameters(bias, device, dtype)

    @classmethod
    def like(
        cls: type[Layer], linear: Any, comm: Communicator, sequence_parallel: bool = False, **options: Any
    ) -> Layer:
        """Return a layer of the sizes of an nn.Linear, or of transformers' Conv1D, on the meta device."""
        transposed = type(linear).__name__ == "Conv1D"  # of transformers
        if not transposed and not isinstance(linear, nn.Linear):
            raise TypeError(f"{cls.__name__}.from_linear: linear is {shown(linear)}, expected a torch.nn.Linear")
        weight, has_bias = linear.weight.t() if transposed else linear.weight, linear.bias is not None
        if given := options.keys() & {"device", "dtype"}:
            raise TypeError(f"{cls.__name__}.from_linear: {min(given)} is that of linear; expected no {min(given)}=")
        outputs, inputs = weight.shape
        made = cls(inputs, outputs, comm, has_bias, sequence_parallel, "meta", weight.dtype, **options)
        made.transposed = transposed
        return made

    @classmethod
    def from_linear(
        cls: type[Layer], linear: Any, comm: Communicator, sequence_parallel: bool = False, **options: Any
    ) -> Layer:
        """Return a layer with this rank's shard of an nn.Linear, or of transformers' Conv1D.

        `linear` must be equal on all ranks; its device, dtype and requires_grad are kept. options: keyword arguments of
        the class, except device and dtype."""
        return cls.like(linear, comm, sequence_parallel, **options).take(linear)

    def shards(self) -> dict[str, Shard]:
        """Return the Shards of weight and bias. A replicated bias is not partial: the layer sums its gradient."""
        shape = (self.out_features, self.in_features)
        full = shape[::-1] if self.transposed else shape
        weight = Shard(self.comm, self.dim, full, blocks=self.blocks, transposed=self.transposed)
        outputs = (self.out_features,)
        bias = Shard(self.comm, 0, outputs, blocks=self.blocks) if self.dim == 0 else Shard(self.comm, None, outputs)
        return {"weight": weight, "bias": bias}

    def reset_parameters(self) -> None:
        """Initialize the parameters as nn.Linear does."""
        self._draw_as_linear(self.in_features)

    def _overlapped(self, function: Callable[..., Any], x: Any) -> Any:
        """Return what a function of overlap/ returns for x and this layer."""
        fusion = self.grad_accumulation_fusion
        options = {"overlap": self.overlap, "reduce_dtype": self.reduce_dtype, "grad_accumulation_fusion": fusion}
        return function(x, self.weight, self.comm, self.bias, **options, owner=self)

    def _check_input(self, x: Tensor) -> None:
        check_linear(type(self).__name__, x, self.weight, self.comm, self.bias)

    def _along_sequence(self, function: Callable[..., Any], x: Any) -> Any:
        """As `_overlapped`, for a function that needs the sequence in dimension 0."""
        name = type(self).__name__
        if not isinstance(x, Tensor):
            return self._overlapped(function, x)
        dim = check_dim(name, x, self.seq_dim, "seq_dim")
        if dim == x.dim() - 1:
            raise ValueError(
                f"{name}: seq_dim {self.seq_dim} is the last dimension of x {list(x.shape)}, which holds the features"
            )
        y: Tensor = self._overlapped(function, x.movedim(dim, 0) if dim else x)
        return y.movedim(0, dim) if dim else y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.comm.rank} of {self.comm.size}, sequence_parallel={self.sequence_parallel}, "
            f"overlap={as_config('', self.overlap, self.kind).method}"
        )


# TypeErrors of Python name the function; users reach it by RowParallelLinear, which does not override it.
inspect.unwrap(_ParallelLinear.__init__).__qualname__ = "RowParallelLinear.__init__"


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer with column parallelism: y_r = x @ W_r.T + b_r.

    The rows of W [out, in] are sharded over the ranks of `comm`: each rank computes out/N of the output features.
    Follow it with a `RowParallelLinear`.

                         x                 y               forward          dgrad
    default              [s, .., in]       [s, .., out/N]  -                all_reduce
    sequence_parallel    [s/N, .., in]     [s, .., out/N]  all_gather(x)    reduce_scatter

    wgrad needs no communication, unless `overlap` gathers x again for it. Without sequence_parallel, x must be equal on
    all ranks; its gradient is then equal too.

    in_features, out_features sizes of the unsharded layer
    comm                      communicator of the N ranks
    bias                      whether to add a bias. Default: True
    sequence_parallel         True: x is sharded along the sequence
    device, dtype             of the parameters. Defaults: the communicator's device, torch's default dtype
    overlap                   how to hide communication behind matmuls: "auto" (if a race shows that it pays), "off",
                              an `OverlapConfig`, a `CommOverlap`, or a dict of TransformerEngine's keys
    reduce_dtype              data type in which to sum over ranks; None: that of the summed tensor
    grad_accumulation_fusion  True: add the weight's gradient to weight.main_grad
    seq_dim                   sequence dimension of x and y, with sequence_parallel
    gather_input              False: x is already gathered, and its gradient is summed where it was gathered. For layers
                              that share an input, call `x = ad.copy(x, comm)`, or with sequence_parallel
                              `x = ad.all_gather(x, comm, seq_dim, grad="sum")`, once
    gather_output             True: gather y, to [s, .., out] on every rank. Its gradient must be equal on all ranks
    blocks                    consecutive blocks of output features, each sharded over the ranks: 3 for queries, keys
                              and values in one layer, or their sizes, such as (32, 16, 16)

    Raises ValueError if out_features, or the size of one of several blocks, is not divisible by N.
    """

    dim, kind = 0, "column"

    @checked
    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        bias: bool = True,
        sequence_parallel: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        overlap: Overlap = "auto",
        reduce_dtype: Dtype = None,
        grad_accumulation_fusion: bool = False,
        seq_dim: int = 0,
        blocks: int | Sequence[int] = 1,
        gather_input: bool = True,
        gather_output: bool = False,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            comm,
            bias,
            sequence_parallel,
            device,
            dtype,
            overlap=overlap,
            reduce_dtype=reduce_dtype,
            grad_accumulation_fusion=grad_accumulation_fusion,
            seq_dim=seq_dim,
            blocks=blocks,
        )
        if self.grad_accumulation_fusion and not gather_input:
            raise ValueError("ColumnParallelLinear: grad_accumulation_fusion needs gather_input=True")
        if gather_output and len(self.blocks) > 1:
            raise ValueError("ColumnParallelLinear: gather_output needs blocks=1; it would interleave several blocks")
        self.gather_input, self.gather_output = gather_input, gather_output

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ W_r.T + b_r.   x [s, .., in] -> [s, .., out/N]; see the class for the other shapes."""
        if not self.gather_input:
            self._check_input(x)
            y = F.linear(x, self.weight, self.bias)
        elif self.sequence_parallel:
            y = self._along_sequence(all_gather_matmul, x)
        else:
            y = self._overlapped(copy_matmul, x)
        return all_gather(y, self.comm, -1, grad="replicated") if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """Linear layer with row parallelism: y = sum_r x_r @ W_r.T + b.

    The columns of W [out, in] are sharded over the ranks of `comm`: each rank has in/N of the input features, which are
    the output of a `ColumnParallelLinear`.

                         x                 y               forward            dgrad
    default              [s, .., in/N]     [s, .., out]    all_reduce         -
    sequence_parallel    [s, .., in/N]     [s/N, .., out]  reduce_scatter     all_gather(dy)

    The bias is replicated, and added once, after the reduction. With sequence_parallel the layer sums its gradient over
    the ranks, since each rank sees a shard of the sequence.

    The arguments are those of `ColumnParallelLinear`, without gather_input and gather_output; blocks are blocks of
    input features. Raises ValueError if in_features, or the size of one of several blocks, is not divisible by N.
    """

    dim, kind = 1, "row"

    def forward(self, x: Tensor) -> Tensor:
        """Return sum_q x_q @ W_q.T + b.   x [s, .., in/N] -> [s, .., out]; sequence_parallel: [s/N, .., out]"""
        if self.sequence_parallel:
            return self._along_sequence(matmul_reduce_scatter, x)
        y: Tensor = self._overlapped(matmul_all_reduce, x)
        return y


class KeyValueLinear(ColumnParallelLinear):
    """Column-parallel layer for fewer key/value heads than ranks: several ranks have the same head.

    comm    communicator of K ranks, one for each head
    shared  communicator of the ranks that have the same head; the layer sums the gradients of weight and bias over it

    The other arguments are those of `ColumnParallelLinear` with gather_input=False: x must be gathered already.
    `Mesh(comm, {"heads": K, "shared": N // K})` has both communicators.
    """

    shared: Communicator

    def __init__(
        self, in_features: int, out_features: int, comm: Communicator, *args: Any, shared: Communicator, **options: Any
    ) -> None:
        check_comm("KeyValueLinear: shared", shared)
        super().__init__(in_features, out_features, comm, *args, **{**options, "gather_input": False})
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ W_k.T + b_k, of this rank's head k.   x [s, .., in] -> [s, .., out/K]"""
        self._check_input(x)
        weight = copy(self.weight, self.shared)
        return F.linear(x, weight, None if self.bias is None else copy(self.bias, self.shared))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shared by {self.shared.size}"
