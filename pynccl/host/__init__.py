"""libnccl's own C ABI on CPU memory, for machines without a GPU: shared memory or sockets, torch for the arithmetic.

`function(name)` gives ctypes function pointers with the signatures of `abi.FUNCTIONS`; buffers are addresses of CPU
memory, which the caller keeps alive until the operation has completed; streams are handles of `HostStream`, or
0 for the calling thread. Environment: PYNCCL_HOST_TIMEOUT and PYNCCL_HOST_INIT_TIMEOUT (seconds, default 600),
PYNCCL_HOST_TRANSPORT (see `sharing`), PYNCCL_JOB_KEY (see `rendezvous`), PYNCCL_HOST_LINK (see `link`),
PYNCCL_HOST_VERSION (see `version`; read when this package is imported), NCCL_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME
(the interface, for ranks on several machines; see `interfaces`).

Calls on a communicator with blocking=0 have completed when they return, so its asynchronous error is never
ncclInProgress: a program written for nonblocking communicators works, and finds nothing to wait for.
"""

from __future__ import annotations

from . import (
    atexit as _atexit,  # noqa: F401 (registers what happens at exit)
    collectives as _collectives,  # noqa: F401 (this and those below register the C functions)
    finalize as _finalize,  # noqa: F401
    init as _init,  # noqa: F401
    params as _params,  # noqa: F401
    query as _query,  # noqa: F401
    register as _register,  # noqa: F401
    rma as _rma,  # noqa: F401
)
from .comm import set_timeout
from .exports import function, take_interrupt
from .stream import CallerStream, HostEvent, HostStream, made_here
from .version import VERSION

__all__ = [
    "VERSION",
    "CallerStream",
    "HostEvent",
    "HostStream",
    "function",
    "made_here",
    "set_timeout",
    "take_interrupt",
]
