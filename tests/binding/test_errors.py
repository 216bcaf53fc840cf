"""Every result code has its own exception, which says what was called, why it failed, and what to do."""

from __future__ import annotations

import pickle

import pytest

import pynccl
from pynccl import Result
from pynccl.bindings.errors import from_result

CLASSES = {
    Result.UNHANDLED_CUDA_ERROR: (pynccl.NcclUnhandledCudaError, RuntimeError),
    Result.SYSTEM_ERROR: (pynccl.NcclSystemError, RuntimeError),
    Result.INTERNAL_ERROR: (pynccl.NcclInternalError, RuntimeError),
    Result.INVALID_ARGUMENT: (pynccl.NcclInvalidArgument, ValueError),
    Result.INVALID_USAGE: (pynccl.NcclInvalidUsage, RuntimeError),
    Result.REMOTE_ERROR: (pynccl.NcclRemoteError, RuntimeError),
    Result.IN_PROGRESS: (pynccl.NcclInProgress, RuntimeError),
    Result.TIMEOUT: (pynccl.NcclTimeout, TimeoutError),
}


@pytest.mark.parametrize("code", [code for code in Result if code])
def test_result_code_exception_survives_pickling(code: Result) -> None:
    error = from_result(code, "all_reduce(count=4)", "NCCL's reason", "NCCL's last error")
    ours, builtin = CLASSES[code]
    for copied in (error, pickle.loads(pickle.dumps(error))):
        assert type(copied) is ours and isinstance(copied, builtin)
        assert copied.code is code
        call, detail, remedy = str(copied).splitlines()
        assert call == f"all_reduce(count=4) failed: NCCL's reason ({code.name})"
        assert detail == "  last error: NCCL's last error"
        assert len(remedy) > 20


def test_unknown_result_code_is_nccl_error() -> None:
    error = from_result(77, "ncclCommInitRank", "unknown")
    assert type(error) is pynccl.NcclError and error.code is None
    assert "code 77" in str(error) and "last error" not in str(error)
