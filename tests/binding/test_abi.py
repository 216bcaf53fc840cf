"""abi.py says what nccl.h says: signatures, struct layouts, enums, and what older libraries know of them."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from libraries import compile_c, real_path

from pynccl.bindings import abi

# sizeof(ncclConfig_t) and sizeof(ncclCollConfig_t), as gcc lays out each release's nccl.h.
CONFIG_BYTES: dict[abi.Version, int] = {
    (2, 18, 3): 48,
    (2, 21, 5): 48,
    (2, 25, 1): 48,
    (2, 26, 5): 48,
    (2, 27, 7): 72,
    (2, 28, 9): 80,
    (2, 29, 7): 88,
    (2, 30, 7): 96,
    (2, 31, 2): 112,
    (2, 32, 3): 120,
}
COLL_CONFIG_BYTES: dict[abi.Version, int] = {(2, 31, 2): 64, (2, 32, 3): 72}

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "ncclConfig_t": abi.Config,
    "ncclCollConfig_t": abi.CollConfig,
    "ncclSimInfo_t": abi.SimInfo,
    "ncclEncryptionConfig_t": abi.EncryptionConfig,
    "ncclWaitSignalDesc_t": abi.WaitSignalDesc,
    "ncclUniqueId": abi.UniqueId,
}
ENUMS: dict[str, Any] = {
    "ncclSuccess": abi.Result.SUCCESS,
    "ncclUnhandledCudaError": abi.Result.UNHANDLED_CUDA_ERROR,
    "ncclSystemError": abi.Result.SYSTEM_ERROR,
    "ncclInternalError": abi.Result.INTERNAL_ERROR,
    "ncclInvalidArgument": abi.Result.INVALID_ARGUMENT,
    "ncclInvalidUsage": abi.Result.INVALID_USAGE,
    "ncclRemoteError": abi.Result.REMOTE_ERROR,
    "ncclInProgress": abi.Result.IN_PROGRESS,
    "ncclInt8": abi.DataType.INT8,
    "ncclUint8": abi.DataType.UINT8,
    "ncclInt32": abi.DataType.INT32,
    "ncclUint32": abi.DataType.UINT32,
    "ncclInt64": abi.DataType.INT64,
    "ncclUint64": abi.DataType.UINT64,
    "ncclFloat16": abi.DataType.FLOAT16,
    "ncclFloat32": abi.DataType.FLOAT32,
    "ncclFloat64": abi.DataType.FLOAT64,
    "ncclBfloat16": abi.DataType.BFLOAT16,
    "ncclSum": abi.RedOp.SUM,
    "ncclProd": abi.RedOp.PROD,
    "ncclMax": abi.RedOp.MAX,
    "ncclMin": abi.RedOp.MIN,
    "ncclAvg": abi.RedOp.AVG,
    "ncclScalarDevice": abi.ScalarResidence.DEVICE,
    "ncclScalarHostImmediate": abi.ScalarResidence.HOST_IMMEDIATE,
}
ENUMS_SINCE: dict[str, tuple[abi.Version, int]] = {
    "ncclFloat8e4m3": ((2, 24), abi.DataType.FLOAT8_E4M3),
    "ncclFloat8e5m2": ((2, 24), abi.DataType.FLOAT8_E5M2),
    "ncclTimeout": ((2, 32), abi.Result.TIMEOUT),
}

# C types as nccl.h spells them, less `const`, -> what ctypes must pass. Handles and all data pointers are void *.
SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "ncclDataType_t": ctypes.c_int,
    "ncclRedOp_t": ctypes.c_int,
    "ncclResult_t": ctypes.c_int,
    "ncclScalarResidence_t": ctypes.c_int,
    "ncclCommMemStat_t": ctypes.c_int,
    "ncclUniqueId": abi.UniqueId,
    "void*": ctypes.c_void_p,
    "char*": ctypes.c_char_p,
    "float": ctypes.c_float,
    "int8_t": ctypes.c_int8,
    "int16_t": ctypes.c_int16,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "ncclComm_t": ctypes.c_void_p,
    "ncclWindow_t": ctypes.c_void_p,
    "ncclParamHandle_t": ctypes.c_void_p,
    "cudaStream_t": ctypes.c_void_p,
    **STRUCTS,
}


@functools.cache
def header() -> Path:
    """The nccl.h that came with the installed libnccl."""
    path = Path(real_path()).parent.parent / "include" / "nccl.h"
    if not path.exists():
        pytest.skip(f"{real_path()} came without its nccl.h")
    return path


@functools.cache
def compiler_options() -> list[str]:
    """-I for as much of CUDA's headers as nccl.h needs."""
    folder = compile_c("", "cuda_headers_are_beside_this.o", ["-c"]).parent
    types = "typedef struct CUstream_st *cudaStream_t; typedef struct CUevent_st *cudaEvent_t;"
    (folder / "cuda_runtime.h").write_text(
        f"#include <stddef.h>\n#define CUDART_VERSION 12000\n#define __CUDA_BF16_TYPES_EXIST__\n{types}\n"
    )
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):
        (folder / name).write_text("")
    return [f"-I{folder}"]


def ask_c(expressions: list[str]) -> list[int]:
    """The values of C integer expressions over nccl.h."""
    prints = "".join(f'  printf("%lld\\n", (long long)({expression}));\n' for expression in expressions)
    source = f'#include "{header()}"\n#include <stdio.h>\nint main(void) {{\n{prints}  return 0;\n}}\n'
    program = compile_c(source, f"ask{abs(hash(prints))}", compiler_options())
    return [int(line) for line in subprocess.run([program], capture_output=True, check=True).stdout.split()]


