"""Read records (recorder files, folders of them, saved JSON, torch's dumps) and group them into jobs."""

from __future__ import annotations

import functools
import glob
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...bindings.values import counted
from ...watch import folder, reader
from ...watch.findings import Priority
from ...watch.formatting import clean, ranks_text
from ...watch.layout import printable
from ...watch.records import DEAD, RUNNING, STOPPED, ProcessRecord, from_json
from ...watch.verdict import Verdict, judge
from . import torch_dumps

MIN_WAIT = 2.0  # seconds; shorter waits are normal in a running job
MIN_WAIT_IN_DUMP = 10.0  # torch takes seconds to write a dump, whose time is that of its file
_MAX_NAMES = 5  # of jobs, in an error
_LONG, _SHORT = 24, 8  # characters of a name that is shortened, and of the shortest one that replaces it


class NothingFoundError(ValueError):
    """No record was found; the message says what was searched for, where, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text, lines=True))


@dataclass
class Job:
    """One run of a program: its processes, and its name for --job. Times are seconds since the epoch."""

    name: str
    processes: list[ProcessRecord] = field(default_factory=list)

    @property
    def living(self) -> int:
        """Number of processes that are known to be alive."""
        return sum(process.state in (RUNNING, STOPPED) for process in self.processes)

    @property
    def exited(self) -> bool:
        """Whether all its known processes have exited without an exception."""
        return all(process.exited_cleanly for process in self.processes)

    @functools.cached_property
    def verdict(self) -> Verdict:
        if self.exited:
            text = f"the job has ended without an exception: {self.known_ranks}."
            return Verdict("finished", Priority.CONSEQUENCE, text)
        return judge(self.processes, min_wait=self._min_wait)

    @property
    def _min_wait(self) -> float:
        if any(process.pid < 0 for process in self.processes):
            return MIN_WAIT_IN_DUMP
        return MIN_WAIT if any(process.state == RUNNING for process in self.processes) else 0.0

    @property
    def known_ranks(self) -> str:
        """Its ranks, for messages: "4 ranks", or "ranks 0 and 1 of 4" if there are records of these."""
        comms = [comm for process in self.processes for comm in process.comms]
        size = max((comm.size for comm in comms), default=len(self.processes))
        known = {comm.rank for comm in comms if comm.size == size}
        return f"{ranks_text(known)} of {size}" if 0 < len(known) < size else counted(size, "rank")

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sort key: the largest is of a job that hangs, else of one that runs, else of the one that ended last."""
        return (
            bool(self.living and self.verdict.wrong),
            self.living > 0,
            self.started if self.living else self.last_seen,
        )

    @property
    def started(self) -> float:
        return min(map(_began, self.processes))

    @property
    def last_seen(self) -> float:
        """When one of its processes was last known to be alive."""
        return max(map(_last_seen, self.processes))

    @property
    def command(self) -> str:
        """Command line of the lowest rank."""
        return min(self.processes, key=lambda process: (process.rank < 0, process.rank, _began(process))).command

    def short_name(self, every: Iterable[Job]) -> str:
        """Return the beginning of the name that no other job has, for --job."""
        others = [job.name for job in every if job is not self]
        ends = range(_SHORT, len(self.name)) if len(self.name) > _LONG else ()
        shorter = (self.name[:end] for end in ends)
        return next((name for name in shorter if not any(other.startswith(name) for other in others)), self.name)


def to_json(job: Job) -> dict[str, Any]:
    """Return the entry of a job in --list --json."""
    return {
        "job": job.name,
        "living": job.living,
        "processes": len(job.processes),
        "started": job.started,
        "last_seen": job.last_seen,
        "program": job.command,
    }


def find(places: Sequence[str], name: str | None) -> tuple[Job, list[Job], list[str]]:
    """Return the job of this name, the other jobs, and one text per unreadable file. Its processes on this node write
    their stacks first.

    name  a job's name, or the beginning of it; None: see Job.order"""
    found, problems = read(places)
    job = _chosen(found, name)
    if reader.ask(job.processes):
        found, problems = read(places)
        first = job.processes[0]
        job = _chosen(found, name or f"{first.job}@{first.pid}")
    return job, [other for other in found if other is not job], problems


def _chosen(found: Sequence[Job], name: str | None) -> Job:
    """Select a job by its name, the beginning of it, or "name@PID" of any of its processes."""
    if name is None:
        return found[0]
    for job in found:
        if name == job.name or any(name in (process.job, f"{process.job}@{process.pid}") for process in job.processes):
            return job
    alike = [job for job in found if job.name.startswith(name)]
    if len(alike) == 1:
        return alike[0]
    some = [clean(job.short_name(found)) for job in (alike or found)[:_MAX_NAMES]]
    wrong = "several jobs begin with this" if alike else "no such job"
    raise NothingFoundError(f"--job {name}: {wrong}; --list shows all, such as\n" + "\n".join(some))


