"""The differentiable collectives as modules, and a Sequential that runs a linear layer with its collective as one.

A module for each function of ops/, with its arguments and its errors, of the communicator it was made with. As
TransformerEngine's operations of the same names: ReduceScatter sums over ranks and keeps slice `rank` of dimension 0,
its backward pass is an all-gather; AllReduce(comm, grad="replicated") passes gradients through unchanged; on one rank
AllReduce, ReduceScatter, AllGather, Copy and Split return their input, not a copy of it as some functions do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import attribute

from .arguments import SUM_OPS, AnyOp, Grad, Op, asks_for_grad, check_comm, check_grad, check_op, check_rank
from .ops.all_gather import all_gather, reduce_scatter, split
from .ops.all_reduce import PreMul, all_reduce, copy
from .ops.all_to_all import all_to_all
from .ops.coalesced import OfLists
from .ops.halo import Halo, halo_exchange
from .ops.permute import check_edges, permute
from .ops.rooted import broadcast, gather, reduce, scatter
from .overlap.config import Overlap, as_config
from .overlap.functions import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .torch_internals import is_hooked
from .wire import Dtype, Splits


class Operation(torch.nn.Module):
    """A function of ops/ with its communicator and its other arguments."""

    function: ClassVar[Any]
    ops: ClassVar[tuple[str, ...]] = SUM_OPS
    takes_premul: ClassVar[bool] = False
    passes_alone: ClassVar[bool] = False  # on one rank the output is the input
    __call__: Callable[..., Tensor]  # for type checkers, to whom that of nn.Module gives Any

    def __init__(self, comm: Communicator, **options: Any) -> None:
        name = f"nn.{type(self).__name__}"
        if "root" in options:
            check_rank(name, comm, options["root"])
        check_comm(name, comm, **options)
        if "grad" in options:
            check_grad(name, options["grad"])
        if "op" in options and not (self.takes_premul and isinstance(options["op"], PreMul)):
            check_op(name, options["op"], self.ops)
        super().__init__()
        self.comm = comm
        self.options = {name: _frozen(value) if name in _SIZES else value for name, value in options.items()}

    def arguments(self) -> dict[str, Any]:
        """What the function gets besides x and the communicator."""
        return self.options

    def forward(self, x: Tensor) -> Tensor:
        if self.passes_alone and self.comm.size == 1 and isinstance(x, Tensor):
            _, call = self.function.plan(x, self.comm, **self.arguments())  # whose checks hold on one rank as on many
            alone: Tensor = call.x
            return alone
        y: Tensor = self.function(x, self.comm, **self.arguments())
        return y

    def extra_repr(self) -> str:
        given = [f"{name}={value!r}" for name, value in self.options.items() if value is not None]
        return ", ".join([f"rank {self.comm.rank} of {self.comm.size}", *given])


_PREMUL = "PreMul(scale)"  # stands for PreMul of what the module's `scale` is when it is called
_SIZES = ("splits", "send_splits", "recv_splits", "halo")


def _frozen(sizes: Any) -> Any:
    """Lists and tensors of sizes as tuples of the module's own: what the caller does with his does not matter then."""
    sizes = sizes.tolist() if attribute(sizes, "tolist") is not None else sizes
    return tuple(_frozen(size) for size in sizes) if isinstance(sizes, list | tuple) else sizes


class AllReduce(Operation):
    """y = sum_q x_q on every rank (op: see `all_reduce`).  grad="replicated": gradients pass through unchanged.
    grad="sum": they are summed over ranks.

    The scale of PreMul(scale) is the module's, by the name `scale`: a parameter if it is an nn.Parameter, a buffer if
    it is another tensor. So it is among its parameters and in its state_dict, and moves with it.
    """

    function = staticmethod(all_reduce)
    ops = ("sum", "avg", "max", "min", "prod")
    takes_premul = True
    passes_alone = True
    scale: Tensor
    __call__: OfLists

    @asks_for_grad
    def __init__(
        self, comm: Communicator, op: AnyOp | PreMul = "sum", *, grad: Grad, reduce_dtype: Dtype = None
    ) -> None:
        super().__init__(comm, op=op, grad=grad, reduce_dtype=reduce_dtype)
        if isinstance(op, PreMul) and isinstance(op.scale, Tensor):
            self.options["op"] = _PREMUL
            if isinstance(op.scale, torch.nn.Parameter):
                self.scale = op.scale
            else:
                self.register_buffer("scale", op.scale)

    def arguments(self) -> dict[str, Any]:
        return {**self.options, "op": PreMul(self.scale)} if self.options["op"] == _PREMUL else self.options


