"""NCCL's result codes as exceptions.

Every exception is a `NcclError` and carries `.code` (a `Result`, or None if NCCL was not called). Arguments that are
rejected before NCCL is called raise `ValueError` or `TypeError`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from enum import IntEnum

from .abi import Result


class Outcome(IntEnum):
    """How a call ended, for the flight recorder. PENDING: it has not, or has returned without an error.

    RAISED, NCCL_FAILED, INTERRUPTED are causes. After the others but ABORTED_BY_PROGRAM, the rank had waited for others
    until then: one was lost, did not come in time, or made a different call."""

    PENDING = 0
    RAISED = 1
    NCCL_FAILED = 2
    INTERRUPTED = 3
    PEER_LOST = 4
    TIMED_OUT = 5
    ABORTED_BY_WATCHDOG = 6
    MISMATCH = 7
    ABORTED_BY_PROGRAM = 8


class NcclError(RuntimeError):
    """An NCCL call failed. `.code` is its `Result`, and `.verdict` names the culprit, if known.

    Most errors leave the communicator unusable: abort() it and create a new one. If a rank has died, `survivors` makes
    one of the others."""

    code: Result | None = None
    verdict = ""  # the culprit in one sentence, if the flight recorder's files show it
    _short = ""  # the message to use with a diagnosis, without generic advice
    _outcome = Outcome.NCCL_FAILED
    _peer = -1  # the rank that was lost, if known
    _closing = False  # whether destroy() raised it, which runs in `finally` after another exception


class NcclLibraryNotFound(NcclError, ImportError):
    """No libnccl was found, or it could not be opened."""


class NcclVersionError(NcclError, NotImplementedError):
    """The loaded libnccl is too old for a function or a field."""


class NcclUnhandledCudaError(NcclError):
    code = Result.UNHANDLED_CUDA_ERROR


class NcclSystemError(NcclError):
    code = Result.SYSTEM_ERROR


class NcclInternalError(NcclError):
    code = Result.INTERNAL_ERROR


class NcclInvalidArgument(NcclError, ValueError):
    code = Result.INVALID_ARGUMENT


class NcclInvalidUsage(NcclError):
    code = Result.INVALID_USAGE


class NcclRemoteError(NcclError):
    """A peer died or the network to it failed; the communicator must be aborted."""

    code = Result.REMOTE_ERROR
    _outcome = Outcome.PEER_LOST


class NcclInProgress(NcclError):
    code = Result.IN_PROGRESS


class NcclTimeout(NcclError, TimeoutError):
    """A deadline passed: a rank did not join, or a connection is stalled.

    Look for the error of the rank that the message names. If it is only slow, pass a longer timeout=."""

    code = Result.TIMEOUT
    _outcome = Outcome.TIMED_OUT


def outcome_of(error: BaseException) -> tuple[Outcome, int]:
    """Return how a call ended that raised this, and the detail: NCCL's result, the lost rank, the signal; -1: none."""
    if isinstance(error, NcclError):
        failed = error._outcome == Outcome.NCCL_FAILED
        return error._outcome, int(error.code or -1) if failed else error._peer
    if isinstance(error, KeyboardInterrupt):
        return Outcome.INTERRUPTED, int(signal.SIGINT)
    return Outcome.RAISED, -1


def with_outcome(error: NcclError, outcome: Outcome, peer: int = -1) -> NcclError:
    """Set how the call ended, where the type of the error does not say it; return the error.   peer: the lost rank"""
    error._outcome, error._peer = outcome, peer
    return error


def reworded(error: NcclError, text: str) -> NcclError:
    """Return the same error with another text."""
    copy = type(error)(text)
    copy.__dict__.update(error.__dict__)
    return copy


def disagreement(rows: Iterable[str], about: str = "", lines: bool = False) -> str:
    """ "the ranks disagree about call #5: rank 0 calls all_reduce(count=4), rank 1 calls all_reduce(count=5)".

    lines  one row per line"""
    return f"the ranks disagree{about}:" + ("\n  " if lines else " ") + ("\n  " if lines else ", ").join(rows)


def ranks_disagree(rows: Iterable[str], about: str) -> NcclError:
    """Return the NcclInvalidUsage of ranks that disagree, one row per line."""
    return with_outcome(NcclInvalidUsage(disagreement(rows, about, lines=True)), Outcome.MISMATCH)


