"""libnccl files on disk: what each one is, and whether it is the file that the installed wheel has written.

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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ...bindings.library import SONAME

FILE_IN_WHEEL = f"nvidia/nccl/lib/{SONAME}"
# Every libnccl from 2.18 to 2.32 carries "NCCL version 2.32.3+cuda12.9"; RCCL says hip in place of cuda.
VERSION_TEXT = re.compile(rb"[NR]CCL version (\d+\.\d+\.\d+)\+(?:cuda|hip)(\d+\.\d+)")


@dataclass(frozen=True)
class LibraryFile:
    """A libnccl on disk. `version` and `cuda` (the CUDA it was built for) are None where the file does not say."""

    path: str
    version: str | None = None
    cuda: str | None = None

    @property
    def what(self) -> str:
        return f"NCCL {self.version or 'of unknown version'}" + (f" for CUDA {self.cuda}" if self.cuda else "")

    def __str__(self) -> str:
        return f"{self.what} in {self.path}"


@functools.cache
def identify(path: str) -> LibraryFile:
    """Version and CUDA by the text within the file: it is not loaded."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = VERSION_TEXT.search(content)
            version, cuda = (group.decode() for group in found.groups()) if found else (None, None)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        version = cuda = None
    return LibraryFile(path, version, cuda)


@dataclass(frozen=True)
class Wheel:
    """An installed nvidia-nccl wheel.

    state  of its file: "intact"; "replaced", another one lies in its place; "missing"; "unrecorded", the wheel's RECORD
           has no hash to compare with
    """

    name: str
    version: str
    installer: str
    file: LibraryFile
    state: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def reinstall(self) -> str:
        """The command that writes the wheel's files anew and touches nothing else."""
        force = "--reinstall" if self.installer == "uv" else "--force-reinstall"
        return f"{pip('install', self.installer)} {force} --no-deps {self.name}=={self.version}"


def installed_wheels() -> list[Wheel]:
    """The nvidia-nccl wheels that Python's metadata knows, each compared with the file on disk."""
    found: dict[tuple[str, str], Wheel] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if re.fullmatch(r"nvidia-nccl(-cu\d+)?", name):
            wheel = _examined(name, distribution)
            found.setdefault((name, wheel.file.path), wheel)  # a folder may be on sys.path twice; the first one counts
    return [found[key] for key in sorted(found)]


def _examined(name: str, distribution: metadata.Distribution) -> Wheel:
    recorded = next((file.hash for file in distribution.files or () if str(file) == FILE_IN_WHEEL), None)
    path = os.path.realpath(str(distribution.locate_file(FILE_IN_WHEEL)))
    if not os.path.exists(path):
        state = "missing"
    elif recorded is None:
        state = "unrecorded"
    else:
        digest = hashlib.new(recorded.mode, Path(path).read_bytes()).digest()
        state = "intact" if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == recorded.value else "replaced"
    installer = (distribution.read_text("INSTALLER") or "pip").strip()
    return Wheel(name, distribution.version, installer, identify(path), state)


def pip(action: str, installer: str = "pip") -> str:
    """`pip install` for this very interpreter: the pip on PATH may be another one's. What uv made has none."""
    python = shlex.quote(sys.executable)
    return f"uv pip {action} --python {python}" if installer == "uv" else f"{python} -m pip {action}"
