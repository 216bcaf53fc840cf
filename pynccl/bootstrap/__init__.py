"""How the ranks of a job find each other: torchrun's environment, a process group, MPI, a store, a shared file.

Every way ends in `Communicator.init` with an id made by rank 0, within one deadline. A rank that cannot go on says so
to the others before they would wait for it, and a rank that never comes is named.
"""

from .env import from_env
from .mpi import from_mpi
from .stores import from_file, from_process_group, from_store

__all__ = ["from_env", "from_file", "from_mpi", "from_process_group", "from_store"]
