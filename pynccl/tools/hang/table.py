"""What each rank is doing, as rows; of many ranks those that do the same share one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...watch.formatting import ago, call_name, clean, numbers, place, seconds
from ...watch.records import DEAD, FAILED, INSIDE, ISSUED, STOPPED, CallRecord, CommRecord, ProcessRecord

APART = 8  # up to so many ranks each has a row of its own
MOST = 40  # rows
_DOING = {INSIDE: "inside", ISSUED: "issued", FAILED: "failed in"}
_Call = tuple[CommRecord, CallRecord]


@dataclass
class RankRow:
    """One rank, or several that do the same.

    doing   what, and in `since` for how many seconds (of several ranks the longest); after: the word behind the time
    where   the main thread's line; of a process that has ended, how; ago: when that was seen, of the first rank
    """

    ranks: list[int]
    processes: list[ProcessRecord]
    state: str
    entered: str = "-"
    completed: str = "-"
    doing: str = "no call yet"
    since: float = 0.0
    after: str = ""
    where: str = ""
    ago: str = ""


def rank_of(process: ProcessRecord) -> int:
    """Of the launch; without one, that of its first communicator. -1: it has none."""
    return process.rank if process.rank >= 0 or not process.comms else process.comms[0].rank


def open_call(comms: Iterable[CommRecord], everywhere: Mapping[str, int] | None = None) -> _Call | None:
    """The call that it is inside, else the oldest that is not known to have completed.

    everywhere  uid -> the last collective that all ranks have entered: those up to it do not wait for a rank"""
    found = [(comm, call) for comm in comms if not comm.ended for call in comm.calls if call.state in (INSIDE, ISSUED)]

    def order(one: _Call) -> tuple[bool, bool, float, int]:
        comm, call = one
        met = 0 < call.number <= (everywhere or {}).get(comm.uid, 0) < comm.entered
        return call.state != INSIDE, met, call.issued, call.entry

    return min(found, key=order, default=None)


def _last_call(comms: Iterable[CommRecord]) -> _Call | None:
    found = [(comm, call) for comm in comms if (call := comm.last())]
    return max(found, key=lambda one: (one[1].issued, one[1].entry), default=None)


def rows(processes: Sequence[ProcessRecord], concerned: Collection[str] = (), all_apart: bool = False) -> list[RankRow]:
    """One a rank, in their order; of many ranks those that do the same together.

    concerned  uids of communicators that are shown, where a rank is not inside a call of another one"""
    everywhere: dict[str, int] = {}
    for comm in (comm for process in processes for comm in process.comms):
        everywhere[comm.uid] = min(comm.entered, everywhere.get(comm.uid, comm.entered))
    single = []
    for process in processes:
        for rank, comms in _members(process).items():
            first = [comm for comm in comms if comm.uid in concerned]
            found = open_call(first, everywhere) or open_call(comms, everywhere) or _last_call(first)
            single.append(_row(process, rank, comms, found or _last_call(comms)))
    single.sort(key=lambda row: (row.ranks, row.processes[0].host, row.processes[0].pid))
    if all_apart or len(single) <= APART:
        return single
    merged: dict[tuple[str, ...], RankRow] = {}
    for row in single:
        same = merged.setdefault((row.state, row.entered, row.completed, row.doing, row.where), row)
        if same is not row:
            same.ranks += row.ranks
            same.processes += row.processes
            same.since = max(same.since, row.since)
    shared = list(merged.values())
    return shared if len(shared) <= MOST else sorted(shared, key=lambda row: -len(row.ranks))


def _members(process: ProcessRecord) -> dict[int, list[CommRecord]]:
    """The ranks that this process is: one of each process in most jobs, several where it made them all by itself."""
    if len({comm.uid for comm in process.comms}) == len(process.comms):
        return {rank_of(process): process.comms}
    by_rank: dict[int, list[CommRecord]] = {}
    for comm in process.comms:
        by_rank.setdefault(comm.rank, []).append(comm)
    return by_rank


def _row(process: ProcessRecord, rank: int, comms: Sequence[CommRecord], found: _Call | None) -> RankRow:
    over = bool(process.end) or process.state == DEAD
    row = RankRow([rank], [process], "ended" if over and process.state != DEAD else process.state)
    row.where, row.ago = _end(process) if over else _where(process, found and found[1])
    if found is not None:
        comm, call = found
        row.entered, row.completed = (str(one) if one else "-" for one in (comm.entered, comm.completed))
        several = len([one for one in comms if not one.ended]) > 1
        was = "was " if over and call.state == INSIDE else ""
        row.doing = f"{was}{_DOING.get(call.state, 'done')} {call_name(call)}" + (
            f" {comm_name(comm)}" if several else ""
        )
        began = call.issued if call.state in (INSIDE, ISSUED) else call.completed or call.returned or call.issued
        until = (process.end_at or process.heartbeat) if over else process.now  # it may have been gone for hours
        row.since = until - began if until and began else 0.0
        row.after = "" if call.state == INSIDE else " before" if over else " ago"
    return row


def _end(process: ProcessRecord) -> tuple[str, str]:
    text = clean(process.end, 40) or "killed or crashed"
    text += f" at {place(process.end_site)}" if process.end_site else ""
    when = ago(process, process.end_at)
    return text, f",{when}" if when else ""


def _where(process: ProcessRecord, call: CallRecord | None) -> tuple[str, str]:
    """Where the main thread is or has been; where nothing newer is known, by its call."""
    if process.where:
        age = process.seen_ago
        return place(process.where), f", seen {seconds(age)} ago" if age else ""
    if process.state == STOPPED:
        return "stopped by a signal or a debugger", ""
    if call is None or not call.site:
        return "?", ""
    return place(call.site) if call.state == INSIDE else f"after {place(call.site)}", ""


def comm_name(comm: CommRecord) -> str:
    return f"'{clean(comm.name, 24)}'"


def text(found: Sequence[RankRow], most: int = MOST) -> list[str]:
    """The table; "(8)" is 8 of them."""
    head = ["rank", "pid", "state", "entered", "done", "doing", "for", "main thread"]
    several = len({process.host for row in found for process in row.processes}) > 1
    lines = columns([head, *(_cells(row, several) for row in found[:most])])
    if found[most:]:
        others = sum(len(row.ranks) for row in found[most:])
        lines.append(f"... {len(found) - most:,} more rows, of {others:,} ranks: --all has a row for each rank")
    return lines


def _cells(row: RankRow, several_hosts: bool) -> list[str]:
    pids = {(process.host, process.pid) for process in row.processes}
    pid = str(row.processes[0].pid) + (f" on {clean(row.processes[0].host, 16)}" if several_hosts else "")
    return [
        numbers(row.ranks, 3) if row.ranks[0] >= 0 else "-",
        pid if len(pids) == 1 else f"({len(pids):,})",
        row.state,
        row.entered,
        row.completed,
        row.doing,
        seconds(row.since) + row.after if row.since else "",
        row.where + row.ago,
    ]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows with their cells aligned, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
