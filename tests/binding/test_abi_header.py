"""abi.py matches the headers of the installed libnccl, as evaluated by the C compiler.

test_abi_versions.py compares older releases with a dump. Neither a driver nor the CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from libraries import real_path

from pynccl.bindings import abi

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from dump_nccl_abi import Header, exported

# C types without `const` -> ctypes types. Enums are passed as int; handles, and structs whose fields only NVIDIA's
# headers use, as void pointers.
WIDTHS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
ENUMS = ("DataType_t", "RedOp_t", "Result_t", "ScalarResidence_t", "CommMemStat_t", "CftTeamMode_t")
HANDLES = ("ncclComm_t", "ncclWindow_t", "ncclParamHandle_t", "cudaStream_t")
RAW = (
    "ncclCommProperties_t", "ncclDevComm_t", "ncclDevCommRequirements_t", "ncclDevResourceRequirements_t",
    "ncclGinBarrierHandle_t", "ncclLLA2AHandle_t", "ncclLsaBarrierHandle_t", "ncclWindow_vidmem_t",
)  # fmt: skip
STRUCTS = ("Config", "CollConfig", "SimInfo", "EncryptionConfig", "WaitSignalDesc", "Team", "MultimemHandle")
CTYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "ncclCftLeId": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "char *": ctypes.c_char_p,
    "void *": ctypes.c_void_p,
    "ncclUniqueId": abi.UniqueId,
    **{f"{width}_t": getattr(ctypes, f"c_{width}") for width in WIDTHS},
    **{f"nccl{name}": ctypes.c_int for name in ENUMS},
    **dict.fromkeys(HANDLES, ctypes.c_void_p),
    **{f"{name} *": ctypes.c_void_p for name in RAW},
    **{f"nccl{name}_t": getattr(abi, name) for name in STRUCTS},
}


def ctype(text: str) -> Any:
    """Return the ctypes type for a C type such as "const int *"; the text itself, which never matches, if unknown."""
    text = " ".join(re.sub(r"\b(const|struct)\b", "", text).replace("*", " * ").split()).replace("* *", "**")
    if text in CTYPES:
        return CTYPES[text]
    inner = ctype(text[:-1].strip()) if text.endswith("*") else text
    return text if isinstance(inner, str) else ctypes.POINTER(inner)


def row_of(prototype: str) -> tuple[Any, ...]:
    """Return (result, *arguments) of a prototype such as "ncclResult_t (int *, size_t)"."""
    result, _, arguments = prototype.rstrip(")").partition("(")
    types = [text for text in arguments.split(",") if text.strip() not in ("", "void")]
    return None if result.strip() == "void" else ctype(result), *map(ctype, types)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (header folder of the installed library, a folder for compiled files)."""
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; Debian's package build-essential has all of them")
    include, folder = Path(real_path()).parent.parent / "include", tmp_path_factory.mktemp("header")
    if not (include / "nccl.h").exists():
        pytest.skip(f"{real_path()} has no nccl.h")
    [code] = Header(include, folder)._evaluate(["NCCL_VERSION_CODE"])
    if abi.version_tuple(code)[:2] != abi.HEADER_VERSION[:2]:
        pytest.skip(
            f"abi.py is for NCCL {abi.HEADER_VERSION}, this is {code}; test_abi_versions.py checks all releases"
        )
    return include, folder


def test_function_table_matches_header_prototypes(installed: tuple[Path, Path]) -> None:
    rows = {**abi.FUNCTIONS, **abi.DEVICE_FUNCTIONS}
    prototypes = {**Header(*installed, "nccl_device/host.h").prototypes(), **Header(*installed).prototypes()}
    assert rows.keys() == prototypes.keys() & exported(Path(real_path())).keys()
    theirs = {name: row_of(prototypes[name]) for name in rows}
    assert {name: (row.restype, *row.argtypes) for name, row in rows.items()} == theirs


def enumerators(enum: type[IntEnum], prefix: str = "nccl") -> dict[str, int]:
    """Return C names and values, such as ncclUnhandledCudaError for Result.UNHANDLED_CUDA_ERROR."""
    words = {member: "".join(word.capitalize() for word in member.name.split("_")) for member in enum}
    return {prefix + word.replace("8E", "8e"): int(member) for member, word in words.items()}


def test_constants_and_device_structs_match_header(installed: tuple[Path, Path]) -> None:
    ours = {
        **enumerators(abi.Result),
        **enumerators(abi.DataType),
        **enumerators(abi.RedOp),
        **enumerators(abi.ScalarResidence, "ncclScalar"),
        **enumerators(abi.MemStat, "ncclStat"),
        **{f"NCCL_ENCRYPTION_MODE_{mode.name}": int(mode) for mode in abi.EncryptionMode},
        "ncclNumResults": len(abi.Result),
        "ncclNumTypes": len(abi.DataType),
        "ncclNumOps": len(abi.RedOp),
        "NCCL_UNIQUE_ID_BYTES": abi.UNIQUE_ID_BYTES,
        "NCCL_SPLIT_NOCOLOR": abi.SPLIT_NOCOLOR,
        f"NCCL_UNDEF_FLOAT == {abi.UNDEF_FLOAT}": 1,
        "NCCL_WIN_REQUIRED_ALIGNMENT": abi.WINDOW_ALIGNMENT,
        "((ncclSimInfo_t) NCCL_SIM_INFO_INITIALIZER).magic": abi.SIM_INFO_MAGIC,
        "((ncclEncryptionConfig_t) NCCL_ENCRYPTION_CONFIG_INITIALIZER).magic": abi.CONFIG_MAGIC,
    }
    assert dict(zip(ours, Header(*installed)._evaluate(list(ours)), strict=True)) == ours
    ours = {}
    for name, struct in (("ncclTeam_t", abi.Team), ("ncclMultimemHandle_t", abi.MultimemHandle)):
        ours[f"sizeof({name})"] = ctypes.sizeof(struct)
        fields = [field[0] for field in struct._fields_]
        ours |= {f"__builtin_offsetof({name}, {field})": getattr(struct, field).offset for field in fields}
    assert dict(zip(ours, Header(*installed, "nccl_device/host.h")._evaluate(list(ours)), strict=True)) == ours
