"""The libnccls that the binding is held against: a stub in C for any version, and the real one of the wheel.

The stub moves nothing and writes down what it was called with. It answers what no machine at hand can: what a library
of 2.21 is given, whether a count above 2^31 arrives whole, what is called once a call of a group has failed. Its
prototypes are copied from nccl.h by hand, so it checks abi.py as well. It can be asked to fail, to take its time, or
to be in progress for a while, as a nonblocking communicator is.
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
_folder = tempfile.TemporaryDirectory(prefix="pynccl-tests-")  # goes with this process


def real_path() -> str:
    """Path of NVIDIA's libnccl: that of PYNCCL_LIBRARY, else the wheel's. Skips the test where there is none."""
    named = os.environ.get("PYNCCL_LIBRARY", "")
    paths = [named] if os.path.isabs(named) else wheel_paths()
    if not paths:
        pytest.skip("no libnccl.so.2 is installed; pip install nvidia-nccl-cu12 (or set PYNCCL_LIBRARY to one)")
    return paths[0]


def compile_c(source: str, name: str, options: list[str], after: list[str] | None = None) -> Path:
    """The file that the C compiler makes of `source`. Skips the test where there is no compiler.

    options and after: what its command line has before and after the source; libraries go after."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    target = Path(_folder.name) / name
    target.with_suffix(".c").write_text(source)
    command = [compiler, *options, str(target.with_suffix(".c")), *(after or []), "-o", str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return target


# What `Stub.rule` can ask of a C function; the numbers are those of stub.c.
FAIL, SLEEP_MS, POLLS, FINAL, NULLED, WHOLE = range(6)


class Called(NamedTuple):
    """One call that the stub saw."""

    name: str
    args: dict[str, int]
    hex: str = ""  # the bytes of a config struct, up to the size that it is stamped with


class Stub:
    """The C library loaded, and what it has seen."""

    def __init__(self, version: Version = HEADER_VERSION) -> None:
        end = time.monotonic() + 5  # a call that an earlier test has left behind would enter the record here
        while any("pynccl nccl" in thread.name for thread in threading.enumerate()) and time.monotonic() < end:
            time.sleep(0.01)
        self.path = compiled(version)
        self.cdll = ctypes.CDLL(self.path)
        self.cdll.stub_record.restype = ctypes.c_char_p
        self.bound: list[str] = []
        self.library = self._library(is_host=False)
        self.cpu_library = self._library(is_host=True)  # accepts CPU tensors, and needs no driver for an init
        for kind in range(6):  # the library is loaded once, and others have used it
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

    def calls(self) -> list[Called]:
        """What was called since the last clear()."""
        found = []
        for line in self.cdll.stub_record().decode().splitlines():
            name, *words = line.split()
            pairs = dict(word.split("=") for word in words)
            hexadecimal = pairs.pop("hex", "")
            found.append(Called(name, {key: int(value) for key, value in pairs.items()}, hexadecimal))
        return found

    def names(self) -> list[str]:
        return [call.name for call in self.calls()]

    def clear(self) -> None:
        self.cdll.stub_clear()

    def rule(self, kind: int, name: str, value: int) -> None:
        self.cdll.stub_rule(kind, name.encode(), value)

    def fail(self, name: str, code: int) -> None:
        """From now on function `name` returns `code`."""
        self.rule(FAIL, name, code)

    def linger(self, name: str, seconds: float) -> None:
        """From now on function `name` takes so long."""
        self.rule(SLEEP_MS, name, round(1000 * seconds))

    def progress(self, name: str, polls: int, final: int = 0) -> None:
        """From now on `name` returns IN_PROGRESS, and the poll of that number after it finds `final`."""
        self.rule(POLLS, name, polls)
        self.rule(FINAL, "", final)

    def null(self, name: str) -> None:
        """From now on `name` succeeds, but the handle that it gives is null."""
        self.rule(NULLED, name, 1)

    def split_whole(self) -> None:
        """From now on a split gives a communicator of all ranks of its parent, not of this one alone."""
        self.rule(WHOLE, "ncclCommSplit", 1)

    def comm(self, nranks: int = 4, rank: int = 1, *, cpu: bool = False) -> Communicator:
        """A communicator of GPU 0, or of CPU memory, made without looking for a driver."""
        library = self.cpu_library if cpu else self.library
        handle = ctypes.c_void_p()
        assert library.ncclCommInitRank(ctypes.byref(handle), nranks, UniqueId(), rank) == 0
        self.clear()
        return Communicator(handle.value or 0, library)


@functools.cache
def compiled(version: Version, soname: str = "") -> str:
    """Path of the stub that reports `version` and lacks what that version lacks."""
    options = ["-shared", "-fPIC", "-pthread", f"-DVERSION={version_code(version)}"]
    if soname:
        options.append(f"-Wl,-soname,{soname}")
    return str(compile_c(STUB.read_text(), f"libstub{version_code(version)}{soname}.so", options))


# What torch with CUDA is to the dynamic loader: a library that needs libnccl.so.2 by name, and no old one.
TORCH = """
extern int ncclGetVersion(int *), ncclDevCommDestroy(); /* the latter since 2.28 */
int version(void) { int found; ncclGetVersion(&found); return found; }
int (*needed)() = ncclDevCommDestroy;
"""
IMPORT_TORCH = """
import ctypes, os
cdll = ctypes.CDLL(os.path.join(os.path.dirname(__file__), "lib", "libtorch_cuda.so"), mode=os.RTLD_NOW)
"""


def torch_with_cuda(site: Path, version: Version = HEADER_VERSION, *, runpath: bool = False, own: bool = True) -> Path:
    """A stand-in under `site` laid out as pip does it; the path of its libnccl, which own=False leaves out.

    It finds that by RPATH as PyPI's torch does, or by RUNPATH, over which LD_LIBRARY_PATH goes.
    """
    stub = Path(compiled(version, SONAME))
    tags = "--enable-new-dtags" if runpath else "--disable-new-dtags"
    link = [f"-Wl,{tags},-rpath,$ORIGIN/../../nothing:$ORIGIN/../../nvidia/nccl/lib", str(stub)]
    built = compile_c(TORCH, f"libtorch{version_code(version)}{tags}.so", ["-shared", "-fPIC", "-w"], link)
    nccl = site / "nvidia" / "nccl" / "lib" / SONAME
    for target, content in ((site / "torch" / "lib" / "libtorch_cuda.so", built), (nccl, stub)):
        if own or content is not stub:
            target.parent.mkdir(parents=True)
            target.write_bytes(content.read_bytes())
    (site / "torch" / "__init__.py").write_text(IMPORT_TORCH)
    return nccl
