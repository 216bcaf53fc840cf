"""Events and files in the Chrome trace format, as shown by ui.perfetto.dev.

A rank is a process (pid), a lane is a thread (tid). Slices of one lane must be disjoint or nested.
Times are in seconds from the start of the trace. The file has microseconds, rounded to nanoseconds so that adjacent
slices do not overlap.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

Event = dict[str, Any]


def named(what: str, pid: int, tid: int, **args: Any) -> Event:
    """Return a metadata event of a process or lane: process_name, process_labels, thread_name, ..."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def process(pid: int, name: str, labels: str = "") -> Iterator[Event]:
    """Yield the metadata of a process. Processes are shown in the order of their pids."""
    yield named("process_name", pid, 0, name=name)
    if labels:
        yield named("process_labels", pid, 0, labels=labels)
    yield named("process_sort_index", pid, 0, sort_index=pid)


def lane(pid: int, tid: int, name: str) -> Iterator[Event]:
    """Yield the metadata of a lane. Lanes are shown in the order of their tids."""
    yield named("thread_name", pid, tid, name=name)
    yield named("thread_sort_index", pid, tid, sort_index=tid)


def piece(
    name: str, category: str, pid: int, tid: int, begin: float, end: float, args: Mapping[str, Any] | None = None
) -> Event:
    """Return a slice (a complete event) of a lane."""
    at = micro(begin)
    event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": at}
    return event | {"dur": round(max(micro(end) - at, 0.0), 3), "args": dict(args or {})}


def moment(name: str, category: str, pid: int, tid: int, at: float, args: Mapping[str, Any] | None = None) -> Event:
    """Return an instant event of the whole process."""
    event = {"ph": "i", "s": "p", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": micro(at)}
    return event | {"args": dict(args or {})}


def arrows(number: int, name: str, places: Sequence[tuple[float, int, int]]) -> Iterator[Event]:
    """Yield flow events: arrows from slice to slice, in the given order.

    number  id of the flow, unique in the trace
    places  (start time, pid, tid) of each slice. Write the arrows after the slices."""
    if len(places) < 2:
        return
    for index, (at, pid, tid) in enumerate(places):
        phase = "s" if index == 0 else "f" if index == len(places) - 1 else "t"
        event = {"ph": phase, "id": number, "name": name, "cat": "collective", "pid": pid, "tid": tid, "ts": micro(at)}
        yield event | ({"bp": "e"} if phase == "f" else {})


def micro(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e6, 3) if math.isfinite(seconds) else 0.0


def write(path: str | os.PathLike[str], events: Iterable[Event], metadata: Mapping[str, Any] | None = None) -> None:
    """Write the events to `path` one by one, since there may be millions; gzip-compressed if the path ends in .gz.

    An existing file is replaced only once everything is written. Raises OSError if the file cannot be written."""
    path = Path(path)
    with replacing(path) as file:
        metadata_json = json.dumps(metadata or {}, allow_nan=False)
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {metadata_json}, "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event, allow_nan=False))
        file.write("\n]}\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """Open a new text file that replaces `path` at the end of the block, unless the block raises."""
    if path.exists() and not path.is_file():  # a pipe or a terminal cannot be replaced
        with open(path, "w") as file:
            yield file
        return
    part = path.with_name(f".{path.name}.{secrets.token_urlsafe(6)}")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask, as a new file
    except OSError as error:  # it names the temporary file, which the caller does not know
        raise type(error)(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "wb") as binary:
            if path.exists():
                os.fchmod(handle, path.stat().st_mode & 0o777)
            if path.suffix == ".gz":
                with gzip.open(binary, "wt", encoding="utf-8", compresslevel=5) as file:
                    yield file
            else:
                with open(binary.fileno(), "w", encoding="utf-8", closefd=False) as text:
                    yield text
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
