"""What the doctor looks at. Nothing here creates a CUDA context or a communicator.

Each finding copes with what it looks for being absent or broken; what is wrong about it is judged in problems.py.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.util
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ... import __version__
from ...bindings import abi
from ...bindings.library import SONAME, gpu_count, gpu_problem, holder, load, torchs_own

FILE_IN_WHEEL = f"nvidia/nccl/lib/{SONAME}"
_DISTRIBUTIONS = ("torch", "cuda-python", "cuda-bindings", "cuda-core", "numpy")
_LIBNCCL = re.compile(r"lib[nr]ccl\.so[.\d]*( \(deleted\))?")  # not libnccl-net.so and the other plugins
# Every libnccl from 2.18 to 2.32 carries "NCCL version 2.32.3+cuda12.9"; RCCL says hip in place of cuda.
_VERSION_TEXT = re.compile(rb"[NR]CCL version (\d+\.\d+\.\d+)\+(?:cuda|hip)(\d+\.\d+)")


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


@dataclass(frozen=True)
class Wheel:
    """An installed nvidia-nccl wheel. state: of its file, "intact", "replaced" by another one, or "missing"."""

    name: str
    version: str
    file: LibraryFile
    state: str
    installer: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Chosen:
    """What `pynccl.load()` gives here. Without a library, `error` says why."""

    asked: str | None  # PYNCCL_LIBRARY
    because: str
    path: str | None = None
    origin: str | None = None
    version: str | None = None
    cuda: str | None = None
    is_host: bool = False
    missing_functions: dict[str, list[str]] = field(default_factory=dict)  # of nccl.h, by the version they came with
    error: str | None = None


@dataclass(frozen=True)
class Torch:
    """torch, and the libnccl that its libraries lead to (`own`) and that it gets (`given`): one loaded before."""

    version: str | None
    cuda: str | None = None
    built_with_nccl: str | None = None
    error: str | None = None
    own: LibraryFile | None = None
    given: LibraryFile | None = None


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver. `gpus` are those of the machine; `usable` counts those that CUDA_VISIBLE_DEVICES leaves."""

    usable: int
    problem: str
    version: str | None = None
    cuda: str | None = None  # the latest CUDA that the driver runs
    gpus: list[dict[str, Any]] = field(default_factory=list)  # name, memory_bytes


@dataclass(frozen=True)
class Findings:
    """versions: of packages, None for those that are not installed; mapped: the libncclls of this process;
    settings: NCCL_* and PYNCCL_* variables in force."""

    versions: dict[str, str | None]
    library: Chosen
    torch: Torch | None
    wheels: list[Wheel]
    mapped: list[LibraryFile]
    driver: Driver
    settings: dict[str, str]


def examine() -> Findings:
    """All findings. torch comes first, as in a training script, so that pynccl meets the copy that torch has loaded."""
    torch = _torch()
    chosen = _chosen_library()
    versions: dict[str, str | None] = {"python": platform.python_version(), "pynccl": __version__}
    return Findings(
        versions=versions | {name: _version(name) for name in _DISTRIBUTIONS},
        library=chosen,
        torch=torch,
        wheels=_installed_wheels(),
        mapped=_mapped_copies(chosen.path),
        driver=_driver_and_gpus(),
        settings=_settings(with_files=not chosen.is_host),
    )


@functools.cache
def identify(path: str) -> LibraryFile:
    """Version and CUDA by the text within the file: it is not loaded."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _VERSION_TEXT.search(content)
            version, cuda = (group.decode() for group in found.groups()) if found else (None, None)
    except (OSError, ValueError):  # ValueError: an empty file cannot be mapped
        version = cuda = None
    return LibraryFile(path, version, cuda)


def _version(name: str) -> str | None:
    """By the metadata, so also of packages that cannot be imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> Torch | None:
    """Imports torch, if it is installed: what a broken one says is a finding, too."""
    if importlib.util.find_spec("torch") is None:
        return None
    path, error, built_with = torchs_own(), None, None
    try:
        importlib.import_module("torch")
    except Exception as broken:
        error = f"{type(broken).__name__}: {broken}"
    held = holder(os.path.basename(path)) if path else None
    own, given = (identify(one) if one else None for one in (path, held))
    if error:
        return Torch(None, error=error, own=own, given=given)
    torch: Any = sys.modules["torch"]
    with contextlib.suppress(AttributeError, RuntimeError):  # a build for CPUs lacks the function
        built_with = _dotted(torch.cuda.nccl.version())
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    return Torch(getattr(torch, "__version__", None), cuda, built_with, own=own, given=given)