def read(places: Sequence[str]) -> tuple[list[Job], list[str]]:
    """Return the jobs in these places (default: the user's folder) and the problems. Raises NothingFoundError."""
    records: list[ProcessRecord] = []
    dumps: list[torch_dumps.Dump] = []
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
            paths += torch_dumps.paths_in(place) + folder.files(place, folder.ENDED)
        for path in paths:
            try:
                content = _read_file(path)
                if isinstance(content, torch_dumps.Dump):
                    dumps.append(content)
                else:
                    records += content
            except (OSError, ValueError, RecursionError) as error:
                why = str(error) or type(error).__name__
                problems.append(why if path in why else f"{path}: {why}")
    records += torch_dumps.records(dumps)
    if records:
        return group(records), problems
    if places:
        expected = problems or ["expected *.watch files, saved --json output, dumps of torch, or folders of them"]
        raise NothingFoundError("\n".join([f"no record in {', '.join(places)}", *expected]))
    raise NothingFoundError(
        f"no records in {folder.base()}\n"
        "was the job started with PYNCCL_WATCH=off, by another user, or with another PYNCCL_WATCH_DIR?\n"
        "to read another folder: python -m pynccl hang DIR"
    )


def _read_file(path: str) -> list[ProcessRecord] | torch_dumps.Dump:
    """Return the record of a process; the processes in a saved `hang --json`, from this or another node; or a dump."""
    first = torch_dumps.first_byte(path)
    if first == torch_dumps.PICKLE:
        return torch_dumps.read(path, torch_dumps.unpickled(path))
    if first != b"{" and not path.endswith(".json"):
        return [reader.read_file(path)]
    with open(path, encoding="utf-8") as file:
        values: Any = json.load(file)
    if torch_dumps.is_dump(values):
        return torch_dumps.read(path, values)
    if not isinstance(values, dict) or not isinstance(values.get("processes"), list):
        raise ValueError('not the output of `python -m pynccl hang --json`: expected an object with "processes"')
    return [from_json(process) for process in values["processes"]]


# Group processes into runs. Two runs may use the same port, and then share the job name and the folder.


def group(records: Iterable[ProcessRecord]) -> list[Job]:
    """Return the jobs, by Job.order. Of two records of one process, the newer one counts.

    Processes that share a communicator belong to one run, because its uid is unique. Processes without a common
    communicator join the newest run with their job name, unless it already has their rank or ended before they
    started."""
    newest = {
        (_machine(record), record.pid, record.started): record
        for record in sorted(records, key=lambda record: record.now)
    }
    jobs: list[Job] = []
    for part in sorted(_by_communicator(newest.values()), key=lambda part: min(map(_began, part))):
        names = {process.job for process in part}
        run = next((job for job in reversed(jobs) if names & {process.job for process in job.processes}), None)
        if run is None or _different_runs(run.processes, part):
            jobs.append(run := Job(""))
        run.processes += part
    jobs.sort(key=lambda job: job.order, reverse=True)
    taken: set[str] = set()
    for job in jobs:
        job.name = (
            " + ".join(dict.fromkeys(process.job for process in job.processes if process.job)) or "a job without a name"
        )
        if job.name in taken:
            job.name += f"@{min(job.processes, key=_began).pid}"
        taken.add(job.name)
    return jobs


def _by_communicator(processes: Iterable[ProcessRecord]) -> list[list[ProcessRecord]]:
    """Group processes that share a communicator, directly or through other processes."""
    parts: list[tuple[set[str], list[ProcessRecord]]] = []
    for process in processes:
        uids, together = process.uids(), [process]
        for part in [part for part in parts if part[0] & uids]:
            parts.remove(part)
            uids, together = uids | part[0], part[1] + together
        parts.append((uids, together))
    return [part for _, part in parts]


def _different_runs(run: Sequence[ProcessRecord], part: Sequence[ProcessRecord]) -> bool:
    """Return whether processes that started later cannot belong to this run."""
    if {process.rank for process in run if process.rank >= 0} & {process.rank for process in part}:
        return True
    for machine in set(map(_machine, part)):  # clocks of different nodes are not comparable
        here = [process for process in run if _machine(process) == machine]
        later = min(process.born for process in part if _machine(process) == machine)  # 0: unknown
        if here and all(process.state == DEAD for process in here) and max(map(_last_seen, here)) < later:
            return True
    return False


def _machine(process: ProcessRecord) -> str:
    return process.machine or process.host


def _last_seen(process: ProcessRecord) -> float:
    return max(process.started, process.heartbeat, process.end_at)


def _began(process: ProcessRecord) -> float:
    return process.born or process.started
