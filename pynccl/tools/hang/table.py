"""The table of what each rank is doing; with many ranks, those with the same state share a row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...watch.formatting import ago, call_name, clean, numbers, place, seconds
from ...watch.records import (
    DEAD,
    FAILED,
    INSIDE,
    ISSUED,
    LAUNCHED,
    NOT_KNOWN,
    STOPPED,
    CallRecord,
    CommRecord,
    ProcessRecord,
)

MAX_SINGLE_ROWS = 8  # with up to this many ranks, each has its own row
MAX_ROWS = 40
_DOING = {INSIDE: "inside", ISSUED: "issued", LAUNCHED: "launched", FAILED: "failed in"}
_Call = tuple[CommRecord, CallRecord]


@dataclass
class RankRow:
    """One rank, or several in the same state.

    doing   the call; since: seconds it has been in it (the longest of several ranks); after: suffix of that time
    where   line of the main thread, or how the process ended; ago: when that was observed for the first rank
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
    """Return the global rank, else the rank in the first communicator; -1 without any."""
    return process.rank if process.rank >= 0 or not process.comms else process.comms[0].rank


def open_call(comms: Iterable[CommRecord], everywhere: Mapping[str, int] | None = None) -> _Call | None:
    """Return the call that it is inside, else the oldest call that is not known to have completed.

    everywhere  uid -> the last collective that all ranks have entered: calls up to it wait for no rank"""
    found = [(comm, call) for comm in comms if not comm.ended for call in comm.calls if call.state in (INSIDE, ISSUED)]

    def order(one: _Call) -> tuple[bool, bool, float, int]:
        comm, call = one
        entered_by_all = 0 < call.number <= (everywhere or {}).get(comm.uid, 0) < comm.entered
        return call.state != INSIDE, entered_by_all, call.issued, call.entry

    return min(found, key=order, default=None)


def _last_call(comms: Iterable[CommRecord]) -> _Call | None:
    found = [(comm, call) for comm in comms if (call := comm.last())]
    return max(found, key=lambda pair: (pair[1].issued, pair[1].entry), default=None)


def rows(
    processes: Sequence[ProcessRecord], concerned: Collection[str] = (), row_per_rank: bool = False
) -> list[RankRow]:
    """Return one row per rank, in order; with many ranks, those in the same state are merged.

    concerned  uids of the communicators to show, unless a rank is inside a call of another one"""
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
    if row_per_rank or len(single) <= MAX_SINGLE_ROWS:
        return single
    merged: dict[tuple[str, ...], RankRow] = {}
    for row in single:
        same = merged.setdefault((row.state, row.entered, row.completed, row.doing, row.where), row)
        if same is not row:
            same.ranks += row.ranks
            same.processes += row.processes
            same.since = max(same.since, row.since)
    shared = list(merged.values())
    return shared if len(shared) <= MAX_ROWS else sorted(shared, key=lambda row: -len(row.ranks))


def _members(process: ProcessRecord) -> dict[int, list[CommRecord]]:
    """Return the ranks of a process: usually one, several if it created a communicator with several ranks."""
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
        row.entered, row.completed = (str(number) if number else "-" for number in (comm.entered, comm.completed))
        several = len([comm for comm in comms if not comm.ended]) > 1
        was = "was " if over and call.state == INSIDE else ""
        words = [f"{was}{_DOING.get(call.state, 'done')}", call_name(call, comm.ranks)]
        words += [comm_name(comm)] if several else []
        words += [f"({NOT_KNOWN})"] if call.state == LAUNCHED else []
        row.doing = " ".join(words)
        began = call.issued if call.state in (INSIDE, ISSUED) else call.completed or call.returned or call.issued
        until = (process.end_at or process.heartbeat) if over else process.now  # it may have ended hours ago
        row.since = until - began if until and began else 0.0
        row.after = "" if call.state == INSIDE else " before" if over else " ago"
    return row


def _end(process: ProcessRecord) -> tuple[str, str]:
    text = clean(process.end, 40) or "killed or crashed"
    text += f" at {place(process.end_site)}" if process.end_site else ""
    when = ago(process, process.end_at)
    return text, f",{when}" if when else ""


def _where(process: ProcessRecord, call: CallRecord | None) -> tuple[str, str]:
    """Return where the main thread is or was; without a newer line, derive it from the call."""
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


def text(found: Sequence[RankRow], max_rows: int = MAX_ROWS) -> list[str]:
    """Return the lines of the table. In the pid column, "(8)" means 8 processes."""
    head = ["rank", "pid", "state", "entered", "done", "doing", "for", "main thread"]
    several = len({process.host for row in found for process in row.processes}) > 1
    lines = columns([head, *(_cells(row, several) for row in found[:max_rows])])
    if found[max_rows:]:
        others = sum(len(row.ranks) for row in found[max_rows:])
        lines.append(f"... {len(found) - max_rows:,} more rows for {others:,} ranks: --all shows one row per rank")
    return lines


def _cells(row: RankRow, several_hosts: bool) -> list[str]:
    pids = {(process.host, process.pid) for process in row.processes}
    pid = str(row.processes[0].pid) + (f" on {clean(row.processes[0].host, 16)}" if several_hosts else "")
    return [
        numbers(row.ranks, 3) if row.ranks[0] >= 0 else "-",
        f"({len(pids):,})" if len(pids) > 1 else pid if row.processes[0].pid > 0 else "-",
        row.state,
        row.entered,
        row.completed,
        row.doing,
        seconds(row.since) + row.after if row.since else "",
        row.where + row.ago,
    ]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the cells of the rows in columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
