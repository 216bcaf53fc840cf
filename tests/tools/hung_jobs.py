"""Hand-made records of hanging jobs, and helpers that run `hang` on them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pynccl.tools import command, hang
from pynccl.watch.records import COMPLETED, INSIDE, ISSUED, CallRecord, CommRecord, ProcessRecord, to_json

NOW = 1_760_000_000.0
Printed = Callable[[], tuple[str, str]]
STACK = "/home/me/train.py:20 main\n/home/me/train.py:35 step\n{}"


def process(rank: int, number: int = 41, state: str = INSIDE, host: str = "node0", size: int = 4) -> ProcessRecord:
    """Return the record of a rank whose newest call is all_reduce #number."""
    calls = [_call(each, COMPLETED) for each in range(number - 3, number)] + [_call(number, state)]
    completed = number if state == COMPLETED else number - 1
    comm = CommRecord("uid1", "tp", rank, size, made=NOW - 100, entered=number, completed=completed, calls=calls)
    where = "/home/me/model.py:88 forward" if state == INSIDE else "/home/me/data.py:41 next_batch"
    times = {"started": NOW - 200, "now": NOW, "heartbeat": NOW - 0.2}
    at = {"where": where, "where_at": NOW - 0.3, "stack": STACK.format(where)}
    return ProcessRecord(4000 + rank, host, machine=host, job="train", rank=rank, comms=[comm], **times, **at)


def _call(number: int, state: str) -> CallRecord:
    issued = NOW - 12.3 - (41 - number)
    done = 0.0 if state in (INSIDE, ISSUED) else issued + 0.002
    times = {"issued": issued, "returned": done, "completed": done}
    arguments = {"count": 33_554_432, "dtype": "BFLOAT16", "op": "SUM", "site": "/home/me/model.py:88"}
    return CallRecord(number, number, "all_reduce", state=state, **arguments, **times)  # type: ignore[arg-type]


def missing(size: int, behind: tuple[int, ...] | None = None, hosts: int = 1) -> list[ProcessRecord]:
    """Return a job in which some ranks (by default the last) have not entered all_reduce #41."""
    behind = (size - 1,) if behind is None else behind
    return [
        process(rank, 40, COMPLETED, f"node{rank * hosts // size}", size)
        if rank in behind
        else process(rank, 41, INSIDE, f"node{rank * hosts // size}", size)
        for rank in range(size)
    ]


def save_records(path: Path, processes: list[ProcessRecord]) -> str:
    """Write the records as `hang --json` does; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"processes": [to_json(each) for each in processes]}))
    return str(path)


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    hang.configure(parser)
    arguments = parser.parse_args(options)
    return command.exit_code_of(lambda: hang.run(arguments), "hang")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def read() -> tuple[str, str]:
        out, err = capsys.readouterr()
        return out, err

    return read
