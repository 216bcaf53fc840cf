"""NVIDIA's own library, as far as it goes without a driver: what it is, what it says, and a clear no to an init."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from libraries import real_path

import pynccl
from pynccl import CommConfig, Communicator, Library
from pynccl.bindings.abi import FUNCTIONS
from pynccl.bindings.library import gpu_count

ROOT = Path(__file__).resolve().parents[2]
needs_no_driver = pytest.mark.skipif(gpu_count() > 0, reason="this machine has a driver and a GPU: tests/gpu covers it")


def no_driver() -> str:
    """What an error has to say here: a container may have the driver's library and no GPU all the same."""
    return "the driver libcuda.so.1" if ctypes.util.find_library("cuda") else "no NVIDIA driver on this machine"


@pytest.fixture(scope="module")
def nccl() -> Library:
    return pynccl.load(real_path())


def test_it_tells_its_version_and_where_it_came_from(nccl: Library) -> None:
    code = ctypes.c_int()
    assert ctypes.CDLL(nccl.path).ncclGetVersion(ctypes.byref(code)) == 0
    major, minor, patch = nccl.version
    assert code.value == major * 10000 + minor * 100 + patch >= 21800
    assert os.path.samefile(nccl.path, real_path())
    assert not nccl.is_host
    assert nccl.origin == "PYNCCL_LIBRARY"
    assert ".".join(map(str, nccl.version)) in repr(nccl)


def test_it_has_every_function_that_the_table_gives_its_version(nccl: Library) -> None:
    for name, row in FUNCTIONS.items():
        assert nccl.supports(name) or row.since > nccl.version, f"{name} is missing in {nccl}"
    assert not [name for name, row in FUNCTIONS.items() if row.since > nccl.version[:2] and nccl.supports(name)]


def test_errors_are_its_own(nccl: Library) -> None:
    for code, words in ((2, "unhandled system error"), (4, "invalid argument"), (5, "invalid usage"), (6, "remote")):
        with pytest.raises(pynccl.NcclError, match=words) as caught:
            nccl.check(code, "some call")
        assert caught.value.code == code
    assert "no error" in nccl.error_string(0) and isinstance(nccl.last_error(), str)
    with pytest.raises(pynccl.NcclInvalidArgument, match="ncclCommCount failed: "):
        nccl.check(nccl.ncclCommCount(None, ctypes.byref(ctypes.c_int())), "ncclCommCount")


def test_groups_open_and_close(nccl: Library) -> None:
    assert [nccl.ncclGroupStart(), nccl.ncclGroupStart(), nccl.ncclGroupEnd(), nccl.ncclGroupEnd()] == [0] * 4


# An id needs a network interface; in a process of its own, because NCCL starts a thread for it and reads its
# environment once.
UNIQUE_IDS = """
import sys, pynccl
nccl = pynccl.load(sys.argv[1])
first, second = (bytes(pynccl.get_unique_id(nccl)) for _ in range(2))
print(len(first), len(second), first != second, any(first))
"""


def in_its_own_process(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code, real_path()]
    whole = {**os.environ, "PYTHONPATH": str(ROOT), "NCCL_SOCKET_IFNAME": "lo", **environment}
    done = subprocess.run(command, env=whole, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_unique_ids_are_128_bytes_and_differ(nccl: Library) -> None:
    assert in_its_own_process(UNIQUE_IDS) == "128 128 True True"


@needs_no_driver
def test_an_init_without_a_driver_says_so_with_the_remedy(nccl: Library) -> None:
    inits = {
        "init": lambda: Communicator.init(1, bytes(128), 0, library=nccl),
        "init on a device": lambda: Communicator.init(2, bytes(128), 1, "cuda:0", library=nccl, timeout=5),
        "init with a config": lambda: Communicator.init(1, bytes(128), 0, config=CommConfig(), library=nccl),
        "init_all": lambda: Communicator.init_all(1, library=nccl),
        "create_stream": lambda: pynccl.create_stream(library=nccl),
        "create_event": lambda: pynccl.create_event(library=nccl),
    }
    for name, init in inits.items():
        with pytest.raises(pynccl.NcclSystemError) as caught:
            init()
        assert no_driver() in str(caught.value), name
        remedy = "install the driver (nvidia-smi must work), or set PYNCCL_LIBRARY=host to run on the CPU"
        assert remedy in str(caught.value)


@needs_no_driver
def test_without_a_gpu_the_host_library_is_the_default(nccl: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYNCCL_LIBRARY")
    assert pynccl.load().is_host
    found = pynccl.load("nccl")
    assert not found.is_host
    assert found.origin in ("already in the process", "wheel", "cuda.pathfinder", "system")
