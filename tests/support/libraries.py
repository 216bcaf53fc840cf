"""The libnccl libraries that the binding is tested with: a C stub of any version, and the real one from the wheel.

The stub moves no data and records its calls. It shows what a machine without GPUs cannot: what a 2.21 library gets,
whether a count above 2^31 is passed unchanged, what is called after a call of a group has failed. Its prototypes are
copied from nccl.h by hand, so it also checks abi.py. It can fail, be slow, or stay in progress for a while like a
nonblocking communicator.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pynccl import Communicator, Library
from pynccl.bindings.abi import FUNCTIONS, HEADER_VERSION, UniqueId, Version, version_code
from pynccl.bindings.library import SONAME, wheel_paths

STUB = Path(__file__).with_name("stub.c")
_folder = tempfile.TemporaryDirectory(prefix="pynccl-tests-")  # removed when this process exits


def real_path() -> str:
    """Return the path of NVIDIA's libnccl: PYNCCL_LIBRARY or the wheel's. Skips the test if there is none."""
    named = os.environ.get("PYNCCL_LIBRARY", "")
    paths = [named] if os.path.isabs(named) else wheel_paths()
    if not paths:
        pytest.skip("no libnccl.so.2 is installed; pip install nvidia-nccl-cu12 (or set PYNCCL_LIBRARY to one)")
    return paths[0]


def compile_c(source: str, name: str, options: list[str], after: list[str] | None = None) -> Path:
    """Compile `source` and return the resulting file. Skips the test if there is no C compiler.

    options and after: arguments before and after the source file; libraries go after."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    target = Path(_folder.name) / name
    target.with_suffix(".c").write_text(source)
    command = [compiler, *options, str(target.with_suffix(".c")), *(after or []), "-o", str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return target


# Kinds of rules for `Stub.rule`, numbered as in stub.c.
FAIL, SLEEP_MS, POLLS, FINAL, NULLED, ALL_RANKS = range(6)


class RecordedCall(NamedTuple):
    """One call that the stub recorded."""

    name: str
    args: dict[str, int]
    hex: str = ""  # the bytes of a config struct, up to its size field


class Stub:
    """The loaded stub library and its record of calls."""

    def __init__(self, version: Version = HEADER_VERSION) -> None:
        end = time.monotonic() + 5  # wait for calls abandoned by earlier tests, which would be recorded here
        while any("pynccl nccl" in thread.name for thread in threading.enumerate()) and time.monotonic() < end:
            time.sleep(0.01)
        self.path = compiled(version)
        self.cdll = ctypes.CDLL(self.path)
        self.cdll.stub_record.restype = ctypes.c_char_p
        self.bound: list[str] = []
        self.library = self._library(is_host=False)
        self.cpu_library = self._library(is_host=True)  # accepts CPU tensors, and init needs no driver
        for kind in range(6):  # reset: the library is loaded once and shared by all tests
            self.rule(kind, "", 0)
        self.clear()

    def _library(self, is_host: bool) -> Library:
        return Library(self.path, "stub", self._resolve, is_host)

    def _resolve(self, name: str) -> Any:
        self.bound.append(name)
        function = getattr(self.cdll, name, None)
        if function is not None:
            function.restype, function.argtypes = FUNCTIONS[name].restype, list(FUNCTIONS[name].argtypes)
        return function

    def calls(self) -> list[RecordedCall]:
        """Return the calls since the last clear()."""
        found = []
        for line in self.cdll.stub_record().decode().splitlines():
            name, *words = line.split()
            pairs = dict(word.split("=") for word in words)
            hexadecimal = pairs.pop("hex", "")
            found.append(RecordedCall(name, {key: int(value) for key, value in pairs.items()}, hexadecimal))
        return found

    def names(self) -> list[str]:
        return [call.name for call in self.calls()]

    def clear(self) -> None:
        self.cdll.stub_clear()

    def rule(self, kind: int, name: str, value: int) -> None:
        self.cdll.stub_rule(kind, name.encode(), value)

    def fail(self, name: str, code: int) -> None:
        """Make function `name` return `code`."""
        self.rule(FAIL, name, code)

    def linger(self, name: str, seconds: float) -> None:
        """Make function `name` take `seconds`."""
        self.rule(SLEEP_MS, name, round(1000 * seconds))

    def progress(self, name: str, polls: int, final: int = 0) -> None:
        """Make `name` return IN_PROGRESS; the poll number `polls` after it returns `final`."""
        self.rule(POLLS, name, polls)
        self.rule(FINAL, "", final)

    def null(self, name: str) -> None:
        """Make `name` succeed with a null handle."""
        self.rule(NULLED, name, 1)

    def split_with_all_ranks(self) -> None:
        """Make splits return a communicator of all ranks of the parent instead of this rank only."""
        self.rule(ALL_RANKS, "ncclCommSplit", 1)

    def comm(self, nranks: int = 4, rank: int = 1, *, cpu: bool = False) -> Communicator:
        """Create a communicator for GPU 0, or with cpu=True for CPU memory, without a driver."""
        library = self.cpu_library if cpu else self.library
        handle = ctypes.c_void_p()
        assert library.ncclCommInitRank(ctypes.byref(handle), nranks, UniqueId(), rank) == 0
        self.clear()
        return Communicator(handle.value or 0, library)


@functools.cache
def compiled(version: Version, soname: str = "") -> str:
    """Return the path of a stub that reports `version` and has only the functions of that version."""
    options = ["-shared", "-fPIC", "-pthread", f"-DVERSION={version_code(version)}"]
    if soname:
        options.append(f"-Wl,-soname,{soname}")
    return str(compile_c(STUB.read_text(), f"libstub{version_code(version)}{soname}.so", options))


# Like torch with CUDA for the dynamic loader: a library that needs libnccl.so.2, version 2.28 or newer.
TORCH = """
extern int ncclGetVersion(int *), ncclDevCommDestroy(); /* the latter since 2.28 */
int version(void) { int found; ncclGetVersion(&found); return found; }
int (*needed)() = ncclDevCommDestroy;
"""
IMPORT_TORCH = """
import ctypes, os
cdll = ctypes.CDLL(os.path.join(os.path.dirname(__file__), "lib", "libtorch_cuda.so"), mode=os.RTLD_NOW)
"""


def torch_with_cuda(
    site: Path, version: Version = HEADER_VERSION, *, runpath: bool = False, with_nccl: bool = True
) -> Path:
    """Create a fake torch under `site`, laid out as by pip, and return the path of its libnccl.

    with_nccl=False omits libnccl. The fake finds it by RPATH, as PyPI's torch does, or with runpath=True by RUNPATH,
    which LD_LIBRARY_PATH overrides.
    """
    stub = Path(compiled(version, SONAME))
    tags = "--enable-new-dtags" if runpath else "--disable-new-dtags"
    link = [f"-Wl,{tags},-rpath,$ORIGIN/../../nothing:$ORIGIN/../../nvidia/nccl/lib", str(stub)]
    built = compile_c(TORCH, f"libtorch{version_code(version)}{tags}.so", ["-shared", "-fPIC", "-w"], link)
    nccl = site / "nvidia" / "nccl" / "lib" / SONAME
    for target, content in ((site / "torch" / "lib" / "libtorch_cuda.so", built), (nccl, stub)):
        if with_nccl or content is not stub:
            target.parent.mkdir(parents=True)
            target.write_bytes(content.read_bytes())
    (site / "torch" / "__init__.py").write_text(IMPORT_TORCH)
    return nccl
