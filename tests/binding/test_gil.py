"""A launch lets the other threads of the process run Python: it may have to wait for one of them.

With several GPUs in one process, NCCL may keep a launch back until another thread has launched on its own communicator.
If the first held the GIL meanwhile, the second could never get there. Here C announces through one pipe that a call has
begun, and returns once a Python thread has answered through another, or with an error if none does.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from libraries import compile_c

import pynccl
from pynccl import Communicator

SOURCE = r"""
#include <poll.h>
#include <unistd.h>

static int begun, answer, patience;
void stub_pipes(int begun_fd, int answer_fd, int milliseconds) {
  begun = begun_fd, answer = answer_fd, patience = milliseconds;
}
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, void *comm, void *stream) {
  char byte = 1;
  struct pollfd poller = {answer, POLLIN, 0};
  if (write(begun, &byte, 1) != 1 || poll(&poller, 1, patience) != 1) return 3;
  return read(answer, &byte, 1) == 1 ? 0 : 3;
}
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
int ncclGetVersion(int *version) { *version = 23203; return 0; }
const char *ncclGetErrorString(int code) { return "nobody answered"; }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclCommCount(void *comm, int *out) { *out = 1; return 0; }
int ncclCommCuDevice(void *comm, int *out) { *out = 0; return 0; }
int ncclCommUserRank(void *comm, int *out) { *out = 0; return 0; }
int ncclCommGetAsyncError(void *comm, int *out) { *out = 0; return 0; }
int ncclCommFinalize(void *comm) { return 0; }
int ncclCommDestroy(void *comm) { return 0; }
int ncclCommAbort(void *comm) { return 0; }
"""


@functools.cache
def compiled() -> str:
    return str(compile_c(SOURCE, "libgil.so", ["-shared", "-fPIC"]))


class Answering:
    """The stub, and a Python thread that answers every call while it is in C."""

    def __init__(self) -> None:
        self.stub = ctypes.CDLL(compiled())
        self.begun, self.answer = os.pipe(), os.pipe()
        self.wait_at_most(20_000)
        self.answered = 0
        self.thread = threading.Thread(target=self._answer, daemon=True)
        self.thread.start()

    def wait_at_most(self, milliseconds: int) -> None:
        self.stub.stub_pipes(self.begun[1], self.answer[0], milliseconds)

    def _answer(self) -> None:
        while os.read(self.begun[0], 1):
            self.answered += 1
            os.write(self.answer[1], b"1")

    def close(self) -> None:
        os.close(self.begun[1])
        self.thread.join(20)
        for end in (self.begun[0], *self.answer):
            os.close(end)


@pytest.fixture
def answering() -> Iterator[Answering]:
    answering = Answering()
    yield answering
    answering.close()


def test_a_launch_lets_other_threads_run(answering: Answering) -> None:
    library = pynccl.load(compiled())
    library.is_host = True  # CPU tensors, no driver
    x, y = torch.zeros(4), torch.zeros(4)
    with Communicator(1, library) as comm:
        plan = comm.plan.all_reduce(x, x)
        group_plan = comm.plan.group([plan])

        def in_a_group() -> None:
            with pynccl.group():
                comm.all_reduce(x, x)

        ways = (lambda: comm.all_reduce(x, x), lambda: comm.all_reduce(x, y), plan, group_plan, in_a_group)
        for number, launch in enumerate(ways, 1):
            launch()  # NcclInternalError if nobody answers
            assert answering.answered == number


def test_a_call_that_holds_the_gil_gets_no_answer(answering: Answering) -> None:
    answering.wait_at_most(100)
    assert ctypes.PyDLL(compiled()).ncclAllReduce(*[None] * 7) == 3
