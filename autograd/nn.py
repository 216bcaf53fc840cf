"""The differentiable collectives as modules, and a Sequential that overlaps linear layers with adjacent collectives.

Each function of `pynccl_autograd` has a module, which stores the communicator and the other arguments and raises the
same errors. The modules behave like the TransformerEngine operations of the same names: ReduceScatter sums over ranks
and keeps slice `rank` of dimension 0, and its backward pass is an all-gather; AllReduce(comm, grad="replicated") passes
gradients through unchanged. On one rank, AllReduce, ReduceScatter, AllGather, Copy and Split return their input, while
the functions return a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.listing import public_dir
from pynccl.bindings.values import attribute, instance

from .arguments import (
    SUM_OPS,
    AnyOp,
    Grad,
    Op,
    as_list,
    check_comm,
    check_grad,
    check_op,
    check_rank,
    require_grad_keyword,
)
from .ops.all_gather import all_gather, reduce_scatter, split
from .ops.all_reduce import PreMul, all_reduce, copy
from .ops.all_to_all import all_to_all
from .ops.coalesced import CallableOnLists
from .ops.halo import Halo, halo_exchange
from .ops.permute import check_edges, permute
from .ops.rooted import broadcast, gather, reduce, scatter
from .overlap.functions import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .overlap.keys import Overlap, as_config
from .torch_internals import is_hooked
from .wire import Dtype, Splits

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Copy",
    "Gather",
    "HaloExchange",
    "Operation",
    "Permute",
    "Reduce",
    "ReduceScatter",
    "Scatter",
    "Sequential",
    "Split",
]
__dir__ = public_dir(globals())


class Operation(torch.nn.Module):
    """Base class: a collective with its communicator and its other arguments."""

    function: ClassVar[Any]
    ops: ClassVar[tuple[str, ...]] = SUM_OPS
    takes_premul: ClassVar[bool] = False
    identity_on_one_rank: ClassVar[bool] = False  # whether the output is the input itself there
    __call__: Callable[..., Tensor]  # for type checkers: nn.Module.__call__ returns Any

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
        """Return the keyword arguments of the function, without x and comm."""
        return self.options

    def forward(self, x: Tensor) -> Tensor:
        """Call the function with x and the module's arguments. For the shapes see the function."""
        if self.identity_on_one_rank and self.comm.size == 1 and isinstance(x, Tensor):
            _, call = self.function.plan(x, self.comm, **self.arguments())  # checks the arguments
            checked: Tensor = call.x
            return checked
        y: Tensor = self.function(x, self.comm, **self.arguments())
        return y

    def extra_repr(self) -> str:
        options = [f"{name}={value!r}" for name, value in self.options.items() if value is not None]
        return ", ".join([f"rank {self.comm.rank} of {self.comm.size}", *options])


_PREMUL = "PreMul(scale)"  # placeholder for PreMul(self.scale), which is built at each call
_SIZES = ("splits", "send_splits", "recv_splits", "halo")


def _frozen(sizes: Any) -> Any:
    """Return sizes as tuples, so that later changes of the lists and tensors passed have no effect."""
    sizes = (as_list(sizes) or sizes) if attribute(sizes, "tolist") is not None else sizes
    return tuple(_frozen(size) for size in sizes) if isinstance(sizes, list | tuple) else sizes


class AllReduce(Operation):
    """Sum x over all ranks (or reduce it with another operator), on every rank. See `pynccl_autograd.all_reduce`.

    grad="replicated" passes gradients through unchanged; grad="sum" sums them over ranks. If `op` is PreMul(scale) with
    a tensor, the module registers it as `scale`: as a parameter if it is an nn.Parameter, else as a buffer.
    """

    function = staticmethod(all_reduce)
    ops = ("sum", "avg", "max", "min", "prod")
    takes_premul = True
    identity_on_one_rank = True
    scale: Tensor
    __call__: CallableOnLists

    @require_grad_keyword
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
    """Return a replicated x; the backward pass sums the gradients over ranks. See `pynccl_autograd.copy`."""

    function = staticmethod(copy)
    identity_on_one_rank = True

    def __init__(self, comm: Communicator, *, reduce_dtype: Dtype = None) -> None:
        super().__init__(comm, reduce_dtype=reduce_dtype)


class ReduceScatter(Operation):
    """Sum x over all ranks and return this rank's slice along `dim`; the backward pass all-gathers the gradients.

    ValueError if the size of `dim` is not divisible by the number of ranks, unless splits= gives the sizes. See
    `pynccl_autograd.reduce_scatter`.
    """

    function = staticmethod(reduce_scatter)
    identity_on_one_rank = True
    __call__: CallableOnLists

    def __init__(
        self, comm: Communicator, dim: int = 0, op: Op = "sum", *, splits: Splits = None, reduce_dtype: Dtype = None
    ) -> None:
        super().__init__(comm, dim=dim, op=op, splits=splits, reduce_dtype=reduce_dtype)


class AllGather(Operation):
    """Concatenate the tensors of all ranks along `dim`, on every rank. See `pynccl_autograd.all_gather`.

    With grad="sum" the backward pass reduce-scatters the gradients; with grad="replicated" it takes this rank's slice.
    """

    function = staticmethod(all_gather)
    identity_on_one_rank = True
    __call__: CallableOnLists

    @require_grad_keyword
    def __init__(
        self, comm: Communicator, dim: int = 0, *, grad: Grad, splits: Splits = None, reduce_dtype: Dtype = None
    ) -> None:
        super().__init__(comm, dim=dim, grad=grad, splits=splits, reduce_dtype=reduce_dtype)


