"""End or suspend communicators: finalize, destroy, abort, revoke, suspend, resume."""

from __future__ import annotations

from .argcheck import check_flags
from .comm import Comm, find
from .exports import export
from .failure import invalid_usage

_SUSPEND_MEM = 0x01


@export
def ncclCommFinalize(comm: Comm) -> None:
    comm.check_usable()
    comm.finalized = True
    comm.flush()


@export
def ncclCommDestroy(comm: int | None) -> None:
    if comm:
        find(comm).destroy()


@export
def ncclCommAbort(comm: int | None) -> None:
    if comm:
        find(comm).abort()


@export
def ncclCommRevoke(comm: Comm, flags: int) -> None:
    """Close the connections, which also fails the peers' operations: with ncclRemoteError unless they revoke too."""
    check_flags("ncclCommRevoke", "revokeFlags", flags, [0], "0 (NCCL_REVOKE_DEFAULT)")
    revoked = "the communicator was revoked; shrink, destroy or abort it"
    comm.fail(invalid_usage(revoked), comm.failure_notice("it revoked the communicator"))


@export
def ncclCommSuspend(comm: Comm, flags: int) -> None:
    comm.check_usable()
    check_flags("ncclCommSuspend", "flags", flags, [_SUSPEND_MEM], "1 (NCCL_SUSPEND_MEM)")
    comm.flush()
    comm.suspended = True
    comm.scratch.release()


@export
def ncclCommResume(comm: Comm) -> None:
    if not comm.suspended:
        raise invalid_usage("ncclCommResume: the communicator is not suspended")
    comm.suspended = False
