"""Beside other libraries on a GPU: vLLM's wrapper, and torch's own NCCL backend in the same step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from gpu.launches import process_group

import pynccl
from pynccl.compat.vllm import PyNcclCommunicator

LARGE = 1 << 22  # elements: kernels take longer than a launch


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


@pytest.fixture(scope="module")
def torchs_own(comm: pynccl.Communicator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Initialize torch's NCCL backend, after our library has told NCCL that ranks may share a GPU."""
    with process_group("nccl", tmp_path_factory.mktemp("store")):
        yield


@pytest.mark.usefixtures("torchs_own")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_of_torchs_nccl_and_ours_run_in_the_order_of_the_step(
    comm: pynccl.Communicator, asynchronous: bool
) -> None:
    """Each result depends on the order, also that of the kernels of torch between the calls."""
    n, side = comm.size, torch.cuda.Stream(comm.device)
    y = torch.full((LARGE,), comm.rank + 1.0, device=comm.device)
    expected = [rank + 1.0 for rank in range(n)]  # of each rank
    for _ in range(5):
        work = dist.all_reduce(y, async_op=asynchronous)
        if work is not None:
            work.wait()
        y += comm.rank
        comm.all_reduce(y, y, "max")
        y /= 2 * n
        if asynchronous:
            side.wait_stream(torch.cuda.current_stream())
            comm.all_reduce(y, y, stream=side)
            torch.cuda.current_stream().wait_stream(side)
        else:
            comm.all_reduce(y, y)
        y -= comm.rank
        highest = (sum(expected) + n - 1) / (2 * n)
        expected = [n * highest - rank for rank in range(n)]
    assert torch.allclose(y, torch.full_like(y, expected[comm.rank]), rtol=1e-5), (y[:4], expected)
