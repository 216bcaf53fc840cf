"""A ctypes binding that calls libnccl directly, on the caller's own CUDA streams.

    import pynccl
    comm = pynccl.init()                  # under torchrun
    comm.all_reduce(x, x)                 # in place, on the current stream

Importing this package imports neither torch nor CUDA.
"""

from .abi import DataType, RedOp, Result, UniqueId
from .bootstrap import from_env as init
from .bootstrap import from_file, from_store
from .communicator import Communicator, get_unique_id
from .config import CollConfig, CommConfig
from .errors import (
    NcclError,
    NcclInProgress,
    NcclInternalError,
    NcclInvalidArgument,
    NcclInvalidUsage,
    NcclLibraryNotFound,
    NcclRemoteError,
    NcclSystemError,
    NcclTimeout,
    NcclUnhandledCudaError,
    NcclVersionError,
)
from .group import group
from .library import Library, load
from .lifecycle import abort
from .memory import Memory, Registration, Window, mem_alloc
from .mempool import mem_pool
from .operators import PreMulSum
from .params import param, params, set_encryption
from .plan import Plan
from .simulation import Simulation, simulate
from .streams import Event, Stream, create_event, create_stream, current_stream

__version__ = "0.1.0"

__all__ = [
    "CollConfig",
    "CommConfig",
    "Communicator",
    "DataType",
    "Event",
    "Library",
    "Memory",
    "NcclError",
    "NcclInProgress",
    "NcclInternalError",
    "NcclInvalidArgument",
    "NcclInvalidUsage",
    "NcclLibraryNotFound",
    "NcclRemoteError",
    "NcclSystemError",
    "NcclTimeout",
    "NcclUnhandledCudaError",
    "NcclVersionError",
    "Plan",
    "PreMulSum",
    "RedOp",
    "Registration",
    "Result",
    "Simulation",
    "Stream",
    "UniqueId",
    "Window",
    "abort",
    "create_event",
    "create_stream",
    "current_stream",
    "from_file",
    "from_store",
    "get_unique_id",
    "group",
    "init",
    "load",
    "mem_alloc",
    "mem_pool",
    "param",
    "params",
    "set_encryption",
    "simulate",
]
