"""A module that holds a communicator can be copied, and shares it; it refuses to be pickled, and says what to do."""

from __future__ import annotations

import copy
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
from pynccl.interop.streams import CudaEvent, CudaStream

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
    "CudaEvent": lambda comm: CudaEvent(SimpleNamespace(handle=1)),
}


@pytest.mark.parametrize("kind", HANDLES)
def test_a_handle_is_shared_by_copies_and_refuses_to_be_pickled(kind: str) -> None:
    handle = HANDLES[kind](Stub().comm(cpu=True))
    assert copy.copy(handle) is handle
    assert copy.deepcopy({"x": handle})["x"] is handle
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        with pytest.raises(TypeError, match=rf"a pynccl\.{kind} cannot be pickled: .*state_dict\(\).*anew"):
            pickle.dumps(handle, protocol)


def test_a_plan_is_shared_by_copies_too() -> None:
    comm = Stub().comm(cpu=True)
    plan = comm.plan.all_reduce(torch.zeros(4))
    assert copy.deepcopy(plan) is plan
    with pytest.raises((pickle.PicklingError, AttributeError), match="plan of all_reduce"):
        pickle.dumps(plan)


class Reduced(torch.nn.Module):
    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.linear = torch.nn.Linear(2, 2)
        self.op = comm.pre_mul_sum(0.5, "float32")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = self.comm.all_reduce(self.linear(x), op=self.op)
        return reduced


def test_a_module_with_a_communicator_is_averaged_and_saved_by_its_state() -> None:
    stub = Stub()
    module = Reduced(stub.comm(cpu=True))
    average: Any = AveragedModel(module)
    average.update_parameters(module)
    assert average.module.comm is module.comm and average.module.op is module.op
    assert average.module.linear.weight is not module.linear.weight
    stub.clear()
    with torch.no_grad():
        average(torch.ones(1, 2))
    assert stub.names() == ["ncclAllReduce"]
    with pytest.raises(TypeError, match=r"a pynccl\.Communicator cannot be pickled: .*Save module\.state_dict\(\)"):
        torch.save(module, io.BytesIO())
    torch.save(module.state_dict(), io.BytesIO())


def test_memory_has_one_owner() -> None:
    with pynccl.mem_alloc(4, "float32") as memory:
        for copied in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="has one owner, who frees it; make another with mem_alloc"):
                copied(memory)
        with pytest.raises(TypeError, match=r"cannot be pickled: save a copy, as torch\.from_dlpack"):
            pickle.dumps(memory)
        values = torch.from_dlpack(memory).fill_(3.0).clone()
    assert values.tolist() == [3.0] * 4
