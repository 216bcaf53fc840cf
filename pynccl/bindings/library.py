"""Find and load a libnccl, bind its functions, and check its version.

Three kinds of library provide the same functions: NVIDIA's libnccl.so.2, any library with its ABI
(PYNCCL_LIBRARY=/path), and the host library (PYNCCL_LIBRARY=host, the default without a GPU), which works on CPU
memory. Code above this module can tell them apart only through `Library.is_host`.
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

from . import abi, share_gpu
from .errors import NcclError, NcclLibraryNotFound, NcclVersionError, from_result
from .resource import Shared
from .values import instance

SONAME = "libnccl.so.2"
_TORCH_LIBRARIES = (("libtorch_cuda.so", SONAME), ("libtorch_hip.so", "librccl.so.1"))  # CPU-only builds have neither
_NOLOAD = getattr(os, "RTLD_NOLOAD", 0)
_PYTHON_API = 0x4  # flag of a ctypes.PYFUNCTYPE
_ROWS = {**abi.FUNCTIONS, **abi.DEVICE_FUNCTIONS}


# Convert a Python integer to a C value that functions without argtypes accept. Used for addresses, handles and sizes,
# which have the same width: ctypes converts to c_void_p three times as fast as to c_size_t.
to_pointer = ctypes.c_void_p.from_param


def without_argtypes(function: Any, wide: int = 0) -> Any:
    """Return the same C function without argtypes, whose conversions are most of the cost of a ctypes call.

    The first `wide` arguments may be 64-bit integers. After them, Python integers are passed as C ints (data type,
    operator, rank), and addresses must be ctypes values (see `to_pointer`)."""
    keeps_gil = function._flags_ & _PYTHON_API  # a function of the host library: see host/exports.py
    prototype = ctypes.PYFUNCTYPE if keeps_gil else ctypes.CFUNCTYPE
    return prototype(ctypes.c_int, *[ctypes.c_void_p] * wide)(ctypes.cast(function, ctypes.c_void_p).value or 0)


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
                f"{path} ({origin}) has no ncclGetVersion, so it is not a libnccl; set "
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
        """Bind the C function `name` and store it as an attribute.

        Raises NcclVersionError if this library does not have it."""
        row = _ROWS.get(name)
        if row is None:
            raise AttributeError(f"nccl.h has no function {name!r}")
        function = self._resolve(name)
        if function is None and self.is_host and row.since <= self.version:
            raise NcclVersionError(f"{name} is not in the host library: it needs a GPU; use a real libnccl")
        if function is None:
            raise NcclVersionError(
                f"{name} needs NCCL >= {_dotted(row.since)}; loaded {_dotted(self.version)} from {self.path}"
            )
        setattr(self, name, function)
        return function

    def supports(self, name: str) -> bool:
        """Return whether this library has the C function `name`."""
        try:
            getattr(self, name)
        except NcclVersionError:
            return False
        return True

    def last_error(self, comm: int | None = None) -> str:
        """Return NCCL's message of the last error; "" if there is none."""
        text = self.ncclGetLastError(comm)
        return text.decode(errors="replace").strip() if text else ""

    def error_string(self, code: int) -> str:
        """Return NCCL's text for a result code."""
        text = self.ncclGetErrorString(code)
        return text.decode() if text else f"result {code}"

    def raise_exception(self) -> None:
        """If the C function that has just failed in this thread was ended by an exception, raise it.

        Only in the host library, whose functions are Python: an exception of a signal handler (Ctrl-C, sys.exit, the
        user's own) cannot pass through C."""
        if self.is_host and (error := host_module().take_exception()) is not None:
            raise error

    def error(self, code: int, call: str, comm: int | None = None) -> NcclError:
        """Return the exception for result `code` of `call`. Raises the one that ended it: see `raise_exception`."""
        self.raise_exception()
        error = from_result(code, call, self.error_string(code), self.last_error(comm))
        failure = host_module().failure_of(comm) if self.is_host else None
        return error if failure is None else failure.describe(error)

    def check(self, code: int, call: str, comm: int | None = None) -> None:
        """Raise unless `code` is ncclSuccess."""
        if code:
            raise self.error(code, call, comm)

    def __repr__(self) -> str:
        return f"<pynccl.Library {_dotted(self.version)} {self.path} ({self.origin})>"


def chosen(library: Library | None, operation: str) -> Library:
    """Return `library`, or load() if it is None. Raises TypeError for anything else."""
    if library is None:
        return load()
    instance(library, Library, f"{operation}: library", "a pynccl.Library (see pynccl.load), or None")
    if not library.is_host and share_gpu.is_shared():
        share_gpu.prepare()  # again in a forked process
    return library


