"""Collect the doctor's findings, without creating a CUDA context or a communicator.

Every finding tolerates missing or broken packages, files and drivers. problems.py decides what is wrong.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import mmap
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ... import __version__
from ...bindings.library import SONAME, gpu_count, gpu_problem, load

FILE_IN_WHEEL = f"nvidia/nccl/lib/{SONAME}"
_DISTRIBUTIONS = ("torch", "cuda-python", "cuda-bindings", "cuda-core", "numpy")
_LIBNCCL = re.compile(r"lib[nr]ccl\.so[.\d]*( \(deleted\))?")  # not libnccl-net.so and the other plugins
# Every libnccl from 2.18 to 2.32 carries "NCCL version 2.32.3+cuda12.9"; RCCL says hip in place of cuda.
_VERSION_TEXT = re.compile(rb"[NR]CCL version (\d+\.\d+\.\d+)\+(?:cuda|hip)(\d+\.\d+)")


@dataclass(frozen=True)
class LibraryFile:
    """A libnccl on disk. `version` and `cuda` (the CUDA version it was built for) are None if the file lacks them."""

    path: str
    version: str | None = None
    cuda: str | None = None

    @property
    def description(self) -> str:
        return f"NCCL {self.version or 'of unknown version'}" + (f" for CUDA {self.cuda}" if self.cuda else "")

    def __str__(self) -> str:
        return f"{self.description} in {self.path}"


@dataclass(frozen=True)
class Wheel:
    """An installed nvidia-nccl wheel. state: "intact", "replaced" (another file is in its place) or "missing"."""

    name: str
    version: str
    file: LibraryFile
    state: str
    installer: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Findings:
    """The output of --json, without the problems."""

    versions: dict[str, str | None]  # of packages; None: not installed
    library: dict[str, Any]  # the result of `pynccl.load()` and the reason for it; "error" if it raises
    torch: dict[str, Any] | None  # None: not installed
    wheels: list[Wheel]
    mapped: list[LibraryFile]  # the libnccl files mapped into this process
    driver: dict[str, Any]  # number of "usable" GPUs, "problem" if there is none, latest "cuda" version it supports
    settings: dict[str, str]  # NCCL_* and PYNCCL_* variables


def examine() -> Findings:
    """Collect all findings. Import torch first, as a training script does, so that pynccl finds torch's libnccl."""
    torch, library = _torch(), _library()
    versions: dict[str, str | None] = {"python": platform.python_version(), "pynccl": __version__}
    return Findings(
        versions=versions | {name: _version(name) for name in _DISTRIBUTIONS},
        library=library,
        torch=torch,
        wheels=_installed_wheels(),
        mapped=_mapped_copies(library["path"]),
        driver=_driver(),
        settings={name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NCCL_", "PYNCCL_"))},
    )


@functools.cache
def identify(path: str) -> LibraryFile:
    """Read the NCCL and CUDA versions from the text inside the file, without loading it."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _VERSION_TEXT.search(content)
            version, cuda = (group.decode() for group in found.groups()) if found else (None, None)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        version = cuda = None
    return LibraryFile(path, version, cuda)


def _version(name: str) -> str | None:
    """Return a package's version from its metadata, which works even if it cannot be imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any] | None:
    """Import torch if it is installed, and record its versions or its import error."""
    if importlib.util.find_spec("torch") is None:
        return None
    found: dict[str, Any] = dict.fromkeys(("version", "cuda", "built_with_nccl", "error"))
    try:
        torch: Any = importlib.import_module("torch")
        found["version"] = getattr(torch, "__version__", None)
        found["cuda"] = getattr(getattr(torch, "version", None), "cuda", None)
    except Exception as broken:
        found["error"] = f"{type(broken).__name__}: {broken}"
    if not found["error"]:
        with contextlib.suppress(AttributeError, RuntimeError):  # CPU builds lack the function
            found["built_with_nccl"] = _dotted(torch.cuda.nccl.version())
    return found


def _library() -> dict[str, Any]:
    """Return the library that pynccl uses in this environment and why it was chosen."""
    requested, usable = os.environ.get("PYNCCL_LIBRARY") or None, gpu_count()
    because = (
        f"PYNCCL_LIBRARY={requested}" if requested else gpu_problem() or f"{usable} usable GPU{'s' * (usable > 1)}"
    )
    found: dict[str, Any] = dict.fromkeys(("asked", "because", "path", "origin", "version", "cuda", "is_host", "error"))
    found |= {"asked": requested, "because": because, "is_host": False}
    try:
        library = load()
    except Exception as error:  # a file that is not a libnccl can raise anything
        return found | {"error": str(error) or type(error).__name__}
    cuda = None if library.is_host else identify(library.path).cuda
    found |= {"path": library.path, "origin": library.origin, "version": _dotted(library.version)}
    return found | {"cuda": cuda, "is_host": library.is_host}


def _installed_wheels() -> list[Wheel]:
    """Return the installed nvidia-nccl wheels, each compared with its file on disk.

    nvidia-nccl-cu12 and nvidia-nccl-cu13 both write nvidia/nccl/lib/libnccl.so.2. The wheel installed last silently
    overwrites the file, and uninstalling either deletes it. `pip check` misses this; the hashes in RECORD reveal it.
    """
    found: dict[tuple[str, str], Wheel] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if re.fullmatch(r"nvidia-nccl(-cu\d+)?", name):
            path = os.path.realpath(str(distribution.locate_file(FILE_IN_WHEEL)))
            recorded = next((file.hash for file in distribution.files or () if str(file) == FILE_IN_WHEEL), None)
            installer = (distribution.read_text("INSTALLER") or "pip").strip()
            wheel = Wheel(name, distribution.version, identify(path), _state(path, recorded), installer)
            found.setdefault((name, path), wheel)  # a folder can be on sys.path twice; keep the first entry
    return [found[key] for key in sorted(found)]


def _state(path: str, recorded: metadata.FileHash | None) -> str:
    if not os.path.exists(path):
        return "missing"
    if recorded is None:
        return "intact"
    digest = hashlib.new(recorded.mode, Path(path).read_bytes()).digest()
    return "intact" if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == recorded.value else "replaced"


def _mapped_copies(loaded: str | None) -> list[LibraryFile]:
    """Return the libnccl files mapped into this process: found by name, plus `loaded` under any name."""
    loaded = os.path.realpath(loaded) if loaded else None
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            paths = dict.fromkeys("/" + line.rstrip("\n").partition("/")[2] for line in maps if "/" in line)
    except OSError:
        return []
    return [identify(path) for path in paths if path == loaded or _LIBNCCL.fullmatch(os.path.basename(path))]


def _driver() -> dict[str, Any]:
    """Return the number of usable GPUs, the reason if there is none, and the latest CUDA version of the driver."""
    code = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):  # no driver
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(code))
    cuda = f"{code.value // 1000}.{code.value % 1000 // 10}" if code.value else None  # 12040 is 12.4
    return {"usable": gpu_count(), "problem": gpu_problem(), "cuda": cuda}


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))
