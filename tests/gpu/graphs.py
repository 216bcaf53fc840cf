"""CUDA graphs of a step, and those of torch.compile: NCCL's destroy and abort wait for all of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def forget_graphs() -> None:
    """Destroy what mode="reduce-overhead" has captured: it lives in dynamo's cache, not in the compiled function."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        torch.cuda.synchronize()
        reset_cudagraph_trees()
    torch._dynamo.reset()
    gc.collect()


@contextmanager
def captured(
    step: Callable[[], Sequence[Tensor]], mode: str = "thread_local"
) -> Iterator[tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]]:
    """The graph of a step, and where it leaves its results. mode: torch's default is "global"."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # NCCL connects, cuBLAS makes its handles: that cannot be captured
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            results = step()
        yield graph, results
    finally:
        torch.cuda.synchronize()
        graph.reset()  # NCCL's destroy waits for it
