"""A ctypes binding that calls libnccl directly, on the caller's own CUDA streams.

    import pynccl
    comm = pynccl.init()                  # under torchrun
    comm.all_reduce(x, x)                 # in place, on the current stream

Importing this package imports neither torch nor CUDA.
"""

from .bindings.abi import DataType, RedOp, Result, UniqueId
from .bindings.errors import (
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
from .bindings.library import Library, load
from .bindings.structs import CollConfig, CommConfig
from .bootstrap import from_env as init
from .bootstrap import from_file, from_store
from .comm.communicator import Communicator, init_all
from .comm.finalize import abort
from .comm.groups import group
from .comm.init import get_unique_id
from .comm.memory import Memory, Registration, Window, mem_alloc
from .comm.mempool import mem_pool
from .comm.plan import Plan
from .comm.redop import PreMulSum
from .comm.simulation import Simulation, simulate
from .interop.streams import Event, Stream, create_event, create_stream, current_stream
from .nccl_params import param, params, set_encryption

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
    "init_all",
    "load",
    "mem_alloc",
    "mem_pool",
    "param",
    "params",
    "set_encryption",
    "simulate",
]

# In tracebacks, reprs and pickles a class has the name by which users import it.
for _public in [globals()[name] for name in __all__]:
    if isinstance(_public, type):
        _public.__module__ = __name__
del _public
