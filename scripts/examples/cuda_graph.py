"""Capture a step with a collective in a CUDA graph and replay it on new data with a single launch.

    torchrun --standalone --nproc-per-node=2 scripts/examples/cuda_graph.py
    cuda_graph: no CUDA graph on cpu: a plan was replayed 3 times on new data, and the results are right

Without a GPU there are no graphs; the script then replays `comm.plan` instead, a prepared collective, which skips the
checks of a call on any device. A capture has these requirements:

- Keep the memory: copy new data into the captured tensors.
- Make one call before the capture: NCCL connects the ranks in the first call, which is slow and cannot be captured.
- Use capture_error_mode="thread_local", because other threads, such as the watchdog, can call CUDA meanwhile.
- Call reset() before destroying the communicator, which waits for all graphs that use it.
- Do not use barrier() or PYNCCL_CHECK=1: both wait for the other ranks, and raise during a capture.
"""

from __future__ import annotations

import torch
from torch import Tensor

import pynccl

COUNT, REPLAYS = 1024, 3


def value(rank: int, replay: int) -> float:
    return 1.0 + rank + 10 * replay


def captured(x: Tensor, comm: pynccl.Communicator) -> list[float]:
    """Return the first element of y = all_reduce(2 x) + 1 for each replay of a graph."""
    comm.all_reduce(x)
    torch.cuda.synchronize(comm.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(comm.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = comm.all_reduce(x * 2) + 1
    found = []
    for replay in range(REPLAYS):
        x.fill_(value(comm.rank, replay))
        graph.replay()
        found.append(y[0].item())
    graph.reset()
    return found


def planned(x: Tensor, comm: pynccl.Communicator) -> list[float]:
    """Do the same with a plan, which contains only the collective and also keeps its buffers."""
    doubled, y = torch.empty_like(x), torch.empty_like(x)
    plan = comm.plan.all_reduce(doubled, y)
    found = []
    for replay in range(REPLAYS):
        torch.mul(x.fill_(value(comm.rank, replay)), 2, out=doubled)
        plan()
        found.append((y + 1)[0].item())
    return found


def main(comm: pynccl.Communicator) -> str:
    x = torch.zeros(COUNT, device=comm.device)
    found = captured(x, comm) if x.is_cuda else planned(x, comm)
    expected = [2 * sum(value(rank, replay) for rank in range(comm.size)) + 1 for replay in range(REPLAYS)]
    if found != expected:
        raise AssertionError(f"rank {comm.rank}: {found}, expected {expected}")
    replayed = "a captured graph" if x.is_cuda else f"no CUDA graph on {comm.device}: a plan"
    return f"cuda_graph: {replayed} was replayed {REPLAYS} times on new data, and the results are right"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
