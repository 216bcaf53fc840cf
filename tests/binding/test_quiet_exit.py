"""A process ends without a word from pynccl, whatever it still holds: globals, threads, cycles, works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

AT_ONCE = 3  # processes
PRELUDE = """
import ctypes, sys, types
held = types.ModuleType("held")  # older than all others and never freed, like what a C extension keeps: it goes last
ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
import atexit, os, threading, time
import torch, torch.distributed as dist
import pynccl, pynccl.torch_backend
import pynccl_autograd as ad
def one(): return pynccl.init_all(1)[0]
def group(): dist.init_process_group("pynccl", store=dist.HashStore(), rank=0, world_size=1)
"""
ENDS = {
    "global": "comm = one()",
    "destroyed": "comm = one(); comm.destroy()",
    "pair": "comms = pynccl.init_all(2)",
    "cycle": "import gc; gc.disable(); comm = one(); comm.me = [comm]; del comm",
    "cycle that calls it": """
class Node:
    def __init__(self): self.comm, self.me = one(), self
    def __del__(self): self.comm.alive
Node()
""",
    "thread local": """
local = threading.local(); local.comm = one()
def run():
    local.comm = one()
    time.sleep(100)
threading.Thread(target=run, daemon=True).start()
""",
    "daemon thread": """
def run(comm):
    started.set()
    while True: time.sleep(0.01)
started = threading.Event(); threading.Thread(target=run, args=(one(),), daemon=True).start(); started.wait()
""",
    "daemon thread that calls": """
comm = one()
def run():
    try:
        while True: comm.all_reduce(torch.ones(4))
    except pynccl.NcclError: pass
threading.Thread(target=run, daemon=True).start()
""",
    "sys.modules": "import types; sys.modules['held'] = types.ModuleType('held'); sys.modules['held'].comm = one()",
    "builtins": "import builtins; builtins.comm = one()",
    "sys attribute": "sys.held = one()",
    "atexit after": "comm = one(); atexit.register(lambda: comm.all_reduce(torch.ones(4)))",
    "atexit that destroys": "comm = one(); atexit.register(comm.destroy)",
    "weakref.finalize": """
import weakref
comm = one()
weakref.finalize(comm, print, end='')
held = weakref.ref(comm, lambda _: comm)
""",
    "graph": "comm = one(); x = torch.ones(4, requires_grad=True); y = ad.all_reduce(x, comm, grad='sum').sum()",
    "plan": """
comm = one()
x = torch.ones(4)
plan = comm.plan.all_reduce(x, x)
group = comm.plan.group([plan, plan])
plan()
""",
    "window": """
comm = one()
memory = pynccl.mem_alloc(4096)
window = comm.window(memory)
held = comm.register(torch.ones(4))
""",
    "operator": """
comm = one()
op = comm.pre_mul_sum(0.5, 'float32')
plan = comm.plan.all_reduce(torch.ones(1), op=op)
""",
    "streams": """
comm = one(); stream = pynccl.create_stream(); event = pynccl.create_event()
for _ in range(20): comm.all_reduce(torch.ones(1 << 18), stream=stream)
event.record(stream)
""",
    "ad.start": """
comm = one()
x = torch.ones(4, requires_grad=True)
work = ad.start(ad.all_reduce, x, comm, grad='sum')
""",
    "process group": "group(); dist.all_reduce(torch.ones(4))",
    "work of a process group": """
group()
work = dist.all_reduce(torch.ones(4), async_op=True)
future = work.get_future()
""",
    "DDP": """
group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
""",
    "DataParallelGradients": """
comm = one(); model = torch.nn.Linear(4, 4); gradients = ad.DataParallelGradients(model, comm)
loss = model(torch.ones(2, 4)).sum(); loss.backward()
""",
    "layers": """
comm = one(); model = torch.nn.Sequential(ad.ColumnParallelLinear(8, 8, comm), ad.RowParallelLinear(8, 8, comm))
loss = model(torch.ones(2, 8)).sum(); loss.backward()
""",
    "split": "comm = one(); child = comm.split(0); other = child.split(0); other.destroy()",
    "generator in a group": """
def generate(comm):
    with pynccl.group(): yield
comm = one(); held = generate(comm); next(held)
""",
    "generator in a with": """
def generate():
    with one() as comm: yield comm
held = generate(); next(held)
""",
    "failed": """
comms = pynccl.init_all(2)
comms[1].abort()
try: comms[0].recv(torch.ones(1), 1)
except pynccl.NcclError as error: held = error
""",
    "os.fork": """
comm = one()
if (child := os.fork()) == 0: sys.exit(0)
os.waitpid(child, 0)
""",
    "os.fork, daemon thread": """
