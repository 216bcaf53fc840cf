"""Rendezvous of a torchrun launch: RANK, WORLD_SIZE, LOCAL_RANK, and the store at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

from ..bindings.errors import NcclInvalidUsage
from ..bindings.library import Library
from ..bindings.structs import CommConfig
from ..bindings.workers import Clock
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator, bootstrap
from .join import init_at
from .master_store import LaunchEnv, open_store
from .rendezvous import Rendezvous

_SERVER = "the process that serves it (rank 0, or torchrun's agent)"
_DUPLICATE_HINT = "every process needs its own RANK, and must call pynccl.init as often as the others"

_MULTI_NODE = "scripts/examples/multi_node.sh"
_LAUNCHERS = (  # a variable that only this launcher sets, its name, the command that sets ours, another call
    ("OMPI_COMM_WORLD_RANK", "mpirun", f"{_MULTI_NODE} mpirun HOST:RANKS,HOST:RANKS", "from_mpi (mpi4py)"),
    ("SLURM_PROCID", "srun", f"{_MULTI_NODE} srun", "init with nranks, unique_id and rank"),
    ("PMI_RANK", "mpirun", f"{_MULTI_NODE} mpirun HOST:RANKS,HOST:RANKS", "from_mpi (mpi4py)"),
    ("PET_NODE_RANK", "Kubeflow without torchrun", "torchrun", "init with nranks, unique_id and rank"),
)


def init(
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    library: Library | None = None,
    elastic: bool = False,
) -> Communicator:
    """Create the communicator of all ranks of a `torchrun` launch.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    device   this rank's GPU; None or "cuda": GPU number LOCAL_RANK. The host library has only the CPU. It is not made
             the current GPU: call torch.cuda.set_device(comm.device) for that.
    timeout  seconds for everything together: connecting to the store at MASTER_ADDR:MASTER_PORT, waiting for the other
             ranks, and NCCL's init. An error is raised at most a second later; Ctrl-C interrupts at any time.
             None: no timeout.
    elastic  True: the ranks can go on if some of them die: see `Communicator.survivors`

    Without torchrun, rank 0 serves the store: on the loopback interface only if MASTER_ADDR is 127.0.0.1, ::1 or
    localhost, on MASTER_ADDR only if that is an address of its node, otherwise on all interfaces.

    All ranks must call it equally often, after a failure or a restart by torchrun too. Raises

    - NcclInvalidUsage outside a launch, or if RANK or WORLD_SIZE are inconsistent between ranks;
    - NcclTimeout naming the ranks that never joined, or why the store was not reached;
    - NcclSystemError if another program uses the port;
    - NcclRemoteError with the reason if another rank failed.
    """
    clock = Clock(timeout, "init: timeout")
    env = read_environment()
    store, ranks = _store_of(env, clock), range(env.nranks)
    rendezvous = Rendezvous(store, env.rank, env.nranks, clock, _SERVER, _DUPLICATE_HINT, ranks=ranks)
    try:
        return init_at("init", rendezvous, library, device, env.local_rank, config, env.serves, elastic=elastic)
    except Exception:
        if env.serves and env.nranks > 1:  # so that the other ranks can read the error
            atexit.unregister(_keep_store_alive)
            atexit.register(_keep_store_alive)
        raise


from_env = init  # Communicator.from_env
bootstrap(from_env, "from_env")


def _keep_store_alive() -> None:
    time.sleep(3.0)


# By launch. They are kept until the process exits: rank 0 may be serving the store to ranks that are one call behind.
_stores: dict[tuple[str | None, ...], Any] = {}


def _store_of(env: LaunchEnv, clock: Clock) -> Any:
    """Return the launch's store, with a prefix that torch.distributed does not use."""
    from torch.distributed import PrefixStore

    launch = tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")))
    if launch not in _stores:
        _stores[launch] = PrefixStore("pynccl", open_store(env, clock))
    return _stores[launch]


# ---------------------------------------------------------------------------------------------- the environment


def read_environment() -> LaunchEnv:
    """Read the launch variables. Raises NcclInvalidUsage with the command that sets them."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise _not_launched(missing)
    rank, nranks = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < nranks:
        raise NcclInvalidUsage(
            f"RANK={os.environ['RANK']!r}, WORLD_SIZE={os.environ['WORLD_SIZE']!r}: expected integers with 0 <= RANK < "
            f"WORLD_SIZE. torchrun sets both:\n  {_torchrun_command()}"
        )
    local = read_local_rank()
    host, port = os.environ["MASTER_ADDR"].strip(), _integer("MASTER_PORT")
    if not host:
        where = "the name or address of rank 0's node, the same on all ranks; 127.0.0.1 if all are on one node"
        raise _invalid("MASTER_ADDR", where)
    lowest = 0 if nranks == 1 else 1  # a single rank may use any free port
    if not lowest <= port <= 65535:
        free = "a free port on rank 0's node, the same on all ranks"
        raise _invalid("MASTER_PORT", f"a number in {lowest}..65535: {free}")
    return LaunchEnv(rank, nranks, rank if local is None else local, host, port, agent_serves())


def read_local_rank() -> int | None:
    """Return LOCAL_RANK, or None if it is empty or not set."""
    if not os.environ.get("LOCAL_RANK"):
        return None
    found = _integer("LOCAL_RANK")
    if found < 0:
        expected = f"this rank's index on its node, 0 or more. torchrun sets it:\n  {_torchrun_command()}"
        raise _invalid("LOCAL_RANK", expected)
    return found


def agent_serves() -> bool:
    """Return whether torchrun's agent serves the store, which then outlives this process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _invalid(name: str, expected: str) -> NcclInvalidUsage:
    return NcclInvalidUsage(f"{name}={os.environ[name]!r}: expected {expected}")


def _not_launched(missing: list[str]) -> NcclInvalidUsage:
    """Return the error of a process without these variables, with the command for the launcher that started it."""
    how, command = "this process was not started by torchrun", _torchrun_command()
    other = "init with nranks, unique_id and rank"
    for variable, launcher, words, call in _LAUNCHERS:
        if variable in os.environ and "RANK" in missing:
            how, command, other = f"{launcher} sets {variable} instead", f"{words} {_program()}", call
            break
    return NcclInvalidUsage(
        f"{', '.join(missing)} not set: {how}. Start it with\n  {command}\nor call Communicator.{other}. "
        "To use all devices in one process (notebooks):\n  comms = pynccl.init_all()"
    )


def _torchrun_command() -> str:
    """Return the torchrun command line that starts this program."""
    return f"torchrun --standalone --nproc-per-node=2 {_program()}"


def _program() -> str:
    """Return this program and its arguments; "train.py" in an interactive session or a notebook."""
    interactive = hasattr(sys, "ps1") or sys.argv[0] in ("", "-", "-c")
    notebook = os.path.basename(sys.argv[0]) in ("ipykernel_launcher.py", "ipython")
    return "train.py" if interactive or notebook else " ".join(sys.argv)


def _integer(name: str) -> int:
    """Return the variable as an integer; -1, which is never valid, if it is not one."""
    try:
        return int(os.environ[name])
    except ValueError:
        return -1
