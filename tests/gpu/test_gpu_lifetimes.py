"""A thousand communicators, one after the other: nothing stays behind on the card or in the process."""

from __future__ import annotations

import json

import pytest
from gpu.launches import run_process

pytestmark = pytest.mark.usefixtures("own_launch")

# The first rounds load kernels and fill caches. Memory in bytes; that of the card is of all processes.
PROGRAM = """
import gc, json, os, sys, time, torch, pynccl

def used():
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    status = open("/proc/self/status").read()
    host = 1024 * int(status.partition("VmRSS:")[2].split()[0])
    return {"card": total - free, "host": host, "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd"))}

torch.cuda.set_device(0)
x, y = torch.ones(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")
began, made, before = time.monotonic(), 0, used()
now = before
while made < 1000 and time.monotonic() - began < 70:
    comm = pynccl.Communicator.init(1, pynccl.get_unique_id(), 0, device=0)
    y.zero_()
    comm.all_reduce(x, y)
    torch.cuda.synchronize()
    assert bool(y.eq(1).all())
    made += 1
    comm.destroy() if made % 10 else comm.abort()
    if made % 100 == 0:
        now = used()
        print(made, f"{time.monotonic() - began:.1f} s", now, flush=True)
        if made == 100:
            before = now
print(json.dumps({"made": made, **{name: now[name] - before[name] for name in before}}))
"""


def test_a_thousand_communicators_leave_nothing_behind() -> None:
    """900 of them, a tenth of which is aborted. An NCCL that keeps a few KB of each is not told from none."""
    done = run_process(["-c", PROGRAM], 95)
    print(done.out)  # to the log of gpu_check
    assert done.code == 0, done.err
    grown = json.loads(done.out.splitlines()[-1])
    assert grown["made"] == 1000, grown
    assert grown["card"] / 900 < 20_000 and grown["host"] / 900 < 70_000, grown
    assert grown["threads"] <= 2 and grown["files"] <= 2, grown
