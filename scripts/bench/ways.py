"""What overhead.py measures: ways to make a call, how each is timed, and NVIDIA's own binding as one."""

from __future__ import annotations

import importlib
import importlib.util
import timeit
from types import SimpleNamespace
from typing import Any, NamedTuple

import pynccl
from pynccl import progress

BARE, CHECKED, PLAN = "bare ctypes", "comm.all_reduce(t, t)", "plan()"


class Way(NamedTuple):
    """One way to make the call."""

    name: str
    statement: str
    names: dict[str, Any]  # that the statement uses
    calls: int = 1  # calls that the statement makes
    reaches_stub: bool = True

    def seconds(self, calls: int) -> float:
        """Time per call, over about so many calls."""
        times = max(calls // self.calls, 1)
        return timeit.Timer(self.statement, globals=self.names).timeit(times) / (times * self.calls)


def nccl4py_ways(comm: pynccl.Communicator, t: Any) -> list[Way]:
    """NVIDIA's binding, which takes the stub because a library of that name is in the process already."""
    if not importlib.util.find_spec("nccl"):
        return []
    core = importlib.import_module("nccl.core")
    low = importlib.import_module("nccl.bindings.nccl")
    theirs = core.Communicator(comm.handle)
    # Asked for, it would look for a GPU. A CPU tensor's index is None, and so it compares equal.
    theirs._device = SimpleNamespace(device_id=t.device.index)
    dtype, op = int(core.NcclDataType.FLOAT32), int(core.NcclRedOp.SUM)
    raw = {"all_reduce": low.all_reduce, "p": t.data_ptr(), "n": t.numel(), "c": low.Comm(comm.handle)}
    names = {"comm": theirs, "t": t, "SUM": core.NcclRedOp.SUM}
    return [
        Way("nccl4py low-level all_reduce", f"all_reduce(p, p, n, {dtype}, {op}, c, 0)", raw),
        Way("nccl4py Communicator.allreduce", "comm.allreduce(t, t, SUM)", names),
    ]


def measure(ways: list[Way], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call of each way, one number per round. `timeit` turns the garbage collector off."""
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in progress.over(range(rounds), "measuring", "round"):
        for way in ways:
            times[way.name].append(way.seconds(calls))
    return times
