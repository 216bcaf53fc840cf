"""What NCCL launches for a setting, by torch's profiler: thread blocks under a cap."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.overlapped import CASES, forward_and_backward, inputs, needs_peers, parts, to
from torch.profiler import ProfilerActivity, profile

from pynccl import Communicator
from pynccl_autograd import OverlapConfig


def ran(step: Callable[[], object], folder: Path) -> list[dict[str, Any]]:
    """Kernels and copies of a step that has run twice before: their "name", "cat" and "args"."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    seen.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]


def blocks(events: list[dict[str, Any]]) -> list[int]:
    """Of each kernel of NCCL."""
    return [event["args"]["grid"][0] for event in events if event["name"].startswith("nccl")]


@pytest.mark.parametrize("method", ["slices", "ring"])
def test_a_cap_of_ctas_is_the_grid_of_every_kernel(child: Communicator, tmp_path: Path, method: str) -> None:
    needs_peers(child)
    case, whole = CASES["matmul_reduce_scatter"], inputs(child, seed=1, sequence=4096)
    own = to(parts(case, whole, child), torch.float32)
    grids = {}
    for most in (1, None):
        config = OverlapConfig(method, chunks=2, num_comm_ctas=most)
        grids[most] = blocks(ran(partial(forward_and_backward, case, own, child, config), tmp_path))
    assert grids[1] and set(grids[1]) == {1}
    if max(grids[None]) == 1:
        pytest.skip("right, but NCCL takes one thread block without a cap, too")