comm = one(); stream = pynccl.create_stream(); comm.all_reduce(torch.ones(4), stream=stream)
if (child := os.fork()) == 0: held = one(); sys.exit(0)
os.waitpid(child, 0)
""",
    "thread pool": """
from concurrent.futures import ThreadPoolExecutor
comm = one(); pool = ThreadPoolExecutor(2); futures = [pool.submit(comm.all_reduce, torch.ones(4)) for _ in range(4)]
""",
    "sys.exit in a thread": "comm = one(); threading.Thread(target=lambda: (comm.barrier(), sys.exit(3))).start()",
    "sys.exit": "comm = one(); sys.exit(0)",
    "exception": "sys.excepthook = lambda *_: None; comm = one(); 1 / 0",
    "exception in a group": "sys.excepthook = lambda *_: None; group(); 1 / 0",
    "asyncio": """
import asyncio
async def main(): return one().all_reduce(torch.ones(4))
asyncio.run(main())
""",
    "no watch": "os.environ['PYNCCL_WATCH'] = 'off'; comm = one(); comm.barrier()",
    "check": "os.environ['PYNCCL_CHECK'] = '1'; comm = one(); comm.barrier()",
    "held by C": """
held.comm, held.stream = one(), pynccl.create_stream()
held.op = held.comm.pre_mul_sum(0.5, 'float32')
""",
    "work held by C": """
held.comm = one()
held.work = ad.start(ad.all_reduce, torch.ones(4, requires_grad=True), held.comm, grad='sum')
""",
    "ranks held by C": "held.comms = pynccl.init_all(2); held.window = one().window(pynccl.mem_alloc(4096))",
    "multiprocessing": """
import multiprocessing
comm = one()
child = multiprocessing.get_context("fork").Process(target=lambda: one().barrier()); child.start(); child.join()
""",
}


def stderr_of(folder: Path, end: str) -> str:
    program = folder / f"{list(ENDS).index(end)}.py"
    program.write_text(PRELUDE + ENDS[end])
    environment = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.stderr if done.returncode == (1 if "1 / 0" in ENDS[end] else 0) else f"{done.returncode}: {done.stderr}"


def ended(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the host library."""
    program = folder / "program.py"
    program.write_text(source)
    environment = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


OUTLIVED = """
import os, socket, torch.distributed, pynccl
held = socket.create_server(("127.0.0.1", 0))  # a free port, which shall stay free until the ranks need it
os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(held.getsockname()[1]))
try: pynccl.init(timeout=1)
except pynccl.NcclTimeout: print("no answer")  # torch waits for one, until the interpreter closes the socket
"""


def test_a_call_that_returns_while_the_interpreter_ends_does_not_abort_the_process(tmp_path: Path) -> None:
    done = ended(tmp_path, OUTLIVED)
    assert (done.returncode, done.stdout) == (0, "no answer\n"), done.stderr
    assert "terminate called" not in done.stderr  # torch prints other lines


ABORTED = """
import ctypes, threading
from pynccl.bindings import workers
library = ctypes.CDLL("libstdc++.so.6")
workers.LEFT_BEHIND_SECONDS = 0.1
workers.WorkerCall(threading.Event().wait, "left behind")
workers._end_left_behind()
library._ZSt9terminatev()
"""


def test_an_abort_at_the_end_takes_place_a_little_later(tmp_path: Path) -> None:
    assert ended(tmp_path, ABORTED).returncode == -signal.SIGABRT


STANDING = """
def threads(): return sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
assert threads() == []
comm = one()
comm.all_reduce(torch.ones(4), stream=pynccl.create_stream())
work = ad.start(ad.all_reduce, torch.ones(4, requires_grad=True), comm, grad='sum')
work.wait()
for _ in range(3): comm.split(0)
pair = pynccl.init_all(2)
group()
for _ in range(3): dist.all_reduce(torch.ones(4), async_op=True).wait()
end = time.monotonic() + 60
while len(threads()) > 2 and time.monotonic() < end: time.sleep(0.1)
print(*threads(), sep=", ")
"""


def test_two_threads_stand_by_at_most(tmp_path: Path) -> None:
    done = ended(tmp_path, PRELUDE + STANDING)
    assert done.stdout == "pynccl watchdog, pynccl-host-store\n", (done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # each process imports torch
def test_a_process_ends_silently_whatever_it_holds(tmp_path: Path) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        printed = dict(zip(ENDS, pool.map(lambda end: stderr_of(tmp_path, end), ENDS), strict=True))
    assert not {end: text for end, text in printed.items() if text}
