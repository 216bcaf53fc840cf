"""libnccl files on disk: what each one is, and whether it is the file that the installed wheel says it wrote.

nvidia-nccl-cu12 and nvidia-nccl-cu13 both write nvidia/nccl/lib/libnccl.so.2. The one installed last wins without a
word, and uninstalling either deletes the file. `pip check` sees nothing of it; the hashes in the wheels' RECORD do.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import mmap
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from ...bindings.library import SONAME

WHEEL = re.compile(r"nvidia-nccl(-cu\d+)?")
FILE_IN_WHEEL = f"nvidia/nccl/lib/{SONAME}"
# Every libnccl from 2.18 to 2.32 carries "NCCL version 2.32.3+cuda12.9"; RCCL says hip in place of cuda.
VERSION_TEXT = re.compile(rb"[NR]CCL version (\d+\.\d+\.\d+)\+(?:cuda|hip)(\d+\.\d+)")
CHUNK = 1 << 22


@dataclass(frozen=True)
class LibraryFile:
    """A libnccl on disk. `version` and `cuda` (the CUDA it was built for) are None where the file does not say."""

    path: str
    version: str | None = None
    cuda: str | None = None

    def __str__(self) -> str:
        return f"{describe(self.version, self.cuda)} in {self.path}"


@dataclass(frozen=True)
class Wheel:
    """An installed nvidia-nccl wheel and the state of its file.

    state  "intact"      the file is the one that the wheel wrote
           "replaced"    another file lies in its place
           "missing"     there is no file
           "unrecorded"  the wheel's RECORD has no hash to compare with
    """

    name: str
    version: str
    installer: str
    file: LibraryFile
    state: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def describe(version: str | None, cuda: str | None) -> str:
    """ "NCCL 2.32.3 for CUDA 12.9", as far as it is known."""
    return f"NCCL {version or 'of unknown version'}" + (f" for CUDA {cuda}" if cuda else "")


@functools.cache
def identify(path: str) -> LibraryFile:
    """Version and CUDA flavour by the text within the file, so without loading it."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = VERSION_TEXT.search(content)
            return LibraryFile(path, *(group.decode() for group in found.groups())) if found else LibraryFile(path)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return LibraryFile(path)


def installed_wheels() -> list[Wheel]:
    """The nvidia-nccl wheels that Python's metadata knows, each compared with the file on disk."""
    found: dict[tuple[str, str], Wheel] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if WHEEL.fullmatch(name):
            wheel = _examine(name, distribution)
            found.setdefault((name, wheel.file.path), wheel)  # a folder may be on sys.path twice; the first one counts
    return [found[key] for key in sorted(found)]


def _examine(name: str, distribution: metadata.Distribution) -> Wheel:
    recorded = next((file for file in distribution.files or () if str(file) == FILE_IN_WHEEL), None)
    path = os.path.realpath(str(distribution.locate_file(FILE_IN_WHEEL)))
    if not os.path.exists(path):
        state = "missing"
    elif recorded is None or recorded.hash is None:
        state = "unrecorded"
    else:
        state = "intact" if recorded.hash.value == _digest(path, recorded.hash.mode) else "replaced"
    installer = (distribution.read_text("INSTALLER") or "pip").strip()
    return Wheel(name, distribution.version, installer, identify(path), state)


@functools.cache
def _digest(path: str, algorithm: str) -> str:
    """Hash of the file as RECORD writes it: URL-safe base64 without padding."""
    digest = hashlib.new(algorithm)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def wheel_problems(wheels: list[Wheel], wanted: str | None) -> Iterator[tuple[str, str, str]]:
    """(code, text, fix) for each file that is not what the wheels say. `wanted` is the wheel to keep, if known."""
    for path in dict.fromkeys(wheel.file.path for wheel in wheels):
        sharing = [wheel for wheel in wheels if wheel.file.path == path]
        if len(sharing) > 1:
            yield "wheel-collision", _collision(sharing), _keep_one(sharing, wanted)
        elif sharing[0].state == "missing":
            text = f"{sharing[0]} is installed, but its file {path} is gone, as after uninstalling another such wheel"
            yield "wheel-file-missing", text, reinstall(sharing[0])
        elif sharing[0].state == "replaced":
            found = describe(sharing[0].file.version, sharing[0].file.cuda)
            text = f"{path} is not the file of {sharing[0]}: its hash differs, and it says that it is {found}"
            yield "wheel-file-replaced", text, reinstall(sharing[0])


def _collision(sharing: list[Wheel]) -> str:
    names = " and ".join(map(str, sharing))
    if sharing[0].state == "missing":
        fate = "The file is gone"
    else:
        found = describe(sharing[0].file.version, sharing[0].file.cuda)
        owner = next((f"that of {wheel}" for wheel in sharing if wheel.state == "intact"), "that of none of them")
        fate = f"The file there is {owner} ({found})"
    return f"{names} are both installed and write the same file, {sharing[0].file.path}. {fate}"


def _keep_one(sharing: list[Wheel], wanted: str | None) -> str:
    """Uninstall all but one. Its file goes with the others, so it is installed anew."""
    *others, kept = sorted(sharing, key=lambda wheel: (wheel.name == wanted, wheel.state == "intact", wheel.name))
    yes = "" if kept.installer == "uv" else "-y "
    return f"{pip('uninstall', kept.installer)} {yes}{' '.join(wheel.name for wheel in others)} && {reinstall(kept)}"


def reinstall(wheel: Wheel) -> str:
    """The command that writes the wheel's files anew and touches nothing else."""
    force = "--reinstall" if wheel.installer == "uv" else "--force-reinstall"
    return f"{pip('install', wheel.installer)} {force} --no-deps {wheel.name}=={wheel.version}"


def pip(action: str, installer: str = "pip") -> str:
    """`pip install` for this very interpreter: the pip on PATH may be another one's. What uv made has none."""
    python = shlex.quote(sys.executable)
    return f"uv pip {action} --python {python}" if installer == "uv" else f"{python} -m pip {action}"
