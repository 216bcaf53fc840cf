"""The C++ compiler compares abi.py with the headers that came with the installed libnccl.

A program is generated from the tables: for each row a function pointer of the row's type, which is given the real
function, for each struct its size and the place and type of each field, for each enumerator and macro its value. It is
compiled with -Werror, linked against libnccl and run; no driver and no CUDA toolkit is needed. C++ rather than C,
because a template can take a function's type apart: no cast hides a difference and no pattern reads the header.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from libraries import Stub, real_path

from pynccl import CollConfig, CommConfig
from pynccl.bindings import abi

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from dump_nccl_abi import Header, exported, write_cuda_headers

# same<theirs, ours>: whether the header's type and the type spelled from a ctypes row are passed alike. They must be
# one type, save that: const does not matter; an enum is passed as int; a handle (a pointer to a type that the header
# does not define) and the structs that the tables call raw are passed as void *.
SAME = r"""
#include <cstddef>
#include <cstdio>
#include <type_traits>

template <class T, class = void> struct opaque : std::true_type {};
template <class T> struct opaque<T, std::void_t<decltype(sizeof(T))>> : std::false_type {};
template <> struct opaque<void> : std::true_type {};
@RAW@
template <class... T> struct list {};
template <class Theirs, class Ours> struct same : std::is_same<Theirs, Ours> {};
template <class T, bool = std::is_enum_v<T>> struct passed_as_int : std::is_same<T, int> {};
template <class T> struct passed_as_int<T, true> : std::bool_constant<sizeof(T) == sizeof(int)> {};
template <class T> struct same<T, int> : passed_as_int<T> {};
template <class T> struct same<T *, void *> : opaque<std::remove_const_t<T>> {};
template <class T, class U> struct same<T *, U *> : same<std::remove_const_t<T>, std::remove_const_t<U>> {};
template <class T, class... Ts, class U, class... Us> struct same<list<T, Ts...>, list<U, Us...>>
    : std::bool_constant<same<T, U>::value && same<list<Ts...>, list<Us...>>::value> {};
template <class R, class... A, class S, class... B> struct same<R(A...), S(B...)>
    : same<list<R, A...>, list<S, B...>> {};

