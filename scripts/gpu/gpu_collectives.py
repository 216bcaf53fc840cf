"""A few collectives of every kind with checked results: do the ranks of this launch reach each other?

Run once per rank with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as gpu_check and torchrun do; ranks may share
a GPU.

examples:
  PYNCCL_LIBRARY=host torchrun --standalone --nproc-per-node=2 scripts/gpu/gpu_collectives.py
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

import pynccl
from pynccl.bindings.library import gpu_count
from pynccl.tools import command

SIZES = (1, 1000, 1 << 20)  # elements of a rank; one each for NCCL's LL, LL128 and Simple protocols, or thereabouts
TIMED = 16 << 20  # elements
WRONG_VALUES = 3
INIT_SECONDS = 20.0


def join() -> pynccl.Communicator:
    """The communicator of the launch; more ranks than GPUs share them."""
    gpus = 0 if pynccl.load().is_host else gpu_count()
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    comm = pynccl.init(device=local % gpus if gpus else None, timeout=INIT_SECONDS)
    if gpus:
        torch.cuda.set_device(comm.device)
    return comm


def synchronize(comm: pynccl.Communicator) -> None:
    """Wait for the GPU, if there is one."""
    if not comm.library.is_host:
        torch.cuda.synchronize()


def checks(comm: pynccl.Communicator, count: int) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
    """Collective -> (the call, what must come out); small whole numbers, so that every sum is exact."""
    rank, size = comm.rank, comm.size

    def each(of: int, blocks: int = 1) -> Tensor:
        return (torch.arange(blocks * count, dtype=torch.float32) + of) % 7

    own, full = each(rank).to(comm.device), each(rank, size).to(comm.device)
    everyone = [each(of) for of in range(size)]
    blocks = [each(of, size).chunk(size)[rank] for of in range(size)]

    def around() -> Tensor:
        recv = torch.empty_like(own)
        with pynccl.group():
            comm.send(own, (rank + 1) % size)
            comm.recv(recv, (rank - 1) % size)
        return recv

    return {
        "all_reduce": (lambda: comm.all_reduce(own), torch.stack(everyone).sum(0)),
        "all_gather": (lambda: comm.all_gather(own), torch.cat(everyone)),
        "reduce_scatter": (lambda: comm.reduce_scatter(full), torch.stack(blocks).sum(0)),
        "broadcast": (lambda: comm.broadcast(own, root=size - 1), everyone[-1]),
        "send and recv": (around, everyone[rank - 1]),
        "all_to_all": (lambda: comm.all_to_all(full), torch.cat(blocks)),
    }


def timed(comm: pynccl.Communicator) -> float:
    """GB/s of an all_reduce in place: bytes of the buffer by seconds, the best of five."""
    x = torch.zeros(TIMED, device=comm.device)
    best = float("inf")
    for _ in range(6):  # the first warms up
        comm.barrier()
        started = time.perf_counter()
        comm.all_reduce(x, x)
        synchronize(comm)
        best = min(best, time.perf_counter() - started)
    return 4 * TIMED / best / 1e9


def main() -> int:
    command.Parser(__doc__, failed="the ranks do not reach each other; 3 they do, and a result is wrong").parse_args()
    started = time.perf_counter()
    with join() as comm:
        joined = time.perf_counter() - started
        comm.barrier()
        connected = time.perf_counter() - started - joined
        wrong = []
        for count in SIZES:
            for name, (call, expected) in checks(comm, count).items():
                got = call().cpu()
                if not torch.equal(got, expected):
                    wrong.append(f"{name} of {count}: {int((got != expected).sum())} of {got.numel()} elements")
        rate = timed(comm)
        found = {"device": comm.device, "init_s": round(joined, 3), "first_call_s": round(connected, 3)}
        print("RESULT " + json.dumps({**found, "all_reduce_64MiB_GB/s": round(rate, 2), "wrong": wrong}), flush=True)
    return WRONG_VALUES if wrong else 0


if __name__ == "__main__":
    command.run(main)
