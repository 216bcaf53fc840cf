"""Every result code has its own exception, which says what was called, why it failed, and what to do."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

import pynccl
from pynccl import Result
from pynccl.bindings.errors import from_result
from pynccl.comm.base import explained
from pynccl.watch import diagnosis

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


def test_detail_that_names_the_expected_value_needs_no_remedy() -> None:
    assert len(str(from_result(Result.INVALID_ARGUMENT, "call", "reason", "x is 1; expected 2")).splitlines()) == 2


def test_diagnosis_replaces_remedy_and_repeated_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "the ranks disagree: rank 0 calls a, rank 1 calls b\nrank 0 calls a\nmake the same calls"
    monkeypatch.setattr(diagnosis, "explain", lambda *_, **__: lines)
    track: Any = SimpleNamespace(size=2, explains=False, note_failure=lambda error: None)
    error = explained(from_result(Result.REMOTE_ERROR, "all_reduce", "remote process exited", "detail"), track)
    assert str(error).splitlines() == [
        "all_reduce failed (REMOTE_ERROR)",
        "  the ranks disagree: rank 0 calls a, rank 1 calls b",
        "  make the same calls",
        "  last error: detail",
    ]
    assert error.code is Result.REMOTE_ERROR and error.verdict == lines.partition("\n")[0]
