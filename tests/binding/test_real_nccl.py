"""NVIDIA's library without a driver: its functions, its error strings, and the error of init."""

from __future__ import annotations

import ctypes
import ctypes.util
import os

import pytest
from libraries import real_path

import pynccl
from pynccl import Communicator, Library
from pynccl.bindings.abi import FUNCTIONS
from pynccl.bindings.library import gpu_count

needs_no_driver = pytest.mark.skipif(gpu_count() > 0, reason="this machine has a driver and a GPU: tests/gpu covers it")


def no_driver() -> str:
    """Return the expected words of an error: a container may have the driver's library but no GPU."""
    return "the driver libcuda.so.1" if ctypes.util.find_library("cuda") else "no NVIDIA driver on this machine"


@pytest.fixture(scope="module")
def nccl() -> Library:
    return pynccl.load(real_path())


def test_real_library_has_functions_of_its_version(nccl: Library) -> None:
    assert os.path.samefile(nccl.path, real_path()) and not nccl.is_host
    for name, row in FUNCTIONS.items():
        assert nccl.supports(name) or row.since > nccl.version, f"{name} is missing in {nccl}"
    assert not [name for name, row in FUNCTIONS.items() if row.since > nccl.version[:2] and nccl.supports(name)]


def test_real_library_error_strings(nccl: Library) -> None:
    for code, words in ((2, "unhandled system error"), (4, "invalid argument"), (5, "invalid usage"), (6, "remote")):
        with pytest.raises(pynccl.NcclError, match=words) as caught:
            nccl.check(code, "some call")
        assert caught.value.code == code
    with pytest.raises(pynccl.NcclInvalidArgument, match="ncclCommCount failed: "):
        nccl.check(nccl.ncclCommCount(None, ctypes.byref(ctypes.c_int())), "ncclCommCount")


@needs_no_driver
def test_init_without_driver_names_remedy(nccl: Library) -> None:
    inits = {
        "init": lambda: Communicator.init(1, bytes(128), 0, library=nccl),
        "init_all": lambda: Communicator.init_all(1, library=nccl),
        "create_stream": lambda: pynccl.create_stream(library=nccl),
    }
    for name, init in inits.items():
        with pytest.raises(pynccl.NcclSystemError) as caught:
            init()
        assert no_driver() in str(caught.value), name
        remedy = "install the driver (nvidia-smi must work), or set PYNCCL_LIBRARY=host to run on the CPU"
        assert remedy in str(caught.value)


@needs_no_driver
def test_host_library_is_default_without_gpu(nccl: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYNCCL_LIBRARY")
    assert pynccl.load().is_host
    found = pynccl.load("nccl")
    assert not found.is_host
    assert found.origin in ("already in the process", "wheel", "cuda.pathfinder", "system")