class Split(Operation):
    """Return this rank's slice of a replicated x along `dim`; the backward pass all-gathers the gradients."""

    function = staticmethod(split)
    identity_on_one_rank = True

    def __init__(self, comm: Communicator, dim: int = 0, *, splits: Splits = None) -> None:
        super().__init__(comm, dim=dim, splits=splits)


class Broadcast(Operation):
    """Copy x of rank `root` to every rank. See `pynccl_autograd.broadcast`."""

    function = staticmethod(broadcast)

    @require_grad_keyword
    def __init__(self, comm: Communicator, root: int, *, grad: Grad, reduce_dtype: Dtype = None) -> None:
        super().__init__(comm, root=root, grad=grad, reduce_dtype=reduce_dtype)


class Reduce(Operation):
    """Sum x over all ranks, on rank `root`; the other ranks get zeros. See `pynccl_autograd.reduce`."""

    function = staticmethod(reduce)

    def __init__(self, comm: Communicator, root: int, op: Op = "sum", *, reduce_dtype: Dtype = None) -> None:
        super().__init__(comm, root=root, op=op, reduce_dtype=reduce_dtype)


class Scatter(Operation):
    """Split x of rank `root` along `dim`, and return slice r on rank r. See `pynccl_autograd.scatter`."""

    function = staticmethod(scatter)

    def __init__(self, comm: Communicator, root: int, dim: int = 0, *, splits: Splits = None) -> None:
        super().__init__(comm, root=root, dim=dim, splits=splits)


class Gather(Operation):
    """Concatenate the tensors of all ranks along `dim`, on rank `root`. See `pynccl_autograd.gather`."""

    function = staticmethod(gather)

    def __init__(self, comm: Communicator, root: int, dim: int = 0, *, splits: Splits = None) -> None:
        super().__init__(comm, root=root, dim=dim, splits=splits)


class AllToAll(Operation):
    """Split x along `split_dim`, send slice q to rank q, and concatenate what arrives along `concat_dim`.

    See `pynccl_autograd.all_to_all`.
    """

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
    """Send x along directed edges between ranks, and sum what arrives. See `pynccl_autograd.permute`."""

    function = staticmethod(permute)

    def __init__(self, comm: Communicator, edges: Iterable[tuple[int, int]]) -> None:
        super().__init__(comm, edges=check_edges(comm, edges))


class HaloExchange(Operation):
    """Overwrite the halos of x along `dim` with the neighbours' borders. See `pynccl_autograd.halo_exchange`."""

    function = staticmethod(halo_exchange)

    def __init__(self, comm: Communicator, dim: int, halo: Halo) -> None:
        super().__init__(comm, dim=dim, halo=halo)


class Sequential(torch.nn.Sequential):
    """A torch.nn.Sequential that fuses these adjacent modules. The results equal those of running them separately.

    nn.Linear (no bias), ReduceScatter(comm)                   matmul_reduce_scatter
    nn.Linear (no bias), AllReduce(comm, grad="replicated")    matmul_all_reduce
    AllGather(comm, grad="sum"), nn.Linear                     all_gather_matmul

    The collective must use dimension 0 and op="sum", without splits= and reduce_dtype=. A pair is not fused

    - if either module has a hook, or a different forward: a subclass, a parametrization, a torch.compile of its own, or
      a library that replaces nn.Linear.forward;
    - on one rank, and if x has fewer than 2 dimensions.

    A bias before a sum over ranks is added once per rank. Add it in a later module instead, or use RowParallelLinear.

    overlap  for all pairs, as in the layers: "auto", "off", OverlapConfig(...) or a dict
    """

    def __init__(self, *modules: Any, overlap: Overlap = "auto") -> None:
        for module in modules:
            instance(module, (torch.nn.Module, OrderedDict), "nn.Sequential: modules", "torch.nn.Modules")
        super().__init__(*modules)
        as_config("nn.Sequential", overlap, "column")  # raises if it is invalid
        self.overlap = overlap

    def forward(self, x: Any) -> Any:
        """Call the modules in order, fused where possible. For the shapes see the modules."""
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
        """Return the index pairs of the modules that would be fused now. Hooks change them."""
        modules = list(self)
        pairs: list[tuple[int, int]] = []
        for at in range(len(modules)):
            if not (pairs and pairs[-1][1] == at) and _fused(modules, at) is not None:
                pairs.append((at, at + 1))
        return pairs


# Adjacent modules, by exact type because a subclass may have a different forward -> the required options of the
# collective, and the function that runs both.
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
    """Return the function that runs the modules `at` and `at + 1` fused; None: run them separately."""
    if at + 1 == len(modules):
        return None
    first, second = modules[at : at + 2]
    options, function = _FUSED.get((type(first), type(second)), ({}, None))
    if function is None or not (_is_plain(first) and _is_plain(second)):
        return None
    collective = first if isinstance(first, Operation) else second
    summed_bias = collective is second and first.bias is not None
    passed = {name: value for name, value in collective.options.items() if value is not None}
    return function if passed == options and collective.comm.size > 1 and not summed_bias else None


_FORWARDS = (torch.nn.Linear.forward, Operation.forward)  # some libraries replace Linear.forward globally


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether calling the module only runs the original forward of its class."""
    custom_forward = "forward" in module.__dict__ or type(module).forward not in _FORWARDS
    return not (custom_forward or is_hooked(module))
