"""Stacks of threads are taken on request only, and never in a healthy program."""

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
    """Make calls during five polls of the watchdog, and return all requests for frames of threads."""
    from pynccl.watch import watchdog

    requests: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        real = sys._current_frames
        patch.setattr(sys, "_current_frames", lambda: requests.append("frames") or real())
        patch.setattr(faulthandler, "dump_traceback", lambda *_, **__: requests.append("dump"))
        dog = watchdog._watchdog
        assert dog is not None
        first = dog.polls
        while comm.all_reduce(torch.tensor(float(dog.polls < first + 5)), op="max").item():
            comm.barrier()
            time.sleep(0.01)
    return requests


def sleeps(comm: Any, folder: str) -> tuple[str, str] | None:
    """Rank 0 requests the stack of rank 1, which is busy elsewhere. Return its position and stack."""
    done = Path(folder, "done")
    if comm.rank == 1:
        comm.barrier()
        while not done.exists():
            time.sleep(0.01)  # elsewhere
        return None
    comm.barrier()
    (record,) = [found for found in read_folder(os.environ["PYNCCL_WATCH_DIR"])[0] if found.pid != os.getpid()]
    before = read_file(record.path)
    assert (before.where, before.stack) == ("", "")
    while not ask([read_file(record.path)]):  # on a busy machine, the answer may take long
        pass
    done.touch()
    after = read_file(record.path)
    return after.where, after.stack


def test_stacks_are_taken_on_request_only(tmp_path: Path) -> None:
    pool = RankPool({**HOST, "PYNCCL_WATCH_TIMEOUT": "30", "PYNCCL_WATCH_DIR": str(tmp_path / "watch")})
    assert pool.run(2, healthy) == [[], []]
    (where, stack), _ = pool.run(2, sleeps, str(tmp_path))
    pool.close()
    assert where == f"{__file__}:{place_of('elsewhere', __file__).partition(':')[2]} sleeps"
    assert stack.endswith(where)


def test_the_wrapper_of_a_deprecated_function_is_no_call_site() -> None:
    """torch's reduce_scatter_tensor is such a function."""
    extensions = pytest.importorskip("typing_extensions")
    wrapped = extensions.deprecated("use another one", category=None)(frames.call_site)
    with_warning = extensions.deprecated("use another one")(frames.call_site)
    with pytest.warns(DeprecationWarning):
        sites = [wrapped(), with_warning()]
    assert all(site.startswith(__file__) for site in sites), sites


def test_all_stacks_equal_the_threads_own_tracebacks() -> None:
    seen: dict[int, list[str]] = {}
    here, leave = threading.Barrier(3), threading.Event()

    def déjà_vu_Ω(levels: int) -> None:
        if levels:
            return déjà_vu_Ω(levels - 1)
        found = traceback.extract_stack()
        seen[threading.get_ident()] = [f"{frame.filename}:{frame.name}" for frame in reversed(found)]
        here.wait(20)
        leave.wait(20)

    threads = [threading.Thread(target=déjà_vu_Ω, args=(levels,)) for levels in (0, 40)]
    for thread in threads:
        thread.start()
    here.wait(20)
    found = frames.all_stacks()
    leave.set()
    for thread in threads:
        thread.join(20)
    for ident, lines in seen.items():
        # Python's own frames below bootstrap are the same. At the top, each thread has continued into wait().
        assert [re.sub(r":\d+ ", ":", line) for line in found[ident]][-len(lines) :] == lines
    assert {*seen, threading.get_ident()} <= found.keys()
