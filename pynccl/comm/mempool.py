"""torch.cuda.MemPool on memory of ncclMemAlloc.

torch calls an allocator while it holds its allocator mutex. A thread that frees a CUDA tensor locks that mutex, usually
with the GIL held. So an allocator that took the GIL could deadlock: both functions must be C. ncclMemFree is passed to
torch directly: the pointer is its first argument, and it ignores the others. ncclMemAlloc returns the memory through a
pointer, so it needs a C wrapper of three lines, compiled with the system's C compiler.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from typing import Any

from ..bindings.errors import NcclInvalidUsage
from ..bindings.library import Library, chosen

_SOURCE = """
#include <stddef.h>
int (*mem_alloc)(void **, size_t);
void *allocate(size_t size, int device, void *stream) {
  void *memory = NULL;
  return mem_alloc(&memory, size) ? NULL : memory;
}
"""
_COMPILE_SECONDS = 60.0
_kept: list[Any] = []  # allocators must outlive their pools, since torch can free memory late
_compiled: dict[int, ctypes.CDLL] = {}  # by the address of ncclMemAlloc


def mem_pool(library: Library | None = None) -> Any:
    """Return a torch.cuda.MemPool that allocates with ncclMemAlloc (NCCL >= 2.19).

        pool = pynccl.mem_pool()
        with torch.cuda.use_mem_pool(pool):
            x = torch.empty(...)

    The first pool of a process compiles a small C function, which needs a C compiler (CC, cc or gcc). If NCCL cannot
    allocate, torch raises OutOfMemoryError; NCCL_DEBUG=WARN shows the reason.

    Raises NcclInvalidUsage with the host library, which uses ordinary CPU tensors, NcclVersionError before NCCL 2.19,
    and RuntimeError without a C compiler (`pynccl.mem_alloc` needs none).
    """
    import torch

    library = chosen(library, "mem_pool")
    if library.is_host:
        raise NcclInvalidUsage(
            "mem_pool: the host library has no GPU memory; allocate CPU tensors as usual, or pass another library="
        )
    functions = allocator_functions(library)
    allocator = torch._C._cuda_customAllocator(*functions)
    _kept.append(allocator)
    return torch.cuda.MemPool(allocator)


def allocator_functions(library: Library) -> tuple[int, int]:
    """Return the addresses of (alloc, free), C functions with the signatures of torch's pluggable CUDA allocator.

    alloc returns NULL if NCCL cannot allocate; torch then reports out of memory. alloc ignores its device argument:
    torch makes that device current, and ncclMemAlloc allocates on the current device."""
    alloc, free = (_address(function) for function in (library.ncclMemAlloc, library.ncclMemFree))
    if alloc not in _compiled:
        wrapper = _compile()
        ctypes.c_void_p.in_dll(wrapper, "mem_alloc").value = alloc
        _compiled[alloc] = wrapper
    return _address(_compiled[alloc].allocate), free


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _compile() -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    with tempfile.TemporaryDirectory(prefix="pynccl-mem-pool-") as folder:
        path = os.path.join(folder, "allocate.so")
        command = [*compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", path]
        try:
            subprocess.run(command, input=_SOURCE, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
            return ctypes.CDLL(path)
        except (OSError, subprocess.SubprocessError) as error:
            output = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            raise RuntimeError(
                f"mem_pool: its allocator could not be compiled: {output[-1] if output else error}\n  install a C "
                "compiler (apt install gcc) or name one with CC=; pynccl.mem_alloc works without one"
            ) from None
