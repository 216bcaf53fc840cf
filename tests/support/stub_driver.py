"""A stub CUDA driver with two GPUs that computes nothing. cuda.core and pynccl use it in a separate process.

`python tests/support/stub_driver.py FOLDER` compiles it, for a whole run of tests: LD_LIBRARY_PATH=FOLDER.

It checks the thread's current context as strictly as the real driver may; see cuda_stub.c.
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
_folder = tempfile.TemporaryDirectory(prefix="pynccl-driver-")  # removed when this process exits

PRELUDE = """
import ctypes, threading
driver = ctypes.CDLL("libcuda.so.1")
import pynccl
from pynccl.interop import devices, streams
from libraries import Stub

stub = Stub()
library = stub.library

def current():
    "Return the ordinal of this thread's current GPU, or None."
    from cuda.bindings import driver as api
    code, device = api.cuCtxGetDevice()
    return int(device) if int(code) == 0 else None

def make_current(ordinal):
    "Make the GPU current as another library would."
    from cuda.bindings import driver as api
    context = 0 if ordinal is None else int(api.cuDevicePrimaryCtxRetain(ordinal)[1])
    api.cuCtxSetCurrent(api.CUcontext(context))
    assert current() == ordinal

def in_a_thread(call):
    "Run call() in a new thread, which has no context, and return or raise its result."
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

def raised_by(call, *kinds):
    "Return the exception of these kinds that call() raises."
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError("no error")
"""


def over_driver(code: str, *paths: str, **environment: str) -> str:
    """Run `code` after PRELUDE in a process that uses the stub driver, check that it succeeds, and return its output.

    paths: prepended to the search path of packages."""
    search_paths = filter(None, [*paths, os.environ.get("PYTHONPATH")])  # PYTHONPATH can select another cuda-core
    python_path = os.pathsep.join([*search_paths, str(HERE), str(HERE.parent)])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "LOCAL_RANK"))}
    variables = {"LD_LIBRARY_PATH": _driver(), "PYTHONPATH": python_path, "PYNCCL_LIBRARY": "", **environment}
    command = [sys.executable, "-c", PRELUDE + code]
    finished = subprocess.run(
        command, env={**inherited, **variables}, capture_output=True, text=True, timeout=110, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


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


def failures_over_driver(codes: dict[str, str], first: str = "") -> str:
    """Run each of `codes` as over_driver does, in forks of one process that has run `first`. Return the tracebacks
    of the failures."""
    return over_driver(f"{first}\nCODES = {codes!r}\n{EACH}")


@functools.cache
def _driver() -> str:
    """Compile the stub and return the folder with libcuda.so.1."""
    return build(_folder.name)


def build(folder: str) -> str:
    """Compile the stub to libcuda.so.1 in this folder, and return the folder."""
    options = ["-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
    built = compile_c((HERE / "cuda_stub.c").read_text(), "libcuda-stub.so", options, ["-ldl"])
    os.makedirs(folder, exist_ok=True)
    (Path(folder) / "libcuda.so.1").write_bytes(built.read_bytes())
    return folder


def broken_pair(folder: Path) -> Path:
    """Fill the folder with a cuda-core 1.0.0 whose import fails as it does with cuda-bindings 13.0.3; return it."""
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


if __name__ == "__main__":
    build(sys.argv[1])
