"""vLLM's own PyNcclCommunicator beside that of pynccl.compat.vllm: the same calls on the same numbers, on the CPU.

FOLDER has an unpacked wheel of vLLM, as for wrappers.py. Its class is given our NCCLLibrary, as others give it
theirs, and so runs on the host library; streams and the current device, which need a GPU, are stand-ins. Each rank
says how many results were equal, in every bit and stride. Two ranks or more.

examples:
  torchrun --standalone --nproc-per-node=3 scripts/beside_vllm.py --vllm out/vllm  # long: it needs the wheel
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from bench.wrappers import HandleZero, stand_ins
from torch.distributed import P2POp, ReduceOp

from pynccl.compat import vllm as compat
from pynccl.tools import command


class Stream(HandleZero):
    def synchronize(self) -> None:
        """The host library's handle 0 is the caller, who is never ahead of himself."""


def their_module(folder: Path) -> Any:
    """vLLM's pynccl.py, whose NCCLLibrary is ours."""
    stand_ins(folder)
    log: Any = logging.getLogger("vllm")
    log.info_once = log.warning_once = log.info
    vars(sys.modules["vllm.logger"])["init_logger"] = lambda name: log
    vars(sys.modules["vllm.utils.torch_utils"])["current_stream"] = Stream
    vars(sys.modules["vllm.distributed.utils"])["StatelessProcessGroup"] = compat.StatelessProcessGroup
    wrapper = vars(importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper"))
    wrapper.update(NCCLLibrary=compat.NCCLLibrary, ncclUniqueId=compat.ncclUniqueId)
    vars(torch.accelerator)["device_index"] = lambda index: contextlib.nullcontext()
    return importlib.import_module("vllm.distributed.device_communicators.pynccl")


def numbers(*shape: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(*shape, generator=made, dtype=torch.float64)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def collectives(c: Any) -> list[torch.Tensor]:
    rank, n = c.rank, c.world_size
    sizes = [(3 * one + 2) % 5 for one in range(n)]  # rows per rank, zero among them
    found = [c.all_reduce(numbers(5, 3), op=op) for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG)]
    x = numbers(4)
    found += [c.all_reduce(x, x), c.all_reduce(numbers(2, 3, 4, 5).to(memory_format=torch.channels_last))]
    c.all_gather(y := zeros(2 * n, 3), numbers(2, 3))
    c.all_gatherv(z := zeros(sum(sizes), 3), numbers(sizes[rank], 3), sizes)
    found += [y, z]
    c.reduce_scatter(y := zeros(2, 3), numbers(2 * n, 3))
    c.reduce_scatterv(z := zeros(sizes[rank], 3), numbers(sum(sizes), 3), sizes)
    found += [y, z]
    c.reduce(y := zeros(4), numbers(4), 1)
    c.scatter(z := zeros(sizes[rank], 3), numbers(sum(sizes), 3) if rank == 1 else zeros(0), sizes, root=1)
    found += [y, z]
    c.broadcast(y := numbers(6), 1)
    c.broadcast(z := torch.nn.Parameter(numbers(6)), 0)
    return [*found, y, z.detach()]


def point_to_point(c: Any) -> list[torch.Tensor]:
    rank, n = c.rank, c.world_size
    right, left = (rank + 1) % n, (rank - 1) % n
    send, recv = numbers(n, 2), zeros(n, 2)
    c.group_start()
    for peer in range(n):
        c.send(send[peer], peer)
        c.recv(recv[peer], peer)
    c.group_end()
    c.batch_isend_irecv([P2POp(dist.isend, send[0], right), P2POp(dist.irecv, y := zeros(2), left)])
    fp8, z = torch.arange(4.0).to(torch.float8_e5m2), torch.zeros(4).to(torch.float8_e5m2)
    c.group_start()
    c.send(fp8, right)
    c.recv(z, left)
    c.group_end()
    c.suspend()
    c.resume()
    return [recv, y, z.float(), c.all_reduce(numbers(3))]


def main() -> int:
    parser = command.Parser(__doc__, failed="a result differs, or a rank failed")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", required=True, help="an unpacked wheel of vLLM")
    folder = parser.parse_args().vllm
    if not (folder / "vllm/distributed/device_communicators/pynccl.py").is_file():
        parser.error(
            f"--vllm {folder}: there is no vllm/distributed/device_communicators/pynccl.py in it; unpack the wheel"
        )
    if int(os.environ.get("WORLD_SIZE", "0")) < 2:
        parser.error(
            "start it on two ranks or more: torchrun --standalone --nproc-per-node=2 scripts/beside_vllm.py ..."
        )
    os.environ.setdefault("PYNCCL_LIBRARY", "host")
    module = their_module(folder.resolve())
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    theirs, ours = (kind(dist.group.WORLD, device) for kind in (module.PyNcclCommunicator, compat.PyNcclCommunicator))
    first, second = ([*collectives(c), *point_to_point(c)] for c in (theirs, ours))
    same = [x.stride() == y.stride() and torch.equal(x, y) for x, y in zip(first, second, strict=True)]
    dist.barrier()
    print(f"rank {dist.get_rank()}: {sum(same)} of {len(same)} results are equal")
    theirs.destroy()
    ours.destroy()
    dist.destroy_process_group()
    return 0 if all(same) else 1


if __name__ == "__main__":
    command.run(main)
