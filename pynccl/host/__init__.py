"""The host library: libnccl's C ABI on CPU memory, over shared memory or sockets, with torch for the arithmetic.

`function(name)` returns a ctypes function pointer with the signature in `abi.FUNCTIONS`. Buffers are addresses of CPU
memory, which the caller must keep alive until the operation has completed. Streams are handles of `HostStream`, or 0
for the calling thread. Environment: PYNCCL_HOST_TIMEOUT and PYNCCL_HOST_INIT_TIMEOUT (seconds, default 600),
PYNCCL_HOST_TRANSPORT (see `sharing`), PYNCCL_JOB_KEY (see `rendezvous`), PYNCCL_HOST_LINK (see `link`),
PYNCCL_HOST_VERSION (see `version`; read when this package is imported), and NCCL_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME
(the network interface for several nodes; see `interfaces`).

On communicators with blocking=0, calls complete before they return. Their asynchronous error is never ncclInProgress,
so programs for nonblocking communicators work and never have to wait.
"""

from __future__ import annotations

from . import (
    atexit as _atexit,  # noqa: F401 (registers the exit handler)
    collectives as _collectives,  # noqa: F401 (this import and the following ones register the C functions)
    finalize as _finalize,  # noqa: F401
    init as _init,  # noqa: F401
    params as _params,  # noqa: F401
    query as _query,  # noqa: F401
    register as _register,  # noqa: F401
    rma as _rma,  # noqa: F401
)
from .comm import is_idle, set_timeout
from .exports import function, take_exception
from .failure import HostFailure, reason_of
from .init import Family
from .mailbox import Message
from .query import failure_of
from .stream import (
    CallerStream,
    HostEvent,
    HostStream,
    awaited_since,
    begin_wait,
    end_wait,
    new_handle,
    stream_from_handle,
    synchronize,
    waiting_for,
)
from .version import VERSION

__all__ = [
    "VERSION",
    "CallerStream",
    "Family",
    "HostEvent",
    "HostFailure",
    "HostStream",
    "Message",
    "awaited_since",
    "begin_wait",
    "end_wait",
    "failure_of",
    "function",
    "is_idle",
    "new_handle",
    "reason_of",
    "set_timeout",
    "stream_from_handle",
    "synchronize",
    "take_exception",
    "waiting_for",
]
