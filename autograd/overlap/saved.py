"""Decisions in files: `save` writes those of this process's races, and `load` reads them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from pynccl.bindings.values import path_of, shown

FILE_VERSION = 2

won: dict[str, dict[str, Any]] = {}  # `PassKey.name` -> results of this process's races
from_files: dict[str, dict[str, Any]] = {}  # the same, of `load`


def save(path: str | Path) -> None:
    """Write the decisions of this process's races as JSON, for `load`.

    All ranks may write the same file, since the ranks of a communicator make the same decisions."""
    path = Path(path_of(path, "overlap.save: path"))
    text = json.dumps({"version": FILE_VERSION, "decisions": {**from_files, **won}}, indent=1)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink()
        raise


def load(path: str | Path) -> None:
    """Read decisions from a file that `save` has written. Call it on every rank, before the first step.

    They apply to passes of the same sizes, data types, options, number of ranks and device that no layer of the
    communicator has run yet. A pass for which the ranks have loaded different schedules is raced for.

    Raises OSError if the file cannot be read, and ValueError if it is not a file of `save`."""
    path = Path(path_of(path, "overlap.load: path"))
    try:
        content = json.loads(path.read_text())
        version = content["version"]
        found = (
            {name: _record(value) for name, value in content["decisions"].items()} if version == FILE_VERSION else {}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"overlap.load: path {path} is not a file of ad.overlap.save(): {shown(error)}") from None
    if version != FILE_VERSION:
        raise ValueError(
            f"overlap.load: {path} has version {shown(version)}, expected {FILE_VERSION}; run the races again and "
            "save()"
        )
    from_files.update(found)


def _record(decision: Any) -> dict[str, Any]:
    """Check a decision of a file."""
    schedule, tried = decision["schedule"], decision["tried"]
    if not isinstance(schedule, str):
        raise TypeError(f"schedule is {shown(schedule)}, expected a string")
    return {"schedule": schedule, "tried": {str(name): float(seconds) for name, seconds in tried.items()}}
