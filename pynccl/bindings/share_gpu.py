"""PYNCCL_SHARE_GPU=1: ranks of one node may share a GPU, to try a program on fewer GPUs than ranks.

NCCL refuses two ranks of one host on one GPU. With this variable each process claims to be a host of its own, and NCCL
2.30 is told to allow it. NCCL reads the host once in a process, at its first init: from then on all communicators of
the process, torch's too, use sockets, even between GPUs that NVLink or shared memory would connect.
"""

from __future__ import annotations

import os
import secrets
import warnings

VARIABLE = "PYNCCL_SHARE_GPU"
_HOST_ID = "NCCL_HOSTID"


def is_shared() -> bool:
    """Return whether PYNCCL_SHARE_GPU is set."""
    return os.environ.get(VARIABLE, "0") not in ("", "0", "off")


def prepare() -> None:
    """Tell NCCL, before its first init in this process. Keeps an NCCL_HOSTID that the user set."""
    own = f"pynccl-{os.getpid()}-"  # a child process inherits its parent's
    host = os.environ.get(_HOST_ID, "")
    if not is_shared() or host.startswith(own):
        return
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if not host or host.startswith("pynccl-"):
        os.environ[_HOST_ID] = own + secrets.token_hex(8)
        if os.environ.get("RANK", "0") == "0":
            text = (
                "ranks may share a GPU and reach each other through sockets: good for trying a program, not for speed"
            )
            warnings.warn(f"{VARIABLE}={os.environ[VARIABLE]}: {text}", RuntimeWarning, stacklevel=2)


def remedy() -> str:
    """Return what to do after NCCL found two ranks on one GPU."""
    if is_shared():
        return (
            f"{VARIABLE} was set after this process's first use of NCCL, or NCCL_HOSTID is the same for several ranks: "
            f"set {VARIABLE}=1 in the environment in which the ranks are started"
        )
    return f"give each rank its own GPU (device=), or set {VARIABLE}=1 on all ranks to share one: good for trying, slow"
