"""Communicators that lose ranks, gain ranks, are revoked, or rest for a while."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch

from ..bindings.abi import UNIQUE_ID_BYTES, DataType, MemStat
from . import algorithms, birth, rendezvous
from .comm import Comm, Turn, find
from .entry import configured, give_birth, join
from .failure import invalid_argument, invalid_usage
from .operation import Operation
from .registry import entry
from .structs import check_config

_SHRINK_ABORT = 0x01
_SUSPEND_MEM = 0x01


@entry
def ncclCommShrink(comm: int | None, excluded: Any, count: int, newcomm: Any, config: Any, flags: int) -> None:
    check_config(config)
    parent = find(comm)
    if not parent.born:
        raise invalid_usage("ncclCommShrink: the communicator is still being initialised")
    if flags & ~_SHRINK_ABORT:
        raise invalid_argument(f"ncclCommShrink: shrinkFlags is {flags:#x}; expected 0, or 1 (NCCL_SHRINK_ABORT)")
    shrink = birth.Shrink(parent, [excluded[i] for i in range(count)] if excluded else [])
    configured(shrink.comm, config, parent)
    if flags & _SHRINK_ABORT and not parent.idle:
        stopped = "ncclCommShrink stopped the communicator's operations (NCCL_SHRINK_ABORT)"
        parent.fail(invalid_usage(stopped), parent.because("it shrank the communicator with NCCL_SHRINK_ABORT"))
    give_birth(newcomm, shrink.comm, shrink.run)


@entry
def ncclCommGetUniqueId(comm: int | None, unique_id: Any) -> None:
    find(comm).check_usable()
    ctypes.memmove(unique_id, rendezvous.make_unique_id(), UNIQUE_ID_BYTES)


@entry
def ncclCommGrow(comm: int | None, nranks: int, unique_id: Any, rank: int, newcomm: Any, config: Any) -> None:
    """Members pass their communicator, rank -1, and one of them the id; new ranks pass no communicator and the id."""
    check_config(config)
    raw = ctypes.string_at(unique_id, UNIQUE_ID_BYTES) if unique_id else None
    if not comm:
        if raw is None:
            raise invalid_argument("ncclCommGrow: a new rank (comm is NULL) has to pass the id of ncclCommGetUniqueId")
        join(newcomm, nranks, raw, rank, config)
        return
    parent = find(comm)
    parent.check_usable()
    if nranks <= parent.size or rank != -1:
        raise invalid_argument(
            f"ncclCommGrow: nRanks is {nranks} and rank {rank} on a member; expected more than the {parent.size} ranks "
            "that there are, and -1"
        )
    grown = configured(Comm(parent.rank, nranks, parent.device), config, parent)
    grown.link = parent.link
    turn = Turn(parent)
    give_birth(newcomm, grown, partial(_grow, parent, turn, grown, raw), turn)


def _grow(parent: Comm, turn: Turn, grown: Comm, raw: bytes | None) -> None:
    """Learn the id from the member that has it, then meet the new ranks."""
    row = UNIQUE_ID_BYTES + 1  # the first byte says whether an id follows
    mine = torch.tensor(list(b"\1" + raw if raw is not None else bytes(row)), dtype=torch.uint8)
    table = torch.empty(parent.size, row, dtype=torch.uint8)
    name, uint8 = "ncclCommGrow", int(DataType.UINT8)
    turn.run(Operation(name, algorithms.GROW, parent, mine.data_ptr(), table.data_ptr(), row, uint8))
    found = {bytes(line[1:]) for line in table.tolist() if line[0]}
    if len(found) != 1:
        raise invalid_usage(f"{name}: the members pass {len(found)} ids; expected one, from the member that made it")
    birth.init_rank(grown, found.pop())


@entry
def ncclCommRevoke(comm: int | None, flags: int) -> None:
    """The connections close, so the peers' operations fail too: with ncclRemoteError unless they revoke as well."""
    own = find(comm)
    if flags:
        raise invalid_argument(f"ncclCommRevoke: revokeFlags is {flags:#x}; expected 0 (NCCL_REVOKE_DEFAULT)")
    revoked = "the communicator was revoked; shrink, destroy or abort it"
    own.fail(invalid_usage(revoked), own.because("it revoked the communicator"))


@entry
def ncclCommSuspend(comm: int | None, flags: int) -> None:
    own = find(comm)
    own.check_usable()
    if flags != _SUSPEND_MEM:
        raise invalid_argument(f"ncclCommSuspend: flags is {flags:#x}; expected 1 (NCCL_SUSPEND_MEM)")
    own.suspend()


@entry
def ncclCommResume(comm: int | None) -> None:
    own = find(comm)
    if not own.suspended:
        raise invalid_usage("ncclCommResume: the communicator is not suspended")
    own.suspended = False


@entry
def ncclCommMemStats(comm: int | None, stat: int, value: Any) -> None:
    own = find(comm)
    if stat == MemStat.GPU_MEM_SUSPEND:
        value[0] = own.dynamic_bytes
    elif stat == MemStat.GPU_MEM_SUSPENDED:
        value[0] = int(own.suspended)
    elif stat == MemStat.GPU_MEM_PERSIST:
        value[0] = own.static_bytes
    elif stat == MemStat.GPU_MEM_TOTAL:
        value[0] = own.dynamic_bytes + own.static_bytes
    else:
        raise invalid_argument(f"ncclCommMemStats: stat is {stat}; expected 0 to {max(MemStat)}")
