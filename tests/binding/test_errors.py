"""Every result code is an exception of its own that says what was called, why it failed, and what to do."""

from __future__ import annotations

import pickle

import pytest

import pynccl
from pynccl import Result
from pynccl.bindings.errors import from_result

CLASSES = {
    Result.UNHANDLED_CUDA_ERROR: pynccl.NcclUnhandledCudaError,
    Result.SYSTEM_ERROR: pynccl.NcclSystemError,
    Result.INTERNAL_ERROR: pynccl.NcclInternalError,
    Result.INVALID_ARGUMENT: pynccl.NcclInvalidArgument,
    Result.INVALID_USAGE: pynccl.NcclInvalidUsage,
    Result.REMOTE_ERROR: pynccl.NcclRemoteError,
    Result.IN_PROGRESS: pynccl.NcclInProgress,
    Result.TIMEOUT: pynccl.NcclTimeout,
}


@pytest.mark.parametrize("code", [code for code in Result if code])
def test_a_code_is_an_exception_that_carries_it(code: Result) -> None:
    error = from_result(code, "all_reduce(count=4)", "NCCL's reason", "NCCL's last error")
    assert type(error) is CLASSES[code]
    assert error.code is code
    call, detail, remedy = str(error).splitlines()
    assert call == f"all_reduce(count=4) failed: NCCL's reason ({code.name})"
    assert detail == "  last error: NCCL's last error"
    assert len(remedy) > 20


def test_without_a_last_error_there_is_no_empty_line() -> None:
    assert "last error" not in str(from_result(Result.REMOTE_ERROR, "send", "gone"))


def test_a_code_of_a_later_nccl_is_still_an_error() -> None:
    error = from_result(77, "ncclCommInitRank", "unknown")
    assert type(error) is pynccl.NcclError
    assert error.code is None
    assert "code 77" in str(error)


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (pynccl.NcclInvalidArgument, ValueError),
        (pynccl.NcclTimeout, TimeoutError),
        (pynccl.NcclVersionError, NotImplementedError),
        (pynccl.NcclLibraryNotFound, ImportError),
        (pynccl.NcclError, RuntimeError),
    ],
)
def test_exceptions_are_caught_as_pythons_own(ours: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="why"):
        raise ours("why")
    assert issubclass(ours, pynccl.NcclError)


def test_exceptions_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(from_result(Result.REMOTE_ERROR, "recv", "peer gone")))
    assert isinstance(error, pynccl.NcclRemoteError)
    assert error.code is Result.REMOTE_ERROR and "peer gone" in str(error)
