"""The private torch APIs that this package uses, and those that differ between torch 2.13 and later versions."""

from __future__ import annotations

from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensor

WorkBase: Any = c10d.Work
ReduceOp: Any = c10d.ReduceOp
_ProcessGroup: Any = c10d.ProcessGroup


def _backends_may_be_python() -> bool:
    try:
        type("Probe", (c10d.Backend,), {})(0, 1)
    except TypeError:  # no Python constructor
        return False
    return True


# From torch 2.14 on, a Backend can be a Python class, and a group can have one backend per device type. Before, only a
# ProcessGroup could be one: it serves all devices, and torch calls its methods directly, without dispatch.
IS_BACKEND = _backends_may_be_python()


class _ProcessGroupBase(_ProcessGroup):
    """Methods that torch needs and does not provide for a ProcessGroup written in Python."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = ""

    def getGroupName(self) -> str:
        return self._name

    group_name = pg_name = property(getGroupName)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.end_coalescing()


Base: Any = c10d.Backend if IS_BACKEND else _ProcessGroupBase


def not_compiled(kind: Any) -> Any:
    """Decorator of a class: torch.compile runs its methods, which torch calls, and does not trace them."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, skip)
    return kind


def has_no_values(x: torch.Tensor) -> bool:
    """Return whether x has only a shape: a call with it does nothing. From torch 2.14 on, torch makes no such call."""
    return x.is_meta or type(x) is FakeTensor


def options(timeout: timedelta) -> Any:
    return c10d.Backend.Options("pynccl", timeout)


def backend_of(group: Any, kind: str) -> Any:
    """Return the backend of a process group for a device type; None if it has none."""
    try:
        return group._get_backend(torch.device(kind))
    except RuntimeError:
        return None


# "SUM", ... by the hash of a ReduceOp or of one of its constants: its number. To ask for op.op takes ten times as long.
OPERATOR_NAMES = {hash(kind): name for name, kind in vars(c10d.ReduceOp.RedOpType).items() if name.isupper()}


def factor(op: Any) -> Any:
    """Return the factor of a PREMUL_SUM: a number or a tensor of one element."""
    return op.__getstate__()[1]


def name_groups_anew() -> None:
    """Restart torch's numbers of groups, as destroy_process_group does: they are the names, which the ranks share."""
    dist.distributed_c10d._world.group_count = 0


def register(make: Any) -> None:
    dist.Backend.register_backend("pynccl", make, extended_api=True, devices=["cpu", "cuda"])
