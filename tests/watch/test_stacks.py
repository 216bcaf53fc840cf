"""Where threads are: told when somebody asks for it, and never looked at in a healthy program."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from hanging import place_of
from ranks import HOST, RankPool

from pynccl.watch import frames
from pynccl.watch.reader import ask, read_file, read_folder


def healthy(comm: Any) -> list[str]:
    """Who asks for the frames of threads while calls are made, through five looks of the watchdog."""
    from pynccl.watch import watchdog

    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        real = sys._current_frames
        patch.setattr(sys, "_current_frames", lambda: asked.append("frames") or real())
        patch.setattr(faulthandler, "dump_traceback", lambda *_, **__: asked.append("dump"))
        dog = watchdog._watchdog
        assert dog is not None
        first = dog.looks
        while comm.all_reduce(torch.tensor(float(dog.looks < first + 5)), op="max").item():
            comm.barrier()
            time.sleep(0.01)
    return asked


def sleeps(comm: Any, folder: str) -> tuple[str, str] | None:
    """Rank 0 asks rank 1, which does something else, where it is: before and after."""
    there = Path(folder, "asked")
    if comm.rank == 1:
        comm.barrier()
        while not there.exists():
            time.sleep(0.01)  # elsewhere
        return None
    comm.barrier()
    (record,) = [one for one in read_folder(os.environ["PYNCCL_WATCH_DIR"])[0] if one.pid != os.getpid()]
    before = read_file(record.path)
    assert (before.where, before.stack) == ("", "")
    while not ask([read_file(record.path)]):  # on a busy machine it may be silent for long
        pass
    there.touch()
    after = read_file(record.path)
    return after.where, after.stack


def test_nobody_looks_at_the_threads_of_a_healthy_job_and_who_is_asked_says_where_it_is(tmp_path: Path) -> None:
    pool = RankPool({**HOST, "PYNCCL_WATCH_TIMEOUT": "30", "PYNCCL_WATCH_DIR": str(tmp_path / "watch")})
    assert pool.run(2, healthy) == [[], []]
    (where, stack), _ = pool.run(2, sleeps, str(tmp_path))
    pool.close()
    assert where == f"{__file__}:{place_of('elsewhere', __file__).partition(':')[2]} sleeps"
    assert stack.endswith(where)


def test_the_stacks_are_those_that_the_threads_see_themselves() -> None:
    seen: dict[int, list[str]] = {}
    here, leave = threading.Barrier(3), threading.Event()

    def déjà_vu_Ω(levels: int) -> None:
        if levels:
            return déjà_vu_Ω(levels - 1)
        found = traceback.extract_stack()
        seen[threading.get_ident()] = [f"{one.filename}:{one.name}" for one in reversed(found)]
        here.wait(20)
        leave.wait(20)

    threads = [threading.Thread(target=déjà_vu_Ω, args=(levels,)) for levels in (0, 40)]
    for thread in threads:
        thread.start()
    here.wait(20)
    found = frames.take()
    leave.set()
    for thread in threads:
        thread.join(20)
    for ident, lines in seen.items():
        # Python's own frames below bootstrap are the same; at the top each thread has gone on into wait().
        assert [re.sub(r":\d+ ", ":", one) for one in found[ident]][-len(lines) :] == lines
    assert {*seen, threading.get_ident()} <= found.keys()
