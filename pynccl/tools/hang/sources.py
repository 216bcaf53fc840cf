"""What the tool reads: recorders' files, folders of them, or the JSON of an earlier run; and which job is meant."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...watch.records import RUNNING, ProcessRecord, from_json
from .runs import LIVING, Run, chosen, listed, lives, named, runs

_MOST_BYTES = 1 << 28  # of a JSON file
_DEPTH = 3  # folders within folders: collected/node0/job
_PATIENCE = 2.0  # seconds that a rank of a running job may wait for another


class NothingFoundError(Exception):
    """There is nothing to judge; the text says what was looked for, where, and what to do."""


@dataclass
class Job:
    """The processes of one job, or what else belongs together because it shares a communicator.

    problems  one text for each file that could not be read
    others    the other jobs that were there: (name, what is known of it)
    """

    name: str
    processes: list[ProcessRecord]
    places: list[str]
    problems: list[str] = field(default_factory=list)
    others: list[tuple[str, str]] = field(default_factory=list)

    @property
    def living(self) -> bool:
        return lives(self.processes)


def find(places: list[str], job: str | None) -> Job:
    """The job that was asked for: in these places, else in the user's base folder. Its processes that run on this
    machine say where they are."""
    found = _find(places, job)
    return _find(places, job) if ask(found.processes) else found


def _find(places: list[str], job: str | None) -> Job:
    return _in_places(places, job) if places else _in_base(base(), job)


# What the other modules of watch/ give: they are imported when called.


def base() -> str:
    from ...watch import folder

    return str(folder.base())


def read_folder(path: str, calls: bool = True) -> tuple[list[ProcessRecord], list[str]]:
    from ...watch import reader

    return reader.read_folder(path, calls=calls)


def read_file(path: str) -> ProcessRecord:
    from ...watch import reader

    return reader.read_file(path)


def ask(processes: list[ProcessRecord]) -> bool:
    """Have them write down where their threads are; whether to read their files anew."""
    from ...watch import reader

    return reader.ask(processes)


def judge(processes: list[ProcessRecord]) -> Any:
    """The verdict. In a job that runs, ranks always wait for each other a little."""
    from ...watch import verdict

    alive = any(process.state == RUNNING for process in processes)
    return verdict.judge(processes, patience=_PATIENCE if alive else 0.0)


def render(verdict_: Any) -> str:
    from ...watch import verdict

    return verdict.render(verdict_)


# ------------------------------------------------------------------------------------------- which runs there are


def all_runs(places: list[str]) -> tuple[list[Run], list[str]]:
    """What there is in these places, else in the user's base folder, where the calls are left out; and the problems
    met."""
    if not places:
        return _runs_in_base(base())
    records: list[ProcessRecord] = []
    problems: list[str] = []
    for place in places:
        for found, wrong in _read(place, _DEPTH):
            records += found
            problems += wrong
    if not records:
        expected = problems or ["expected files *.watch, folders of them, or what --json has written"]
        raise NothingFoundError("\n  ".join([f"no record in {', '.join(places)}", *expected]))
    return runs(records), problems


def _runs_in_base(folder: str) -> tuple[list[Run], list[str]]:
    records, problems = read_folder(folder, calls=False)
    if not records and problems:
        raise NothingFoundError("\n  ".join([f"no file in {folder} could be read:", *problems]))
    if not records:
        raise NothingFoundError(
            f"no job has left a record in {folder}\n"
            "  was it started with PYNCCL_WATCH=off, by another user, or with another PYNCCL_WATCH_DIR?\n"
            "  a job that has ended without an error removes its record\n"
            "  pass the folder: python -m pynccl hang DIR"
        )
    return runs(records), problems


def _in_base(folder: str, job: str | None) -> Job:
    """The newest job that has living processes, else the newest; or the one that was named."""
    found, problems = _runs_in_base(folder)
    run = _asked(found, job, folder)
    processes: list[ProcessRecord] = []
    for one in run:
        records, wrong = _file(one.path) if os.path.exists(one.path) else ([], [])  # it has ended well meanwhile
        processes += records
        problems += wrong
    return _job(found, run, processes or run, [folder], problems)


def _in_places(places: list[str], job: str | None) -> Job:
    """All that is in these places, which may have been collected from several machines: the job asked for, else that
    with living processes, else the newest."""
    found, problems = all_runs(places)
    run = _asked(found, job, ", ".join(places))
    return _job(found, run, run, places, problems)


def _asked(found: list[Run], job: str | None, where: str) -> Run:
    run = chosen(found, job) if job else found[0]
    if run is None:
        raise NothingFoundError(f"--job {job}: no job of that name in {where}; there are\n  {listed(found)}")
    return run


def _job(found: list[Run], run: Run, processes: Run, places: list[str], problems: list[str]) -> Job:
    names = named(found)
    own = next(name for name, one in names if one is run)
    return Job(own, processes, places, problems, [(name, said(one)) for name, one in names if one is not run])


def said(run: Run) -> str:
    living = sum(one.state in LIVING for one in run)
    count = f"{len(run)} process{'es' if len(run) > 1 else ''}"
    return f"{count}, " + (f"{living} of them running" if living else "none of them running here")


# ------------------------------------------------------------------------------------------- folders and files


def _read(place: str, depth: int) -> Iterable[tuple[list[ProcessRecord], list[str]]]:
    if not os.path.exists(place):
        raise NothingFoundError(f"{place}: no such file or folder")
    if not os.path.isdir(place):
        yield _file(place)
        return
    inside = sorted(os.path.join(place, one) for one in os.listdir(place))
    if not any(one.endswith(".watch") for one in inside) and depth:
        for one in inside:
            if os.path.isdir(one) or one.endswith(".json"):
                yield from _read(one, depth - 1)
        return
    yield read_folder(place)
    for one in inside:
        if one.endswith(".json"):
            yield _file(one)


def _file(path: str) -> tuple[list[ProcessRecord], list[str]]:
    try:
        if path.endswith(".json"):
            return _from_json(path), []
        return [read_file(path)], []
    except (OSError, ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        return [], [why if path in why else f"{path}: {why}"]


def _from_json(path: str) -> list[ProcessRecord]:
    """The processes of an earlier `hang --json`, of this machine or another."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("no regular file")
        if found.st_size > _MOST_BYTES:
            raise ValueError(f"larger than {_MOST_BYTES >> 20} MiB")
        values: Any = json.load(file)
    if not isinstance(values, dict) or not isinstance(values.get("processes"), list):
        raise ValueError('not what `python -m pynccl hang --json` writes: expected an object with "processes"')
    return [from_json(one) for one in values["processes"]]
