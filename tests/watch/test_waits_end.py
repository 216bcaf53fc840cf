"""A call that waits can be ended: by the watchdog, if it is asked to, and by Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hanging import (
    SPEAKS,
    all_reduce,
    barrier,
    group,
    large,
    on_a_stream,
    place_of,
    plan,
    recv,
    said,
    send,
    standard_error,
)
from ranks import HOST, RankPool

TIMEOUT = 0.5
FLOATS = "FLOAT32 x 4"

# PYNCCL_WATCH_ACTION=raise


def raises(place: Any, folder: str) -> list[tuple[str, str, str, bool]]:
    """A rank waits in vain, twice: both errors, what was said, and whether another communicator lives on."""
    import pynccl

    found = []
    for body in (all_reduce, on_a_stream):
        own = f"{folder}/{body.__name__}"
        os.makedirs(own)
        with standard_error(own, 0):
            other = pynccl.Communicator.init_all(1)[0]
            comms = pynccl.Communicator.init_all(2)
            errors = []
            for _ in range(2):
                with pytest.raises(pynccl.NcclTimeout) as raised:
                    body(comms[0])
                errors.append(str(raised.value))
            lives = other.all_reduce(torch.ones(1)).item() == 1
            pynccl.abort(comms)
        found.append((*errors, said(own, 0), lives))
    return found


def test_the_blocked_call_raises_if_asked_to(tmp_path: Path) -> None:
    variables = {"PYNCCL_WATCH_TIMEOUT": str(TIMEOUT), "PYNCCL_WATCH_ACTION": "raise"}
    pool = RankPool({**HOST, **variables}, communicators=False)
    [found] = pool.run(1, raises, str(tmp_path))
    pool.close()
    for body, (error, again, text, lives) in zip((all_reduce, on_a_stream), found, strict=True):
        sentence = f"rank 1 never entered all_reduce #1 (comm 'world', 2 ranks, {FLOATS}, {place_of(body.__name__)})"
        assert sentence in error and sentence in again and sentence in text
        assert "the communicator is aborted (PYNCCL_WATCH_ACTION=raise)" in text
        assert lives


# Ctrl-C


def of_init(comm: Any) -> None:
    import pynccl

    pynccl.Communicator.init(2, pynccl.get_unique_id(), 0, timeout=None)


def of_a_split(comm: Any) -> None:
    comm.timeout = None
    comm.split(0)


def of_destroy(comm: Any) -> None:
    import pynccl

    comm.timeout = None
    comm.all_reduce(torch.ones(4), stream=pynccl.create_stream())
    comm.destroy()


INTERRUPTED = (all_reduce, large, on_a_stream, recv, send, barrier, plan, group, of_init, of_a_split, of_destroy)


def interrupts(place: Any, folder: str) -> list[str]:
    """The calls that waited in which Ctrl-C was heard."""
    import pynccl

    signal.signal(signal.SIGINT, signal.default_int_handler)
    heard = []
    with standard_error(folder, 0):
        for body in INTERRUPTED:
            comms = pynccl.Communicator.init_all(2)
            try:
                threading.Thread(target=press, args=(folder, said(folder, 0).count(SPEAKS))).start()
                body(comms[0])
            except KeyboardInterrupt:
                heard.append(body.__name__)
            pynccl.abort(comms)
    return heard


def press(folder: str, before: int) -> None:
    """Ctrl-C, once the watchdog has spoken again."""
    while said(folder, 0).count(SPEAKS) <= before:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_heard_in_every_call_that_the_watchdog_looks_at(tmp_path: Path) -> None:
    pool = RankPool({**HOST, "PYNCCL_WATCH_TIMEOUT": "0.2"}, communicators=False)
    [heard] = pool.run(1, interrupts, str(tmp_path))
    pool.close()
    assert heard == [body.__name__ for body in INTERRUPTED]