class Copy(Operation):
    """y = x; gradients are summed over ranks."""

    function = staticmethod(copy)
    passes_alone = True

    def __init__(self, comm: Communicator, *, reduce_dtype: Dtype = None) -> None:
        super().__init__(comm, reduce_dtype=reduce_dtype)


class ReduceScatter(Operation):
    """y_r = (sum_q x_q)[slice r of `dim`]; gradients are all-gathered.

    ValueError if `dim` is not divisible by the number of ranks, unless splits= gives the sizes."""

    function = staticmethod(reduce_scatter)
    passes_alone = True
    __call__: OfLists

    def __init__(
        self, comm: Communicator, dim: int = 0, op: Op = "sum", *, splits: Splits = None, reduce_dtype: Dtype = None
    ) -> None:
        super().__init__(comm, dim=dim, op=op, splits=splits, reduce_dtype=reduce_dtype)


class AllGather(Operation):
    """y = concat_q x_q along `dim` on every rank; gradients are reduce-scattered (grad="replicated": cut).

    See `all_gather` for which grad to take."""

    function = staticmethod(all_gather)
    passes_alone = True
    __call__: OfLists

    @asks_for_grad
    def __init__(
        self, comm: Communicator, dim: int = 0, *, grad: Grad, splits: Splits = None, reduce_dtype: Dtype = None
    ) -> None:
        super().__init__(comm, dim=dim, grad=grad, splits=splits, reduce_dtype=reduce_dtype)


class Split(Operation):
    """y_r = x[slice r of `dim`] of a replicated x; gradients are gathered."""

    function = staticmethod(split)
    passes_alone = True

    def __init__(self, comm: Communicator, dim: int = 0, *, splits: Splits = None) -> None:
        super().__init__(comm, dim=dim, splits=splits)


class Broadcast(Operation):
    """y_r = x_root on every rank; x on the others gives shape and type. grad: see `broadcast`."""

    function = staticmethod(broadcast)

    @asks_for_grad
    def __init__(self, comm: Communicator, root: int, *, grad: Grad, reduce_dtype: Dtype = None) -> None:
        super().__init__(comm, root=root, grad=grad, reduce_dtype=reduce_dtype)


class Reduce(Operation):
    """root: sum_q x_q, others: zeros."""

    function = staticmethod(reduce)

    def __init__(self, comm: Communicator, root: int, op: Op = "sum", *, reduce_dtype: Dtype = None) -> None:
        super().__init__(comm, root=root, op=op, reduce_dtype=reduce_dtype)


class Scatter(Operation):
    """y_r = x_root[slice r of `dim`]."""

    function = staticmethod(scatter)

    def __init__(self, comm: Communicator, root: int, dim: int = 0, *, splits: Splits = None) -> None:
        super().__init__(comm, root=root, dim=dim, splits=splits)


class Gather(Operation):
    """root: concat_q x_q along `dim`, others: size 0 along it."""

    function = staticmethod(gather)

    def __init__(self, comm: Communicator, root: int, dim: int = 0, *, splits: Splits = None) -> None:
        super().__init__(comm, root=root, dim=dim, splits=splits)


class AllToAll(Operation):
    """Part q of x along `split_dim` goes to rank q; what arrives is concatenated along `concat_dim`."""

    function = staticmethod(all_to_all)

    def __init__(
        self,
        comm: Communicator,
        split_dim: int = 0,
        concat_dim: int = 0,
        *,
        send_splits: Splits = None,
        recv_splits: Splits = None,
    ) -> None:
        sizes = {"send_splits": send_splits, "recv_splits": recv_splits}
        super().__init__(comm, split_dim=split_dim, concat_dim=concat_dim, **sizes)


class Permute(Operation):
    """y_r = sum of x_q over the edges (q, r), zeros without one."""

    function = staticmethod(permute)

    def __init__(self, comm: Communicator, edges: Iterable[tuple[int, int]]) -> None:
        super().__init__(comm, edges=check_edges(comm, edges))


