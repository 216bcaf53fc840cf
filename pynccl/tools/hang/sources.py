"""What the tool reads: recorders' files, folders of them, or the JSON of an earlier run; and which job is meant."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ...watch.records import RUNNING, STOPPED, ProcessRecord, from_json

_MOST_BYTES = 1 << 28  # of a JSON file
_DEPTH = 3  # folders within folders: collected/node0/job
_LIVING = (RUNNING, STOPPED)
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
        return any(one.state in _LIVING for one in self.processes)


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


def jobs(path: str) -> list[str]:
    """Folders of jobs in a base folder, the newest first."""
    from ...watch import folder

    return [str(one) for one in folder.jobs(path)]


def read_folder(path: str) -> tuple[list[ProcessRecord], list[str]]:
    from ...watch import reader

    return reader.read_folder(path)


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


# ------------------------------------------------------------------------------------------- without a folder


def _in_base(folder: str, job: str | None) -> Job:
    """The newest job that has living processes, else the newest; or the one that was named."""
    found = jobs(folder)
    if not found:
        raise NothingFoundError(
            f"no job has left a record in {folder}\n"
            "  was it started with PYNCCL_WATCH=off, by another user, or with another PYNCCL_WATCH_DIR?\n"
            "  a job that has ended without an error removes its record\n"
            "  pass the folder: python -m pynccl hang DIR"
        )
    chosen = _named(found, job, folder) if job else next(filter(_lives, found), found[0])
    processes, problems = read_folder(chosen)
    if not processes:
        raise NothingFoundError("\n  ".join([f"no file in {chosen} could be read:", *problems]))
    others = [(_name(one), "running" if _lives(one) else "ended") for one in found if one != chosen]
    return Job(_name(chosen), processes, [chosen], problems, others)


def _named(found: list[str], job: str, folder: str) -> str:
    for one in found:
        if _name(one) == job:
            return one
    alike = [one for one in found if job in _name(one)]
    if len(alike) == 1:
        return alike[0]
    _no_such_job(job, folder, map(_name, alike or found))


def _no_such_job(job: str, where: str, names: Iterable[str]) -> NoReturn:
    rows = "\n  ".join(names)
    raise NothingFoundError(f"--job {job}: no job of that name in {where}; there are\n  {rows}")


def _name(path: str) -> str:
    return os.path.basename(os.path.normpath(path))


def _lives(path: str) -> bool:
    """Whether a process of the job lives, by the names of its files alone: there may be many jobs."""
    from ...watch import folder

    numbers = (re.search(r"-(\d+)-(\d+)\.watch$", one) for one in map(str, folder.files(path)))
    return any(found and folder.started(int(found[1])) == int(found[2]) for found in numbers)


# ------------------------------------------------------------------------------------------- folders and files


def _in_places(places: list[str], job: str | None) -> Job:
    """All that is in these places, which may have been collected from several machines: the job asked for, else that
    with living processes, else the newest."""
    records: list[ProcessRecord] = []
    problems: list[str] = []
    for place in places:
        for found, wrong in _read(place, _DEPTH):
            records += found
            problems += wrong
    if not records:
        raise NothingFoundError(
            "\n  ".join(
                [
                    f"no record in {', '.join(places)}",
                    *(problems or ["expected files *.watch, folders of them, or what --json has written"]),
                ]
            )
        )
    groups = _by_job(records)
    if job:
        asked = [group for group in groups if any(job == one.job for one in group)]
        if not asked:
            _no_such_job(job, ", ".join(places), map(_name_of, groups))
        groups = asked + [group for group in groups if group not in asked]
    return Job(_name_of(groups[0]), groups[0], places, problems, [(_name_of(one), _said(one)) for one in groups[1:]])


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
    if os.path.getsize(path) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES >> 20} MiB")
    with open(path, encoding="utf-8") as file:
        said: Any = json.load(file)
    if not isinstance(said, dict) or not isinstance(said.get("processes"), list):
        raise ValueError('not what `python -m pynccl hang --json` writes: expected an object with "processes"')
    return [from_json(one) for one in said["processes"]]


def _by_job(records: list[ProcessRecord]) -> list[list[ProcessRecord]]:
    """Grouped by the job's name, and by shared communicators where a launch has no name that all its machines know.
    First those that live, then the newest. A process that was read twice counts once, the newer look."""
    once: dict[tuple[str, int, float], ProcessRecord] = {}
    for one in sorted(records, key=lambda one: one.now):
        once[one.machine or one.host, one.pid, one.started] = one
    above: dict[str, str] = {}

    def root(name: str) -> str:
        while above.setdefault(name, name) != name:
            above[name] = name = above[above[name]]
        return name

    for one in once.values():
        for comm in one.comms:
            for uid in filter(None, (comm.uid, *comm.aliases)):
                above[root(f"comm {uid}")] = root(f"job {one.job}")
    by_root: dict[str, list[ProcessRecord]] = {}
    for one in once.values():
        by_root.setdefault(root(f"job {one.job}"), []).append(one)
    groups = list(by_root.values())
    return sorted(groups, key=lambda group: (any(one.state in _LIVING for one in group), _newest(group)), reverse=True)


def _newest(group: list[ProcessRecord]) -> float:
    return max(max(one.started, one.heartbeat, one.end_at) for one in group)


def _name_of(group: list[ProcessRecord]) -> str:
    names = list(dict.fromkeys(one.job for one in group if one.job))
    return " + ".join(names[:3]) + (f" + {len(names) - 3} more" if len(names) > 3 else "") or "a job without a name"


def _said(group: list[ProcessRecord]) -> str:
    living = sum(one.state in _LIVING for one in group)
    return f"{len(group)} processes, " + (f"{living} of them running" if living else "none of them running here")
