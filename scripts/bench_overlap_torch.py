"""The same layers by torch.distributed alone: functional collectives, one after the other, and DTensor's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_overlap_cases import Case, Shape, Step, Tensors
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import _functional_collectives as funcol

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.host.link import Link, parse, sleep_until

_OPERATORS = torch.ops._c10d_functional


class ModelledLink:
    """The link that PYNCCL_HOST_LINK describes, for torch's functional collectives, DTensor's among them.

    A collective is given its time on a FIFO link when it is launched; whoever waits for it sleeps until that is over,
    if gloo was faster. So torch, too, may compute while something is under way. It holds for all that calls the
    operators of torch.ops._c10d_functional from Python; `calls` counts them."""

    def __init__(self, text: str) -> None:
        link = parse(text)
        assert link is not None
        self.link: Link = link
        self.calls: Counter[str] = Counter()
        self._due: dict[int, float] = {}
        self._plain = {name: getattr(_OPERATORS, name) for name in ("all_reduce", "wait_tensor")}
        self._plain |= {name: getattr(_OPERATORS, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}

    @contextlib.contextmanager
    def applied(self) -> Iterator[ModelledLink]:
        for name in self._plain:
            setattr(_OPERATORS, name, getattr(self, f"_{name}"))
        try:
            yield self
        finally:
            for name, operator in self._plain.items():
                setattr(_OPERATORS, name, operator)

    def _all_gather_into_tensor(self, x: Tensor, size: int, group: Any) -> Tensor:
        return self._launch("all_gather_into_tensor", size - 1, (size - 1) * x.nbytes, x, size, group)

    def _reduce_scatter_tensor(self, x: Tensor, op: str, size: int, group: Any) -> Tensor:
        return self._launch("reduce_scatter_tensor", size - 1, (size - 1) / size * x.nbytes, x, op, size, group)

    def _all_reduce(self, x: Tensor, op: str, group: Any) -> Tensor:
        size = dist.get_world_size()
        return self._launch("all_reduce", 2 * (size - 1), 2 * (size - 1) / size * x.nbytes, x, op, group)

    def _launch(self, name: str, steps: int, nbytes: float, *arguments: Any) -> Tensor:
        self.calls[name] += 1
        moment = self.link.reserve(steps, nbytes)
        made: Tensor = self._plain[name](*arguments)
        self._due[made.data_ptr()] = moment
        return made

    def _wait_tensor(self, made: Tensor) -> Tensor:
        there: Tensor = self._plain["wait_tensor"](made)
        moment = self._due.pop(made.data_ptr(), None)
        if moment is not None:
            sleep_until(moment)
        return there


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gathered(x: Tensor) -> Tensor:
    """Of all ranks; torch 2.13 calls the function otherwise."""
    function = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
    whole: Tensor = function(x, 0, _world())
    return _arrived(whole)


def scattered(x: Tensor) -> Tensor:
    """This rank's rows of the sum."""
    function = getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd
    part: Tensor = function(x, "sum", 0, _world())
    return _arrived(part)


def _arrived(x: Any) -> Tensor:
    """Waited for, as the next operation would."""
    if not isinstance(x, funcol.AsyncCollectiveTensor):
        return x
    there: Tensor = x.trigger_wait()
    return x if x.requires_grad else there


class _Copied(Function):
    """x [..] -> x, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return _arrived(funcol.all_reduce(cotangents[0], "sum", _world()))


def torch_step(case: Case, tensors: Tensors) -> Step:
    """The pass, once, as `step_of` makes it of ours."""
    x, w, gy = tensors

    def layer() -> Tensor:
        if case.layer == "all_gather_matmul":
            return F.linear(gathered(x), w)
        if case.layer == "matmul_reduce_scatter":
            return scattered(F.linear(x, w))
        if case.layer == "copy_matmul":
            return F.linear(_Copied.apply(x), w)
        return _arrived(funcol.all_reduce(F.linear(x, w).detach(), "sum", _world()))

    if not case.backward:
        return lambda: (layer().detach(),)
    y = layer()
    return lambda: torch.autograd.grad(y, (x, w), gy, retain_graph=True)


class Mlp:
    """An MLP without biases and its step, forward and backward: of our layers or DTensor's, equal in their weights."""

    def __init__(self, shape: Shape, rank: int, ranks: int, device: torch.device) -> None:
        made = torch.Generator().manual_seed(7)
        first = torch.randn(shape.hidden, shape.width, generator=made) * shape.width**-0.5
        second = torch.randn(shape.width, shape.hidden, generator=made) * shape.hidden**-0.5
        self._shape, self._device, self._ranks = shape, device, ranks
        self._weights = tuple(weight.to(device, shape.dtype) for weight in (first, second))
        made.manual_seed(8 + rank)
        rows = shape.tokens // ranks
        self.x, self.gy = (
            torch.randn(rows, shape.width, generator=made).to(device, shape.dtype).requires_grad_(want)
            for want in (True, False)
        )

    def ours(self, comm: Communicator, overlap: Any) -> Step:
        shape, options = self._shape, {"bias": False, "sequence_parallel": True, "dtype": self._shape.dtype}
        up = ad.ColumnParallelLinear(shape.width, shape.hidden, comm, overlap=overlap, **options)  # type: ignore[arg-type]
        down = ad.RowParallelLinear(shape.hidden, shape.width, comm, overlap=overlap, **options)  # type: ignore[arg-type]
        for layer, weight in zip((up, down), self._weights, strict=True):
            layer.load_full(weight)
        return self._step(nn.Sequential(up, nn.ReLU(), down))

    def dtensor(self) -> Step:
        """ColwiseParallel and RowwiseParallel, whose input and output are cut by rows."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        shape, options = self._shape, {"bias": False, "device": self._device, "dtype": self._shape.dtype}
        model = nn.Sequential(
            nn.Linear(shape.width, shape.hidden, **options),  # type: ignore[arg-type]
            nn.ReLU(),
            nn.Linear(shape.hidden, shape.width, **options),  # type: ignore[arg-type]
        )
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), self._weights, strict=True):
                parameter.copy_(weight)
        mesh = init_device_mesh(self._device.type, (self._ranks,))
        plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(model, mesh, plan)
        return self._step(model)

    def _step(self, model: nn.Module) -> Step:
        def step() -> tuple[Tensor, ...]:
            model.zero_grad(set_to_none=True)
            del self.x.grad
            y = _arrived(model(self.x))  # what DTensor leaves under way, the next operation would wait for
            y.backward(self.gy)
            grads = [parameter.grad for parameter in model.parameters()]
            return y.detach(), _arrived(self.x.grad), *(_local(grad) for grad in grads)

        return step


def _local(grad: Any) -> Tensor:
    """This rank's part of a gradient."""
    to_local: Callable[[], Tensor] | None = getattr(grad, "to_local", None)
    return grad if to_local is None else to_local()
