"""Measure one case: warm up, time, check. With --compare, alternate with torch. The slowest rank counts.

Iterations are timed with the host's clock on the host library, and with events on the stream on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

from ...comm.collectives import bus_factor
from ...comm.communicator import Communicator
from ...comm.redop import Op
from ..command import FailedError
from .cases import Buffers, Call, Case, call_of

PLACEMENTS = ("out-of-place", "in-place")
_MAX_TURNS, _MIN_ITERATIONS_PER_TURN = 8, 5


@dataclass
class Side:
    """Measurement of one case out of place or in place: seconds, the maximum over the ranks."""

    times: list[float]  # of each iteration, in the order in which they ran
    mean: float
    wrong: int | None = None  # wrong elements on all ranks; None: not checked
    torch: float | None = None  # mean of torch's iterations; None: not measured, or unsupported by torch


@dataclass
class Row:
    case: Case
    sides: list[Side | None]  # out of place, in place; None if the collective has no in-place form

    @property
    def wrong(self) -> int:
        return sum(side.wrong or 0 for side in self.sides if side)

    def bandwidths(self, seconds: float) -> tuple[float, float]:
        """Return algbw and busbw in GB/s."""
        algorithm = self.case.nbytes / seconds * 1e-9 if seconds else 0.0
        return algorithm, algorithm * bus_factor(self.case.collective, self.case.ranks)


class AllocationError(FailedError):
    """A rank cannot allocate the buffers of a size."""


def measure_case(comm: Communicator, case: Case, options: argparse.Namespace) -> Row:
    """Measure a row of the table. All ranks return the same row."""
    buffers = _allocate(comm, case)
    return Row(case, [_measure_side(comm, buffers, index, options) for index in (0, 1)])


def _allocate(comm: Communicator, case: Case) -> Buffers:
    """Allocate the buffers. Raises on all ranks if one of them is out of memory."""
    buffers, reason = None, ""
    try:
        buffers = Buffers(case, comm)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0] or "out of memory"
    failed = reduce_over_ranks(comm, [float(buffers is None)], "max")[0]
    if buffers is None or failed:
        raise AllocationError(
            f"{case.nbytes} bytes of {case.collective}: {reason or 'another rank failed'}; pass a smaller -e"
        )
    return buffers


def _measure_side(comm: Communicator, buffers: Buffers, index: int, options: argparse.Namespace) -> Side | None:
    placement = buffers.placements[index]
    if placement is None:
        return None
    case = buffers.case
    call = call_of(comm, case, placement)
    torch_call = _supported_torch_call(comm, case, placement, index == 1) if options.compare else None
    buffers.clear()
    for function in [call, torch_call] if torch_call else [call]:
        for _ in range(options.warmup_iters):
            function()
    times, torch_times = _alternate(comm, call, torch_call, options.iters)
    side = Side(reduce_over_ranks(comm, times, "max"), reduce_over_ranks(comm, [statistics.fmean(times)], "max")[0])
    if torch_times:
        side.torch = reduce_over_ranks(comm, [statistics.fmean(torch_times)], "max")[0]
    if options.check:
        side.wrong = _count_wrong(comm, buffers, placement, call, options.check)
    return side


def _alternate(comm: Communicator, call: Call, torch_call: Call | None, count: int) -> tuple[list[float], list[float]]:
    """Return seconds of count iterations of each call, measured in alternating turns."""
    if torch_call is None:
        return iterations(comm, call, count), []
    turns = max(min(_MAX_TURNS, count // _MIN_ITERATIONS_PER_TURN), 1)
    times: list[float] = []
    torch_times: list[float] = []
    for turn in range(turns):
        part = count * (turn + 1) // turns - count * turn // turns
        times += iterations(comm, call, part)
        torch_times += iterations(comm, torch_call, part)
    return times, torch_times


def _supported_torch_call(comm: Communicator, case: Case, placement: tuple[Any, Any], in_place: bool) -> Call | None:
    """Return torch's call, or None if it fails on a rank: torch's backends support fewer types and operators."""
    call = make_torch_call(case, comm.rank, placement, in_place)
    if call is None:
        return None
    try:
        call()
        failed = 0.0
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        failed = 1.0
    return None if reduce_over_ranks(comm, [failed], "max")[0] else call


def _count_wrong(comm: Communicator, buffers: Buffers, placement: tuple[Any, Any], call: Call, rounds: int) -> int:
    """Return the number of wrong elements, summed over ranks and rounds."""
    found = 0
    for _ in range(rounds):
        buffers.prepare(placement)
        comm.barrier()  # send buffers are ready before other ranks read them; on a GPU one stream orders the work
        call()
        found += buffers.wrong(placement)
    return round(reduce_over_ranks(comm, [float(found)], "sum")[0])


# ---------------------------------------------------------------------------------------------------- clocks


def iterations(comm: Communicator, call: Call, count: int) -> list[float]:
    """Return the seconds of each of count calls on this rank, after a barrier and one untimed call."""
    if not comm.library.is_host:
        return _on_the_stream(comm, call, count)
    comm.barrier()
    call()  # absorbs the wait for the rank that leaves the barrier last, which exceeds a small collective's time
    stamps = [time.perf_counter()]
    for _ in range(count):
        call()
        stamps.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(stamps)]


def _on_the_stream(comm: Communicator, call: Call, count: int) -> list[float]:
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    comm.barrier()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e-3 for before, after in itertools.pairwise(events)]


def reduce_over_ranks(comm: Communicator, values: list[float], op: Op) -> list[float]:
    """Reduce the values over all ranks, element by element."""
    import torch

    row = torch.tensor(values, dtype=torch.float64, device=comm.device)
    found: list[float] = comm.all_reduce(row, row, op).tolist()
    return found


# ----------------------------------------------------------------------------------------- torch.distributed


def connect_torch(comm: Communicator) -> str:
    """Create torch's default process group on the same ranks. Return the name of its backend."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two functions
    backend = dist.get_default_backend_for_device(torch.device(comm.device))
    if comm.size == 1:
        store: Any = dist.HashStore()
    else:  # torchrun's agent or pynccl.init serves this store
        master = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"pynccl/perf/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", master)
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size)
    return backend


def disconnect_torch() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def make_torch_call(row: Case, rank: int, placement: tuple[Any, Any], in_place: bool) -> Call | None:
    """Return torch's call, or None: its all_reduce, broadcast and reduce are in place only, the others out of place."""
    import torch.distributed as dist

    send, recv = placement
    if in_place != (row.collective in ("all_reduce", "broadcast", "reduce")):
        return None
    op = {"prod": "PRODUCT"}.get(row.op, row.op.upper())
    reduce_op: Any = getattr(dist.ReduceOp, op)
    rows = list(recv.split(row.count)) if rank == row.root else None
    blocks = list(send.split(row.count)) if rank == row.root else None
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(recv, reduce_op),
        "broadcast": lambda: dist.broadcast(recv, row.root),
        "reduce": lambda: dist.reduce(recv, row.root, reduce_op),
        "all_gather": lambda: dist.all_gather_into_tensor(recv, send),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(recv, send, reduce_op),
        "all_to_all": lambda: dist.all_to_all_single(recv, send),
        "gather": lambda: dist.gather(send, rows, row.root),
        "scatter": lambda: dist.scatter(recv, blocks, row.root),
        "send_recv": lambda: _ring_step(rank, row.ranks, send, recv),
    }
    return calls[row.collective]


def _ring_step(rank: int, ranks: int, send: Any, recv: Any) -> None:
    import torch.distributed as dist

    pair = [
        dist.P2POp(dist.isend, send, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, recv, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
