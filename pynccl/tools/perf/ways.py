"""Which way NCCL took: the kernels that torch's profiler sees of one call on a GPU."""

from __future__ import annotations

import re

from .operations import Call


def taken(call: Call, look: bool) -> str:
    """Make the call, on all ranks; who looks learns what ran for it on the GPU, "" where the profiler sees nothing."""
    if not look:
        call()
        return ""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return named([event.name for event in seen.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA])


def named(events: list[str]) -> str:
    """What ran, by the names of kernels and copies: "kernel AllReduce_Sum_f32_RING_LL", "symmetric kernel ..",
    "copy engine"; "" for none."""
    found = []
    for event in events:
        if kernel := re.match(r"ncclSymk?(?:Dev)?Kernel_(\w+)", event):
            found.append(f"symmetric kernel {kernel[1]}")
        elif kernel := re.match(r"nccl(?:Dev)?Kernel_(\w+)", event):
            found.append(f"kernel {kernel[1]}")
    if not found and any(re.match(r"Memcpy (DtoD|PtoP)", event) for event in events):
        found.append("copy engine")
    return ", ".join(dict.fromkeys(found))


def in_lines(ways: list[tuple[int, str]]) -> list[str]:
    """(bytes, way) in the order of the rows -> "8 to 65,536 B: kernel ..", a line for each run of equal ways."""
    runs: list[tuple[int, int, str]] = []
    for nbytes, way in ways:
        if way and runs and runs[-1][2] == way:
            runs[-1] = (runs[-1][0], nbytes, way)
        elif way:
            runs.append((nbytes, nbytes, way))
    return [f"{f'{first:,}' if first == last else f'{first:,} to {last:,}'} B: {way}" for first, last, way in runs]
