"""Compile a stub libnccl for benchmarks: it creates communicators, and every other function just returns 0."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from pynccl.bindings import abi

COMMON = r"""
#include <stddef.h>
#include <stdlib.h>

typedef struct { int rank, nranks, aborted; } *comm_t;
typedef struct { char internal[128]; } unique_id_t;
int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return code ? "aborted" : "no error"; }
const char *ncclGetLastError(comm_t comm) { return ""; }
int ncclCommInitRank(comm_t *comm, int nranks, unique_id_t id, int rank) {
  *comm = malloc(sizeof **comm);
  **comm = (typeof(**comm)){rank, nranks, 0};
  return 0;
}
int ncclCommCount(comm_t comm, int *out) { *out = comm->nranks; return 0; }
int ncclCommCuDevice(comm_t comm, int *out) { *out = 0; return 0; }
int ncclCommUserRank(comm_t comm, int *out) { *out = comm->rank; return 0; }
"""


def compile_stub(folder: Path, source: str, *options: str) -> Path:
    """Compile the stub with the functions of `source`. Its soname lets other bindings find the loaded library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("no C compiler to compile the stub library; install cc or gcc")
    target = folder / "libnccl.so.2"
    (folder / "stub.c").write_text(COMMON + source)
    # Weak, so that the definitions in `source` win. `()` accepts any arguments in C11, but not in C23.
    plain = "".join(f"__attribute__((weak)) int {name}() {{ return 0; }}\n" for name in abi.FUNCTIONS)
    (folder / "plain.c").write_text(plain)
    words = [compiler, "-O2", "-std=gnu11", "-w", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", *options]
    words.append(f"-DVERSION={abi.version_code(abi.HEADER_VERSION)}")
    subprocess.run([*words, "stub.c", "plain.c", "-o", target.name], cwd=folder, check=True)
    return target
