"""The libnccls that the binding is held against: a stub in C for any version, and the real one of the wheel.

The stub moves nothing and writes down what it was called with. It answers what no machine at hand can: what a library
of 2.21 is given, whether a count above 2^31 arrives whole, what is called once a call of a group has failed. Its
prototypes are copied from nccl.h by hand, so it checks abi.py as well.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pynccl import Communicator, Library
from pynccl.abi import FUNCTIONS, HEADER_VERSION, UniqueId, Version, version_code
from pynccl.library import wheel_paths

_folder = tempfile.TemporaryDirectory(prefix="pynccl-tests-")  # goes with this process


def real_path() -> str:
    """Path of NVIDIA's libnccl: that of PYNCCL_LIBRARY, else the wheel's. Skips the test where there is none."""
    named = os.environ.get("PYNCCL_LIBRARY", "")
    paths = [named] if os.path.isabs(named) else wheel_paths()
    if not paths:
        pytest.skip("no libnccl.so.2 is installed; pip install nvidia-nccl-cu12 (or set PYNCCL_LIBRARY to one)")
    return paths[0]


def compile_c(source: str, name: str, options: list[str]) -> Path:
    """The file that the C compiler makes of `source`. Skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    target = Path(_folder.name) / name
    target.with_suffix(".c").write_text(source)
    command = [compiler, *options, str(target.with_suffix(".c")), "-o", str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return target


SOURCE = r"""
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int rank, nranks, device; } *comm_t;
typedef struct { char internal[128]; } unique_id_t;
typedef void *stream_t;
typedef struct { size_t size; unsigned int magic, version; char rest[]; } config_t;

static char record[1 << 16], failing[64];
static int failing_code;

const char *stub_record(void) { return record; }
void stub_clear(void) { record[0] = 0; }
void stub_fail(const char *name, int code) { snprintf(failing, sizeof failing, "%s", name); failing_code = code; }

static int note(const char *name, const char *format, ...) {
  size_t used = strlen(record);
  used += snprintf(record + used, sizeof record - used, "%s", name);
  va_list args;
  va_start(args, format);
  used += vsnprintf(record + used, sizeof record - used, format, args);
  va_end(args);
  snprintf(record + used, sizeof record - used, "\n");
  return strcmp(name, failing) ? 0 : failing_code;
}
static void note_config(const char *what, const config_t *config) {
  size_t used = strlen(record);
  used += snprintf(record + used, sizeof record - used, "%s size=%zu version=%u magic=%u hex=", what, config->size,
                   config->version, config->magic);
  for (size_t i = 0; i < config->size; i++)
    used += snprintf(record + used, sizeof record - used, "%02x", ((unsigned char *)config)[i]);
  snprintf(record + used, sizeof record - used, "\n");
}
static int make(comm_t *out, int rank, int nranks, int device) {
  *out = malloc(sizeof **out);
  **out = (typeof(**out)){rank, nranks, device};
  return 0;
}

int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "some error"; }
const char *ncclGetLastError(comm_t comm) { return comm ? "what the stub has to say" : ""; }
int ncclGetUniqueId(unique_id_t *id) { memset(id, 7, sizeof *id); return note("ncclGetUniqueId", ""); }
int ncclCommInitRank(comm_t *comm, int nranks, unique_id_t id, int rank) {
  make(comm, rank, nranks, 0);
  return note("ncclCommInitRank", " nranks=%d rank=%d first=%d last=%d", nranks, rank, id.internal[0],
              id.internal[127]);
}
int ncclCommInitRankConfig(comm_t *comm, int nranks, unique_id_t id, int rank, config_t *config) {
  make(comm, rank, nranks, 0);
  note_config("config", config);
  return note("ncclCommInitRankConfig", " nranks=%d rank=%d first=%d last=%d", nranks, rank, id.internal[0],
              id.internal[127]);
}
int ncclCommInitAll(comm_t *comms, int n, const int *devices) {
  for (int i = 0; i < n; i++) make(comms + i, i, n, devices ? devices[i] : i);
  return note("ncclCommInitAll", " n=%d", n);
}
int ncclCommSplit(comm_t comm, int color, int key, comm_t *out, config_t *config) {
  *out = NULL;
  if (color >= 0) make(out, 0, 1, comm->device);
  if (config) note_config("config", config);
  return note("ncclCommSplit", " color=%d key=%d", color, key);
}
int ncclCommFinalize(comm_t comm) { return note("ncclCommFinalize", " rank=%d", comm->rank); }
int ncclCommDestroy(comm_t comm) { return note("ncclCommDestroy", " rank=%d", comm->rank); }
int ncclCommAbort(comm_t comm) { return note("ncclCommAbort", " rank=%d", comm->rank); }
int ncclCommGetAsyncError(comm_t comm, int *code) { *code = note("ncclCommGetAsyncError", ""); return 0; }
int ncclCommCount(comm_t comm, int *out) { *out = comm->nranks; return 0; }
int ncclCommCuDevice(comm_t comm, int *out) { *out = comm->device; return 0; }
int ncclCommUserRank(comm_t comm, int *out) { *out = comm->rank; return 0; }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int dtype, int residence, comm_t comm) {
  *op = 1000 + dtype;
  unsigned long long bits = 0;
  if (residence == 1) memcpy(&bits, scalar, dtype == 8 ? 8 : 4);
  return note("ncclRedOpCreatePreMulSum", " dtype=%d residence=%d bits=%llu", dtype, residence, bits);
}
int ncclRedOpDestroy(int op, comm_t comm) { return note("ncclRedOpDestroy", " op=%d", op); }

#define MOVED " send=%zu recv=%zu count=%zu dtype=%d"
#define WHERE " comm=%d stream=%zu"
#define MOVED_ARGS (size_t)send, (size_t)recv, count, dtype
#define WHERE_ARGS comm->rank, (size_t)stream
#define PEER " buffer=%zu count=%zu dtype=%d peer=%d"
#define PEER_ARGS (size_t)buffer, count, dtype, peer
#define BUFFERS const void *send, void *recv, size_t count, int dtype
#define PLACE comm_t comm, stream_t stream

int ncclReduce(BUFFERS, int op, int root, PLACE) {
  return note("ncclReduce", MOVED " op=%d root=%d" WHERE, MOVED_ARGS, op, root, WHERE_ARGS);
}
int ncclBroadcast(BUFFERS, int root, PLACE) {
  return note("ncclBroadcast", MOVED " root=%d" WHERE, MOVED_ARGS, root, WHERE_ARGS);
}
int ncclAllReduce(BUFFERS, int op, PLACE) {
  return note("ncclAllReduce", MOVED " op=%d" WHERE, MOVED_ARGS, op, WHERE_ARGS);
}
int ncclReduceScatter(BUFFERS, int op, PLACE) {
  return note("ncclReduceScatter", MOVED " op=%d" WHERE, MOVED_ARGS, op, WHERE_ARGS);
}
int ncclAllGather(BUFFERS, PLACE) { return note("ncclAllGather", MOVED WHERE, MOVED_ARGS, WHERE_ARGS); }
#if VERSION >= 22800
int ncclAlltoAll(BUFFERS, PLACE) { return note("ncclAlltoAll", MOVED WHERE, MOVED_ARGS, WHERE_ARGS); }
int ncclGather(BUFFERS, int root, PLACE) {
  return note("ncclGather", MOVED " root=%d" WHERE, MOVED_ARGS, root, WHERE_ARGS);
}
int ncclScatter(BUFFERS, int root, PLACE) {
  return note("ncclScatter", MOVED " root=%d" WHERE, MOVED_ARGS, root, WHERE_ARGS);
}
#endif
#if VERSION >= 23100
int ncclAllReduceConfig(BUFFERS, int op, PLACE, config_t *config) {
  note_config("config", config);
  return note("ncclAllReduceConfig", MOVED " op=%d" WHERE, MOVED_ARGS, op, WHERE_ARGS);
}
#endif
int ncclSend(const void *buffer, size_t count, int dtype, int peer, PLACE) {
  return note("ncclSend", PEER WHERE, PEER_ARGS, WHERE_ARGS);
}
int ncclRecv(void *buffer, size_t count, int dtype, int peer, PLACE) {
  return note("ncclRecv", PEER WHERE, PEER_ARGS, WHERE_ARGS);
}
int ncclGroupStart(void) { return note("ncclGroupStart", ""); }
int ncclGroupEnd(void) { return note("ncclGroupEnd", ""); }
"""


class Called(NamedTuple):
    """One call that the stub saw."""

    name: str
    args: dict[str, int]
    hex: str = ""  # the bytes of a config struct, up to the size that it is stamped with


class Stub:
    """The C library loaded, and what it has seen."""

    def __init__(self, version: Version = HEADER_VERSION) -> None:
        self.path = compiled(version)
        self.cdll = ctypes.CDLL(self.path)
        self.cdll.stub_record.restype = ctypes.c_char_p
        self.bound: list[str] = []
        self.library = self._library(is_host=False)
        self.cpu_library = self._library(is_host=True)  # accepts CPU tensors, and needs no driver for a birth
        self.cdll.stub_fail(b"", 0)
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

    def fail(self, name: str, code: int) -> None:
        """From now on function `name` returns `code`."""
        self.cdll.stub_fail(name.encode(), code)

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
    options = ["-shared", "-fPIC", f"-DVERSION={version_code(version)}"]
    if soname:
        options.append(f"-Wl,-soname,{soname}")
    return str(compile_c(SOURCE, f"libstub{version_code(version)}{soname}.so", options))
