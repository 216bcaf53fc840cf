"""An MLP of two linear layers, of pynccl_autograd's or of DTensor's, and a modelled link for torch's collectives."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.host.link import parse, sleep_until

_OPERATORS = torch.ops._c10d_functional
Step = Callable[[], tuple[Tensor, ...]]


class ModelledLink:
    """The link that PYNCCL_HOST_LINK describes, for torch's functional collectives, DTensor's among them.

    A collective is given its time on a FIFO link when it is launched; whoever waits for it sleeps until that is over,
    if gloo was faster. So torch, too, may compute while something is under way. It holds for all that calls the
    operators of torch.ops._c10d_functional from Python; `calls` counts them."""

    def __init__(self, text: str) -> None:
        self.link = parse(text)
        self.calls: Counter[str] = Counter()
        self._due: dict[int, float] = {}
        names = ("wait_tensor", "all_gather_into_tensor", "reduce_scatter_tensor")
        self._plain = {name: getattr(_OPERATORS, name) for name in names}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        for name in self._plain:
            setattr(_OPERATORS, name, getattr(self, f"_{name}"))
        try:
            yield
        finally:
            for name, operator in self._plain.items():
                setattr(_OPERATORS, name, operator)

    def _all_gather_into_tensor(self, x: Tensor, size: int, group: Any) -> Tensor:
        return self._launch("all_gather_into_tensor", size - 1, (size - 1) * x.nbytes, x, size, group)

    def _reduce_scatter_tensor(self, x: Tensor, op: str, size: int, group: Any) -> Tensor:
        return self._launch("reduce_scatter_tensor", size - 1, (size - 1) / size * x.nbytes, x, op, size, group)

    def _launch(self, name: str, steps: int, nbytes: float, *arguments: Any) -> Tensor:
        assert self.link is not None
        self.calls[name] += 1
        moment = self.link.reserve(steps, nbytes)
        made: Tensor = self._plain[name](*arguments)
        self._due[made.data_ptr()] = moment
        return made

    def _wait_tensor(self, made: Tensor) -> Tensor:
        there: Tensor = self._plain["wait_tensor"](made)
        sleep_until(self._due.pop(made.data_ptr(), 0.0))
        return there


class Mlp:
    """[width -> hidden -> width] with a ReLU and without biases, whose input and output are cut by rows, and its step,
    forward and backward: of our layers or DTensor's, equal in their weights.   rows: of all ranks"""

    def __init__(
        self, rows: int, width: int, hidden: int, ranks: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(7)
        like: Any = {"bias": False, "device": device, "dtype": dtype}
        self.whole = nn.Sequential(nn.Linear(width, hidden, **like), nn.ReLU(), nn.Linear(hidden, width, **like))
        torch.manual_seed(8 + dist.get_rank())
        self.x = torch.randn(rows // ranks, width).to(device, dtype).requires_grad_()
        self.gy, self.ranks = torch.randn_like(self.x), ranks

    def ours(self, comm: Communicator, overlap: Any) -> nn.Sequential:
        up, relu, down = self.whole
        first = ad.ColumnParallelLinear.from_linear(up, comm, sequence_parallel=True, overlap=overlap)
        last = ad.RowParallelLinear.from_linear(down, comm, sequence_parallel=True, overlap=overlap)
        return nn.Sequential(first, relu, last)

    def dtensor(self) -> nn.Sequential:
        """Of `whole` itself."""
        mesh = init_device_mesh(self.x.device.type, (self.ranks,))
        cuts = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
        parallelize_module(self.whole, mesh, cuts)
        return self.whole

    def step(self, model: nn.Module) -> Step:
        def step() -> tuple[Tensor, ...]:
            model.zero_grad(set_to_none=True)
            self.x.grad = None
            y = _arrived(model(self.x))  # what DTensor leaves under way, the next operation would wait for
            y.backward(self.gy)
            grads: list[Any] = [parameter.grad for parameter in model.parameters()]
            local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
            return y.detach(), _arrived(self.x.grad), *local

        return step


def _arrived(x: Any) -> Tensor:
    """Waited for."""
    if not isinstance(x, funcol.AsyncCollectiveTensor):
        return x
    there: Tensor = x.trigger_wait()
    return x if x.requires_grad else there
