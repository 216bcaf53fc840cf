"""What this room takes from torch that is private, or that differs between torch 2.13 and later ones."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

Work: Any = c10d.Work
ReduceOp: Any = c10d.ReduceOp


def _backends_may_be_python() -> bool:
    try:
        type("Probe", (c10d.Backend,), {})(0, 1)
    except TypeError:  # no constructor
        return False
    return True


# From torch 2.14 on, a Backend can be a class of Python, and a group can have one for each kind of device. Before, only
# a whole ProcessGroup could: it serves all devices, and torch calls its methods without its own dispatch between.
IS_BACKEND = _backends_may_be_python()


class _GroupOfOldTorch(c10d.ProcessGroup):
    """What torch asks of a process group, and cannot answer for one of Python."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name, self._desc = "", "undefined"

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """No hooks, no works."""

    # Names of the collectives before torch 2.13, which other libraries still call.

    def _allgather_base(self, *args: Any) -> Any:
        return self.all_gather_single(*args)

    def allgather_into_tensor_coalesced(self, *args: Any) -> Any:
        return self.all_gather_single_coalesced(*args)

    def _reduce_scatter_base(self, *args: Any) -> Any:
        return self.reduce_scatter_single(*args)

    def reduce_scatter_tensor_coalesced(self, *args: Any) -> Any:
        return self.reduce_scatter_single_coalesced(*args)

    def alltoall_base(self, *args: Any) -> Any:
        return self.all_to_all_single(*args)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.end_coalescing()


Base: Any = c10d.Backend if IS_BACKEND else _GroupOfOldTorch


def options(timeout: timedelta) -> Any:
    return c10d.Backend.Options("pynccl", timeout)


def backend_of(group: Any, kind: str) -> Any:
    """The backend of a process group for this kind of device; None where it has none."""
    try:
        return group._get_backend(torch.device(kind))
    except RuntimeError:
        return None


def operator_name(op: Any) -> str:
    """ "SUM", of a ReduceOp or of one of its constants."""
    return str(getattr(op, "op", op).name)


def factor(op: Any) -> Any:
    """Of a PREMUL_SUM: a number, or a tensor of one element."""
    return op.__getstate__()[1]


def register(make: Any) -> None:
    dist.Backend.register_backend("pynccl", make, extended_api=True, devices=["cpu", "cuda"])
