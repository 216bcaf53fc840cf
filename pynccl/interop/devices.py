"""Which GPU a name means, which one is current in the calling thread, and work on another one.

"Current" is CUDA's word: every thread has a GPU of its own that calls go to which name none, and a thread that has not
used one yet has none. Whoever needs another one here uses `on_device`, so that the caller finds his own again.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from ..bindings.errors import NcclSystemError, NcclUnhandledCudaError
from ..bindings.library import gpu_problem
from ..bindings.values import INT_MAX, integer, shown


def device_ordinal(device: Any, name: str = "device") -> int:
    """1 for 1, "cuda:1", torch.device("cuda", 1); the current GPU for "cuda"; 0 for "cpu"."""
    if hasattr(type(device), "__index__"):
        return integer(device, name, 0, INT_MAX, "an ordinal >= 0, or a name ('cuda:1', 'cpu')")
    kind, _, index = str(device).partition(":")
    if kind not in ("cuda", "cpu", "hip") or (index and not index.isdigit()):
        raise ValueError(f"{name} {shown(device)} is none; pass an ordinal (1) or a name ('cuda:1', 'cpu')")
    return int(index) if index else 0 if kind == "cpu" else current_device()


def names_no_ordinal(device: Any) -> bool:
    """Whether it is "cuda" or torch.device("cuda"): a GPU, but not which."""
    return not hasattr(type(device), "__index__") and str(device) in ("cuda", "hip")


def current_device() -> int:
    """Ordinal of this thread's current GPU, 0 where there is no usable driver.

    torch's, once it has begun to use CUDA: it may have chosen one without telling the driver so far."""
    if gpu_problem():
        return 0
    torchs = getattr(sys.modules.get("torch"), "cuda", None)  # torch may be in the middle of being imported
    if torchs is not None and torchs.is_initialized():
        return int(torchs.current_device())
    return int(cuda_core().Device(None).device_id)


def core_device(device: int | str | None) -> Any:
    """cuda.core's device of that name or number; None: the current one."""
    problem = gpu_problem()
    if problem:
        raise NcclSystemError(
            f"{problem}\n  install the driver (nvidia-smi must work), or set PYNCCL_LIBRARY=host to run on the CPU"
        )
    if str(device).startswith("cpu"):
        raise ValueError(f"device is {shown(device)}, expected a GPU: 'cuda:1', 1, or None for the current one")
    return cuda_core().Device(current_device() if device is None else device_ordinal(device))


class on_device:
    """`with on_device(1):` that GPU is current in this thread; afterwards what was before is again, also if that is
    none, and after an error. None: nothing is changed.

    Costs one question to the driver where the GPU is current already."""

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
            # Its answer does not matter: a context that was destroyed meanwhile is nothing to return to.
            driver.cuCtxSetCurrent(driver.CUcontext(self._before))


_contexts: dict[int, int] = {}  # the primary contexts, by ordinal, of the GPUs that were current here once


def _current_context() -> int:
    """CUcontext of this thread as an integer, 0 for none."""
    code, context = cuda_driver().cuCtxGetCurrent()
    if code:
        raise NcclUnhandledCudaError(f"cuCtxGetCurrent failed: {described(code)}\n  can CUDA still be used here?")
    return int(context)


def described(code: Any) -> str:
    """A CUresult in words: "CUDA_ERROR_INVALID_HANDLE (400)"."""
    return f"{getattr(code, 'name', 'CUresult')} ({int(code)})"


@functools.cache
def cuda_driver() -> Any:
    """The driver API of cuda.bindings."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(import_problem(error)) from error
    return driver


def cuda_core() -> Any:
    """cuda.core, wherever this version keeps it."""
    try:
        import cuda.core as core

        core.Device  # noqa: B018  before 0.5 the package was there, empty but for `experimental`
    except AttributeError:
        import cuda.core.experimental as core
    except ImportError as error:
        raise ImportError(import_problem(error)) from error
    return core


def import_problem(error: ImportError) -> str:
    """Why cuda.core or cuda.bindings cannot be imported, with both versions, and what to do."""
    core, bindings = (_version(name) for name in ("cuda-core", "cuda-bindings"))
    return (
        f"cuda-core {core} with cuda-bindings {bindings} cannot be imported: {error}\n  {import_remedy(core, bindings)}"
    )


def import_remedy(core: str, bindings: str) -> str:
    """What to install instead of these two, "not installed" among them."""
    if core == "1.0.0":  # which was built against 13.1.1's C functions; the releases before and after take all of 13
        return "pip install 'cuda-core>=1.0.1' (1.0.0 alone needs cuda-bindings >= 13.1.1, or 12)"
    major = bindings.partition(".")[0] if bindings[:1].isdigit() else "13"
    return f"pip install --upgrade cuda-core 'cuda-bindings=={major}.*' numpy, so that they fit each other"


def _version(name: str) -> str:
    from importlib import metadata  # half of what the import of this package would take

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
