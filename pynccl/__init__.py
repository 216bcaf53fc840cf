"""A ctypes binding that calls libnccl directly, on the caller's own CUDA streams.

    import pynccl
    comm = pynccl.init()                  # under torchrun
    comm.all_reduce(x, x)                 # in place, on the current stream

Importing this package imports neither torch nor CUDA.
"""

from .abi import DataType, RedOp, Result, UniqueId
from .bootstrap import from_env as init
from .bootstrap import from_file, from_store
from .communicator import Communicator, PreMulSum, get_unique_id
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
from .streams import Event, Stream, create_event, create_stream

__version__ = "0.1.0"

__all__ = [
    "CollConfig",
    "CommConfig",
    "Communicator",
    "DataType",
    "Event",
    "Library",
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
    "PreMulSum",
    "RedOp",
    "Result",
    "Stream",
    "UniqueId",
    "create_event",
    "create_stream",
    "from_file",
    "from_store",
    "get_unique_id",
    "group",
    "init",
    "load",
]
