"""The records that the tool reads (files of recorders, folders of them, saved JSON), and which job each belongs to."""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...watch import folder, reader
from ...watch.layout import printable
from ...watch.records import DEAD, RUNNING, STOPPED, ProcessRecord, from_json
from .text import columns, cut, plural, seconds

LIVING = (RUNNING, STOPPED)


class NothingFoundError(ValueError):
    """There is nothing to judge; the text says what was looked for, where, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text, lines=True))


@dataclass
class Job:
    """One run of a program: its processes, and the name by which --job finds it."""

    name: str
    processes: list[ProcessRecord] = field(default_factory=list)

    @property
    def living(self) -> int:
        """How many of its processes are known to live."""
        return sum(one.state in LIVING for one in self.processes)

    @property
    def started(self) -> float:
        """Seconds since the epoch."""
        return min(map(_began, self.processes))

    @property
    def last_seen(self) -> float:
        """When one of its processes was last known to live, in seconds since the epoch."""
        return max(map(_last_seen, self.processes))

    @property
    def command(self) -> str:
        """Of the lowest rank."""
        return min(self.processes, key=lambda one: (one.rank < 0, one.rank, _began(one))).command


def find(places: Sequence[str], name: str | None) -> tuple[Job, list[Job], list[str]]:
    """The job of this name (None: the newest with living processes, else the newest), the others, and one text for each
    file that could not be read. Its processes that run on this machine say where they are."""
    found, problems = read(places)
    job = _chosen(found, name)
    if reader.ask(job.processes):
        found, problems = read(places)
        job = _chosen(found, name or job.name)
    return job, [one for one in found if one is not job], problems


def _chosen(found: Sequence[Job], name: str | None) -> Job:
    """By its name, by "name@PID" of any of its processes, or by a part of its name that no other one has."""
    if name is None:
        return found[0]
    for job in found:
        if name == job.name or any(name in (one.job, f"{one.job}@{one.pid}") for one in job.processes):
            return job
    alike = [job for job in found if name in job.name]
    if len(alike) != 1:
        names = "\n".join(cut(job.name, 160) for job in found)
        raise NothingFoundError(f"--job {name}: no job of that name; there are\n{names}")
    return alike[0]


def read(places: Sequence[str]) -> tuple[list[Job], list[str]]:
    """The jobs in these places, else in the user's own folder, and the problems. NothingFoundError if there is none."""
    records: list[ProcessRecord] = []
    problems: list[str] = []
    for place in places or [folder.base()]:
        if places and not os.path.exists(place):
            raise NothingFoundError(f"{place}: no such file or folder")
        found, wrong = _in_place(place)
        records += found
        problems += wrong
    if records:
        return group(records), problems
    if places:
        expected = problems or ["expected files *.watch, folders of them, or what --json has written"]
        raise NothingFoundError("\n".join([f"no record in {', '.join(places)}", *expected]))
    raise NothingFoundError(
        f"no job has left a record in {folder.base()}\n"
        "was it started with PYNCCL_WATCH=off, by another user, or with another PYNCCL_WATCH_DIR?\n"
        "a job that has ended without an error removes its record\n"
        "pass the folder: python -m pynccl hang DIR"
    )


def _in_place(place: str) -> tuple[list[ProcessRecord], list[str]]:
    if os.path.isfile(place):
        return _file(place)
    records, problems = reader.read_folder(place)
    for path in sorted(glob.glob(os.path.join(glob.escape(place), "*.json"))):
        found, wrong = _file(path)
        records += found
        problems += wrong
    return records, problems


