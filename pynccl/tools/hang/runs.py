"""Which processes are of one run of a program. Two runs may use the same port, and leave records in the same folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...watch.records import DEAD, RUNNING, STOPPED, ProcessRecord
from .clean import line

LIVING = (RUNNING, STOPPED)

Run = list[ProcessRecord]


def runs(records: Iterable[ProcessRecord]) -> list[Run]:
    """Those that live first, then the newest. A process that was read twice counts once, the newer look.

    Ranks that share a communicator are of one run: its name is drawn anew each time. So are those of jobs with one
    name that have not met yet, unless they cannot be: two have the same RANK, or all of one part had ended before the
    other one was started."""
    found: list[Run] = []
    newest: dict[str, int] = {}  # of the runs of a name
    for part in sorted(_met(_once(records)), key=lambda part: min(map(began, part))):
        names = {one.job for one in part}
        number = max((newest[name] for name in names if name in newest), default=-1)
        if number < 0 or _are_apart(found[number], part):
            number = len(found)
            found.append([])
        found[number] += part
        newest.update(dict.fromkeys(names, number))
    return sorted(found, key=lambda run: (lives(run), max(map(last_seen, run))), reverse=True)


def lives(run: Run) -> bool:
    return any(one.state in LIVING for one in run)


def last_seen(process: ProcessRecord) -> float:
    """The last time that it is known to have lived."""
    return max(process.started, process.heartbeat, process.end_at)


def name_of(run: Run) -> str:
    """That of its job; of a run on several machines, of all the names that it has there."""
    names = list(dict.fromkeys(one.job for one in run if one.job))
    return " + ".join(names[:3]) + (f" + {len(names) - 3} more" if len(names) > 3 else "") or "a job without a name"


def named(found: Sequence[Run]) -> list[tuple[str, Run]]:
    """Each with a name of its own, for --job: that of the job, with "@" and the first one's pid where an earlier one in
    the list has that."""
    names: dict[str, Run] = {}
    for run in found:
        name = name_of(run)
        names[name if name not in names else f"{name}@{min(run, key=began).pid}"] = run
    return list(names.items())


def chosen(found: Sequence[Run], asked: str) -> Run | None:
    """The run with this name, the first one of several; with this name and the pid of one of its processes; or the only
    one whose name has this part. None: there is none."""
    rows = named(found)
    for name, run in rows:
        if asked == name or any(asked in (one.job, f"{one.job}@{one.pid}") for one in run):
            return run
    alike = [run for name, run in rows if asked in name]
    return alike[0] if len(alike) == 1 else None


def listed(found: Sequence[Run]) -> str:
    """Their names, a line each."""
    return "\n  ".join(line(name, 160) for name, _ in named(found))


def began(process: ProcessRecord) -> float:
    return process.born or process.started


def _once(records: Iterable[ProcessRecord]) -> Run:
    found: dict[tuple[str, int, float], ProcessRecord] = {}
    for one in sorted(records, key=lambda one: one.now):
        found[one.machine or one.host, one.pid, one.started] = one
    return list(found.values())


def _met(processes: Run) -> list[Run]:
    """Those that share a communicator together, others alone."""
    above: dict[str, str] = {}

    def root(name: str) -> str:
        while above.setdefault(name, name) != name:
            above[name] = name = above[above[name]]
        return name

    for number, one in enumerate(processes):
        for comm in one.comms:
            for uid in filter(None, (comm.uid, *comm.aliases)):
                above[root(f"comm {uid}")] = root(f"process {number}")
    found: dict[str, Run] = {}
    for number, one in enumerate(processes):
        found.setdefault(root(f"process {number}"), []).append(one)
    return list(found.values())


def _are_apart(run: Run, part: Run) -> bool:
    """Whether what was started later cannot be of the same run."""
    if {one.rank for one in run if one.rank >= 0} & {one.rank for one in part}:
        return True
    for machine in {one.machine or one.host for one in part}:
        here = [one for one in run if (one.machine or one.host) == machine]
        later = [one.born for one in part if (one.machine or one.host) == machine]
        if here and all(one.state == DEAD for one in here) and max(map(last_seen, here)) < min(later):
            return True
    return False
