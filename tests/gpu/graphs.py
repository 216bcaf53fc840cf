"""Capture and destroy CUDA graphs, including those of torch.compile: NCCL's destroy and abort wait for all graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def destroy_compiled_graphs() -> None:
    """Destroy the graphs of mode="reduce-overhead". They live in dynamo's cache, not in the compiled function."""
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
    """Capture a step. Yield the graph and the step's results. mode: torch's default is "global"."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # NCCL connects and cuBLAS creates handles, which cannot be captured
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
