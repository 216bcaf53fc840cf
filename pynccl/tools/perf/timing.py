"""Seconds per iteration: from a moment at which all ranks begin on the host, by events of the stream on a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from ...comm.communicator import Communicator
from .operations import Call

_SPIN_SECONDS = 0.0002  # a sleep may end that much late


def iterations(comm: Communicator, call: Call, count: int, one_clock: bool) -> list[float]:
    """Seconds of each of count calls on this rank. one_clock: all ranks read the same, being on one machine."""
    if not comm.library.is_host:
        return _on_the_stream(comm, call, count)
    stamps = [_begin_together(comm, one_clock)]
    for _ in range(count):
        call()
        stamps.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(stamps)]


def _begin_together(comm: Communicator, one_clock: bool) -> float:
    """Wait for the moment at which all ranks begin. A barrier lets them go one after the other, which takes longer than
    a small collective does: where they have a clock in common, they agree on a time that none has reached yet."""
    if not one_clock:
        comm.barrier()
        return time.perf_counter()
    start = float(across(comm, [time.perf_counter() + 0.001 + 0.0005 * comm.size], "max")[0])
    time.sleep(max(start - time.perf_counter() - _SPIN_SECONDS, 0.0))
    while time.perf_counter() < start:
        pass
    return start


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


def captured(comm: Communicator, make: Callable[[], Call], count: int) -> Any:
    """A CUDA graph of count calls, after one replay. The call is made on the stream that is captured: a plan launches
    on the stream on which it was made."""
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()  # the buffers are filled
    with torch.cuda.stream(stream):
        call = make()
        call()  # what NCCL makes ready at its first call is no part of a graph
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    graph.replay()
    torch.cuda.synchronize()
    comm.barrier()
    return graph


def across(comm: Communicator, values: list[float], how: Any) -> list[float]:
    """values of all ranks as one, element by element: an operator, or "rank0"."""
    import torch

    row = torch.tensor(values, dtype=torch.float64, device=comm.device)
    if how == "rank0":
        comm.broadcast(row, row, 0)
    else:
        comm.all_reduce(row, row, how)
    found: list[float] = row.tolist()
    return found
