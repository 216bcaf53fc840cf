"""The same collectives through torch.distributed, on the same buffers: its own backend for the device."""

from __future__ import annotations

import os
import warnings
from typing import Any

from ...comm.communicator import Communicator
from .operations import Call, Case


def connect(comm: Communicator) -> str:
    """Make torch's default group of the same ranks. Returns the name of its backend."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two of its functions
    backend = dist.get_default_backend_for_device(torch.device(comm.device))
    if comm.size == 1:
        store: Any = dist.HashStore()
    else:  # which torchrun's agent serves, or pynccl.init has served by now
        master = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"pynccl/perf/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", master)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    return backend


def leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def call_of(row: Case, rank: int, place: tuple[Any, Any], in_place: bool) -> Call | None:
    """torch's call, or None where it has none: all_reduce, broadcast and reduce are in place there, the rest is not."""
    import torch.distributed as dist

    send, recv = place
    if in_place != (row.collective in ("all_reduce", "broadcast", "reduce")):
        return None
    op = {"prod": "PRODUCT"}.get(row.op, row.op.upper())
    kind: Any = getattr(dist.ReduceOp, op)
    rows = list(recv.split(row.count)) if rank == row.root else None
    parts = list(send.split(row.count)) if rank == row.root else None
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(recv, kind),
        "broadcast": lambda: dist.broadcast(recv, row.root),
        "reduce": lambda: dist.reduce(recv, row.root, kind),
        "all_gather": lambda: dist.all_gather_into_tensor(recv, send),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(recv, send, kind),
        "all_to_all": lambda: dist.all_to_all_single(recv, send),
        "gather": lambda: dist.gather(send, rows, row.root),
        "scatter": lambda: dist.scatter(recv, parts, row.root),
        "send_recv": lambda: _round_a_ring(rank, row.ranks, send, recv),
    }
    return calls[row.collective]


def _round_a_ring(rank: int, ranks: int, send: Any, recv: Any) -> None:
    import torch.distributed as dist

    pair = [
        dist.P2POp(dist.isend, send, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, recv, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
