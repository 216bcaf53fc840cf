"""Processes that hang or end badly on a GPU: the watchdog speaks, and the process ends, with the right code."""

from __future__ import annotations

import pytest
from gpu.launches import Ended, as_ranks

pytestmark = pytest.mark.usefixtures("own_launch")

SPEAKS = 2  # seconds, of PYNCCL_WATCH_TIMEOUT
LEAVES = 8  # seconds from being connected until a rank that hangs leaves by itself, with code 7
LIMIT = 35  # seconds, after which a process is killed: code -9

# `x` is reduced, both ranks are connected; `leave` ends a rank that waits in a call of C.
PRELUDE = """
import os, sys, threading, time, torch, pynccl
comm = pynccl.init(device=0)
torch.cuda.set_device(comm.device)
x, rank = torch.ones(1 << 20, device=comm.device), comm.rank
y = torch.zeros_like(x)
comm.all_reduce(x, y)
torch.cuda.synchronize()
comm.barrier()
leave = threading.Timer(LEAVES, os._exit, (7,))
leave.daemon = True
""".replace("LEAVES", str(LEAVES))


def run(source: str, action: str = "report") -> list[Ended]:
    return as_ranks(["-c", PRELUDE + source], 2, LIMIT, PYNCCL_WATCH_TIMEOUT=SPEAKS, PYNCCL_WATCH_ACTION=action)


@pytest.mark.parametrize(("calls", "action"), [(1, "raise"), (20_000, "report"), (20_000, "raise")])
def test_a_missing_peer_is_told_also_where_the_main_thread_is_stuck_in_a_launch(calls: int, action: str) -> None:
    """The queue of launches takes about a thousand; the call after that returns when a kernel has ended."""
    ended = run(
        f"""
leave.start()
if rank == 1:
    time.sleep(100)
try:
    for _ in range({calls}):
        comm.all_reduce(x, y)
    while comm.alive:
        time.sleep(0.01)
    comm.all_reduce(x, y)
except pynccl.NcclTimeout as error:
    print("raised", error)
""",
        action,
    )
    assert "pynccl watchdog: rank 0 of 2" in ended[0].err and "rank 1 never entered" in ended[0].err, ended[0].err
    if action == "raise":
        assert ended[0].out.startswith("raised ") and ended[0].code == 0, ended[0].out + ended[0].err
    else:
        assert ended[0].code == 7, ended[0].err


GRAPH = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    comm.all_reduce(x, y)
graph.replay()
torch.cuda.synchronize()
"""
HUNG = """
if rank == 1:
    leave.start()
    time.sleep(100)
comm.all_reduce(x, y)
"""


@pytest.mark.parametrize(
    ("source", "code"),
    [(GRAPH, 0), (HUNG, 0), (HUNG + "raise ZeroDivisionError\n", 1)],
    ids=["a live graph", "a hung kernel", "an exception and a hung kernel"],
)
def test_a_process_ends_with(source: str, code: int) -> None:
    """Within the ten seconds that it has for closing what is open, and what CUDA's own end takes."""
    first, second = run(source)
    assert first.code == code, f"{first.code} after {first.seconds:.0f} s: {first.err}"
    assert ("ZeroDivisionError" in first.err) == (code == 1)
    assert second.code == (7 if HUNG in source else code), second.err