@functools.cache
def header_version() -> abi.Version:
    return abi.version_tuple(ask_c(["NCCL_VERSION_CODE"])[0])


@functools.cache
def prototypes() -> dict[str, tuple[str, list[str]]]:
    """name -> (result type, argument types) of every ncclXxx in nccl.h."""
    program = compile_c(f'#include "{header()}"\n', "header.i", ["-E", "-P", *compiler_options()])
    text = re.sub(r"\s+", " ", program.read_text())
    found = {}
    for result, name, arguments in re.findall(r"([\w ]+[ *]+)(nccl[A-Z]\w+) ?\(([^()]*)\) ?;", text):
        types = [
            _type(argument, named=True) for argument in arguments.split(",") if argument.strip() not in ("", "void")
        ]
        found[name] = (_type(result, named=False), types)
    return found


def _type(text: str, *, named: bool) -> str:
    """ "const void *sendbuff" -> "void*"."""
    text = re.sub(r"\b(const|extern)\b", "", text)
    if named:
        text = re.sub(r"\w+ *$", "", text)
    return " ".join(text.replace("*", " * ").split()).replace(" *", "*")


def _ctype(text: str) -> Any:
    if text in SCALARS:
        return SCALARS[text]
    return ctypes.POINTER(_ctype(text.removesuffix("*"))) if text.endswith("*") else None


def known(since: abi.Version) -> bool:
    return since <= header_version()


def test_every_function_of_the_header_is_in_the_table() -> None:
    ours = {name for name, row in abi.FUNCTIONS.items() if known(row.since)}
    theirs = set(prototypes())
    assert len(theirs) > 25
    # A function may leave the header and stay in the library for old programs, as ncclResetDebugInit did.
    assert [name for name in ours - theirs if not hasattr(ctypes.CDLL(real_path()), name)] == []
    if header_version() <= abi.HEADER_VERSION:
        assert theirs - ours == set()


def test_signatures_are_those_of_the_header() -> None:
    wrong = {}
    for name, (result, arguments) in prototypes().items():
        row = abi.FUNCTIONS.get(name)
        expected = (None if result == "void" else _ctype(result), *map(_ctype, arguments))
        if row is not None and (row.restype, *row.argtypes) != expected:
            wrong[name] = (row, result, arguments)
    assert not wrong


def test_structs_are_laid_out_as_gcc_lays_them_out() -> None:
    since = {"ncclConfig_t": abi.CONFIG_SINCE, "ncclCollConfig_t": abi.COLL_CONFIG_SINCE}
    text = header().read_text()
    expected, expressions = [], []
    for name, struct in STRUCTS.items():
        if not re.search(rf"\b{name}\b", text):
            continue
        expressions.append(f"sizeof({name})")
        expected.append(abi.struct_size(struct, since.get(name, {}), header_version()))
        for field, _ in struct._fields_:  # type: ignore[misc]
            if known(since.get(name, {}).get(field, abi.MIN_VERSION)):
                expressions += [f"offsetof({name}, {field})", f"sizeof((({name} *)0)->{field})"]
                expected += [getattr(struct, field).offset, getattr(struct, field).size]
    assert dict(zip(expressions, ask_c(expressions), strict=True)) == dict(zip(expressions, expected, strict=True))


def test_enums_have_the_values_of_the_header() -> None:
    ours = {**ENUMS, **{name: value for name, (since, value) in ENUMS_SINCE.items() if known(since)}}
    assert dict(zip(ours, ask_c(list(ours)), strict=True)) == {name: int(value) for name, value in ours.items()}


def test_constants_are_those_of_the_header() -> None:
    assert ask_c(["NCCL_UNIQUE_ID_BYTES", "NCCL_SPLIT_NOCOLOR", "NCCL_CONFIG_UNDEF_INT"]) == [
        abi.UNIQUE_ID_BYTES,
        abi.SPLIT_NOCOLOR,
        abi.UNDEF_INT,
    ]


@pytest.mark.parametrize("version", CONFIG_BYTES)
def test_an_older_library_gets_the_struct_it_was_compiled_with(version: abi.Version) -> None:
    assert abi.struct_size(abi.Config, abi.CONFIG_SINCE, version) == CONFIG_BYTES[version]
    if version in COLL_CONFIG_BYTES:
        assert abi.struct_size(abi.CollConfig, abi.COLL_CONFIG_SINCE, version) == COLL_CONFIG_BYTES[version]


def test_every_config_field_says_since_when() -> None:
    for struct, since in ((abi.Config, abi.CONFIG_SINCE), (abi.CollConfig, abi.COLL_CONFIG_SINCE)):
        fields = [name for name, _ in struct._fields_]  # type: ignore[misc]
        assert fields == ["size", "magic", "version", *since]
        assert list(since.values()) == sorted(since.values()), "a later field after an earlier one: no prefix any more"


@pytest.mark.parametrize(
    ("code", "version"),
    [(2708, (2, 7, 8)), (2804, (2, 8, 4)), (21805, (2, 18, 5)), (22304, (2, 23, 4)), (23203, (2, 32, 3))],
)
def test_version_codes_read_as_releases(code: int, version: abi.Version) -> None:
    assert abi.version_tuple(code) == version
    if code > 10000:
        assert abi.version_code(version) == code


def test_elements_have_the_sizes_of_their_types() -> None:
    sizes = {t.name: t.itemsize for t in abi.DataType}
    bits = {name: int(re.findall(r"\d+", name)[0]) // 8 for name in sizes}
    assert sizes == bits
    assert len(sizes) == 12
