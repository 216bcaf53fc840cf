"""vLLM's wrapper on a GPU: a communicator of all ranks of the launch."""

from __future__ import annotations

import pytest
import torch

import pynccl
from pynccl.compat.vllm import (
    PyNcclCommunicator,
)


def test_a_communicator_of_all_ranks(comm: pynccl.Communicator) -> None:
    if comm.size == 1:
        pytest.skip("a PyNcclCommunicator of one rank is disabled, as vLLM's is; start two ranks")
    identity = torch.frombuffer(bytearray(bytes(pynccl.get_unique_id(comm.library))), dtype=torch.uint8)
    identity = comm.broadcast(identity.to(comm.device), root=0).cpu()
    c = PyNcclCommunicator.from_unique_id_bytes(
        bytes(identity.tolist()), comm.rank, comm.size, torch.device(comm.device), comm.library.path
    )
    x = torch.full((1000,), comm.rank + 1.0, device=comm.device)
    total = comm.size * (comm.size + 1) / 2
    assert c.all_reduce(x).unique().tolist() == [total]
    with pytest.raises(ValueError, match="is on cpu"):
        c.all_reduce(torch.ones(1))
    side = torch.cuda.Stream(comm.device)
    side.wait_stream(torch.cuda.current_stream())
    y = c.all_reduce(x, stream=side)
    torch.cuda.current_stream().wait_stream(side)
    assert y.unique().tolist() == [total]
    gathered = torch.empty(comm.size * 1000, device=comm.device)
    c.all_gather(gathered, x)
    assert gathered[::1000].tolist() == [rank + 1.0 for rank in range(comm.size)]
    c.destroy()
