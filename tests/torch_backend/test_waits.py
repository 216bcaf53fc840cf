"""While a communicator is made, or a message waits for its peer, the watchdog and the hang tool name who is missing."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import process_group
from ranks import HOST, Place, RankPool

ROOT = Path(__file__).resolve().parents[2]
OBSERVER, WAITING, MISSING = 0, 1, 2  # ranks
SECONDS = 40.0  # until the watchdog has reported


class Group:
    """What the cases use: a group of the waiting and the missing rank, and a folder for them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.pair = dist.new_group([WAITING, MISSING])
        self.x = torch.ones(3)

    @property
    def comm(self) -> Any:
        import pynccl

        return pynccl.Communicator.from_process_group(self.pair)

    @property
    def world(self) -> Any:
        import pynccl

        return pynccl.Communicator.from_process_group()


# Each call in which rank 1 waits for rank 2; rank 2 makes its own later. The waiting line has the name as its comment.


def recv(of: Group) -> None:
    dist.recv(of.x, MISSING) if dist.get_rank() == WAITING else dist.send(of.x, WAITING)  # recv


def send(of: Group) -> None:
    dist.send(of.x, MISSING) if dist.get_rank() == WAITING else dist.recv(of.x, WAITING)  # send


def irecv_in_group(of: Group) -> None:
    if dist.get_rank() == WAITING:
        work = dist.irecv(of.x, MISSING, group=of.pair)  # irecv_in_group
        assert work is not None
        work.wait()
    else:
        dist.send(of.x, WAITING, group=of.pair)


def isend_in_group(of: Group) -> None:
    if dist.get_rank() == WAITING:
        work = dist.isend(of.x, MISSING, group=of.pair)  # isend_in_group
        assert work is not None
        work.wait()
    else:
        dist.recv(of.x, WAITING, group=of.pair)


def later_recv(of: Group) -> None:
    dist.recv(of.x, MISSING) if dist.get_rank() == WAITING else dist.send(of.x, WAITING)  # later_recv


def new_group(of: Group) -> None:
    group = dist.new_group([WAITING, MISSING], use_local_synchronization=True)
    dist.all_reduce(torch.ones(2), group=group)  # new_group


def second_init(of: Group) -> None:
    import pynccl

    named = pynccl.CommConfig(comm_name="second")
    pynccl.Communicator.from_process_group(of.pair, config=named).destroy()  # second_init


def split(of: Group) -> None:
    of.comm.split(0).destroy()  # split


def shrink(of: Group) -> None:
    of.world.shrink([OBSERVER]).destroy()  # shrink


def grow(of: Group) -> None:
    unique_id = of.comm.grow_id() if dist.get_rank() == WAITING else None
    if unique_id is not None:
        Path(of.folder, "id").write_bytes(bytes(unique_id))
    of.comm.grow(3, unique_id).destroy()  # grow


def join_grown(of: Group) -> None:
    import pynccl

    unique_id = Path(of.folder, "id").read_bytes()
    pynccl.Communicator.join_grown(3, unique_id, 2).destroy()


NEVER = "rank 2 never entered {} (comm '{}', {} ranks, {}); rank 1 has waited "
CASES: dict[Callable[[Group], None], str] = {
    recv: "rank 2 never called send to rank 1; rank 1 has waited ",
    send: "rank 2 never called recv from rank 1; rank 1 has waited ",
    irecv_in_group: "rank 2 never called send to rank 1; rank 1 has waited ",
    isend_in_group: "rank 2 never called recv from rank 1; rank 1 has waited ",
    later_recv: "rank 2 never called send to rank 1; rank 1 has waited ",
    new_group: "rank 2 never entered all_reduce #1 (comm 'group ",
    second_init: NEVER.format("init", "second", 2, "{line}"),
    split: NEVER.format("split #1", "group {group}", 2, "{line}"),
    shrink: NEVER.format("shrink", "world", 3, "{line}"),
    grow: NEVER.format("grow", "group {group}", 2, "{line}"),
}


def line_of(marker: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {marker}")]
    return f"{Path(__file__).name}:{number}"


def wait_for(path: str) -> None:
    """Wait in queue.get until the file exists."""
    there: queue.Queue[bool] = queue.Queue()

    def listen() -> None:
        end = time.monotonic() + SECONDS
        while not os.path.exists(path) and time.monotonic() < end:
            time.sleep(0.01)
        there.put(os.path.exists(path))

    threading.Thread(target=listen, daemon=True).start()
    assert there.get(timeout=SECONDS + 1), "the watchdog did not report"  # elsewhere


def observe(log: Path) -> tuple[str, str, int]:
    """Return the report of rank 1's watchdog, and the sentence and exit code of the hang tool once it names a rank."""
    end, report = time.monotonic() + SECONDS, ""
    while "stack, innermost" not in report and time.monotonic() < end:
        time.sleep(0.05)
        report = log.read_text() if log.exists() else ""
    done, command = None, [sys.executable, "-m", "pynccl", "hang", "--json", os.environ["PYNCCL_WATCH_DIR"]]
    while (done is None or done.returncode != 1) and time.monotonic() < end:  # it ignores waits of less than 2 s
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done is not None
    return report, json.loads(done.stdout)["verdict"]["sentence"], done.returncode


def in_each(place: Place, path: str, folder: str) -> tuple[str, dict[str, tuple[str, str, int]]]:
    """Run the cases. Return the name of the group, and what rank 0 has observed."""
    found = {}
    with process_group("pynccl", place, path):
        of = Group(folder)
        name = of.comm.name.removeprefix("group ") if place.rank != OBSERVER else ""
        for case in CASES:
            seen = f"{folder}/{case.__name__}"
            dist.barrier()  # on a busy machine the watchdog may report it: before the redirection
            file = os.open(f"{seen}.stderr{place.rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 2)
            os.close(file)
            if place.rank == OBSERVER:
                found[case.__name__] = observe(Path(f"{seen}.stderr{WAITING}"))
                Path(seen).touch()
                if case is grow:
                    join_grown(of)
            else:
                if place.rank == MISSING:
                    wait_for(seen)
                case(of)
    return name, found


@pytest.mark.timeout(300)
def test_all_waits_of_an_init_name_the_missing_rank_and_its_line(tmp_path: Path) -> None:
    pool = RankPool(
        {**HOST, "PYNCCL_WATCH_TIMEOUT": "0.5", "PYNCCL_WATCH_DIR": str(tmp_path / "watch")}, communicators=False
    )
    (_, found), (name, _), _ = pool.run(3, in_each, str(tmp_path / "store"), str(tmp_path), timeout=240)
    pool.close()
    where = f"rank 2: process alive, .*its main thread is in {line_of('elsewhere')}, in queue.get"
    for case, expected in CASES.items():
        report, sentence, code = found[case.__name__]
        expected = expected.format(line=line_of(case.__name__), group=name)
        assert expected in report and sentence.startswith(expected) and code == 1, (report, sentence)
        assert re.search(where, report), report
