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
def test_a_code_is_an_exception_that_carries_it_between_processes_too(code: Result) -> None:
    error = from_result(code, "all_reduce(count=4)", "NCCL's reason", "NCCL's last error")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert type(one) is CLASSES[code]
        assert one.code is code
        call, detail, remedy = str(one).splitlines()
        assert call == f"all_reduce(count=4) failed: NCCL's reason ({code.name})"
        assert detail == "  last error: NCCL's last error"
        assert len(remedy) > 20
    assert "last error" not in str(from_result(code, "send", "gone"))


def test_a_code_of_a_later_nccl_is_still_an_error() -> None:
    error = from_result(77, "ncclCommInitRank", "unknown")
    assert type(error) is pynccl.NcclError
    assert error.code is None
    assert "code 77" in str(error)


def test_exceptions_are_caught_as_pythons_own() -> None:
    for ours, builtin in [
        (pynccl.NcclInvalidArgument, ValueError),
        (pynccl.NcclTimeout, TimeoutError),
        (pynccl.NcclVersionError, NotImplementedError),
        (pynccl.NcclLibraryNotFound, ImportError),
        (pynccl.NcclError, RuntimeError),
    ]:
        assert issubclass(ours, pynccl.NcclError) and issubclass(ours, builtin)
