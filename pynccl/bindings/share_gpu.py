"""PYNCCL_SHARE_GPU=1: ranks of one node may share a GPU, to try a program on fewer GPUs than ranks.

NCCL refuses two ranks of one host on one GPU. With this variable each process claims to be a host of its own, and NCCL
2.30 is told to allow it. NCCL reads the host once in a process, at its first init: from then on all communicators of
the process, torch's too, use sockets, even between GPUs that NVLink or shared memory would connect.
"""

from __future__ import annotations

import os
import secrets
import warnings

from .errors import switch

VARIABLE = "PYNCCL_SHARE_GPU"
_HOST_ID = "NCCL_HOSTID"
_WARNING = f"{VARIABLE}=1: ranks may share a GPU, and communicate through sockets: good for trying, not for speed"


def is_shared() -> bool:
    """Return whether PYNCCL_SHARE_GPU is 1. NcclInvalidUsage if it is neither 1 nor 0."""
    return switch(VARIABLE, "ranks may share a GPU")


def prepare() -> None:
    """Tell NCCL, before its first init in this process. Keeps an NCCL_HOSTID that the user set."""
    own = f"pynccl-{os.getpid()}-"  # a child process inherits its parent's
    host = os.environ.get(_HOST_ID, "")
    if host.startswith(own):
        return
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if not host or host.startswith("pynccl-"):
        os.environ[_HOST_ID] = own + secrets.token_hex(8)
        if os.environ.get("RANK", "0") == "0":
            warnings.warn(_WARNING, RuntimeWarning, stacklevel=1000)  # of no line: it is printed in one line