_BY_CODE: dict[int, type[NcclError]] = {
    int(cls.code): cls
    for cls in (
        NcclUnhandledCudaError,
        NcclSystemError,
        NcclInternalError,
        NcclInvalidArgument,
        NcclInvalidUsage,
        NcclRemoteError,
        NcclInProgress,
        NcclTimeout,
    )
    if cls.code is not None
}

_REMEDY: dict[int, str] = {
    Result.UNHANDLED_CUDA_ERROR: "run with NCCL_DEBUG=INFO to see which CUDA call failed",
    Result.SYSTEM_ERROR: "run with NCCL_DEBUG=INFO to see which system call failed; check sockets, /dev/shm, ulimits",
    Result.INTERNAL_ERROR: "run with NCCL_DEBUG=INFO; if it repeats, report it with that log",
    Result.INVALID_ARGUMENT: "one of the arguments above is out of range for this communicator",
    Result.INVALID_USAGE: "the ranks made mismatched calls, or the communicator is no longer usable; ",
    Result.REMOTE_ERROR: "a peer died or became unreachable: look for the first error in the other ranks' logs, "
    "then abort() this communicator",
    Result.IN_PROGRESS: "the communicator is nonblocking: poll async_error() until it leaves IN_PROGRESS",
    Result.TIMEOUT: "look for the late or dead rank in the other ranks' logs",
}


_SWITCH = {"": False, "0": False, "off": False, "1": True, "on": True}  # in lower case


def switch(name: str, meaning: str) -> bool:
    """Return whether this environment variable is 1. NcclInvalidUsage if it is neither 1 nor 0."""
    text = os.environ.get(name, "").strip()
    if text.lower() not in _SWITCH:
        raise NcclInvalidUsage(f"{name}={text!r}: expected 1 ({meaning}) or 0")
    return _SWITCH[text.lower()]


_CHECK_IS_OFF = "run with PYNCCL_CHECK=1 to compare the calls of all ranks"
_CHECK_IS_ON = (
    "PYNCCL_CHECK=1 found no mismatch in the collectives of communicators created since it was set; check what it does "
    "not compare: send and recv, shrink, grow, windows"
)


_TWO_ON_ONE_GPU = ("Duplicate GPU", "using the same GPU")  # NCCL's words up to 2.29, and since
_SHARE_IS_OFF = "give each rank its own GPU (device=), or set PYNCCL_SHARE_GPU=1 on all ranks: good for trying, slow"
_SHARE_IS_ON = (
    "PYNCCL_SHARE_GPU was set after this process's first use of NCCL, or NCCL_HOSTID is the same for several ranks: "
    "set PYNCCL_SHARE_GPU=1 in the environment in which the ranks are started"
)


def _is_on(name: str) -> bool:
    return _SWITCH.get(os.environ.get(name, "").strip().lower(), False)


def from_result(code: int, call: str, reason: str, detail: str = "") -> NcclError:
    """Return the exception for `code`: the call, NCCL's reason, its last error, and what to do."""
    cls = _BY_CODE.get(code, NcclError)
    name = Result(code).name if code in _BY_CODE else f"code {code}"
    lines = [f"{call} failed: {reason} ({name})"]
    if detail:
        lines.append(f"  last error: {detail}")
    # NCCL's text for REMOTE_ERROR, "remote process exited or ...", can contradict a diagnosis.
    short = [f"{call} failed ({name})" if code == Result.REMOTE_ERROR else lines[0], *lines[1:]]
    explains = code == Result.INVALID_ARGUMENT and "expected" in detail  # the detail says how to fix it
    if code in _REMEDY and not explains:
        lines.append(f"  {_REMEDY[code]}")
    if any(text in detail for text in _TWO_ON_ONE_GPU):
        lines[-1] = f"  {_SHARE_IS_ON if _is_on('PYNCCL_SHARE_GPU') else _SHARE_IS_OFF}"
    elif code == Result.INVALID_USAGE:
        lines[-1] += _CHECK_IS_ON if _is_on("PYNCCL_CHECK") else _CHECK_IS_OFF
    error = cls("\n".join(lines))
    error.code, error._short = Result(code) if code in _BY_CODE else None, "\n".join(short)
    return error
