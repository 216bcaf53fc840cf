"""The libnccl that the dynamic loader will give torch, found without importing torch.

Who needs a library by its SONAME, as torch needs "libnccl.so.2", gets whichever copy of that name is in the process
already. So a copy that is opened before torch is imported becomes torch's, and if it is older than the one torch was
built with, `import torch` fails ("undefined symbol: ncclCommResume"). A copy that is opened by its path takes nothing
from those that are there. Hence torch's own has to be the first, and here is how to find it: torch's library says in
its dynamic section what it needs and where to look (ld.so(8): RPATH, LD_LIBRARY_PATH, RUNPATH).
"""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import sys
from typing import BinaryIO, NamedTuple

LIBNCCL = re.compile(r"lib[nr]ccl\.so[.\d]*")
LIBRARIES_OF_TORCH = ("libtorch_cuda.so", "libtorch_hip.so")  # a build for CPUs has neither
_STRINGS, _STRINGS_SIZE = 5, 10  # tags of the dynamic section, as elf.h has them
_NEEDED, _SONAME, _RPATH, _RUNPATH = 1, 14, 15, 29
_LOAD, _DYNAMIC = 1, 2  # kinds of segments


class Needed(NamedTuple):
    """A library that torch needs, by name. `path` is None where torch's own search path does not lead to it."""

    name: str
    path: str | None


def needed_by_torch() -> Needed | None:
    """The libnccl of the installed torch. None: no torch, one without NCCL, or one that NCCL is linked into."""
    for folder in _folders_of_torch():
        for library in LIBRARIES_OF_TORCH:
            path = os.path.join(folder, "lib", library)
            entries = _dynamic(path)
            for name in entries.get(_NEEDED, ()):
                if LIBNCCL.fullmatch(name):
                    files = (os.path.join(place, name) for place in _search_path(entries, os.path.dirname(path)))
                    return Needed(name, next((os.path.realpath(file) for file in files if os.path.exists(file)), None))
    return None


def name_of(path: str) -> str:
    """The SONAME of a file, else its path. "" for a bare name: which file that is decides the loader's search."""
    return _dynamic(path).get(_SONAME, [path])[0] if os.sep in path else ""


def _folders_of_torch() -> list[str]:
    """Where torch would be imported from."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError, AttributeError):  # ValueError: a stand-in in sys.modules without a spec
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def _search_path(entries: dict[int, list[str]], origin: str) -> list[str]:
    """Folders in the loader's order. An RPATH counts only where there is no RUNPATH."""
    given = re.split("[:;]", _ld_library_path())
    own = (entries.get(_RUNPATH) or entries.get(_RPATH) or [""])[0].split(":")
    own = [folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in own]
    return [folder for folder in ([*given, *own] if _RUNPATH in entries else [*own, *given]) if folder]


def _ld_library_path() -> str:
    """As it was when the process started: the loader does not look at it again."""
    try:
        with open("/proc/self/environ", "rb") as file:
            lines = file.read().split(b"\0")
    except OSError:
        return os.environ.get("LD_LIBRARY_PATH", "")
    return next((os.fsdecode(line.partition(b"=")[2]) for line in lines if line.startswith(b"LD_LIBRARY_PATH=")), "")


def _dynamic(path: str) -> dict[int, list[str]]:
    """The strings of the file's dynamic section by their tags; none where it is no library of this machine."""
    try:
        with open(path, "rb") as file:
            return _read_dynamic(file)
    except (OSError, struct.error):
        return {}


def _read_dynamic(file: BinaryIO) -> dict[int, list[str]]:
    head = file.read(64)
    if head[:6] != b"\x7fELF\2" + (b"\1" if sys.byteorder == "little" else b"\2"):  # 64 bits
        return {}
    start, size, number = *struct.unpack_from("=Q", head, 32), *struct.unpack_from("=HH", head, 54)
    table = _at(file, start, size * number)
    # kind, flags, offset in the file, address, physical address, size in the file
    segments = [struct.unpack_from("=IIQQQQ", table, index * size) for index in range(number)]
    words = b"".join(_at(file, segment[2], segment[5]) for segment in segments if segment[0] == _DYNAMIC)
    rows = [struct.unpack_from("=QQ", words, at) for at in range(0, len(words) - 15, 16)]
    values = dict(rows)
    address = values.get(_STRINGS, 0)
    offset = next((s[2] + address - s[3] for s in segments if s[0] == _LOAD and s[3] <= address < s[3] + s[5]), 0)
    strings = _at(file, offset, values.get(_STRINGS_SIZE, 0))
    found: dict[int, list[str]] = {}
    for tag, value in rows:
        if tag in (_NEEDED, _SONAME, _RPATH, _RUNPATH):
            found.setdefault(tag, []).append(os.fsdecode(strings[value : strings.find(b"\0", value)]))
    return found


def _at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
