"""Effects of settings on NCCL's kernels, measured with torch's profiler: thread blocks under a cap."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.overlapped import CASES, forward_and_backward, inputs, needs_peers, shards_of, to
from torch.profiler import ProfilerActivity, profile

from pynccl import Communicator
from pynccl_autograd import OverlapConfig


def profiled_kernels(step: Callable[[], object], folder: Path) -> list[dict[str, Any]]:
    """Profile a step after two warm-up runs. Return its kernels and copies: "name", "cat" and "args"."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]


def blocks(events: list[dict[str, Any]]) -> list[int]:
    """Return the number of thread blocks of each NCCL kernel."""
    return [event["args"]["grid"][0] for event in events if event["name"].startswith("nccl")]


@pytest.mark.parametrize("method", ["slices", "ring"])
def test_a_cap_on_ctas_limits_the_grid_of_every_kernel(child: Communicator, tmp_path: Path, method: str) -> None:
    needs_peers(child)
    case, full = CASES["matmul_reduce_scatter"], inputs(child, seed=1, sequence=4096)
    shards = to(shards_of(case, full, child), torch.float32)
    grids = {}
    for max_ctas in (1, None):
        config = OverlapConfig(method, chunks=2 if method == "slices" else None, num_comm_ctas=max_ctas)
        grids[max_ctas] = blocks(profiled_kernels(partial(forward_and_backward, case, shards, child, config), tmp_path))
    assert grids[1] and set(grids[1]) == {1}
    if max(grids[None]) == 1:
        pytest.skip("no effect to see: NCCL uses one thread block without a cap, too")
