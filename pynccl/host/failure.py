"""Errors of the host library: result codes with messages, and the message of ncclGetLastError."""

from __future__ import annotations

import errno
import resource
import threading
from typing import TypeGuard

from ..bindings.abi import Result
from ..bindings.errors import NcclError, Outcome, with_outcome
from ..bindings.values import shown


class HostFailure(Exception):
    """An error of a C function: `code` is its result, `text` becomes the last error.

    mismatch  whether it says that the ranks' calls differ
    culprit   the rank that was lost, if known; else -1"""

    def __init__(self, code: Result, text: str, *, mismatch: bool = False, culprit: int = -1) -> None:
        super().__init__(text)
        self.code, self.text, self.mismatch, self.culprit = code, text, mismatch, culprit

    def describe(self, error: NcclError) -> NcclError:
        """Tell the exception for this failure what its result code does not say, and return it."""
        if error.code == self.code and (self.mismatch or self.culprit >= 0):
            with_outcome(error, Outcome.MISMATCH if self.mismatch else error._outcome, self.culprit)
        return error


class TransportFailure(Exception):
    """A failed exchange with peers, which the communicator turns into a HostFailure that names the operation.

    culprit  the rank that caused it, or None
    verdict  for mismatched calls: the complete message
    """

    def __init__(self, text: str, *, timed_out: bool = False, culprit: int | None = None, verdict: str = "") -> None:
        super().__init__(text or verdict)
        self.timed_out, self.culprit, self.verdict = timed_out, culprit, verdict


# The texts of ncclGetErrorString.
REASONS: dict[int, str] = {
    Result.SUCCESS: "no error",
    Result.UNHANDLED_CUDA_ERROR: "unhandled cuda error",
    Result.SYSTEM_ERROR: "unhandled system error",
    Result.INTERNAL_ERROR: "internal error",
    Result.INVALID_ARGUMENT: "invalid argument",
    Result.INVALID_USAGE: "invalid usage",
    Result.REMOTE_ERROR: "remote process exited or there was a network error",
    Result.IN_PROGRESS: "NCCL operation in progress",
    Result.TIMEOUT: "operation timed out",
}


def out_of_descriptors(error: BaseException) -> TypeGuard[OSError]:
    """Return whether this process or machine has run out of file descriptors, which is not the peer's fault."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def by_signal(error: OSError) -> bool:
    """Return whether a signal handler raised it, such as the TimeoutError of an alarm: no system call failed."""
    return error.errno is None


def reason_of(error: BaseException) -> str:
    """Return what happened to a rank whose operation ended with an exception, for messages."""
    return "was interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"raised {shown(error)}"


def system_error(name: str, error: OSError) -> HostFailure:
    """Return the failure of the C function `name` for an operating system error."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    advice = f": the limit is {limit:,} (ulimit -n); raise it, or destroy communicators that you do not need"
    return HostFailure(
        Result.SYSTEM_ERROR, f"{name}: {error.strerror or error}{advice if out_of_descriptors(error) else ''}"
    )


def invalid_argument(text: str) -> HostFailure:
    return HostFailure(Result.INVALID_ARGUMENT, text)


def invalid_usage(text: str) -> HostFailure:
    return HostFailure(Result.INVALID_USAGE, text)


# Set when the process is about to exit: background waits end.
exiting = threading.Event()


class LastError:
    """The latest error message of the process, and the failure of the last C function that failed. Assigning is atomic,
    so no lock is needed."""

    text = ""
    failure: HostFailure | None = None


last_error = LastError()
