"""What train.py shows: time in communication, the losses beside the unsharded model's, their curve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

import pynccl
from pynccl.comm.observing import Observer, observing
from pynccl_autograd.overlap.lanes import Lanes

COMPARED_STEPS = 50
# Largest relative difference of the two losses within COMPARED_STEPS. Only the order of summation differs, but training
# amplifies rounding errors from step to step, which is also why later steps are shown and not judged.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-2}


class _Blocked(Observer):
    """Tells the meter how long overlapped layers have waited for their communication."""

    def __init__(self, meter: CommMeter) -> None:
        self._meter = meter

    def closed(self, lanes: Lanes) -> None:
        self._meter.add(getattr(lanes.main, "blocked", 0.0))


class CommMeter:
    """Seconds that this rank spends in collectives of one communicator, waiting for other ranks included.

    The methods of `comm` are wrapped. On the CPU a collective returns when it is done, so its time is that of the call;
    of one beside matmuls it is the time that the matmuls waited for it, which overlapped layers tell their observers.
    On a GPU the call returns at once: CUDA events on its stream, before and after, tell how long it held the stream.
    """

    METHODS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")

    def __init__(self, comm: pynccl.Communicator) -> None:
        self.calls = 0
        self.how = "time inside collectives" + ("" if comm.library.is_host else " by CUDA events on their stream")
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._open = contextlib.ExitStack()
        if comm.library.is_host:
            self._open.enter_context(observing(_Blocked(self)))
        for name in self.METHODS:
            method = getattr(comm, name)
            setattr(comm, name, self._on_cpu(method) if comm.library.is_host else self._on_gpu(method))

    def seconds(self) -> float:
        """In all so far. On a GPU the streams must have been synchronized."""
        self._seconds += sum(start.elapsed_time(end) for start, end in self._events) / 1e3
        self._events.clear()
        return self._seconds

    def add(self, seconds: float) -> None:
        self._seconds += seconds

    def _on_cpu(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if options.get("stream") is not None:
                self.calls += 1
                return method(*args, **options)
            started = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.calls += 1
                self._seconds += time.perf_counter() - started

        return timed

    def _on_gpu(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, stream: Any = None, **options: Any) -> Any:
            on = torch.cuda.current_stream()
            if stream is not None:
                on = torch.cuda.ExternalStream(pynccl.interop.streams.stream_handle(stream))
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(on)
            result = method(*args, stream=stream, **options)
            end.record(on)
            self.calls += 1
            self._events.append((start, end))
            return result

        return timed


class Comparison:
    """The losses of the sharded model, and of the unsharded one if it is trained beside it, step by step."""

    HEADER = "    step      sharded    unsharded   difference"

    def __init__(self, steps: int, dtype: str) -> None:
        self.sharded: list[float] = []
        self.unsharded: list[float] = []
        self.every = max(1, steps // 10)
        self.tolerance = TOLERANCE[dtype]

    def differences(self) -> list[float]:
        """|sharded - unsharded| / |unsharded| of each step; NaN counts as infinite."""
        pairs = zip(self.sharded, self.unsharded, strict=True)
        values = [abs(a - b) / abs(b) if b else abs(a - b) for a, b in pairs]
        return [value if value == value else float("inf") for value in values]

    def row(self) -> str:
        """The last step as a line of the table; "" where none is due."""
        step = len(self.sharded)
        if step % self.every and step != 1:
            return ""
        row = f"{step:8d} {self.sharded[-1]:12.6f} {self.unsharded[-1]:12.6f} {self.differences()[-1]:12.1e}"
        return f"{self.HEADER}\n{row}" if step == 1 else row

    def agrees(self) -> bool:
        return max(self.differences()[:COMPARED_STEPS]) < self.tolerance

    def verdict(self) -> str:
        judged = self.differences()[:COMPARED_STEPS]
        rest = self.differences()[COMPARED_STEPS:]
        found = f"largest relative difference in {len(judged)} steps {max(judged):.1e}, limit {self.tolerance:.0e}"
        later = f" (later steps: {max(rest):.1e})" if rest else ""
        if self.agrees():
            return f"check: the sharded and the unsharded model agree: {found}{later}"
        return f"check FAILED: the sharded and the unsharded model differ: {found}{later}"


def plot(path: str, losses: Comparison, title: str) -> str:
    """Draw the loss curve, with --check both curves and their difference; returns what was done, in words."""
    try:
        import matplotlib
    except ImportError:
        return "no loss curve: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    rows = 2 if losses.unsharded else 1
    figure, axes = plt.subplots(
        rows, squeeze=False, sharex=True, figsize=(8, 3 + 2 * rows), height_ratios=[3, 1][:rows], layout="constrained"
    )
    steps = range(1, len(losses.sharded) + 1)
    top = axes[0][0]
    if losses.unsharded:  # thick and pale below, since the two curves are meant to lie on each other
        top.plot(steps, losses.unsharded, color="#f2b134", linewidth=6, label="unsharded model")
    top.plot(steps, losses.sharded, color="#1b4f8f", linewidth=1.8, marker="o" if len(steps) == 1 else "", label=title)
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    if losses.unsharded:
        low = axes[1][0]
        shown = [value or float("nan") for value in losses.differences()]  # zero has no logarithm: a gap
        low.semilogy(steps, shown, color="#1b4f8f", marker=".", linestyle="")
        low.axhline(losses.tolerance, color="#c0392b", linestyle="--", linewidth=1, label="limit")
        low.set_ylabel("relative difference\n(if any)")
        low.legend(loc="center right")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
    axes[-1][0].set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"wrote {path}"