def load(spec: str | os.PathLike[str] | None = None) -> Library:
    """Load the NCCL library and return it. Each spec is loaded once.

    spec  "host"; "nccl" to require a real libnccl; or the path of a library with NCCL's ABI.
          None: PYNCCL_LIBRARY if set, otherwise "nccl" with a GPU and "host" without.

    You may import torch before or after. torch keeps its own libnccl if you name a different one here, and "nccl" uses
    torch's own libnccl if it has one.

    Raises NcclLibraryNotFound, listing every location that was tried.
    """
    if spec is not None:
        instance(spec, (str, os.PathLike), "load: spec", "'host', 'nccl', the path of a libnccl.so.2, or None")
        spec = os.fspath(spec)
    chosen_spec = spec or os.environ.get("PYNCCL_LIBRARY") or ("nccl" if gpu_count() else "host")
    if share_gpu.is_shared() and chosen_spec != "host":
        share_gpu.prepare()
    if chosen_spec in ("host", "nccl"):
        return _load(chosen_spec)
    try:
        return _load(chosen_spec)
    except (OSError, ValueError) as error:  # ValueError: a NUL, half a surrogate pair
        source = f"load: spec is {spec!r}" if spec else f"PYNCCL_LIBRARY={chosen_spec}"
        reason = str(error).removeprefix(f"{chosen_spec}: ")
        raise NcclLibraryNotFound(
            f"{source}: {reason}; pass the path of a libnccl.so.2, 'nccl' to search for one, or 'host'"
        ) from error


@functools.cache
def _load(spec: str) -> Library:
    if spec == "host":
        return _load_host()
    if spec == "nccl":
        return _load_nccl()
    _open_torch_nccl()
    return _from_cdll(_open(spec), spec, "given path")


def _open_torch_nccl() -> None:
    """Open torch's libnccl before any other, so that torch gets its own.

    The dynamic loader resolves "libnccl.so.2", which torch needs, to the copy with that SONAME that is already in the
    process. If that copy is older than torch's, `import torch` fails ("undefined symbol: ncclCommResume")."""
    own = torchs_own()
    if own and not holder(os.path.basename(own)):
        with contextlib.suppress(OSError):  # importing torch will report it
            _open(own)


def holder(name: str) -> str:
    """Return the file already loaded in this process that `name` resolves to; "" if none."""
    try:
        return _file_of(_open(name, _NOLOAD)) or name
    except OSError:
        return ""


def torchs_own() -> str:
    """Return the libnccl of the installed torch, without importing it; "" if there is no torch for GPUs.

    Searched in torch's site-packages, on sys.path, in torch's lib folder, in sys.prefix; otherwise the system's."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError, AttributeError):  # ValueError: a stub in sys.modules without a spec
        return ""
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for library, name in _TORCH_LIBRARIES:
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
    """Import and return the host library, on first use. It is written in Python and needs torch."""
    return importlib.import_module("pynccl.host")


def _load_nccl() -> Library:
    """Search in order: already in the process, torch's own (to share it), wheels, conda and toolkits, the system."""
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
    """Return (origin, function that returns the path, extra dlopen flags) in search order."""
    rows: list[tuple[str, Callable[[], str], int]] = [("already in the process", lambda: SONAME, _NOLOAD)]
    own = torchs_own()
    if os.path.basename(own) == SONAME:
        rows.append(("torch's own", lambda: own, 0))
    rows += [("wheel", functools.partial(str, path), 0) for path in wheel_paths()]
    rows += [("cuda.pathfinder", _pathfinder, 0), ("system", lambda: SONAME, 0)]
    return rows


def _pathfinder() -> str:
    """Search conda environments and toolkits. It comes after the wheels because it opens the library RTLD_GLOBAL."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = load_nvidia_dynamic_lib("nccl").abs_path
    if path is None:
        raise OSError("found, but without a path")
    return path


def wheel_paths(name: str = SONAME, folders: Sequence[str] = ()) -> list[str]:
    """Return the libraries of nvidia-nccl-cu12 / -cu13 wheels, in the order of `folders` (default: sys.path)."""
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
    """Return the path of the loaded file according to the dynamic loader; "" if unknown."""
    info = _DlInfo()
    try:
        address = ctypes.cast(cdll.ncclGetVersion, ctypes.c_void_p)
        ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    except AttributeError:  # not a libnccl; Library() reports it
        return ""
    return os.path.realpath(os.fsdecode(info.file)) if info.file else ""


class Functions(dict[str, Any]):
    """Map a name to its C function, called as `(*inputs, communicator, stream, *config)`. Filled on first use.

    The communicator, stream and config must be ctypes values."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def __missing__(self, name: str) -> Any:
        function = getattr(self.library, name)
        # Functions that move data take buffers and a size, then ints, then two handles. The others keep their argtypes.
        types = list(function.argtypes)
        wide, ints = types.index(ctypes.c_int), types.count(ctypes.c_int)
        handles = types[wide + ints :][:2]
        plain = types[wide : wide + ints] == [ctypes.c_int] * ints and handles == [ctypes.c_void_p] * 2
        self[name] = without_argtypes(function, wide) if plain else function
        return self[name]


def gpu_count() -> int:
    """Return the number of GPUs that this process can use with CUDA (or ROCm)."""
    return _driver()[0]


def gpu_problem() -> str:
    """Return why there is no usable GPU; "" if there is one."""
    return _driver()[1]


@functools.cache
def _driver() -> tuple[int, str]:
    """Return (number of GPUs, problem) from the driver. Plain ctypes, to avoid importing a CUDA package."""
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
