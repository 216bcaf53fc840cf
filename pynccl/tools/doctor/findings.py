"""What the doctor looks at. Nothing here creates a CUDA context or a communicator.

Each finding copes with what it looks for being absent or broken; what is wrong about it is judged in problems.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
from ...bindings.library import Library, gpu_count, gpu_problem, holder, load, torchs_own
from ...interop.devices import cuda_core, cuda_driver
from .wheels import LibraryFile, Wheel, identify, installed_wheels

DISTRIBUTIONS = ("torch", "cuda-python", "cuda-bindings", "cuda-core", "cuda-pathfinder", "numpy")
# Not libnccl-net.so and the other plugins, of which there may be many.
LIBNCCL = re.compile(r"lib[nr]ccl\.so[.\d]*( \(deleted\))?")


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
    known_functions: int = len(abi.FUNCTIONS)
    missing_functions: dict[str, list[str]] = field(default_factory=dict)  # by the version that they need
    error: str | None = None


@dataclass(frozen=True)
class Torch:
    """torch, and the libnccl that it brings. A build for CPUs has neither `cuda` nor `hip`, and no NCCL.

    own    the libnccl that its libraries lead to
    given  the one that it gets: another, if that was loaded before
    files  those of the process once torch is imported, before pynccl loads one
    """

    version: str | None
    cuda: str | None = None
    hip: str | None = None
    built_with_nccl: str | None = None
    files: list[LibraryFile] = field(default_factory=list)
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
class Setting:
    """A variable in force: of the environment, or of a configuration file that NCCL reads."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Findings:
    versions: dict[str, str | None]
    library: Chosen
    torch: Torch | None
    wheels: list[Wheel]
    mapped: list[LibraryFile]
    driver: Driver
    settings: list[Setting]
    cuda_core: str | None  # why the installed cuda-core cannot be imported


def examine() -> Findings:
    """All findings. torch comes first, as in a training script, so that pynccl meets the copy that torch has loaded."""
    torch = torch_and_its_copy()
    chosen = chosen_library()
    return Findings(
        versions=versions(),
        library=chosen,
        torch=torch,
        wheels=installed_wheels(),
        mapped=mapped_copies(chosen.path),
        driver=driver_and_gpus(),
        settings=settings(with_files=not chosen.is_host),
        cuda_core=cuda_core_error(),
    )


def versions() -> dict[str, str | None]:
    """By the metadata, so also of packages that cannot be imported; None is "not installed"."""
    found: dict[str, str | None] = {"python": platform.python_version(), "pynccl": __version__}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def torch_and_its_copy() -> Torch | None:
    """Imports torch, if it is installed: what a broken one says is a finding, too."""
    if importlib.util.find_spec("torch") is None:
        return None
    path = torchs_own()
    error = None
    try:
        importlib.import_module("torch")
    except Exception as broken:
        error = f"{type(broken).__name__}: {broken}"
    held = holder(os.path.basename(path)) if path else None
    own, given = (identify(one) if one else None for one in (path, held))
    if error:
        return Torch(None, error=error, own=own, given=given)
    torch: Any = sys.modules["torch"]
    of = getattr(torch, "version", None)
    built_with = None
    with contextlib.suppress(AttributeError, RuntimeError):  # a build for CPUs lacks the function
        built_with = _dotted(torch.cuda.nccl.version())
    return Torch(
        getattr(torch, "__version__", None),
        getattr(of, "cuda", None),
        getattr(of, "hip", None),
        built_with,
        mapped_copies(),
        own=own,
        given=given,
    )


def chosen_library() -> Chosen:
    """The library that every call of pynccl goes to in this environment, and why it is that one."""
    asked = os.environ.get("PYNCCL_LIBRARY") or None
    usable = gpu_count()
    because = f"PYNCCL_LIBRARY={asked}" if asked else gpu_problem() or f"{usable} usable GPU{'s' * (usable > 1)}"
    try:
        library = load()
    except Exception as error:  # whatever a file that is no libnccl comes up with
        return Chosen(asked, because, error=str(error) or type(error).__name__)
    return Chosen(
        asked,
        because,
        path=library.path,
        origin=library.origin,
        version=_dotted(library.version),
        cuda=None if library.is_host else identify(library.path).cuda,
        is_host=library.is_host,
        missing_functions=missing_functions(library),
    )


def missing_functions(library: Library) -> dict[str, list[str]]:
    """Functions of nccl.h that `library` lacks, by the version they appeared in."""
    missing: dict[str, list[str]] = {}
    for name, row in sorted(abi.FUNCTIONS.items(), key=lambda item: item[1].since):
        if not library.supports(name):
            missing.setdefault(_dotted(row.since), []).append(name)
    return missing


def mapped_copies(loaded: str | None = None) -> list[LibraryFile]:
    """The libncclls that are mapped into this process: by their names, and `loaded` whatever its name is."""
    loaded = os.path.realpath(loaded) if loaded else None
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            paths = dict.fromkeys("/" + line.rstrip("\n").partition("/")[2] for line in maps if "/" in line)
    except OSError:
        return []
    return [identify(path) for path in paths if path == loaded or LIBNCCL.fullmatch(os.path.basename(path))]


def driver_and_gpus() -> Driver:
    """By NVML, which lists GPUs that no program can use, too; `problem` has in words what is wrong without it."""
    usable, problem = gpu_count(), gpu_problem()
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        handles = [nvml.device_get_handle_by_index_v2(index) for index in range(nvml.device_get_count_v2())]
        memory = [int(nvml.device_get_memory_info_v2(gpu).total) for gpu in handles]
        code = nvml.system_get_cuda_driver_version_v2()  # 12040 is 12.4
        return Driver(
            usable,
            problem,
            nvml.system_get_driver_version(),
            f"{code // 1000}.{code % 1000 // 10}",
            [
                {"name": nvml.device_get_name(gpu), "memory_bytes": size}
                for gpu, size in zip(handles, memory, strict=True)
            ],
        )
    except Exception:  # no cuda-python, none with NVML, no driver, or one that does not answer
        return Driver(usable, problem)


def cuda_core_error() -> str | None:
    """What importing cuda.core and the driver API says, where cuda-core is installed."""
    if versions()["cuda-core"] is None:
        return None
    try:
        cuda_core()
        cuda_driver()
    except ImportError as error:
        return str(error)
    return None


def settings(with_files: bool) -> list[Setting]:
    """NCCL_* and PYNCCL_* variables in force. NCCL reads its files in this order and lets nothing be overwritten."""
    found = {
        name: Setting(name, value, "environment")
        for name, value in sorted(os.environ.items())
        if name.startswith(("NCCL_", "PYNCCL_"))
    }
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    for path in (own, "/etc/nccl.conf") if with_files else ():
        lines = Path(path).read_text(errors="replace").splitlines() if os.access(path, os.R_OK) else []
        for name, equals, value in (line.partition("=") for line in lines if not line.startswith("#")):
            if equals:
                found.setdefault(name, Setting(name, value, path))
    return list(found.values())


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))
