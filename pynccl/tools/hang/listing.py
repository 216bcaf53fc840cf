"""`--list`: each job with its state, age, size and program."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from ...watch.records import ProcessRecord
from .clean import known, line, seconds
from .runs import LIVING, Run, began, last_seen, lives, named

_HEAD = ("job", "state", "processes", "started", "size", "program")
_PROGRAM = 60


def as_json(found: Sequence[Run]) -> list[dict[str, Any]]:
    """Seconds since the epoch, and bytes; 0 where they are not known."""
    return [
        {
            "job": name,
            "living": sum(one.state in LIVING for one in run),
            "processes": len(run),
            "started": min(map(began, run)),
            "last_seen": max(map(last_seen, run)),
            "bytes": sum(map(_bytes, run)),
            "program": _first(run).command,
        }
        for name, run in named(found)
    ]


def text(found: Sequence[Run]) -> str:
    """A row for each job, those that live first."""
    rows = [_HEAD, *(_row(name, run, time.time()) for name, run in named(found))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(name: str, run: Run, now: float) -> tuple[str, ...]:
    living = sum(one.state in LIVING for one in run)
    state = "running" if living == len(run) else f"{living} running" if living else _ago(max(map(last_seen, run)), now)
    size = sum(map(_bytes, run))
    return (
        line(name, 80),
        state if lives(run) else f"seen {state}",
        f"{len(run):,}",
        _ago(min(map(began, run)), now),
        f"{size / 1e6:.1f} MB" if size else "-",
        line(_program(_first(run).command), _PROGRAM),
    )


def _ago(moment: float, now: float) -> str:
    return f"{seconds(now - moment)} ago" if known(moment) else "?"


def _first(run: Run) -> ProcessRecord:
    """The lowest rank of the launch, else the first one."""
    return min(run, key=lambda one: (one.rank < 0, one.rank, began(one)))


def _program(command: str) -> str:
    """Without the folders of the interpreter and of the script."""
    interpreter, _, rest = command.partition(" ")
    script, space, options = rest.partition(" ")
    return f"{os.path.basename(interpreter)} {os.path.basename(script)}{space}{options}"


def _bytes(process: ProcessRecord) -> int:
    """What its file takes, if it is here."""
    try:
        return os.stat(process.path).st_blocks * 512 if process.path else 0
    except (OSError, ValueError):  # a name with a NUL
        return 0
