"""A CUDA driver of two GPUs that computes nothing: cuda.core and pynccl run over it, in a process of their own.

What belongs to a thread's current context is checked as strictly as the real driver may do it; see cuda_stub.c.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from libraries import compile_c

HERE = Path(__file__).resolve().parent
_folder = tempfile.TemporaryDirectory(prefix="pynccl-driver-")  # goes with this process

PRELUDE = """
import ctypes, threading
driver = ctypes.CDLL("libcuda.so.1")
import pynccl
from pynccl.interop import devices, streams
from libraries import Stub

stub = Stub()
library = stub.library

def current():
    "Ordinal of the current GPU of this thread, None for none."
    from cuda.bindings import driver as api
    code, device = api.cuCtxGetDevice()
    return int(device) if int(code) == 0 else None

def make_current(ordinal):
    "As another library does it."
    from cuda.bindings import driver as api
    context = 0 if ordinal is None else int(api.cuDevicePrimaryCtxRetain(ordinal)[1])
    api.cuCtxSetCurrent(api.CUcontext(context))
    assert current() == ordinal

def in_a_thread(call):
    "What call() returns or raises in a new thread, which has no context."
    found = []
    def run():
        try:
            assert current() is None
            found.append(call())
            assert current() is None
        except BaseException as error:
            found.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]

def refused(call, *kinds):
    "What call() raises, which is of these kinds."
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError("no error")
"""


def over_driver(code: str, *paths: str, **environment: str) -> str:
    """What `code` prints, behind PRELUDE, in a process that finds the stub as its driver. It must not fail.

    paths: to be searched for packages before all others."""
    given_paths = filter(None, [*paths, os.environ.get("PYTHONPATH")])  # another cuda-core may be tried by the latter
    found = os.pathsep.join([*given_paths, str(HERE), str(HERE.parent)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "LOCAL_RANK"))}
    given = {"LD_LIBRARY_PATH": _driver(), "PYTHONPATH": found, "PYNCCL_LIBRARY": "", **environment}
    command = [sys.executable, "-c", PRELUDE + code]
    done = subprocess.run(command, env={**kept, **given}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


EACH = """
import os, sys, traceback
for name, code in CODES.items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            exec(code, globals())
        except BaseException:
            print(f"--- {name}", traceback.format_exc(), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(f"--- {name} died", flush=True)
"""


def failures_over_driver(codes: dict[str, str]) -> str:
    """What went wrong in which of `codes`, each in a fork of its own of one process as of over_driver."""
    return over_driver(f"CODES = {codes!r}\n{EACH}")


@functools.cache
def _driver() -> str:
    """The folder of libcuda.so.1."""
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    built = compile_c((HERE / "cuda_stub.c").read_text(), "libcuda-stub.so", options, ["-ldl"])
    (Path(_folder.name) / "libcuda.so.1").write_bytes(built.read_bytes())
    return _folder.name


def broken_pair(folder: Path) -> Path:
    """A folder of packages with a cuda-core 1.0.0 that fails as it does beside cuda-bindings 13.0.3."""
    for name, version in (("cuda_core", "1.0.0"), ("cuda_bindings", "13.0.3")):
        (folder / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    (folder / "cuda" / "core").mkdir(parents=True)
    why = "cuda.bindings.cydriver does not export expected C function cuDevSmResourceSplit"
    (folder / "cuda" / "core" / "__init__.py").write_text(f"raise ImportError({why!r})")
    (folder / "cuda" / "bindings").mkdir()
    (folder / "cuda" / "bindings" / "__init__.py").write_text("")
    return folder
