"""One case measured: warm up, time, check; torch by turns where it is compared with. The slowest rank counts.

Seconds per iteration are those of the host's clock on the host library, between events of the stream on a GPU.
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

PLACES = ("out-of-place", "in-place")
_MOST_TURNS, _LEAST_A_TURN = 8, 5


@dataclass
class Side:
    """What was measured of one case in one place, combined over the ranks. Seconds."""

    times: list[float]  # of each iteration, in the order in which they ran
    mean: float
    wrong: int | None = None  # elements of all ranks; None: not checked
    torch: float | None = None  # mean of torch's iterations; None: not measured, or torch cannot


@dataclass
class Row:
    case: Case
    sides: list[Side | None]  # out of place, in place; None where the collective cannot

    @property
    def wrong(self) -> int:
        return sum(side.wrong or 0 for side in self.sides if side)

    def bandwidths(self, seconds: float) -> tuple[float, float]:
        """Of the algorithm and of the bus, in GB/s."""
        algorithm = self.case.nbytes / seconds * 1e-9 if seconds else 0.0
        return algorithm, algorithm * bus_factor(self.case.collective, self.case.ranks)


class UnfitError(FailedError):
    """A rank has not the memory for a size."""


def measured(comm: Communicator, case: Case, options: argparse.Namespace) -> Row:
    """The row of the table, equal on all ranks."""
    buffers = _made(comm, case)
    return Row(case, [_side(comm, buffers, index, options) for index in (0, 1)])


def _made(comm: Communicator, case: Case) -> Buffers:
    """The buffers; an error on all ranks if one of them has not the memory."""
    buffers, why = None, ""
    try:
        buffers = Buffers(case, comm)
    except (RuntimeError, MemoryError) as error:
        why = str(error).partition("\n")[0] or "out of memory"
    failed = across(comm, [float(buffers is None)], "max")[0]
    if buffers is None or failed:
        raise UnfitError(
            f"{case.nbytes} bytes of {case.collective}: {why or 'another rank has failed'}; pass a smaller -e"
        )
    return buffers


def _side(comm: Communicator, buffers: Buffers, index: int, options: argparse.Namespace) -> Side | None:
    place = buffers.places[index]
    if place is None:
        return None
    case = buffers.case
    call = call_of(comm, case, place)
    theirs = _torchs(comm, case, place, index == 1) if options.compare else None
    buffers.clear()
    for one in [call, theirs] if theirs else [call]:
        for _ in range(options.warmup_iters):
            one()
    times, torchs = _by_turns(comm, call, theirs, options.iters)
    side = Side(across(comm, times, "max"), across(comm, [statistics.fmean(times)], "max")[0])
    if torchs:
        side.torch = across(comm, [statistics.fmean(torchs)], "max")[0]
    if options.check:
        side.wrong = _wrong(comm, buffers, place, call, options.check)
    return side


def _by_turns(comm: Communicator, call: Call, theirs: Call | None, count: int) -> tuple[list[float], list[float]]:
    if theirs is None:
        return iterations(comm, call, count), []
    turns = max(min(_MOST_TURNS, count // _LEAST_A_TURN), 1)
    ours: list[float] = []
    torchs: list[float] = []
    for turn in range(turns):
        part = count * (turn + 1) // turns - count * turn // turns
        ours += iterations(comm, call, part)
        torchs += iterations(comm, theirs, part)
    return ours, torchs


def _torchs(comm: Communicator, case: Case, place: tuple[Any, Any], in_place: bool) -> Call | None:
    """torch's call, if it can be made on all ranks: its backends know fewer types and operators."""
    call = torchs_call(case, comm.rank, place, in_place)
    if call is None:
        return None
    try:
        call()
        failed = 0.0
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        failed = 1.0
    return None if across(comm, [failed], "max")[0] else call


def _wrong(comm: Communicator, buffers: Buffers, place: tuple[Any, Any], call: Call, rounds: int) -> int:
    """Elements that are wrong, of all ranks and rounds."""
    found = 0
    for _ in range(rounds):
        buffers.prepare(place)
        comm.barrier()  # what is sent is ready before another rank reads it, and one stream orders what a GPU does
        call()
        found += buffers.wrong(place)
    return round(across(comm, [float(found)], "sum")[0])


# ---------------------------------------------------------------------------------------------------- clocks


def iterations(comm: Communicator, call: Call, count: int) -> list[float]:
    """Seconds of each of count calls on this rank, after a barrier and one call more."""
    if not comm.library.is_host:
        return _on_the_stream(comm, call, count)
    comm.barrier()
    call()  # waits for the rank that leaves the barrier last, which takes longer than a small collective
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


def across(comm: Communicator, values: list[float], op: Op) -> list[float]:
    """The values of all ranks reduced, element by element."""
    import torch

    row = torch.tensor(values, dtype=torch.float64, device=comm.device)
    found: list[float] = comm.all_reduce(row, row, op).tolist()
    return found


# ----------------------------------------------------------------------------------------- torch.distributed


def connect_torch(comm: Communicator) -> str:
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


def leave_torch() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def torchs_call(row: Case, rank: int, place: tuple[Any, Any], in_place: bool) -> Call | None:
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
