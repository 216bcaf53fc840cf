"""Decisions in files: `save` writes those of this process's races, and `load` reads them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from pynccl.bindings.values import instance, path_of, shown
from pynccl.chrome_trace import replacing

FILE_VERSION = 3

won: dict[str, dict[str, Any]] = {}  # `PassKey.name` -> results of this process's races
from_files: dict[str, dict[str, Any]] = {}  # the same, of `load`


def save(path: str | Path) -> None:
    """Write the decisions of this process's races as JSON, for `load`; gzip-compressed if the path ends in .gz.

    All ranks may write the same file, since the ranks of a communicator make the same decisions. Raises OSError if the
    file cannot be written, and leaves an old file as it was."""
    path = Path(path_of(path, "overlap.save: path"))
    text = json.dumps({"version": FILE_VERSION, "decisions": {**from_files, **won}}, indent=1)
    with replacing(path) as file:
        file.write(text + "\n")


def load(path: str | Path) -> None:
    """Read decisions from a file that `save` has written. Call it on every rank, before the first step.

    They apply to passes of the same sizes, data types, options, number of ranks and device that no layer of the
    communicator has run yet. A pass for which the ranks have loaded different schedules is raced for.

    Raises OSError if the file cannot be read, and ValueError if it is not a file of `save`."""
    path = Path(path_of(path, "overlap.load: path"))
    data = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)  # `replacing` compresses .gz
        version = content["version"]
        if version == FILE_VERSION:
            from_files.update({name: _checked(decision) for name, decision in content["decisions"].items()})
    except Exception as error:  # whatever else such a file contains
        raise ValueError(f"overlap.load: path {path} is not a file of ad.overlap.save(): {shown(error)}") from None
    if version != FILE_VERSION:
        raise ValueError(
            f"overlap.load: {path} has version {shown(version)}, expected {FILE_VERSION}; run the races again and "
            "save()"
        )


def _checked(decision: Any) -> dict[str, Any]:
    instance(decision["schedule"], str, "schedule", "a string")
    return {"schedule": decision["schedule"], "tried": {way: float(time) for way, time in decision["tried"].items()}}
