"""A ctypes binding that calls libnccl directly, on the caller's own CUDA streams.

    import pynccl
    comm = pynccl.init()                  # under torchrun
    comm.all_reduce(x, x)                 # in place, on the current stream

Importing this package imports neither torch nor CUDA. See help() of each name for details:

initialization     init (ranks of torchrun), init_all (devices of this process), from_store, from_file, get_unique_id;
                   Communicator has these and from_process_group, from_mpi, split, shrink, grow
operations         Communicator.all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, gather, scatter,
                   send, recv, put_signal, barrier, ...; group (several calls in one launch), Plan (prepared calls,
                   made by comm.plan); simulate, Simulation
teardown           Communicator.destroy, finalize, abort; abort (several communicators at once)
operators, types   RedOp, PreMulSum, DataType, UniqueId, Result
configuration      CommConfig (per communicator), CollConfig (per call); param, params, set_encryption (of NCCL)
streams            create_stream, create_event, current_stream; Stream, Event
memory             mem_alloc, mem_pool; Memory, Registration, Window
the library        load; Library
errors             NcclError; NcclInvalidArgument, NcclInvalidUsage, NcclTimeout, NcclRemoteError, NcclInProgress,
                   NcclSystemError, NcclInternalError, NcclUnhandledCudaError, NcclLibraryNotFound, NcclVersionError
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

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
from .bindings.listing import public_dir as _public_dir
from .bindings.structs import CollConfig, CommConfig
from .bindings.torch_names import no_attribute as _no_attribute
from .bootstrap import from_env as init, from_file, from_store
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

__dir__ = _public_dir(globals())

if not _TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> object:
        raise _no_attribute(_sys.modules.get(__name__), name, methods=Communicator)


# Tracebacks, reprs and pickles show the public import path of a class.
for _public in [globals()[name] for name in __all__]:
    if isinstance(_public, type):
        _public.__module__ = __name__
del _public
