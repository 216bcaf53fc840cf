"""A CUDA driver that does not answer, as the stub driver here, silences the watchdog for no communicator."""

from __future__ import annotations

import pytest
from stub_driver import over_driver

TIMEOUT = 0.3
LOOKS = """
import contextlib, io, time
from pynccl.watch import recorder, watchdog
make_current(0)
comms = [stub.comm() for _ in range(2)]
stream = pynccl.create_stream(0, library=library)

def call():
    for comm in comms:
        comm.all_reduce((4096, 8, "float32"), (8192, 8, "float32"), stream=stream)

def helpers():
    return sum(thread.name == "pynccl question" for thread in threading.enumerate())

watchdog.stop()                                  # looks are taken by hand
own = watchdog.Watchdog(recorder.started())
own.stop()
watchdog.ANSWER_SECONDS = 0.05
said = io.StringIO()

def look(times):
    "So many looks; the seconds that the longest one took."
    longest = 0.0
    with contextlib.redirect_stderr(said):
        for _ in range(times):
            began = time.monotonic()
            own.look()
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.05)
    return longest

def completed():
    return [comm._track.comm_head.completed for comm in comms]
"""
SILENT = "the CUDA driver does not answer: the launch queue is full or the device hangs"


@pytest.mark.parametrize("when", ["recorded", "asked for"])
def test_a_driver_that_does_not_answer_is_the_finding(when: str) -> None:
    code = f"""
call()
look(1)
if {when == "asked for"}:
    driver.stub_query(600)                       # under way
    look(1)
driver.stub_block(1)
look(2)
assert said.getvalue() == "" and helpers() == 1
look(20)
assert helpers() == 1                            # never more than one that is stuck
assert said.getvalue().count({SILENT!r}) == 2, said.getvalue()
driver.stub_block(0)
driver.stub_query(0)
look(4)
print(completed(), helpers())
"""
    assert over_driver(LOOKS + code, PYNCCL_WATCH_TIMEOUT=str(TIMEOUT)).strip() == "[1, 1] 0"


def test_all_that_are_stuck_are_aborted_at_once() -> None:
    code = """
stub.linger("ncclCommAbort", 1.0)                # which waits for the other one's kernel
call()
look(1)
driver.stub_block(1)
for _ in range(40):
    assert look(1) < 0.9                         # nor does the watchdog wait
    if "ncclCommAbort" in stub.names() and not any(comm.alive for comm in comms):
        break
time.sleep(0.1)
assert stub.names().count("ncclCommAbort") == 2 and stub.cdll.stub_overlaps() >= 1
driver.stub_block(0)
for comm in comms:
    try:
        comm.barrier()
    except pynccl.NcclTimeout as error:
        print("does not answer" in str(error))
"""
    given = {"PYNCCL_WATCH_TIMEOUT": str(TIMEOUT), "PYNCCL_WATCH_ACTION": "raise"}
    assert over_driver(LOOKS + code, **given).split() == ["True", "True"]


def test_a_process_without_cuda_streams_asks_nothing_beside() -> None:
    code = """
comms = [pynccl.Communicator.init_all(1, library=pynccl.bindings.library.load())[0]]
side = pynccl.create_stream()
import torch
comms[0].all_reduce(torch.zeros(4), stream=side)
asked = []
watchdog.Helper.ask = lambda self, call, limit: asked.append(call)
look(4)
print(completed(), asked)
"""
    assert over_driver(LOOKS + code, PYNCCL_LIBRARY="host").strip() == "[1] []"
