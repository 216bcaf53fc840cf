"""Find, load, bind and version-gate one libnccl.

Three libraries answer the same calls: NVIDIA's libnccl.so.2, any library with its ABI (PYNCCL_LIBRARY=/path), and the
host library (PYNCCL_LIBRARY=host, the default without a GPU), which works on CPU memory. Nothing above this module
knows which one it has, except through `Library.is_host`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import abi
from .errors import NcclError, NcclLibraryNotFound, NcclVersionError, from_result
from .resource import Shared
from .values import instance

SONAME = "libnccl.so.2"
_OF_TORCH = (("libtorch_cuda.so", SONAME), ("libtorch_hip.so", "librccl.so.1"))  # a build for CPUs has neither
_NOLOAD = getattr(os, "RTLD_NOLOAD", 0)
_ROWS = {**abi.FUNCTIONS, **abi.DEVICE_FUNCTIONS}


# A Python integer as a finished C value, which a function without argtypes takes as it is. For addresses, handles and
# sizes, which are as wide: ctypes converts to c_void_p three times as fast as to c_size_t.
to_pointer = ctypes.c_void_p.from_param


def without_argtypes(function: Any, wide: int = 0) -> Any:
    """The same C function without the conversions by argtypes, which are most of the cost of a call by ctypes.

    Its first `wide` arguments may be integers of any size. Of the others, integers are passed as C ints (data type,
    operator, rank), and addresses must be finished values."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * wide)(ctypes.cast(function, ctypes.c_void_p).value or 0)


class Library(Shared):
    """One loaded libnccl: its C functions are attributes, bound on first use.

    path     file it was loaded from, or "host"
    origin   the step of the search that found it
    version  (major, minor, patch), as the library reports it
    is_host  True for the host library: buffers are CPU memory, streams are `HostStream`
    """

    def __init__(self, path: str, origin: str, resolve: Callable[[str], Any | None], is_host: bool = False) -> None:
        self.path = path
        self.origin = origin
        self.is_host = is_host
        self._resolve = resolve
        if resolve("ncclGetVersion") is None:
            raise NcclLibraryNotFound(
                f"{path} ({origin}) has no ncclGetVersion, so it is no libnccl; name one with "
                "PYNCCL_LIBRARY=/path/to/libnccl.so.2"
            )
        code = ctypes.c_int()
        self.check(self.ncclGetVersion(ctypes.byref(code)), "ncclGetVersion")
        self.version: abi.Version = abi.version_tuple(code.value)
        if self.version < abi.MIN_VERSION:
            raise NcclVersionError(
                f"pynccl needs NCCL >= {_dotted(abi.MIN_VERSION)}; loaded {_dotted(self.version)} from {path}"
            )

    def __getattr__(self, name: str) -> Any:
        """Bind the C function `name`; afterwards it is an ordinary attribute.

        Raises NcclVersionError if this library does not have it."""
        row = _ROWS.get(name)
        if row is None:
            raise AttributeError(f"nccl.h has no function {name!r}")
        function = self._resolve(name)
        if function is None and self.is_host and row.since <= self.version:
            raise NcclVersionError(f"{name} is not in the host library: it works on a GPU only; use a real libnccl")
        if function is None:
            raise NcclVersionError(
                f"{name} needs NCCL >= {_dotted(row.since)}; loaded {_dotted(self.version)} from {self.path}"
            )
        setattr(self, name, function)
        return function

    def supports(self, name: str) -> bool:
        """Whether this library has the C function `name`."""
        try:
            getattr(self, name)
        except NcclVersionError:
            return False
        return True

    def last_error(self, comm: int | None = None) -> str:
        """NCCL's human-readable account of the last error ("" if there is none)."""
        text = self.ncclGetLastError(comm)
        return text.decode(errors="replace").strip() if text else ""

    def error_string(self, code: int) -> str:
        """NCCL's own words for a result code."""
        text = self.ncclGetErrorString(code)
        return text.decode() if text else f"result {code}"

    def error(self, code: int, call: str, comm: int | None = None) -> NcclError:
        """The exception for result `code` of `call`."""
        if self.is_host and host_module().take_interrupt():  # Ctrl-C arrived inside the C function
            raise KeyboardInterrupt
        return from_result(code, call, self.error_string(code), self.last_error(comm))

    def check(self, code: int, call: str, comm: int | None = None) -> None:
        """Raise unless `code` is ncclSuccess."""
        if code:
            raise self.error(code, call, comm)

    def __repr__(self) -> str:
        return f"<pynccl.Library {_dotted(self.version)} {self.path} ({self.origin})>"


