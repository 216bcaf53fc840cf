"""The records that the tool reads (files of recorders, folders of them, saved JSON), and which job each belongs to."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...watch import folder, reader
from ...watch.formatting import clean
from ...watch.layout import printable
from ...watch.records import DEAD, RUNNING, STOPPED, ProcessRecord, from_json


class NothingFoundError(ValueError):
    """There is nothing to judge; the text says what was looked for, where, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text, lines=True))


@dataclass
class Job:
    """One run of a program: its processes, and the name by which --job finds it. Times in seconds since the epoch."""

    name: str
    processes: list[ProcessRecord] = field(default_factory=list)

    @property
    def living(self) -> int:
        """How many of its processes are known to live."""
        return sum(one.state in (RUNNING, STOPPED) for one in self.processes)

    @property
    def started(self) -> float:
        return min(map(_began, self.processes))

    @property
    def last_seen(self) -> float:
        """When one of its processes was last known to live."""
        return max(map(_last_seen, self.processes))

    @property
    def command(self) -> str:
        """Of the lowest rank."""
        return min(self.processes, key=lambda one: (one.rank < 0, one.rank, _began(one))).command


def to_json(job: Job) -> dict[str, Any]:
    """What --list says of a job, as values for json.dumps."""
    return {
        "job": job.name,
        "living": job.living,
        "processes": len(job.processes),
        "started": job.started,
        "last_seen": job.last_seen,
        "program": job.command,
    }


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
    """By its name, or by "name@PID" of any of its processes."""
    if name is None:
        return found[0]
    for job in found:
        if name == job.name or any(name in (one.job, f"{one.job}@{one.pid}") for one in job.processes):
            return job
    names = "\n".join(clean(job.name) for job in found)
    raise NothingFoundError(f"--job {name}: no job of that name; there are\n{names}")


def read(places: Sequence[str]) -> tuple[list[Job], list[str]]:
    """The jobs in these places, else in the user's own folder, and the problems. NothingFoundError if there is none."""
    records: list[ProcessRecord] = []
    problems: list[str] = []
    for place in places or [folder.base()]:
        if places and not os.path.exists(place):
            raise NothingFoundError(f"{place}: no such file or folder")
        paths = [place]
        if not os.path.isfile(place):
            found, wrong = reader.read_folder(place)
            records += found
            problems += wrong
            paths = sorted(glob.glob(os.path.join(glob.escape(place), "*.json")))
        for path in paths:
            try:
                records += _from_json(path) if path.endswith(".json") else [reader.read_file(path)]
            except (OSError, ValueError, RecursionError) as error:
                why = str(error) or type(error).__name__
                problems.append(why if path in why else f"{path}: {why}")
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
    newest = {(_machine(one), one.pid, one.started): one for one in sorted(records, key=lambda one: one.now)}
    jobs: list[Job] = []
    for part in sorted(_met(newest.values()), key=lambda part: min(map(_began, part))):
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


def _met(processes: Iterable[ProcessRecord]) -> list[list[ProcessRecord]]:
    """Those that share a communicator together, others alone."""
    parts: list[tuple[set[str], list[ProcessRecord]]] = []
    for one in processes:
        uids, together = one.uids(), [one]
        for part in [part for part in parts if part[0] & uids]:
            parts.remove(part)
            uids, together = uids | part[0], part[1] + together
        parts.append((uids, together))
    return [part for _, part in parts]


def _are_apart(run: Sequence[ProcessRecord], part: Sequence[ProcessRecord]) -> bool:
    """Whether what was started later cannot be of the same run."""
    if {one.rank for one in run if one.rank >= 0} & {one.rank for one in part}:
        return True
    for machine in set(map(_machine, part)):  # clocks of two machines are not compared
        here = [one for one in run if _machine(one) == machine]
        later = min(one.born for one in part if _machine(one) == machine)  # 0: not known
        if here and all(one.state == DEAD for one in here) and max(map(_last_seen, here)) < later:
            return True
    return False


def _machine(process: ProcessRecord) -> str:
    return process.machine or process.host


def _last_seen(process: ProcessRecord) -> float:
    return max(process.started, process.heartbeat, process.end_at)


def _began(process: ProcessRecord) -> float:
    return process.born or process.started
