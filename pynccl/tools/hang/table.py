"""What each rank is doing, as rows; ranks that do the same share one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ...watch.job import seen_ago
from ...watch.records import DEAD, FAILED, INSIDE, ISSUED, STOPPED, CallRecord, CommRecord, ProcessRecord
from .clean import cut, known, line, place, ranks, seconds

APART = 8  # up to so many ranks each has a row of its own
MOST = 40  # rows
WIDTH = 100
_RANKS = 22
_DASH = "-"
_ENDED = "ended"
_LABEL = {DEAD: "how it ended", _ENDED: "how it ended"}


@dataclass
class Row:
    """One rank, or several that do the same.

    doing, since  what, and for how many seconds, by the clock of each one's machine: [] where that is not known
    where, ended  the main thread's place, and how many seconds ago it was seen if not just now; of processes that have
                  ended how, and how many seconds ago
    """

    ranks: list[int]
    processes: list[ProcessRecord]
    state: str
    entered: str
    completed: str
    doing: str
    since: list[float]
    after: str
    where: str
    ended: list[float]


def rank_of(process: ProcessRecord) -> int:
    """Of the launch; without one, that of its first communicator. -1: it has none."""
    return process.rank if process.rank >= 0 or not process.comms else process.comms[0].rank


def open_call(
    comms: Iterable[CommRecord], everywhere: Mapping[str, int] | None = None
) -> tuple[CommRecord, CallRecord] | None:
    """The call that it is inside, else the oldest that is not known to have completed.

    everywhere  uid -> the last collective that all ranks have entered: those up to it do not wait for a rank"""
    found = [(comm, call) for comm in comms if not comm.ended for call in comm.calls if call.state in (INSIDE, ISSUED)]

    def order(one: tuple[CommRecord, CallRecord]) -> tuple[bool, bool, float, int]:
        comm, call = one
        met = 0 < call.number <= (everywhere or {}).get(comm.uid, 0) < comm.entered
        return call.state != INSIDE, met, call.issued, call.entry

    return min(found, key=order, default=None)


def last_call(comms: Iterable[CommRecord]) -> tuple[CommRecord, CallRecord] | None:
    found = [(comm, call) for comm in comms if (call := comm.last())]
    return max(found, key=lambda one: (one[1].issued, one[1].entry), default=None)


def rows(processes: list[ProcessRecord], concerned: Collection[str] = (), all_apart: bool = False) -> list[Row]:
    """One a rank, in their order; of many ranks those that do the same together.

    concerned  uids of communicators of which to tell, where a rank is not inside a call of another one"""
    everywhere: dict[str, int] = {}
    for comm in (comm for process in processes for comm in process.comms):
        everywhere[comm.uid] = min(comm.entered, everywhere.get(comm.uid, comm.entered))
    single = [
        _row(process, rank, comms, set(concerned), everywhere)
        for process in processes
        for rank, comms in _members(process)
    ]
    single.sort(key=lambda row: (row.ranks, row.processes[0].host, row.processes[0].pid))
    if all_apart or len(single) <= APART:
        return single
    merged: dict[tuple[str, ...], Row] = {}
    for row in single:
        key = (row.state, row.entered, row.completed, row.doing, row.where)
        if key in merged:
            merged[key].ranks += row.ranks
            merged[key].processes += row.processes
            merged[key].since += row.since
            merged[key].ended += row.ended
        else:
            merged[key] = row
    found = list(merged.values())
    return found if len(found) <= MOST else sorted(found, key=lambda row: -len(row.ranks))


def _members(process: ProcessRecord) -> list[tuple[int, list[CommRecord]]]:
    """The ranks that this process is: one of each process in most jobs, several where it made them all by itself."""
    uids = [comm.uid for comm in process.comms]
    if len(set(uids)) == len(uids):
        return [(rank_of(process), process.comms)]
    by_rank: dict[int, list[CommRecord]] = {}
    for comm in process.comms:
        by_rank.setdefault(comm.rank, []).append(comm)
    return sorted(by_rank.items())


def _row(
    process: ProcessRecord, rank: int, comms: list[CommRecord], concerned: set[str], everywhere: Mapping[str, int]
) -> Row:
    first = [comm for comm in comms if concerned.intersection((comm.uid, *comm.aliases))]
    found = open_call(first, everywhere) or open_call(comms, everywhere) or last_call(first) or last_call(comms)
    row = Row([rank], [process], line(process.state), _DASH, _DASH, "no call yet", [], "", place(process.where), [])
    if process.end or process.state == DEAD:
        row.state = DEAD if process.state == DEAD else _ENDED
        row.where = line(process.end, 80) or "killed or crashed"
        row.where += f" at {place(process.end_site)}" if process.end_site else ""
        row.ended = [process.now - process.end_at] if known(process.end_at) and known(process.now) else []
    elif not row.where:
        row.where = "stopped by a signal or a debugger" if row.state == STOPPED else _last_line(found and found[1])
    elif age := seen_ago(process):
        row.ended = [age]
    if found is not None:
        comm, call = found
        row.entered, row.completed = (str(one) if one else _DASH for one in (comm.entered, comm.completed))
        several = len([one for one in comms if not one.ended]) > 1
        row.doing, moment, row.after = _doing(call, f" {comm_name(comm)}" if several else "")
        if row.state in _LABEL:
            _as_it_ended(row, process, call)
        elif known(moment) and known(process.now):
            row.since = [process.now - moment]
    return row


def _last_line(call: CallRecord | None) -> str:
    """Where the main thread is or has been, by its call."""
    if call is None or not call.site:
        return "?"
    return place(call.site) if call.state == INSIDE else f"after {place(call.site)}"


def _as_it_ended(row: Row, process: ProcessRecord, call: CallRecord) -> None:
    """What it was doing then, and for how long: by now it may have been gone for hours."""
    end = process.end_at if known(process.end_at) else process.heartbeat
    began = call.issued if call.state in (INSIDE, ISSUED) else call.completed or call.returned or call.issued
    row.since = [end - began] if known(end) and known(began) else []
    row.doing, row.after = ("was " + row.doing, "") if call.state == INSIDE else (row.doing, " before")


def comm_name(comm: CommRecord) -> str:
    return f"'{line(comm.name, 24)}'"


def call_name(call: CallRecord) -> str:
    """ "all_reduce #41", "send to 3", "recv from 0", "broadcast #7"."""
    name = line(call.operation, 32)
    if call.collective:
        return f"{name} #{call.number}"
    if call.peer >= 0:
        return f"{name} {'from' if 'recv' in name or 'wait' in name else 'to'} {call.peer}"
    return name


def _doing(call: CallRecord, comm: str) -> tuple[str, float, str]:
    """What, since when, and the word behind the time."""
    name = call_name(call) + comm
    if call.state == INSIDE:
        return f"inside {name}", call.issued, ""
    if call.state == ISSUED:
        return f"issued {name}", call.issued, " ago"
    if call.state == FAILED:
        return f"failed in {name}", call.returned or call.issued, " ago"
    return f"done {name}", call.completed or call.returned or call.issued, " ago"


def span(times: list[float], after: str) -> str:
    """ "12.3 s", "12.1 to 12.9 s": of several ranks the shortest and the longest."""
    if not times:
        return ""
    low, high = seconds(min(times)), seconds(max(times))
    if low == high:
        return low + after
    return f"{low.removesuffix(' s') if low.count(' ') == high.count(' ') == 1 else low} to {high}{after}"


def text(found: list[Row], most: int = MOST) -> list[str]:
    """The table; "(8)" is 8 of them. Where it would be too wide, the places are on lines of their own."""
    hosts = {line(process.host) for row in found for process in row.processes}
    left_out = found[most:]
    cells = [_cells(row, len(hosts) > 1) for row in found[:most]]
    head = ["rank", "pid", "host", "state", "entered", "done", "doing", "for", "main thread"]
    used = [column for column in range(len(head)) if any(row[column] for row in cells)]
    table = [head, *cells]
    widths = {column: max(len(row[column]) for row in table) for column in used}
    if sum(widths.values()) + 2 * (len(used) - 1) <= WIDTH:
        lines = [_joined(row, used, widths) for row in table]
    else:
        lines = [_joined(head, used[:-1], widths)]
        for row in cells:
            lines += [
                _joined(row, used[:-1], widths),
                cut(f"      {_LABEL.get(row[3], 'main thread')}: {row[-1]}", WIDTH),
            ]
    if left_out:
        others = sum(len(row.ranks) for row in left_out)
        lines.append(f"... {len(left_out):,} more rows, of {others:,} ranks: --all has a row for each rank")
    return lines


def _cells(row: Row, with_host: bool) -> list[str]:
    one = row.processes[0]
    number = ranks(row.ranks, _RANKS) if row.ranks[0] >= 0 else _DASH
    hosts = sorted({line(process.host, 16) for process in row.processes})
    host = hosts[0] if len(hosts) == 1 else f"({len(hosts):,})"
    pids = {(process.host, process.pid) for process in row.processes}
    pid = str(one.pid) if len(pids) == 1 else f"({len(pids):,})"
    ended = span(row.ended, " ago")
    ended = f"seen {ended}" if ended and row.state not in _LABEL else ended
    where = f"{row.where}, {ended}" if ended else row.where
    what = [row.state, row.entered, row.completed, row.doing, span(row.since, row.after), where]
    return [number, pid, host if with_host else "", *what]


def _joined(row: list[str], used: list[int], widths: dict[int, int]) -> str:
    return "  ".join(row[column].ljust(widths[column]) for column in used).rstrip()
