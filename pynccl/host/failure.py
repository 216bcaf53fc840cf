"""What went wrong in the host library: a result code with a message, and the last message for ncclGetLastError."""

from __future__ import annotations

import errno
import resource
import threading

from ..bindings.abi import Result


class HostFailure(Exception):
    """Becomes the result code of the C function; `text` becomes the last error."""

    def __init__(self, code: Result, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class TransportFailure(Exception):
    """An exchange with the peers broke; the communicator turns it into a HostFailure that names the operation.

    culprit  the rank because of which; None where none is to blame
    verdict  how the calls of the ranks disagree: that is then the whole message
    """

    def __init__(self, text: str, *, timed_out: bool = False, culprit: int | None = None, verdict: str = "") -> None:
        super().__init__(text or verdict)
        self.timed_out, self.culprit, self.verdict = timed_out, culprit, verdict


# What ncclGetErrorString says.
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


def none_left(error: BaseException) -> bool:
    """Whether this process, or the machine, has no descriptor left: which says nothing of the peer."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def of_system(name: str, error: OSError) -> HostFailure:
    """What the C function `name` fails with where the system refuses something."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    advice = f": this process may have {most:,} (ulimit -n); raise that, or end communicators first"
    return HostFailure(Result.SYSTEM_ERROR, f"{name}: {error.strerror or error}{advice if none_left(error) else ''}")


def invalid_argument(text: str) -> HostFailure:
    return HostFailure(Result.INVALID_ARGUMENT, text)


def invalid_usage(text: str) -> HostFailure:
    return HostFailure(Result.INVALID_USAGE, text)


# Set when the process is about to exit: whoever waits for something in the background gives up.
exiting = threading.Event()


class LastError:
    """The newest message of the process. One assignment of a str is atomic, so threads need no lock."""

    text = ""


last_error = LastError()
