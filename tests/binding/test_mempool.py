"""What torch's allocator is given for a pool of NCCL's memory: C functions, in which no thread waits for the GIL."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from libraries import Stub, compile_c

import pynccl
from pynccl import Library
from pynccl.comm import mempool

SIZES = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
KINDS: dict[str, Callable[[Library], int | None]] = {
    "native": lambda library: mempool.native_alloc(mempool._address(library.ncclMemAlloc)),
    "python": mempool.python_alloc,
}


def c_allocator(library: Library, kind: str) -> tuple[Any, Any]:
    """(alloc, free) as torch has them: by address, with its signatures."""
    alloc = KINDS[kind](library)
    if alloc is None:
        pytest.skip(f"no machine code for {os.uname().machine}, or none may be run")
    free = mempool._address(library.ncclMemFree)
    return ctypes.CFUNCTYPE(ctypes.c_void_p, *SIZES)(alloc), ctypes.CFUNCTYPE(None, ctypes.c_void_p, *SIZES)(free)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_gets_ncclMemAllocs_memory_and_gives_it_back(kind: str) -> None:
    stub = Stub()
    alloc, free = c_allocator(stub.library, kind)
    pointers = [alloc(1 << 13, device, 0xC0DE) for device in (0, 3)]
    for pointer in pointers:
        ctypes.memset(pointer, 1, 1 << 13)
        free(pointer, 1 << 13, 0, 0xC0DE)
    assert [(call.name, *call.args.values()) for call in stub.calls()] == [
        *[("ncclMemAlloc", 1 << 13)] * 2,
        *[("ncclMemFree", pointer) for pointer in pointers],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_torch_gets_null_when_there_is_no_memory(kind: str) -> None:
    stub = Stub()
    alloc, _ = c_allocator(stub.library, kind)
    for code in (1, 7, -1):  # the pointer that the stub leaves there is none
        stub.fail("ncclMemAlloc", code)
        assert alloc(64, 0, None) is None
    stub.fail("ncclMemAlloc", 0)
    assert alloc(1 << 40 >> 30, 0, None)


def test_a_size_of_more_than_32_bits_arrives_whole() -> None:
    stub = Stub()
    alloc, _ = c_allocator(stub.library, "native")
    stub.fail("ncclMemAlloc", 1)
    alloc((1 << 45) + 8, 0, None)
    assert stub.calls()[0].args["size"] == (1 << 45) + 8


# Torch's allocator: one thread allocates with the mutex in hand, another frees with the GIL in hand.

TORCHS = """
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <time.h>
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int held, wanted;
static int is(int *flag) { return __atomic_load_n(flag, __ATOMIC_SEQ_CST); }
void *allocate(void *(*alloc)(size_t, int, void *), size_t size) {
  pthread_mutex_lock(&mutex);
  __atomic_store_n(&held, 1, __ATOMIC_SEQ_CST);
  while (!is(&wanted)) sched_yield();
  void *memory = alloc(size, 0, NULL);
  held = wanted = 0;
  pthread_mutex_unlock(&mutex);
  return memory;
}
void wait_until_held(void) { while (!is(&held)) sched_yield(); }
int give_back(int milliseconds) {
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += milliseconds / 1000, end.tv_nsec += milliseconds % 1000 * 1000000;
  if (end.tv_nsec >= 1000000000) end.tv_sec++, end.tv_nsec -= 1000000000;
  __atomic_store_n(&wanted, 1, __ATOMIC_SEQ_CST);
  int code = pthread_mutex_timedlock(&mutex, &end);
  if (code == 0) pthread_mutex_unlock(&mutex);
  return code;
}
"""


def freed_meanwhile(kind: str, milliseconds: int) -> int:
    """What a thread gets that asks for the mutex with the GIL in hand while another one allocates."""
    path = str(compile_c(TORCHS, "libtorchs_allocator.so", ["-shared", "-fPIC", "-pthread"]))
    without_gil, with_gil = ctypes.CDLL(path), ctypes.PyDLL(path)
    without_gil.allocate.restype, without_gil.allocate.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    alloc, _ = c_allocator(Stub().library, kind)
    address = ctypes.cast(alloc, ctypes.c_void_p).value
    memory: list[Any] = []
    thread = threading.Thread(target=lambda: memory.append(without_gil.allocate(address, 64)))
    thread.start()
    without_gil.wait_until_held()
    code = int(with_gil.give_back(milliseconds))
    thread.join()
    assert memory[0]
    return code


def test_memory_can_be_freed_with_the_gil_in_hand_while_another_thread_allocates() -> None:
    assert freed_meanwhile("native", 20_000) == 0


def test_an_allocator_in_python_would_hang_there() -> None:
    assert freed_meanwhile("python", 200) == errno.ETIMEDOUT


def test_the_code_cannot_be_written_to_and_is_made_once() -> None:
    stub = Stub()
    give = mempool._address(stub.library.ncclMemAlloc)
    page = mempool.native_alloc(give)
    if page is None:
        pytest.skip("no machine code here")
    assert mempool.native_alloc(give) == page
    with open("/proc/self/maps") as maps:
        (rights,) = [line.split()[1] for line in maps if int(line.split("-")[0], 16) == page]
    assert rights == "r-xp"


# Where there can be no machine code


@pytest.fixture(params=["processor", "refused"])
def no_machine_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mempool, "_native", {})
    if request.param == "processor":
        monkeypatch.setattr("os.uname", lambda: SimpleNamespace(machine="riscv64"))
    else:
        monkeypatch.setattr(mempool, "_EXECUTE", 1 << 20)  # which no system grants
    yield


@pytest.mark.usefixtures("no_machine_code")
def test_python_allocates_then_and_says_what_to_mind() -> None:
    stub = Stub()
    with pytest.warns(RuntimeWarning, match=r"Python allocates, .* can hang both: use one thread"):
        alloc, free = mempool.allocator_functions(stub.library)
    pointer = ctypes.CFUNCTYPE(ctypes.c_void_p, *SIZES)(alloc)(64, 0, None)
    assert pointer and free == mempool._address(stub.library.ncclMemFree)
    assert stub.names() == ["ncclMemAlloc"]


def test_an_allocator_in_python_lets_no_garbage_be_collected() -> None:
    stub = Stub()
    found: list[bool] = []
    original = stub.library.ncclMemAlloc

    def watched(*args: Any) -> int:
        found.append(gc.isenabled())
        return int(original(*args))

    stub.library.ncclMemAlloc = watched
    alloc, _ = c_allocator(stub.library, "python")
    assert alloc(64, 0, None) and found == [False] and gc.isenabled()
    stub.library.ncclMemAlloc = lambda *args: 1 // 0
    assert alloc(64, 0, None) is None and gc.isenabled()


# The pool


def test_a_pool_is_made_of_these_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, ...]] = []

    def custom(*functions: int) -> str:
        given.append(functions)
        return "allocator"

    monkeypatch.setattr(torch._C, "_cuda_customAllocator", custom, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    library = Stub().library
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pynccl.mem_pool(library) == "pool of allocator"
    assert given == [mempool.allocator_functions(library)]


def test_there_is_no_pool_on_the_host_library_or_an_old_one() -> None:
    with pytest.raises(RuntimeError, match="the host library has no GPU memory; allocate CPU tensors as usual"):
        pynccl.mem_pool(Stub().cpu_library)
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclMemAlloc needs NCCL >= 2\.19"):
        pynccl.mem_pool(Stub((2, 18, 3)).library)
