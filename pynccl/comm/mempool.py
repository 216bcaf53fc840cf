"""torch.cuda.MemPool on memory of ncclMemAlloc, with no compiler and no Python in its way.

torch calls an allocator while it holds the mutex of its own, and whoever frees a CUDA tensor asks for that mutex, in
Python mostly with the GIL in hand. An allocator that needs the GIL so deadlocks with any thread that frees a tensor
meanwhile. ncclMemFree can be given to torch as it is: the pointer comes first, and what follows it does not look at.
ncclMemAlloc gives the memory through a pointer, where torch wants it as the result: a few instructions of machine code
turn the one into the other. Only where there are none for the processor, or none may be added, does Python allocate.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ..bindings.errors import NcclInvalidUsage
from ..bindings.library import Library, chosen

# void *alloc(size_t size, int device, stream) { void *p = 0; return ncclMemAlloc(&p, size) ? 0 : p; }
# The device is left alone: torch passes the current one, by which ncclMemAlloc goes too.
_X86_64 = (
    "f30f1efa"  # endbr64
    "4883ec18"  # sub rsp, 24                     a multiple of 16 again
    "48c744240800000000"  # mov qword [rsp+8], 0
    "4889fe"  # mov rsi, rdi
    "488d7c2408"  # lea rdi, [rsp+8]
    "48b8{address}"  # mov rax, ncclMemAlloc
    "ffd0"  # call rax
    "85c0"  # test eax, eax
    "488b442408"  # mov rax, [rsp+8]
    "7402"  # je over the next
    "31c0"  # xor eax, eax
    "4883c418"  # add rsp, 24
    "c3"  # ret
)
_AARCH64 = (
    "fd7bbea9"  # stp x29, x30, [sp, #-32]!
    "fd030091"  # mov x29, sp
    "ff0b00f9"  # str xzr, [sp, #16]
    "e10300aa"  # mov x1, x0
    "e0430091"  # add x0, sp, #16
    "f0000058"  # ldr x16, ncclMemAlloc            from behind the last instruction
    "00023fd6"  # blr x16
    "e10b40f9"  # ldr x1, [sp, #16]
    "1f000071"  # cmp w0, #0
    "20009f9a"  # csel x0, x1, xzr, eq
    "fd7bc2a8"  # ldp x29, x30, [sp], #32
    "c0035fd6"  # ret
    "{address}"
)
_CODE = {"x86_64": _X86_64, "aarch64": _AARCH64}
_READ, _WRITE, _EXECUTE = 1, 2, 4

_kept: list[Any] = []  # allocators and callbacks live as long as the process: torch may free late
_native: dict[int, int] = {}  # by the address of ncclMemAlloc


def mem_pool(library: Library | None = None) -> Any:
    """A torch.cuda.MemPool whose memory is ncclMemAlloc's: `with torch.cuda.use_mem_pool(pool): x = torch.empty(...)`.

    Where NCCL has no memory, torch raises its OutOfMemoryError; NCCL_DEBUG=WARN says why. Needs no compiler. On other
    processors than x86-64 and 64-bit ARM, and where no code may be added to the process, a RuntimeWarning says that
    Python allocates: then let one thread allocate in the pool while no other thread frees CUDA tensors.

    Raises NcclInvalidUsage with the host library, whose tensors are ordinary CPU tensors, NcclVersionError before 2.19.
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

    alloc returns NULL when NCCL has no memory, which torch reports as out of memory."""
    give, take = (_address(function) for function in (library.ncclMemAlloc, library.ncclMemFree))
    alloc = native_alloc(give)
    if alloc is None:
        warnings.warn(
            f"mem_pool: Python allocates, since this process can take no machine code ({os.uname().machine}); a thread "
            "that frees a CUDA tensor while another allocates in the pool can hang both: use one thread",
            RuntimeWarning,
            stacklevel=3,
        )
        alloc = python_alloc(library)
    return alloc, take


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def native_alloc(mem_alloc: int) -> int | None:
    """Address of an allocator for torch that calls the ncclMemAlloc at this one; None where there can be none."""
    code = _CODE.get(os.uname().machine) if sys.maxsize > 1 << 32 else None
    if code is not None and mem_alloc not in _native:
        page = _executable(bytes.fromhex(code.format(address=mem_alloc.to_bytes(8, sys.byteorder).hex())))
        if page is not None:
            _native[mem_alloc] = page
    return _native.get(mem_alloc)


def _executable(code: bytes) -> int | None:
    """Address of a page of its own with this code, never writable and executable at once; it is never given back.

    None where the system refuses. It sees to the caches when it makes a page executable that was written before."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(None, mmap.PAGESIZE, _READ | _WRITE, flags, -1, 0)
    if page in (None, ctypes.c_void_p(-1).value):
        return None
    ctypes.memmove(page, code, len(code))
    return int(page) if libc.mprotect(page, mmap.PAGESIZE, _READ | _EXECUTE) == 0 else None


def python_alloc(library: Library) -> int:
    """The same in Python, for want of better."""

    def alloc(nbytes: int, device: int, stream: int) -> int | None:
        collects = gc.isenabled()
        gc.disable()  # what it would free may be a tensor, for which torch's allocator is not ready now
        try:
            pointer = ctypes.c_void_p()
            code = library.ncclMemAlloc(ctypes.byref(pointer), nbytes)
            return None if code else pointer.value
        except BaseException as error:  # nothing may cross into C
            print(f"pynccl.mem_pool: {error}", file=sys.stderr)
            return None
        finally:
            if collects:
                gc.enable()

    kind: Callable[..., Any] = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    callback = kind(alloc)
    _kept.append(callback)
    return _address(callback)
