"""Save a checkpoint that does not depend on the number of ranks, and load it with torch alone and on fewer ranks.

    torchrun --standalone --nproc-per-node=3 scripts/examples/checkpoint.py
    checkpoint: saved by 3 ranks, loaded by torch alone and by a model on 2: the outputs agree

`ad.full_state_dict` gathers the sharded parameters with the names and shapes of the unsharded model, so that torch can
load the file. `ad.load_full_state_dict` gives each rank its shard, on any number of ranks; rank 0 reads the file and
the other ranks pass None, so only rank 0 needs access to it. For large models, `ad.save_full_state_dict(model, folder)`
writes tensor by tensor. `ad.full_optimizer_state_dict` is for the optimizer.
"""

from __future__ import annotations

import io

import torch
from torch import nn

import pynccl
import pynccl_autograd as ad

WIDTH, HIDDEN = 8, 840  # 840 is divisible by 1 to 8 ranks


def unsharded() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).double()


def sharded(comm: pynccl.Communicator) -> nn.Sequential:
    up = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, dtype=torch.float64)
    return nn.Sequential(up, nn.GELU(), ad.RowParallelLinear(HIDDEN, WIDTH, comm, dtype=torch.float64))


def read(file: io.BytesIO) -> dict[str, torch.Tensor]:
    file.seek(0)
    return torch.load(file, weights_only=True)


def load_and_run(comm: pynccl.Communicator, file: io.BytesIO | None, x: torch.Tensor) -> torch.Tensor:
    """Load the weights into a new model, sharded over the ranks of comm, and return its output for x."""
    model = sharded(comm)
    ad.load_full_state_dict(model, None if file is None else read(file))
    return model(x).detach()


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    model = sharded(comm)
    y = model(x.to(comm.device)).detach()
    state = ad.full_state_dict(model)  # every rank calls it; rank 0 gets the result, on the CPU
    file = io.BytesIO() if comm.rank == 0 else None  # or a path
    if file is not None:
        torch.save(state, file)
    half = (comm.size + 1) // 2
    fewer = comm.split(0 if comm.rank < half else None)
    if fewer is not None:
        with fewer:
            loaded = load_and_run(fewer, file, x.to(comm.device))
        torch.testing.assert_close(loaded, y)
    if file is not None:
        reference = unsharded()
        reference.load_state_dict(read(file))  # plain torch
        torch.testing.assert_close(reference(x).detach(), y.cpu())
    return f"checkpoint: saved by {comm.size} ranks, loaded by torch alone and by a model on {half}: the outputs agree"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
