"""A main thread that waits in a library is placed at the user's own line, with the library's function."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pynccl.watch import frames

# Poll the main thread until it is where the test expects it, then print its place: the last one seen, at the deadline.
PRELUDE = """
import os, sys, threading, time
from pynccl.watch import frames

def watch(end=time.monotonic() + 40):
    place = ""
    while not place.endswith(sys.argv[1]) and time.monotonic() < end:
        place = frames.place(frames.main_stack(frames.all_stacks()))
        time.sleep(0.01)
    print(place, flush=True)
    os._exit(0)

threading.Thread(target=watch, daemon=True).start()
"""

# Where the main thread is -> (program, the library's function). The marked line is the user's.
PROGRAMS = {
    "queue": ("import queue\nqueue.Queue().get()  # here", "queue.get"),
    "multiprocessing": ("import multiprocessing\nmultiprocessing.Queue().get()  # here", "multiprocessing.queues.get"),
    "subprocess": (
        """
import subprocess
reader, writer = os.pipe()
subprocess.run(["cat"], stdin=reader, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # here
""",
        "subprocess.run",
    ),
    "urlopen": (
        """
import socket, urllib.request
server = socket.create_server(("127.0.0.1", 0))
urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/")  # here
""",
        "urllib.request.urlopen",
    ),
    "asyncio": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(60)\nasyncio.run(main())  # here",
        "asyncio.runners.run",
    ),
    "DataLoader": (
        """
import torch
class Slow(torch.utils.data.IterableDataset):
    def __iter__(self, parent=os.getpid()):
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)
for batch in torch.utils.data.DataLoader(Slow(), num_workers=1):  # here
    pass
""",
        "torch.utils.data.dataloader.__next__",
    ),
    "own code": ("time.sleep(60)  # here", "<module>"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_place_of_a_main_thread(name: str, tmp_path: Path) -> None:
    program, function = PROGRAMS[name]
    path = tmp_path / "train.py"
    path.write_text(PRELUDE + program)
    [number] = [number for number, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("  # here")]
    command = [sys.executable, str(path), function]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    between = " " if function == "<module>" else ", in "
    assert done.stdout == f"{path}:{number}{between}{function}\n", done.stderr


LIBRARY = sysconfig.get_paths()["stdlib"]
SCRIPTS, PACKAGES = sysconfig.get_path("scripts"), "/opt/venv/lib/python3.12/site-packages"
# Stack, innermost frame first -> its place
STACKS = {
    "a console script": (
        [
            f"{LIBRARY}/queue.py:171 get",
            f"{PACKAGES}/trainer/loop.py:88 fit",
            f"{PACKAGES}/trainer/cli.py:7 main",
            f"{SCRIPTS}/trainer:8 <module>",
        ],
        f"{PACKAGES}/trainer/loop.py:88, in queue.get",
    ),
    "a decorator": (
        [f"{PACKAGES}/lib/core.py:3 load", f"{PACKAGES}/lib/util.py:9 wrapper", "/home/me/my train.py:88 step"],
        "/home/me/my train.py:88, in lib.core.load",
    ),
    "Python only": ([f"{LIBRARY}/queue.py:171 get", f"{LIBRARY}/code.py:9 run"], f"{LIBRARY}/code.py:9, in queue.get"),
    "a call of this package": (
        [f"{Path(frames.__file__).parents[1]}/comm/call.py:9 issue", "/home/me/train.py:88 step"],
        "/home/me/train.py:88 step",
    ),
    "generated code": (
        ["<string>:0 <module>", "/home/me/train.py:88 step", "<string>:1 <module>"],
        "/home/me/train.py:88, in <string>.<module>",
    ),
    "no frames": ([], ""),
}


@pytest.mark.parametrize("name", STACKS)
def test_place_of_a_stack(name: str) -> None:
    stack, expected = STACKS[name]
    assert frames.place(stack) == expected
