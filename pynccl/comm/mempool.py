"""torch.cuda.MemPool on memory of ncclMemAlloc.

torch calls an allocator while it holds its own mutex, and a thread that frees a CUDA tensor asks for that mutex, mostly
with the GIL held. So an allocator must not need the GIL: both functions are C. ncclMemFree is passed to torch as it is:
the pointer comes first, and it ignores the rest. ncclMemAlloc returns the memory through a pointer, which needs a
function of three lines around it; the C compiler of the machine makes it.
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
_SECONDS = 60.0  # that the compiler may take
_kept: list[Any] = []  # allocators live as long as the process: torch may free late
_compiled: dict[int, ctypes.CDLL] = {}  # by the address of ncclMemAlloc


def mem_pool(library: Library | None = None) -> Any:
    """A torch.cuda.MemPool whose memory is ncclMemAlloc's: `with torch.cuda.use_mem_pool(pool): x = torch.empty(...)`.

    The first pool of a process compiles a small C function: it needs a C compiler (CC, cc or gcc), as torch.compile
    does. Where NCCL has no memory, torch raises its OutOfMemoryError; NCCL_DEBUG=WARN says why.

    Raises NcclInvalidUsage with the host library, whose tensors are ordinary CPU tensors, NcclVersionError before 2.19,
    and RuntimeError without a compiler: `pynccl.mem_alloc` needs none.
    """
    import torch

    library = chosen(library)
    if library.is_host:
        raise NcclInvalidUsage(
            "mem_pool: the host library has no GPU memory; allocate CPU tensors as usual, or pass another library="
        )
    functions = allocator_functions(library)
    allocator = torch._C._cuda_customAllocator(*functions)
    _kept.append(allocator)
    return torch.cuda.MemPool(allocator)


def allocator_functions(library: Library) -> tuple[int, int]:
    """Addresses of (alloc, free), C functions with the signatures of torch's pluggable CUDA allocator.

    alloc returns NULL when NCCL has no memory, which torch reports as out of memory. It leaves the device alone: torch
    makes it the current one, on which ncclMemAlloc allocates."""
    give, take = (_address(function) for function in (library.ncclMemAlloc, library.ncclMemFree))
    if give not in _compiled:
        made = _compile()
        ctypes.c_void_p.in_dll(made, "mem_alloc").value = give
        _compiled[give] = made
    return _address(_compiled[give].allocate), take


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _compile() -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    with tempfile.TemporaryDirectory(prefix="pynccl-mem-pool-") as folder:
        path = os.path.join(folder, "allocate.so")
        command = [*compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", path]
        try:
            subprocess.run(command, input=_SOURCE, check=True, capture_output=True, text=True, timeout=_SECONDS)
            return ctypes.CDLL(path)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            raise RuntimeError(
                f"mem_pool: its allocator could not be compiled: {said[-1] if said else error}\n  install a C compiler "
                "(apt install gcc) or name one with CC=; pynccl.mem_alloc and its DLPack tensors need none"
            ) from None
