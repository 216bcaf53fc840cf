"""ad.trace on a GPU: slices have the times of their kernels, and tracing does not wait for the GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator

COUNT = 1 << 20
BUSY_CYCLES = 200_000_000  # about 100 ms: much longer than a launch


class Late(nn.Module):
    """Return 2 x after a long delay on the current stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(BUSY_CYCLES)
        return 2 * x


def slices(path: Path | None, category: str) -> list[dict[str, Any]]:
    """Return the slices of rank 0. Other ranks have no file and return none."""
    if path is None:
        return []
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["cat"] == category and event["pid"] == 0]


def test_slices_have_gpu_times_and_tracing_does_not_wait(comm: Communicator, tmp_path: Path) -> None:
    x = torch.ones(COUNT, device=comm.device)
    out = torch.empty_like(x)  # a single rank launches nothing in place
    comm.all_reduce(2 * x, out)  # the first launch of a kernel loads it, and waits for a busy GPU
    torch.cuda.synchronize()
    model = Late()
    with ad.trace(tmp_path / "trace.json", comm, model=model) as trace:
        began = time.perf_counter()
        y = model(x)
        comm.all_reduce(y, out)
        issued = time.perf_counter() - began
        not_done = not torch.cuda.current_stream().query()
    assert not_done and issued < 0.05
    for layer in slices(trace.path, "gpu_user_annotation"):
        assert layer["name"] == "Late" and layer["dur"] > 50e3
        (call,) = slices(trace.path, "comm")
        assert call["ts"] >= layer["ts"] + layer["dur"] - 1.0
        assert call["args"]["bytes"] == 4 * COUNT and call["args"]["hidden_us"] == 0


def test_started_work_is_shown_as_hidden(comm: Communicator, tmp_path: Path) -> None:
    x = torch.ones(COUNT, device=comm.device)
    ad.start(ad.all_reduce, x, comm, grad="sum").wait()
    torch.cuda.synchronize()
    with ad.trace(tmp_path / "trace.json", comm) as trace:
        work = ad.start(ad.all_reduce, x, comm, grad="sum")
        torch.cuda._sleep(BUSY_CYCLES)
        work.wait()
    if trace.path is not None and 1 < comm.size <= torch.cuda.device_count():  # ranks that share a GPU take turns
        (call,) = slices(trace.path, "comm")
        assert call["args"]["exposed_us"] < 0.5 * call["dur"]  # it completed long before wait()