using any_function = void (*)();
template <class Row, class Real> Row *as_row(Real *real) {
  return reinterpret_cast<Row *>(reinterpret_cast<any_function>(real));
}
"""
STRUCTS: dict[type[ctypes.Structure], str] = {
    abi.UniqueId: "ncclUniqueId",
    abi.Config: "ncclConfig_t",
    abi.CollConfig: "ncclCollConfig_t",
    abi.SimInfo: "ncclSimInfo_t",
    abi.EncryptionConfig: "ncclEncryptionConfig_t",
    abi.WaitSignalDesc: "ncclWaitSignalDesc_t",
    abi.Team: "ncclTeam_t",
    abi.MultimemHandle: "ncclMultimemHandle_t",
}
SINCE: dict[str, dict[str, abi.Version]] = {
    "ncclConfig_t": abi.CONFIG_SINCE,
    "ncclCollConfig_t": abi.COLL_CONFIG_SINCE,
}


class Tables(NamedTuple):
    """What one program checks."""

    functions: Mapping[str, abi.Function]
    structs: Mapping[str, type[ctypes.Structure]]
    values: Mapping[str, float]  # C constant expression -> its value
    raw: tuple[str, ...] = ()  # structs that the header defines and the tables carry as void pointers


def enumerators(enum: type[IntEnum], prefix: str) -> dict[str, float]:
    """ncclUnhandledCudaError for Result.UNHANDLED_CUDA_ERROR."""
    words = {member: "".join(word.capitalize() for word in member.name.split("_")) for member in enum}
    return {prefix + word.replace("8E", "8e"): int(member) for member, word in words.items()}


HOST = Tables(
    abi.FUNCTIONS,
    {name: struct for struct, name in STRUCTS.items() if struct not in (abi.Team, abi.MultimemHandle)},
    {
        **enumerators(abi.Result, "nccl"),
        **enumerators(abi.DataType, "nccl"),
        **enumerators(abi.RedOp, "nccl"),
        **enumerators(abi.ScalarResidence, "ncclScalar"),
        **enumerators(abi.MemStat, "ncclStat"),
        **{f"NCCL_ENCRYPTION_MODE_{mode.name}": int(mode) for mode in abi.EncryptionMode},
        "ncclNumResults": len(abi.Result),
        "ncclNumTypes": len(abi.DataType),
        "ncclNumOps": len(abi.RedOp),
        "NCCL_UNIQUE_ID_BYTES": abi.UNIQUE_ID_BYTES,
        "NCCL_CONFIG_UNDEF_INT": abi.UNDEF_INT,
        "NCCL_SPLIT_NOCOLOR": abi.SPLIT_NOCOLOR,
        "NCCL_UNDEF_FLOAT": abi.UNDEF_FLOAT,
        "NCCL_WIN_REQUIRED_ALIGNMENT": abi.WINDOW_ALIGNMENT,
        "(ncclConfig_t NCCL_CONFIG_INITIALIZER).magic": abi.CONFIG_MAGIC,
        "(ncclCollConfig_t NCCL_COLLCONFIG_INITIALIZER).magic": abi.CONFIG_MAGIC,
        "(ncclEncryptionConfig_t NCCL_ENCRYPTION_CONFIG_INITIALIZER).magic": abi.CONFIG_MAGIC,
        "(ncclSimInfo_t NCCL_SIM_INFO_INITIALIZER).magic": abi.SIM_INFO_MAGIC,
    },
    raw=("ncclConfigExt_t",),
)
DEVICE = Tables(
    abi.DEVICE_FUNCTIONS,
    {STRUCTS[struct]: struct for struct in (abi.Team, abi.MultimemHandle)},
    {"(ncclCommProperties_t NCCL_COMM_PROPERTIES_INITIALIZER).magic": abi.CONFIG_MAGIC},
    raw=(
        "ncclCommProperties_t",
        "ncclDevComm_t",
        "ncclDevCommRequirements_t",
        "ncclDevResourceRequirements_t",
        "ncclGinBarrierHandle_t",
        "ncclLLA2AHandle_t",
        "ncclLsaBarrierHandle_t",
        "ncclWindow_vidmem_t",
    ),
)
CODES = {
    "b": "signed char", "B": "unsigned char", "c": "char", "h": "short", "H": "unsigned short", "i": "int",
    "I": "unsigned int", "l": "long", "L": "unsigned long", "f": "float", "P": "void *", "z": "char *",
}  # fmt: skip


def spelled(ctype: Any) -> str:
    """The C++ name of a ctypes type."""
    if ctype is None:
        return "void"
    if ctype in STRUCTS:
        return STRUCTS[ctype]
    if isinstance(ctype._type_, str):
        return CODES[ctype._type_]
    return spelled(ctype._type_) + (f"[{ctype._length_}]" if hasattr(ctype, "_length_") else " *")


def row_type(row: abi.Function) -> str:
    return f"{spelled(row.restype)}({', '.join(map(spelled, row.argtypes))})"


def struct_checks(name: str, struct: type[ctypes.Structure], version: abi.Version) -> Iterator[str]:
    since = SINCE.get(name, {})
    size = abi.struct_size(struct, since, version)
    # A newer header may have added fields at the end; libraries take the older struct too.
    yield f'static_assert(sizeof({name}) {">=" if version > abi.HEADER_VERSION else "=="} {size}, "size of {name}");'
    for field, ctype in struct._fields_:  # type: ignore[misc]
        if since.get(field, abi.MIN_VERSION) <= version:
            at = getattr(struct, field)
            place = f"offsetof({name}, {field}) == {at.offset} && sizeof({name}::{field}) == {at.size}"
            kind = f"same<decltype({name}::{field}), {spelled(ctype)}>::value"
            yield f'static_assert({place} && {kind}, "{name}.{field}");'


def program(header: str, tables: Tables, version: abi.Version) -> str:
    """C++ that compiles where `tables` say what the header says, and then prints the library's version and the rows'
    number."""
    raw = "".join(f"template <> struct opaque<{name}> : std::true_type {{}};\n" for name in tables.raw)
    lines = [f"#include <{header}>", SAME.replace("@RAW@", raw)]
    for name, struct in tables.structs.items():
        lines += struct_checks(name, struct, version)
    lines += [f'static_assert({c} == ({value}), R"({c})");' for c, value in tables.values.items()]
    rows = {name: row_type(row) for name, row in tables.functions.items()}
    lines += [f'static_assert(same<decltype({name}), {row}>::value, "{name}");' for name, row in rows.items()]
    lines += [f"static auto *row_{name} = as_row<{row}>({name});" for name, row in rows.items()]
    pointers = ", ".join(f"reinterpret_cast<any_function>(row_{name})" for name in rows)
    lines += [
        f"static any_function rows[] = {{{pointers}}};",
        "int main() {",
        "  int version = 0, found = 0;",
        f"  auto *get_version = as_row<{row_type(abi.FUNCTIONS['ncclGetVersion'])}>(ncclGetVersion);",
        "  if (get_version(&version)) return 1;",
        "  for (any_function row : rows) found += row != nullptr;",
        r'  std::printf("%d %d\n", version, found);',
        "}",
    ]
    return "\n".join(lines) + "\n"


class Installed:
    """The libnccl and the headers that the tables are held against."""

    def __init__(self, folder: Path, library: str) -> None:
        self.folder, self.library = folder, library
        self.include = Path(library).parent.parent / "include"
        if not (self.include / "nccl.h").exists():
            pytest.skip(f"{library} came without its nccl.h")
        layout = Header(self.include, folder).layout()
        self.enums: dict[str, int] = layout["enums"]
        self.structs: dict[str, Any] = layout["structs"]
        self.version = abi.version_tuple(layout["code"])

    def known(self, tables: Tables) -> Tables:
        """The part of `tables` that holds for this release."""
        if self.version > abi.HEADER_VERSION:  # which may count more of everything
            return tables._replace(values={c: n for c, n in tables.values.items() if not c.startswith("ncclNum")})
        if self.version == abi.HEADER_VERSION:
            return tables
        names = self.enums.keys() | self.structs.keys()
        return Tables(
            {name: row for name, row in tables.functions.items() if row.since <= self.version},
            {name: struct for name, struct in tables.structs.items() if name in names},
            {c: n for c, n in tables.values.items() if c in names and not c.startswith("ncclNum")},
            tuple(name for name in tables.raw if name in names),
        )

    def compile(self, source: str, *options: str) -> subprocess.CompletedProcess[str]:
        path = self.folder / "check.cpp"
        path.write_text(source)
        # Deprecated is ncclResetDebugInit: a row for old libraries.
        warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations"]
        include = [f"-I{write_cuda_headers(self.folder)}", "-isystem", str(self.include), "-DNCCL_OS_LINUX"]
        command = ["g++", "-std=c++17", *warnings, *include, str(path), *options]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)

    def run(self, source: str) -> bytes:
        """What the program made of `source` and libnccl prints."""
        target = self.folder / "check"
        folder = str(Path(self.library).parent)
        done = self.compile(source, "-o", str(target), self.library, f"-Wl,-rpath,{folder},-z,now")
        assert done.returncode == 0, done.stderr
        return subprocess.run([target], check=True, capture_output=True, timeout=60).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    missing = [tool for tool in ("gcc", "g++", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on this machine; Debian's package build-essential has all of them")
    return Installed(tmp_path_factory.mktemp("header"), real_path())


@pytest.fixture(params=["nccl.h", "nccl_device/host.h"])
def checked(request: pytest.FixtureRequest, installed: Installed) -> tuple[str, Tables]:
    """A header and the tables that speak of it."""
    if not (installed.include / request.param).exists():
        pytest.skip(f"NCCL {installed.version}: {request.param} came with 2.32; before, it was C++ for nvcc")
    return request.param, installed.known(HOST if request.param == "nccl.h" else DEVICE)


def test_the_tables_say_what_the_header_says(installed: Installed, checked: tuple[str, Tables]) -> None:
    header, tables = checked
    version, rows = map(int, installed.run(program(header, tables, installed.version)).split())
    assert abi.version_tuple(version) == installed.version
    assert rows == len(tables.functions) > 20


def test_every_function_that_a_c_program_could_call_has_a_row(
    installed: Installed, checked: tuple[str, Tables]
) -> None:
    header, tables = checked
    declared = Header(installed.include, installed.folder, header).prototypes().keys()
    callable_ = declared & exported(Path(installed.library)).keys()
    assert tables.functions.keys() <= callable_
    if installed.version <= abi.HEADER_VERSION:
        assert callable_ <= abi.FUNCTIONS.keys() | abi.DEVICE_FUNCTIONS.keys()


def argument_names(header: str) -> dict[str, tuple[str, ...]]:
    """Function -> the names of its arguments, where it is declared first, from text without comments."""
    found: dict[str, tuple[str, ...]] = {}
    for name, arguments in re.findall(r"\b(nccl[A-Z]\w*)\s*\(([^(){};]*)\)\s*(?:NCCL_\w+\s*)?;", header):
        given = [re.sub(r"=.*|\[.*", "", one).strip() for one in arguments.split(",")]
        found.setdefault(name, tuple(re.split(r"[\s*&]+", one)[-1] for one in given if one not in ("", "void")))
    return found


def test_arguments_have_the_names_of_the_header(installed: Installed, checked: tuple[str, Tables]) -> None:
    if installed.version != abi.HEADER_VERSION:
        pytest.skip(f"the names are those of NCCL {abi.HEADER_VERSION}; this one is {installed.version}")
    header, tables = checked
    files = [installed.include / header, *sorted((installed.include / "nccl_device").rglob("*.h"))]
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", "\n".join(path.read_text() for path in files), flags=re.DOTALL)
    names = argument_names(text)
    assert tables.functions.keys() <= names.keys()
    assert {name: row.names for name, row in tables.functions.items()} == {
        name: names[name] for name in tables.functions
    }


def from_c(installed: Installed, name: str, initializer: str) -> bytes:
    """The bytes of nccl.h's own initializer macro."""
    source = f"""
#include <nccl.h>
#include <cstdio>
#include <cstring>
int main() {{
  {name} filled = {initializer}, copied;
  std::memset(&copied, 0, sizeof copied);  /* a copy, field by field of equal layout, leaves the padding alone */
  std::memcpy(&copied, &filled, sizeof copied);
  std::fwrite(&copied, sizeof copied, 1, stdout);
}}
"""
    return installed.run(source)


def fields(struct: ctypes.Structure) -> dict[str, object]:
    return {name: getattr(struct, name) for name, _ in struct._fields_}  # type: ignore[misc]


def test_an_empty_config_is_the_headers_initializer(installed: Installed) -> None:
    library = Stub(installed.version).library
    configs = {"CONFIG": (CommConfig, abi.Config, "ncclConfig_t")}
    if installed.version >= (2, 31):
        configs["COLLCONFIG"] = (CollConfig, abi.CollConfig, "ncclCollConfig_t")
    for macro, (config, struct, name) in configs.items():
        theirs, ours = from_c(installed, name, f"NCCL_{macro}_INITIALIZER"), config().to_struct(library)
        assert ours.size == len(theirs)
        assert fields(ours) == fields(struct.from_buffer_copy(theirs + bytes(ours)[len(theirs) :]))