def chosen(library: Library | None) -> Library:
    """The library that was passed, or else what load() gives; TypeError for what is none."""
    if library is None:
        return load()
    instance(library, Library, "library", "a pynccl.Library, such as pynccl.load('host') returns, or None")
    return library


def load(spec: str | os.PathLike[str] | None = None) -> Library:
    """The library for `spec`, else for PYNCCL_LIBRARY, else the best one of this machine. Loaded once per spec.

    spec  "host"; "nccl" to insist on a real libnccl; or the path of a library with NCCL's ABI.
          None: PYNCCL_LIBRARY, and without it "nccl" where there is a GPU, "host" where there is none.

    It does not matter whether torch is imported before or after: it keeps its own libnccl beside any other that is
    named here, and "nccl" is torch's own where torch has one.

    Raises NcclLibraryNotFound with every place that was tried.
    """
    if spec is not None:
        instance(spec, (str, os.PathLike), "spec", "'host', 'nccl', or the path of a libnccl.so.2, a string; or None")
        spec = os.fspath(spec)
    return _load(spec or os.environ.get("PYNCCL_LIBRARY") or ("nccl" if gpu_count() else "host"))


@functools.cache
def _load(spec: str) -> Library:
    if spec == "host":
        return _load_host()
    if spec == "nccl":
        return _load_nccl()
    try:
        _open_torchs_own()
        return _from_cdll(_open(spec), spec, "PYNCCL_LIBRARY")
    except (OSError, ValueError) as error:  # ValueError: a NUL, half a surrogate pair
        named = spec if spec.isprintable() else repr(spec)
        raise NcclLibraryNotFound(
            f"PYNCCL_LIBRARY={named}: {error}; give the path of a libnccl.so.2, 'nccl' to search for one, or 'host'"
        ) from error


def _open_torchs_own() -> None:
    """Before another libnccl, which torch would otherwise be given.

    Who needs "libnccl.so.2", as torch does, gets whichever copy of that SONAME is in the process already; if it is
    older than the one torch was built with, `import torch` fails ("undefined symbol: ncclCommResume")."""
    own = torchs_own()
    if own and not holder(os.path.basename(own)):
        with contextlib.suppress(OSError):  # torch will say so itself, if it is ever imported
            _open(own)


def holder(name: str) -> str:
    """The library of the process that whoever needs `name` will get, whatever is opened from now on; "" if none."""
    try:
        return _file_of(_open(name, _NOLOAD)) or name
    except OSError:
        return ""


def torchs_own() -> str:
    """The libnccl of the installed torch, found without importing it: beside it, on sys.path, in the environment, else
    the system's; "" if there is no torch for GPUs."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError, AttributeError):  # ValueError: a stand-in in sys.modules without a spec
        return ""
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for library, name in _OF_TORCH:
            if os.path.exists(os.path.join(folder, "lib", library)):
                wheels = wheel_paths(name, [os.path.dirname(folder), *sys.path])
                files = [*wheels, os.path.join(folder, "lib", name), os.path.join(sys.prefix, "lib", name)]
                return next(filter(os.path.exists, files), name)
    return ""


def _open(path: str, mode: int = 0) -> ctypes.CDLL:
    return ctypes.CDLL(path, mode=mode | os.RTLD_NOW | os.RTLD_LOCAL)


def _load_host() -> Library:
    return Library("host", "host library", host_module().function, is_host=True)


@functools.cache
def host_module() -> Any:
    """The host library. Like the C libraries it is opened by its name, on first use; it is Python, and needs torch."""
    return importlib.import_module("pynccl.host")


def _load_nccl() -> Library:
    """A copy already in the process -> torch's, so that both share it -> the wheel -> conda, toolkit -> the system."""
    tried = []
    for origin, locate, mode in _candidates():
        try:
            path = locate()
            cdll = _open(path, mode)
        except (OSError, ImportError, RuntimeError) as error:
            tried.append(f"  {origin}: {error}")
        else:
            return _from_cdll(cdll, path, origin)
    raise NcclLibraryNotFound(
        "\n".join(
            [
                f"no {SONAME} found:",
                *tried,
                "  install pynccl-autograd[cu13] (or [cu12]), set PYNCCL_LIBRARY=/path/to/libnccl.so.2,",
                "  or set PYNCCL_LIBRARY=host to run on the CPU",
            ]
        )
    )