def _file(path: str) -> tuple[list[ProcessRecord], list[str]]:
    try:
        return (_from_json(path) if path.endswith(".json") else [reader.read_file(path)]), []
    except (OSError, ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        return [], [why if path in why else f"{path}: {why}"]


def _from_json(path: str) -> list[ProcessRecord]:
    """The processes of an earlier `hang --json`, of this machine or another."""
    with open(path, encoding="utf-8") as file:
        values: Any = json.load(file)
    if not isinstance(values, dict) or not isinstance(values.get("processes"), list):
        raise ValueError('not what `python -m pynccl hang --json` writes: expected an object with "processes"')
    return [from_json(one) for one in values["processes"]]


# Which processes are of one run: two runs may use the same port, and so have the same job name and the same folder.


def group(records: Iterable[ProcessRecord]) -> list[Job]:
    """The jobs, those that live first, then the newest. A process that was read twice counts once, the newer look.

    Ranks that share a communicator are of one run: its name is new in each run. Ranks that have not met belong to the
    newest run of their job's name, unless that has their rank already, or had ended before they were started."""
    newest = {(one.machine or one.host, one.pid, one.started): one for one in sorted(records, key=lambda one: one.now)}
    jobs: list[Job] = []
    for part in sorted(_met(list(newest.values())), key=lambda part: min(map(_began, part))):
        names = {one.job for one in part}
        run = next((job for job in reversed(jobs) if names & {one.job for one in job.processes}), None)
        if run is None or _are_apart(run.processes, part):
            jobs.append(run := Job(""))
        run.processes += part
    jobs.sort(key=lambda job: (job.living > 0, job.last_seen), reverse=True)
    taken: set[str] = set()
    for job in jobs:
        job.name = " + ".join(dict.fromkeys(one.job for one in job.processes if one.job)) or "a job without a name"
        if job.name in taken:
            job.name += f"@{min(job.processes, key=_began).pid}"
        taken.add(job.name)
    return jobs


def _met(processes: Sequence[ProcessRecord]) -> list[list[ProcessRecord]]:
    """Those that share a communicator together, others alone."""
    parts: list[tuple[set[str], list[ProcessRecord]]] = []
    for one in processes:
        uids = {uid for comm in one.comms for uid in (comm.uid, *comm.aliases)}
        shared = [part for part in parts if part[0] & uids]
        parts = [part for part in parts if not part[0] & uids]
        parts.append((uids.union(*(part[0] for part in shared)), [*(p for part in shared for p in part[1]), one]))
    return [part for _, part in parts]


def _are_apart(run: Sequence[ProcessRecord], part: Sequence[ProcessRecord]) -> bool:
    """Whether what was started later cannot be of the same run."""
    if {one.rank for one in run if one.rank >= 0} & {one.rank for one in part}:
        return True
    for machine in {one.machine or one.host for one in part}:  # clocks of two machines are not compared
        here = [one for one in run if (one.machine or one.host) == machine]
        later = min(one.born for one in part if (one.machine or one.host) == machine)  # 0: not known
        if here and all(one.state == DEAD for one in here) and max(map(_last_seen, here)) < later:
            return True
    return False


def _last_seen(process: ProcessRecord) -> float:
    return max(process.started, process.heartbeat, process.end_at)


def _began(process: ProcessRecord) -> float:
    return process.born or process.started


# --list


def as_json(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Times in seconds since the epoch."""
    return [
        {
            "job": job.name,
            "living": job.living,
            "processes": len(job.processes),
            "started": job.started,
            "last_seen": job.last_seen,
            "program": job.command,
        }
        for job in jobs
    ]


def listed(jobs: Iterable[Job]) -> list[str]:
    """A row for each job."""
    now = time.time()
    rows = [["job", "state", "processes", "started", "program"]]
    for job in jobs:
        running = "running" if job.living == len(job.processes) else f"{job.living} running"
        state = running if job.living else f"seen {seconds(now - job.last_seen)} ago"
        started = f"{seconds(now - job.started)} ago" if job.started else "?"
        words = job.command.split(" ")
        program = " ".join([*map(os.path.basename, words[:2]), *words[2:]])
        rows.append([cut(job.name, 80), state, f"{len(job.processes):,}", started, cut(program, 60)])
    return columns(rows)


def summary(job: Job) -> str:
    """ "4 processes, 2 of them running"."""
    running = f"{job.living} of them running" if job.living else "none of them running here"
    return f"{plural(len(job.processes), 'process')}, {running}"
