"""The ranks of a torchrun launch: RANK, WORLD_SIZE, LOCAL_RANK, and the store at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import Counter
from typing import Any

from ..bindings.errors import NcclInvalidUsage
from ..bindings.library import Library
from ..bindings.structs import CommConfig
from ..bindings.workers import Clock
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator, bootstrap
from .join import init_at
from .master_store import Place, open_store
from .rendezvous import Rendezvous

_SERVER = "the process that serves it (rank 0, or torchrun's agent)"
_AGAIN = "every process needs a RANK of its own, and calls from_env as often as the others"


@bootstrap
def from_env(
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    library: Library | None = None,
) -> Communicator:
    """The communicator of all ranks of a `torchrun` launch (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    device   this rank's GPU; None or "cuda": number LOCAL_RANK. The host library has the CPU only. It does not become
             the thread's current GPU: that is torch.cuda.set_device(comm.device)'s to do.
    timeout  seconds until the communicator is there: for reaching the store at MASTER_ADDR:MASTER_PORT, for the other
             ranks, and for NCCL's init, together. At most a second later there is an error; Ctrl-C ends it at once.
             None: for ever.

    Without torchrun, rank 0 serves the store: on the loopback alone if MASTER_ADDR is 127.0.0.1, ::1 or localhost, on
    MASTER_ADDR alone if that is an address of its machine, else on all interfaces.

    Every rank must call it equally often. Raises NcclInvalidUsage outside a launch, or if the ranks' RANK or WORLD_SIZE
    contradict each other; NcclTimeout naming the ranks that never came, or why the store was not reached;
    NcclSystemError if another program has the port; NcclRemoteError with the reason if another rank could not go on.
    """
    clock = Clock(timeout)
    place = read_environment()
    rendezvous = Rendezvous(_store_of_next(place, clock), place.rank, place.nranks, clock, _SERVER, _AGAIN)
    try:
        return init_at(rendezvous, library, device, place.local_rank, config, place.serves)
    except Exception:
        if place.serves and place.nranks > 1:  # the others read there why it failed
            atexit.unregister(_linger)
            atexit.register(_linger)
        raise


def _linger() -> None:
    time.sleep(3.0)


# By launch. The stores are kept until the process ends: rank 0's may be the server of all the others, which may be a
# call behind. Failed calls are counted, too.
_stores: dict[tuple[str | None, ...], Any] = {}
_calls: Counter[tuple[str | None, ...]] = Counter()


def _store_of_next(place: Place, clock: Clock) -> Any:
    """A part of the launch's store that no other call uses."""
    from torch.distributed import PrefixStore

    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives a restart
    launch = (*map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")), restart)
    number = _calls[launch]
    _calls[launch] += 1  # also where the store is not reached: the others count this call
    if launch not in _stores:
        _stores[launch] = PrefixStore(f"pynccl/{restart}", open_store(place, clock))
    return PrefixStore(str(number), _stores[launch])


# ---------------------------------------------------------------------------------------------- the environment


def read_environment() -> Place:
    """This process's place, or NcclInvalidUsage with the line that would have worked."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise NcclInvalidUsage(
            f"{', '.join(missing)} not set: this process was not started by torchrun. Start it with\n  {_line()}\n"
            "or pass rank, size and id yourself to Communicator.init. For all devices in this one process, as in a "
            "notebook, there is\n  comms = pynccl.init_all()"
        )
    rank, nranks = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < nranks:
        raise NcclInvalidUsage(
            f"RANK={os.environ['RANK']!r}, WORLD_SIZE={os.environ['WORLD_SIZE']!r}: expected integers with 0 <= RANK < "
            f"WORLD_SIZE. torchrun sets both:\n  {_line()}"
        )
    local = read_local_rank()
    host, port = os.environ["MASTER_ADDR"].strip(), _integer("MASTER_PORT")
    if not host:
        where = "the name or address of rank 0's machine, the same on all ranks; 127.0.0.1 if all are on one machine"
        raise _wrong("MASTER_ADDR", where)
    lowest = 0 if nranks == 1 else 1  # alone, a rank may take any port
    if not lowest <= port <= 65535:
        free = "of a port that is free on rank 0's machine, the same on all ranks"
        raise _wrong("MASTER_PORT", f"a number in {lowest}..65535, {free}")
    return Place(rank, nranks, rank if local is None else local, host, port, agent_serves())


def read_local_rank() -> int | None:
    """LOCAL_RANK, None if it is empty or not set."""
    if not os.environ.get("LOCAL_RANK"):
        return None
    found = _integer("LOCAL_RANK")
    if found < 0:
        raise _wrong("LOCAL_RANK", f"this rank's number on its machine, 0 or more. torchrun sets it:\n  {_line()}")
    return found


def agent_serves() -> bool:
    """Whether torchrun's agent serves the store, which then outlives this process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wrong(name: str, expected: str) -> NcclInvalidUsage:
    return NcclInvalidUsage(f"{name}={os.environ[name]!r}: expected {expected}")


def _line() -> str:
    """How torchrun starts the program that runs here."""
    interactive = hasattr(sys, "ps1") or sys.argv[0] in ("", "-", "-c")
    notebook = os.path.basename(sys.argv[0]) in ("ipykernel_launcher.py", "ipython")
    return "torchrun --standalone --nproc-per-node=2 " + ("train.py" if interactive or notebook else " ".join(sys.argv))


def _integer(name: str) -> int:
    """-1 if it is none, which no variable may be."""
    try:
        return int(os.environ[name])
    except ValueError:
        return -1