def _chosen_library() -> Chosen:
    """The library that every call of pynccl goes to in this environment, and why it is that one."""
    asked, usable = os.environ.get("PYNCCL_LIBRARY") or None, gpu_count()
    because = f"PYNCCL_LIBRARY={asked}" if asked else gpu_problem() or f"{usable} usable GPU{'s' * (usable > 1)}"
    try:
        library = load()
    except Exception as error:  # whatever a file that is no libnccl comes up with
        return Chosen(asked, because, error=str(error) or type(error).__name__)
    missing: dict[str, list[str]] = {}
    for name, row in sorted(abi.FUNCTIONS.items(), key=lambda item: item[1].since):
        if not library.supports(name):
            missing.setdefault(_dotted(row.since), []).append(name)
    version, cuda = _dotted(library.version), None if library.is_host else identify(library.path).cuda
    return Chosen(asked, because, library.path, library.origin, version, cuda, library.is_host, missing)


def _installed_wheels() -> list[Wheel]:
    """The nvidia-nccl wheels that Python's metadata knows, each compared with the file on disk.

    nvidia-nccl-cu12 and nvidia-nccl-cu13 both write nvidia/nccl/lib/libnccl.so.2. The one installed last wins without a
    word, and uninstalling either deletes the file. `pip check` sees nothing of it; the hashes in the wheels' RECORD do.
    """
    found: dict[tuple[str, str], Wheel] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if re.fullmatch(r"nvidia-nccl(-cu\d+)?", name):
            path = os.path.realpath(str(distribution.locate_file(FILE_IN_WHEEL)))
            recorded = next((file.hash for file in distribution.files or () if str(file) == FILE_IN_WHEEL), None)
            installer = (distribution.read_text("INSTALLER") or "pip").strip()
            wheel = Wheel(name, distribution.version, identify(path), _state(path, recorded), installer)
            found.setdefault((name, path), wheel)  # a folder may be on sys.path twice; the first one counts
    return [found[key] for key in sorted(found)]


def _state(path: str, recorded: metadata.FileHash | None) -> str:
    if not os.path.exists(path):
        return "missing"
    if recorded is None:
        return "intact"
    digest = hashlib.new(recorded.mode, Path(path).read_bytes()).digest()
    return "intact" if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == recorded.value else "replaced"


def _mapped_copies(loaded: str | None) -> list[LibraryFile]:
    """The libncclls that are mapped into this process: by their names, and `loaded` whatever its name is."""
    loaded = os.path.realpath(loaded) if loaded else None
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            paths = dict.fromkeys("/" + line.rstrip("\n").partition("/")[2] for line in maps if "/" in line)
    except OSError:
        return []
    return [identify(path) for path in paths if path == loaded or _LIBNCCL.fullmatch(os.path.basename(path))]


def _driver_and_gpus() -> Driver:
    """By NVML, which lists GPUs that no program can use, too; `problem` has in words what is wrong without it."""
    usable, problem = gpu_count(), gpu_problem()
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        handles = [nvml.device_get_handle_by_index_v2(index) for index in range(nvml.device_get_count_v2())]
        memory = [int(nvml.device_get_memory_info_v2(gpu).total) for gpu in handles]
        gpus = [
            {"name": nvml.device_get_name(gpu), "memory_bytes": size} for gpu, size in zip(handles, memory, strict=True)
        ]
        code = nvml.system_get_cuda_driver_version_v2()  # 12040 is 12.4
        cuda = f"{code // 1000}.{code % 1000 // 10}"
        return Driver(usable, problem, nvml.system_get_driver_version(), cuda, gpus)
    except Exception:  # no cuda-python, none with NVML, no driver, or one that does not answer
        return Driver(usable, problem)


def _settings(with_files: bool) -> dict[str, str]:
    """Of the environment, and of the files that NCCL reads: in this order, and nothing is overwritten."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "PYNCCL_"))}
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    for path in (own, "/etc/nccl.conf") if with_files else ():
        lines = Path(path).read_text(errors="replace").splitlines() if os.access(path, os.R_OK) else []
        for name, equals, value in (line.partition("=") for line in lines if not line.startswith("#")):
            if equals:
                found.setdefault(name, f"{value}   (from {path})")
    return found


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))
