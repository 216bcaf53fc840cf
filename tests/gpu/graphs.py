"""The CUDA graphs of torch.compile, for which NCCL's destroy and abort wait."""

from __future__ import annotations

import gc

import torch


def forget_graphs() -> None:
    """Destroy what mode="reduce-overhead" has captured: it lives in dynamo's cache, not in the compiled function."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        torch.cuda.synchronize()
        reset_cudagraph_trees()
    torch._dynamo.reset()
    gc.collect()
