"""Processes that hang or fail on a GPU: the watchdog reports, and the process exits with the right code."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.launches import ProcessResult, run_ranks

pytestmark = pytest.mark.usefixtures("own_launch")

WATCH_TIMEOUT = 2  # seconds, PYNCCL_WATCH_TIMEOUT
EXIT_AFTER = 8  # seconds from connecting until a hung rank exits by itself, with code 7
LIMIT = 35  # seconds until a process is killed: code -9

# Both ranks are connected after reducing `x`. `leave` ends a rank that waits in a C call.
PRELUDE = """
import os, sys, threading, time, torch, pynccl
comm = pynccl.init(device=0)
torch.cuda.set_device(comm.device)
x, rank = torch.ones(1 << 20, device=comm.device), comm.rank
y = torch.zeros_like(x)
comm.all_reduce(x, y)
torch.cuda.synchronize()
comm.barrier()
leave = threading.Timer(EXIT_AFTER, os._exit, (7,))
leave.daemon = True
""".replace("EXIT_AFTER", str(EXIT_AFTER))


def run(source: str, action: str = "report", ranks: int = 2, **more: object) -> list[ProcessResult]:
    more |= {"PYNCCL_WATCH_TIMEOUT": WATCH_TIMEOUT, "PYNCCL_WATCH_ACTION": action}
    return run_ranks(["-c", PRELUDE + source], ranks, LIMIT, **more)


UNTIL_ABORTED = """
try:
    for _ in range(CALLS):
        comm.all_reduce(x, y)
    while comm.alive:
        time.sleep(0.01)
    comm.all_reduce(x, y)
except pynccl.NcclError as error:
    print("raised", type(error).__name__, error)
"""


@pytest.mark.parametrize(("calls", "action"), [(1, "raise"), (20_000, "report"), (20_000, "raise")])
def test_a_missing_peer_is_reported_even_if_the_main_thread_is_stuck_in_a_launch(calls: int, action: str) -> None:
    """The launch queue holds about a thousand calls. The next call blocks until a kernel completes."""
    ended = run(
        f"""
leave.start()
if rank == 1:
    time.sleep(100)
CALLS = {calls}
"""
        + UNTIL_ABORTED,
        action,
    )
    assert "pynccl watchdog: rank 0 of 2" in ended[0].err and "rank 1 never entered" in ended[0].err, ended[0].err
    if action == "raise":
        assert ended[0].out.startswith("raised NcclTimeout ") and ended[0].code == 0, ended[0].out + ended[0].err
    else:
        assert ended[0].code == 7, ended[0].err


ASKED = """
import subprocess
if rank == 1:
    time.sleep(3)
    hang = subprocess.run([sys.executable, "-m", "pynccl", "hang"], capture_output=True, text=True, timeout=20)
    print(hang.returncode, hang.stdout, hang.stderr, flush=True)
    os._exit(0)
leave = threading.Timer(15, os._exit, (7,))
leave.start()
comm.all_reduce(x, y)
torch.cuda.synchronize()
"""


def test_hang_names_the_missing_rank_from_another_process_while_a_kernel_waits(tmp_path: Path) -> None:
    first, second = run(ASKED, PYNCCL_WATCH_DIR=tmp_path)
    assert second.out.startswith("1 rank 1 never entered all_reduce #"), second.out + second.err
    assert "\n0     " in second.out and "rank 1: process alive" in second.out, second.out
    assert first.code == 7 and "rank 1 never entered" in first.err, first.err


KILLED = """
import signal
CALLS = 1
if rank == 2:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
leave.start()
"""


@pytest.mark.parametrize("action", ["report", "raise"])
def test_a_killed_rank_is_named_on_those_that_wait_for_it(action: str) -> None:
    *left, killed = run(KILLED + UNTIL_ABORTED, action, 3)
    assert killed.code == -9
    for done in left:
        assert "rank 2's process" in done.out + done.err, done
        assert done.code in ((0,) if action == "raise" else (0, 7)), done  # NCCL may have noticed it, too


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
def test_a_process_exits_with_the_right_code_despite(source: str, code: int) -> None:
    """Within the ten seconds that cleanup may take, and the time of CUDA's own shutdown."""
    first, second = run(source)
    assert first.code == code, f"{first.code} after {first.seconds:.0f} s: {first.err}"
    assert ("ZeroDivisionError" in first.err) == (code == 1)
    assert second.code == (7 if HUNG in source else code), second.err


SHARED = """
import os, sys, torch, torch.distributed as dist, pynccl, pynccl.torch_backend
torch.cuda.set_device(0)
if sys.argv[1] == "backend":
    dist.init_process_group("pynccl")
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x)
    dist.destroy_process_group()
else:
    with pynccl.init() as comm:  # GPU LOCAL_RANK modulo 1
        x = comm.all_reduce(torch.ones(4, device=comm.device))
        torch.cuda.synchronize()
print(x.tolist())
"""


@pytest.mark.parametrize("how", ["init", "backend"])
@pytest.mark.parametrize("shared", [1, 0])
def test_ranks_share_a_gpu_with_one_variable_which_the_refusal_names(how: str, shared: int) -> None:
    for done in run_ranks(["-c", SHARED, how], 2, 60, PYNCCL_SHARE_GPU=shared):
        if shared:
            assert (done.code, done.out) == (0, "[2.0, 2.0, 2.0, 2.0]\n"), done.err
        else:
            assert done.code == 1 and "set PYNCCL_SHARE_GPU=1 on all ranks" in done.err, done.err
