"""A step with a collective in it, captured into a CUDA graph and replayed on new data: one launch for all of it.

    torchrun --standalone --nproc-per-node=2 scripts/examples/cuda_graph.py
    cuda_graph: no CUDA graph on cpu: a plan was replayed 3 times on new data, and the results are right

Without a GPU there are no graphs, and the script says so; `comm.plan`, a prepared collective, is then replayed instead,
which saves the checks of a call on any device. What a capture asks for:

- the memory stays: new data is copied into the tensors that were captured
- one call before it: NCCL connects the ranks in the first one, which takes long and cannot be captured
- capture_error_mode="thread_local": other threads, such as the watchdog, may call CUDA meanwhile
- reset() before the communicator's end, which waits for every graph that holds it
- no barrier(), and no PYNCCL_CHECK=1: both wait for the other ranks, and raise within a capture
"""

from __future__ import annotations

import torch
from torch import Tensor

import pynccl

COUNT, REPLAYS = 1024, 3


def value(rank: int, replay: int) -> float:
    return 1.0 + rank + 10 * replay


def captured(x: Tensor, comm: pynccl.Communicator) -> list[float]:
    """What each replay of y = all_reduce(2 x) + 1 has as its first element."""
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
    """The same with a plan, which has the collective alone; its buffers stay, too."""
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
    what = "a captured graph" if x.is_cuda else f"no CUDA graph on {comm.device}: a plan"
    return f"cuda_graph: {what} was replayed {REPLAYS} times on new data, and the results are right"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
