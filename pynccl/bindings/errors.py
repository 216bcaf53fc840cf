"""Result codes of NCCL as exceptions that say what to do.

Every exception is a `NcclError` and carries `.code` (a `Result`, or None where NCCL was never asked). Bad arguments
found before anything reaches NCCL are `ValueError` / `TypeError` as in the rest of Python.
"""

from __future__ import annotations

import os

from .abi import Result


class NcclError(RuntimeError):
    """An NCCL call failed. `.code` is its `Result`."""

    code: Result | None = None
    verdict = ""  # who caused it, in one sentence, where the records of the ranks tell


class NcclLibraryNotFound(NcclError, ImportError):
    """No libnccl could be found or opened."""


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


class NcclInProgress(NcclError):
    code = Result.IN_PROGRESS


class NcclTimeout(NcclError, TimeoutError):
    """A deadline passed: a rank that never came, a link that stands still."""

    code = Result.TIMEOUT


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
    Result.INVALID_USAGE: "the calls of the ranks disagree, or the communicator is not usable any more; ",
    Result.REMOTE_ERROR: "a peer died or became unreachable: look for the first error in the other ranks' logs, "
    "then abort() this communicator",
    Result.IN_PROGRESS: "the communicator is nonblocking: poll async_error() until it leaves IN_PROGRESS",
    Result.TIMEOUT: "look for the rank that is late or gone in the other ranks' logs",
}


_CHECK_IS_OFF = "run with PYNCCL_CHECK=1 to compare the calls of all ranks"
_CHECK_IS_ON = (
    "PYNCCL_CHECK=1 has compared the collective calls of the communicators that were made since it was set, so look at "
    "what it does not compare: sends and receives, shrink, grow, windows"
)


def from_result(code: int, call: str, reason: str, detail: str = "") -> NcclError:
    """The exception for `code`: what was called, NCCL's reason, its last error, what to do."""
    cls = _BY_CODE.get(code, NcclError)
    name = Result(code).name if code in _BY_CODE else f"code {code}"
    lines = [f"{call} failed: {reason} ({name})"]
    if detail:
        lines.append(f"  last error: {detail}")
    setting = code == Result.INVALID_ARGUMENT and "PYNCCL_HOST_" in detail  # which the detail says how to mend
    if code in _REMEDY and not setting:
        lines.append(f"  {_REMEDY[code]}")
    if code == Result.INVALID_USAGE:
        lines[-1] += _CHECK_IS_ON if os.environ.get("PYNCCL_CHECK", "0") not in ("", "0", "off") else _CHECK_IS_OFF
    error = cls("\n".join(lines))
    error.code = Result(code) if code in _BY_CODE else None
    return error
