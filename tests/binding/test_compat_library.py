"""The names of vLLM's and SGLang's wrappers: signatures, numbers, and the C functions one by one."""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import pynccl
from pynccl.compat import sglang, vllm
from pynccl.compat.vllm import (
    NCCLLibrary,
    buffer_type,
    cudaStream_t,
    ncclDataTypeEnum,
    ncclRedOpTypeEnum,
    ncclUniqueId,
)
from pynccl.compat.wrapper import operator_of

WRAPPERS = Path(__file__).parents[1] / "support" / "data" / "wrappers.txt"


def rows_of(library: str) -> list[tuple[str, str, str]]:
    lines = [line.split(" ", 1)[1] for line in WRAPPERS.read_text().splitlines() if line.startswith(library)]
    found = [re.fullmatch(r"(\w+)\.(\w+)\((.*)\)", line) for line in lines]
    return [(one[1], one[2], one[3]) for one in found if one is not None]


@pytest.mark.parametrize("module", [vllm, sglang], ids=["vllm", "sglang"])
def test_methods_take_what_theirs_take(module: Any) -> None:
    """The same parameters in the same order, with defaults where theirs have them; ours may have more of both."""
    rows = rows_of(module.__name__.rpartition(".")[2])
    assert len(rows) > 30
    wrong = []
    for kind, name, parameters in rows:
        method = inspect.getattr_static(getattr(module, kind), name, None) or getattr(getattr(module, kind), name, None)
        found = inspect.signature(getattr(method, "__func__", method)) if method is not None else None
        ours = [
            one.name + ("=" if one.default is not one.empty else "")
            for one in (found.parameters.values() if found else ())
            if one.name not in ("self", "cls")
        ]
        theirs = parameters.split(", ") if parameters else []
        rest = ours[len(theirs) :]
        same = all(mine in (other, f"{other}=") for mine, other in zip(ours, theirs, strict=False))
        if found is None or not same or len(ours) < len(theirs) or not all(one.endswith("=") for one in rest):
            wrong.append(f"{kind}.{name}({parameters}): here {ours}")
    assert not wrong


def test_importing_pynccl_brings_no_compat_and_compat_no_torch() -> None:
    code = (
        "import sys, pynccl; assert 'pynccl.compat' not in sys.modules; "
        "import pynccl.compat.vllm, pynccl.compat.sglang; assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr


def test_enums_are_those_of_nccl() -> None:
    names = ("int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16")
    for name, number in zip(names, (0, 1, 2, 4, 6, 7, 8, 9), strict=True):
        dtype = getattr(torch, name)
        assert ncclDataTypeEnum.from_torch(dtype) == number and ncclDataTypeEnum.supports_torch_dtype(dtype)
    assert ncclDataTypeEnum.try_from_torch(torch.complex64) is None
    with pytest.raises(ValueError, match=r"Unsupported dtype: torch\.complex64"):
        ncclDataTypeEnum.from_torch(torch.complex64)
    operators = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG)
    assert [ncclRedOpTypeEnum.from_torch(op) for op in operators] == [0, 1, 2, 3, 4]
    assert [operator_of(ReduceOp(op)) for op in operators] == list(pynccl.RedOp)
    assert [operator_of(op) for op in operators] == list(pynccl.RedOp)
    for op in (ReduceOp.BAND, "sum", None, [ReduceOp.SUM]):
        with pytest.raises(ValueError, match="Unsupported op"):
            operator_of(op)


def test_library_alone() -> None:
    nccl = NCCLLibrary()
    version = nccl.ncclGetRawVersion()
    major, minor, patch = map(int, nccl.ncclGetVersion().split("."))
    assert version == major * 10000 + minor * 100 + patch
    identity = nccl.ncclGetUniqueId()
    assert isinstance(identity, ncclUniqueId) and len(bytes(identity.internal)) == 128 and any(identity.internal)
    again = nccl.unique_id_from_bytes(bytes(identity.internal))
    assert list(again.internal) == list(identity.internal)
    with pytest.raises(ValueError, match="128 bytes for ncclUniqueId, got 5"):
        nccl.unique_id_from_bytes(b"short")
    assert nccl.has_symbol("ncclAllReduce") and not nccl.has_symbol("ncclNoSuchThing")
    nccl.NCCL_CHECK(0)
    with pytest.raises(RuntimeError, match="NCCL error") as raised:
        nccl.NCCL_CHECK(4)
    assert nccl.ncclGetErrorString(4) in str(raised.value)


def test_library_path_and_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NCCLLibrary("host").lib is pynccl.load("host")
    for module, variable in ((vllm, "VLLM_NCCL_SO_PATH"), (sglang, "SGLANG_NCCL_SO_PATH")):
        monkeypatch.setenv(variable, "/nowhere/libnccl.so.2")
        with pytest.raises(pynccl.NcclLibraryNotFound, match=r"/nowhere/libnccl\.so\.2"):
            module.NCCLLibrary()
        assert module.NCCLLibrary("host").lib.is_host


def test_raw_calls_on_one_rank() -> None:
    """As in a script around vLLM's NCCLLibrary alone: pointers in, no torch.distributed."""
    nccl = NCCLLibrary()
    comm = nccl.ncclCommInitRank(1, nccl.ncclGetUniqueId(), 0)
    x, y = torch.arange(6.0), torch.empty(6)
    float32, stream = ncclDataTypeEnum.from_torch(x.dtype), cudaStream_t(0)
    args = (buffer_type(x.data_ptr()), buffer_type(y.data_ptr()), 6, float32)
    for call in (
        lambda: nccl.ncclAllReduce(*args, ncclRedOpTypeEnum.ncclSum, comm, stream),
        lambda: nccl.ncclReduce(*args, ncclRedOpTypeEnum.ncclMax, 0, comm, stream),
        lambda: nccl.ncclAllGather(*args, comm, stream),
        lambda: nccl.ncclReduceScatter(*args, 0, comm, stream),
        lambda: nccl.ncclBroadcast(*args, 0, comm, stream),
    ):
        y.zero_()
        call()
        assert torch.equal(x, y)
    y.zero_()
    nccl.ncclGroupStart()
    nccl.ncclSend(x.data_ptr(), 6, float32, 0, comm, None)
    nccl.ncclRecv(y.data_ptr(), 6, float32, 0, comm, None)
    nccl.ncclGroupEnd()
    assert torch.equal(x, y)
    with pytest.raises(RuntimeError, match="NCCL error"):
        nccl.ncclSend(x.data_ptr(), 6, float32, 7, comm, None)
    nccl.ncclCommDestroy(comm)
    with pytest.raises(RuntimeError, match="NCCL error"):
        nccl.ncclAllReduce(*args, 0, ctypes.c_void_p(), stream)