def _candidates() -> list[tuple[str, Callable[[], str], int]]:
    """(origin, where it is, extra dlopen flags) in the order of the search."""
    rows: list[tuple[str, Callable[[], str], int]] = [("already in the process", lambda: SONAME, _NOLOAD)]
    own = torchs_own()
    if os.path.basename(own) == SONAME:
        rows.append(("torch's own", lambda: own, 0))
    rows += [("wheel", functools.partial(str, path), 0) for path in wheel_paths()]
    rows += [("cuda.pathfinder", _pathfinder, 0), ("system", lambda: SONAME, 0)]
    return rows


def _pathfinder() -> str:
    """Conda environments and toolkits. After the wheels, because it opens what it finds RTLD_GLOBAL."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = load_nvidia_dynamic_lib("nccl").abs_path
    if path is None:
        raise OSError("found without a path")
    return path


def wheel_paths(name: str = SONAME, folders: Sequence[str] = ()) -> list[str]:
    """Files of the nvidia-nccl-cu12 / -cu13 wheels, in the order of `folders`, else of sys.path."""
    paths = [os.path.join(entry, "nvidia", "nccl", "lib", name) for entry in folders or sys.path if entry]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def _from_cdll(cdll: ctypes.CDLL, path: str, origin: str) -> Library:
    def resolve(name: str) -> Any | None:
        try:
            function = getattr(cdll, name)
        except AttributeError:
            return None
        row = _ROWS[name]
        function.restype, function.argtypes = row.restype, list(row.argtypes)
        return function

    return Library(path if os.path.isabs(path) else _file_of(cdll) or path, origin, resolve)


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(cdll: ctypes.CDLL) -> str:
    """The file that was loaded, as the dynamic loader knows it; "" if it does not say."""
    info = _DlInfo()
    try:
        address = ctypes.cast(cdll.ncclGetVersion, ctypes.c_void_p)
        ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    except AttributeError:  # no libnccl, which its user will say
        return ""
    return os.path.realpath(os.fsdecode(info.file)) if info.file else ""


class Functions(dict[str, Any]):
    """Name -> C function for `(*inputs, communicator, stream, *config)`, the last ones finished. Filled when used."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def __missing__(self, name: str) -> Any:
        function = getattr(self.library, name)
        # What moves data takes buffers and a size, then ints, then two handles. Other functions keep their argtypes.
        types = list(function.argtypes)
        wide, ints = types.index(ctypes.c_int), types.count(ctypes.c_int)
        handles = types[wide + ints :][:2]
        plain = types[wide : wide + ints] == [ctypes.c_int] * ints and handles == [ctypes.c_void_p] * 2
        self[name] = without_argtypes(function, wide) if plain else function
        return self[name]


def gpu_count() -> int:
    """Number of GPUs that a CUDA (or ROCm) program of this process could use."""
    return _driver()[0]


def gpu_problem() -> str:
    """Why there is no usable GPU; "" if there is one."""
    return _driver()[1]


@functools.cache
def _driver() -> tuple[int, str]:
    """(number of GPUs, what is wrong) as the driver says. By plain ctypes: a look must not cost an import."""
    for name, init, count in (
        ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),
        ("libamdhip64.so", "hipInit", "hipGetDeviceCount"),
    ):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        code = getattr(driver, init)(ctypes.c_uint(0))
        if code:
            return 0, f"the driver {name} reports error {code} from {init} (is CUDA_VISIBLE_DEVICES empty?)"
        number = ctypes.c_int()
        code = getattr(driver, count)(ctypes.byref(number))
        if code or not number.value:
            return 0, f"the driver {name} shows no GPU (is CUDA_VISIBLE_DEVICES empty?)"
        return number.value, ""
    return 0, "no NVIDIA driver on this machine: libcuda.so.1 cannot be loaded"


def _dotted(version: abi.Version) -> str:
    return ".".join(map(str, version))
