"""Device names, the current GPU of a thread, and temporary switches to another GPU.

"Current device" is CUDA's term: each thread has one, or none until it first uses a GPU. Code that needs another GPU
uses `on_device`, which restores the caller's.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from ..bindings.errors import NcclSystemError, NcclUnhandledCudaError
from ..bindings.library import gpu_problem
from ..bindings.values import INT_MAX, integer, shown


def device_ordinal(device: Any, name: str = "device") -> int:
    """Return the ordinal: 1 for 1, "cuda:1", torch.device("cuda", 1); the current GPU for "cuda"; 0 for "cpu"."""
    if hasattr(type(device), "__index__"):
        return integer(device, name, 0, INT_MAX, "an ordinal >= 0, or a name ('cuda:1', 'cpu')")
    kind, _, index = shown(device, str).partition(":")
    if kind not in ("cuda", "cpu", "hip") or (index and not index.isdigit()):
        raise ValueError(f"{name} {shown(device)} is not a device; pass an ordinal (1) or a name ('cuda:1', 'cpu')")
    return int(index) if index else 0 if kind == "cpu" else current_device()


def names_no_ordinal(device: Any) -> bool:
    """Return whether `device` is "cuda" or torch.device("cuda"), without an ordinal."""
    return not hasattr(type(device), "__index__") and str(device) in ("cuda", "hip")


def current_device() -> int:
    """Return the ordinal of this thread's current GPU; 0 without a usable driver.

    Once torch has initialized CUDA, torch is asked: it may have selected a GPU without setting it in the driver yet."""
    if gpu_problem():
        return 0
    torchs = getattr(sys.modules.get("torch"), "cuda", None)  # torch may be partially imported
    if torchs is not None and torchs.is_initialized():
        return int(torchs.current_device())
    return int(cuda_core().Device(None).device_id)


def gpu_ordinal(device: int | str | None) -> int:
    """Return the ordinal of a GPU given by name or ordinal; None: the current one. Whether it exists is not checked."""
    problem = gpu_problem()
    if problem:
        raise NcclSystemError(
            f"{problem}\n  install the driver (nvidia-smi must work), or set PYNCCL_LIBRARY=host to run on the CPU"
        )
    if device is None:
        return current_device()
    if type(device) is not int and str(device).startswith("cpu"):
        raise ValueError(f"device is {shown(device)}, expected a GPU: 'cuda:1', 1, or None for the current one")
    return device_ordinal(device)


def core_device(device: int | str | None) -> Any:
    """Return the cuda.core device for a name or ordinal; None: the current one."""
    return cuda_core().Device(gpu_ordinal(device))


class on_device:
    """`with on_device(1):` makes that GPU current in this thread. None: no change.

    On exit, also after an error, the previous state is restored, even if no GPU was current. Costs one driver call if
    the GPU is current already."""

    __slots__ = ("_before", "_changed", "_ordinal")

    def __init__(self, ordinal: int | None) -> None:
        self._ordinal = ordinal

    def __enter__(self) -> None:
        self._changed = False
        if self._ordinal is None:
            return
        known = _contexts.get(self._ordinal)
        device = core_device(self._ordinal) if known is None else None
        self._before = before = _current_context()
        if before and before == known:
            return
        (device or cuda_core().Device(self._ordinal)).set_current()
        self._changed = True
        _contexts[self._ordinal] = _current_context()

    def __exit__(self, *exc: object) -> None:
        if self._changed:
            driver = cuda_driver()
            # The result is ignored: the previous context may have been destroyed in the meantime.
            driver.cuCtxSetCurrent(driver.CUcontext(self._before))


_contexts: dict[int, int] = {}  # primary contexts by ordinal, of the GPUs used so far


def _current_context() -> int:
    """Return this thread's CUcontext as an integer; 0 for none."""
    code, context = cuda_driver().cuCtxGetCurrent()
    if code:
        raise NcclUnhandledCudaError(
            f"cuCtxGetCurrent failed: {described(code)}\n  check whether CUDA still works in this process"
        )
    return int(context)


def described(code: Any) -> str:
    """Return a CUresult as text: "CUDA_ERROR_INVALID_HANDLE (400)"."""
    return f"{getattr(code, 'name', 'CUresult')} ({int(code)})"


@functools.cache
def cuda_driver() -> Any:
    """Import and return the driver API of cuda.bindings."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(import_problem(error)) from error
    return driver


def cuda_core() -> Any:
    """Import and return cuda.core, which older versions keep in cuda.core.experimental."""
    try:
        import cuda.core as core

        core.Device  # noqa: B018  before 0.5 the package has only `experimental`
    except AttributeError:
        import cuda.core.experimental as core
    except ImportError as error:
        raise ImportError(import_problem(error)) from error
    return core


def import_problem(error: ImportError) -> str:
    """Return why cuda.core or cuda.bindings cannot be imported, with both versions and a remedy."""
    core, bindings = (_version(name) for name in ("cuda-core", "cuda-bindings"))
    return (
        f"cuda-core {core} with cuda-bindings {bindings} cannot be imported: {error}\n  {import_remedy(core, bindings)}"
    )


def import_remedy(core: str, bindings: str) -> str:
    """Return which versions to install, given the installed versions or "(not installed)"."""
    if core == "1.0.0":  # it needs C functions of 13.1.1; the releases before and after work with every 13.x
        return "pip install 'cuda-core>=1.0.1' (1.0.0 alone needs cuda-bindings >= 13.1.1, or 12)"
    major = bindings.partition(".")[0] if bindings[:1].isdigit() else "13"
    return f"pip install --upgrade cuda-core 'cuda-bindings=={major}.*' numpy, to get matching versions"


def _version(name: str) -> str:
    from importlib import metadata  # slow: half of this package's import time

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
