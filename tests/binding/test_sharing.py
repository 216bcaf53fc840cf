"""A module with a communicator can be copied, and the copy shares it. Pickling raises and says what to do."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from libraries import Stub
from torch.optim.swa_utils import AveragedModel

import pynccl
from pynccl import Communicator
from pynccl.interop.events import CudaEvent
from pynccl.interop.streams import CudaStream

HANDLES: dict[str, Callable[[Communicator], Any]] = {
    "Communicator": lambda comm: comm,
    "PreMulSum": lambda comm: comm.pre_mul_sum(2.0, "float32"),
    "Registration": lambda comm: comm.register(torch.zeros(4)),
    "Window": lambda comm: comm.window(torch.zeros(4)),
    "Library": lambda comm: comm.library,
    "Planner": lambda comm: comm.plan,
    "HostStream": lambda comm: pynccl.create_stream(),
    "HostEvent": lambda comm: pynccl.create_event(),
    "CudaStream": lambda comm: CudaStream(SimpleNamespace(handle=1)),
    "CudaEvent": lambda comm: CudaEvent(0, pointer=ctypes.c_void_p(1)),
}


def test_handles_are_shared_by_copies_and_not_picklable() -> None:
    comm = Stub().comm(cpu=True)
    for kind, make in HANDLES.items():
        handle = make(comm)
        assert copy.copy(handle) is handle and copy.deepcopy({"x": handle})["x"] is handle, kind
        for protocol in (0, pickle.HIGHEST_PROTOCOL):
            with pytest.raises(TypeError, match=rf"a pynccl\.{kind} cannot be pickled: .*state_dict\(\).*create a new"):
                pickle.dumps(handle, protocol)
    plan = comm.plan.all_reduce(torch.zeros(4))
    assert copy.deepcopy(plan) is plan
    with pynccl.mem_alloc(4, "float32") as memory, pytest.raises(TypeError, match="has one owner, which frees it"):
        copy.deepcopy(memory)


def test_module_with_communicator_is_averaged_and_saves_state_dict() -> None:
    comm = Stub().comm(cpu=True)
    module: Any = torch.nn.Linear(2, 2)
    module.comm = comm
    average: Any = AveragedModel(module)
    average.update_parameters(module)
    assert average.module.comm is comm and average.module.weight is not module.weight
    with pytest.raises(TypeError, match=r"a pynccl\.Communicator cannot be pickled: .*Save module\.state_dict\(\)"):
        torch.save(module, io.BytesIO())
    torch.save(module.state_dict(), io.BytesIO())
