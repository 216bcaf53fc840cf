"""Rendezvous of the ranks of a job: torchrun's environment, a process group, MPI, a store, a shared file.

Every method calls `Communicator.init` with an id made by rank 0, all within one deadline. A rank that fails reports its
error to the others at once, and the error names ranks that never joined.
"""

from ..bindings.listing import public_dir
from . import survivors, sync_state  # methods of Communicator
from .env import from_env
from .mpi import from_mpi
from .stores import from_file, from_process_group, from_store

__all__ = ["from_env", "from_file", "from_mpi", "from_process_group", "from_store", "survivors", "sync_state"]

__dir__ = public_dir(globals())