class HaloExchange(Operation):
    """Ranks in a line: the neighbours' borders overwrite the halos of x along `dim`."""

    function = staticmethod(halo_exchange)

    def __init__(self, comm: Communicator, dim: int, halo: Halo) -> None:
        super().__init__(comm, dim=dim, halo=halo)


class Sequential(torch.nn.Sequential):
    """torch.nn.Sequential that runs these neighbours as one, with the result of running them one by one:

    nn.Linear (no bias), ReduceScatter(comm)                   matmul_reduce_scatter
    nn.Linear (no bias), AllReduce(comm, grad="replicated")    matmul_all_reduce
    AllGather(comm, grad="sum"), nn.Linear                     all_gather_matmul

    Each along dimension 0, with op="sum", no splits= and no reduce_dtype=. A pair is run one by one where a hook is on
    either module, so that hooks fire as ever; where a module has another forward (a subclass, a parametrization, a
    torch.compile of its own, a library that replaces nn.Linear's); on one rank; and where x has fewer than 2
    dimensions. A bias before a sum over ranks counts once per rank: leave it to a module behind, or to
    RowParallelLinear.

    overlap  of all pairs, as of the layers: "auto", "off", OverlapConfig(...), a dict
    """

    def __init__(self, *modules: Any, overlap: Overlap = "auto") -> None:
        super().__init__(*modules)
        as_config("nn.Sequential", overlap, "column")  # that it is one
        self.overlap = overlap

    def forward(self, x: Any) -> Any:
        modules = list(self)
        at = 0
        while at < len(modules):
            run = _fused(modules, at)
            if run is not None and x.dim() >= 2:
                x = run(modules[at], modules[at + 1], x, getattr(self, "overlap", "auto"))
                at += 2
            else:
                x = modules[at](x)
                at += 1
        return x

    def fused_pairs(self) -> list[tuple[int, int]]:
        """The indices of the modules that would be run as one now: hooks come and go."""
        modules = list(self)
        pairs: list[tuple[int, int]] = []
        for at in range(len(modules)):
            if not (pairs and pairs[-1][1] == at) and _fused(modules, at) is not None:
                pairs.append((at, at + 1))
        return pairs


# Two neighbours, by their exact types, as a subclass may have another forward: what the options of the collective must
# be, and what runs the two as one.
_FUSED: dict[tuple[type, type], tuple[dict[str, object], Callable[[Any, Any, Tensor, Overlap], Tensor]]] = {
    (torch.nn.Linear, ReduceScatter): (
        {"dim": 0, "op": "sum"},
        lambda linear, scatter, x, overlap: matmul_reduce_scatter(
            x, linear.weight, scatter.comm, overlap=overlap, owner=linear
        ),
    ),
    (torch.nn.Linear, AllReduce): (
        {"op": "sum", "grad": "replicated"},
        lambda linear, reduce, x, overlap: matmul_all_reduce(
            x, linear.weight, reduce.comm, overlap=overlap, owner=linear
        ),
    ),
    (AllGather, torch.nn.Linear): (
        {"dim": 0, "grad": "sum"},
        lambda gather, linear, x, overlap: all_gather_matmul(
            x, linear.weight, gather.comm, linear.bias, overlap=overlap, owner=linear
        ),
    ),
}


def _fused(modules: list[Any], at: int) -> Callable[[Any, Any, Tensor, Overlap], Tensor] | None:
    """What runs the module at `at` and the next one as one; None: run them one by one."""
    if at + 1 == len(modules):
        return None
    first, second = modules[at : at + 2]
    options, function = _FUSED.get((type(first), type(second)), ({}, None))
    if function is None or not (_is_plain(first) and _is_plain(second)):
        return None
    collective = first if isinstance(first, Operation) else second
    summed_bias = collective is second and first.bias is not None
    given = {name: value for name, value in collective.options.items() if value is not None}
    return function if given == options and collective.comm.size > 1 and not summed_bias else None


_FORWARDS = (torch.nn.Linear.forward, Operation.forward)  # libraries replace the first for all layers at once


def _is_plain(module: torch.nn.Module) -> bool:
    """Calling it is running its class's forward, and nothing else."""
    own_forward = "forward" in module.__dict__ or type(module).forward not in _FORWARDS
    return not (own_forward or is_hooked(module))
