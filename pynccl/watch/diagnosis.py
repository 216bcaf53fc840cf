"""Diagnose a communicator that hangs or has failed from the records of all ranks, for watchdog and error messages.

Records of this node are read from their files. Records of other nodes come through the rendezvous store, if there is
one: the `exchange` of a track.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from . import folder, reader
from .cross_node import Exchange, identity
from .records import DEAD, FAILED, RUNNING, ProcessRecord
from .track import Track

_MAX_WAIT = 1.0  # seconds that an error waits for the records of the other ranks
_MAX_WAIT_ACROSS = 2.0  # the same with ranks on other nodes, which poll for queries once a second
_MAX_RANKS_ASKED = 256  # larger jobs do not query on failure: all failing ranks would read all records
_POLL_SECONDS = 0.02


def enable_cross_node(track: Track, store: Any, serves: bool) -> None:
    """Give the communicator an exchange through the store that it was created with. A process has one exchange per
    store, even if several of its threads are ranks.

    serves  this process serves the store"""
    own = track.recorder
    with own.sharing:
        known = (*(other.exchange for other in own.tracks), own.exchange)
        found = next((exchange for exchange in known if exchange is not None and exchange.store == store), None)
        track.exchange = own.exchange = found or Exchange(store, track.uid, track.size)
    track.exchange.serves = track.exchange.serves or serves


def records(uid: str) -> list[ProcessRecord]:
    """Return the records of all processes on this node that are or were in the communicator."""
    found, _ = reader.read_folder(folder.base(), uid=uid)
    return found


def ends(uid: str) -> dict[int, str]:
    """Return how the processes of this node that were in the communicator have ended: process id -> the sentence."""
    from .findings import describe_end  # a slow import
    from .graph import WaitGraph
    from .job import Job, last_seen_at

    graph = WaitGraph(Job(records(uid)), 0.0, uid)
    group = next((group for group in graph.job.groups if group.uid == uid), None)
    found = {}
    for process in (process for process in graph.job.processes if process.state == DEAD):
        text, member = describe_end(graph, process, group), graph.job.member(process, group)
        if process.killed and member is not None and (seen := last_seen_at(member)):
            text += f"; {seen}"
        found[process.pid] = text
    return found


def own_answer(uid: str, path: str) -> list[ProcessRecord]:
    """Return this process's answer to a query: its own record, from the file `path`, and those of processes on this
    node that cannot answer."""
    own = [reader.read_file(path)] if path else []
    return own + [record for record in records(uid) if record.pid != os.getpid() and record.state != RUNNING]


def all_here(track: Track) -> bool:
    """Return whether the files of all ranks of the communicator are on this node, also of ranks that have yet to create
    it, so that no query is needed."""
    known, _ = reader.read_folder(folder.base(), calls=False)
    ranks = {comm.rank for record in known for comm in record.of(track.uid)}
    launched = {record.rank for record in known if record.job == folder.job()}
    ranks |= {rank for rank, number in enumerate(track.ranks) if number in launched}
    return ranks >= set(range(track.size))


def report(track: Track, answered: list[ProcessRecord] | None = None) -> str:
    """Return which rank is missing, and where it is, for a call that hangs.

    answered  the answers of the ranks on all nodes; None: use only the records of this node"""
    exchange = track.exchange
    here, _, found = _judged(track, [] if answered is None else [*exchange.reported_ends(), *answered])
    from .verdict import about  # a slow import, rarely needed

    text = about(found, track.uid, track.rank)
    for process in _running(here, found):
        if process.path != track.recorder.path:  # else this process prints it anyway
            folder.leave_message(process.path, text)
    if answered is not None and exchange.unreachable:
        return f"{text}\nranks on other nodes could not be queried: {exchange.unreachable}"
    return text


def explain(track: Track, patient: bool) -> str:
    """Return why a call of this communicator has failed; "" if unknown.

    patient  wait up to a second for the culprit to record its end, because it may be ending right now"""
    text, question, began = "", 0, time.monotonic()
    elsewhere = track.exchange if track.exchange is not None and not all_here(track) else None
    if elsewhere and track.recorder.path:  # the ranks there need it too
        with contextlib.suppress(Exception):
            elsewhere.report_end(reader.read_file(track.recorder.path))
            question, _ = elsewhere.ask() if elsewhere.size <= _MAX_RANKS_ASKED else (0, False)
    end = began + (_MAX_WAIT_ACROSS if question else _MAX_WAIT if patient else 0.0)
    while True:
        began, certain = time.monotonic(), False
        with contextlib.suppress(Exception):  # a failing diagnosis must not hide the error
            text, certain = _explanation(track, elsewhere, question, patient)
        now = time.monotonic()
        if certain or now > end:
            return text
        time.sleep(max(_POLL_SECONDS, now - began))  # leaves half of the time to other threads


def _explanation(track: Track, elsewhere: Exchange | None, question: int, patient: bool) -> tuple[str, bool]:
    """Return the current explanation, and whether it is final. It is not final if it only says that other ranks failed
    too: then the culprit has yet to record its end."""
    from . import verdict

    remote: list[ProcessRecord] = []
    if elsewhere:
        for record in records(track.uid):
            if record.state == DEAD:  # if it was killed, it cannot report its own end
                elsewhere.report_end(record)
        remote = [*elsewhere.reported_ends(), *(elsewhere.answers(question) if question else [])]
    _, known, found = _judged(track, remote)
    text = verdict.about(found, track.uid, track.rank)
    others = [record for record in known if any(comm.rank != track.rank for comm in record.of(track.uid))]
    if not others and not elsewhere:
        return text, True
    known_ranks = {comm.rank for record in known for comm in record.of(track.uid)}
    blamed = {rank for uid, rank in found.culprits if uid == track.uid}
    if not patient and found.kind in ("missing", "unmatched") and found.processes:
        return text, True  # a rank that is elsewhere, and not about to end
    both_sides = found.kind in ("mismatch", "crossed")
    certain = both_sides or (any(_has_ended_or_failed(record, track) for record in others) and found.kind != "failed")
    return text, certain and found.wrong and blamed <= known_ranks


def _judged(track: Track, elsewhere: Sequence[ProcessRecord]) -> tuple[list[ProcessRecord], list[ProcessRecord], Any]:
    """Return the records of this node, those of all nodes, and the verdict, once the culprits have written stacks."""
    from .verdict import judge

    for asked in (False, True):
        here = records(track.uid)
        everywhere: dict[tuple[str, str, int], ProcessRecord] = {}
        for record in (*here, *elsewhere):
            everywhere.setdefault(identity(record), record)
        found = judge(list(everywhere.values()), uid=track.uid)
        if asked or not reader.ask(_running(here, found)):
            break
    return here, list(everywhere.values()), found


def _running(known: list[ProcessRecord], found: Any) -> list[ProcessRecord]:
    """Return the culprits that are running, and so can write their stacks."""
    return [process for process in known if process.state == RUNNING and (process.host, process.pid) in found.processes]


def _has_ended_or_failed(process: ProcessRecord, track: Track) -> bool:
    """Return whether this process, of another rank, has ended or failed."""
    others = [comm for comm in process.of(track.uid) if comm.rank != track.rank]
    if others and (process.end or process.state == DEAD):
        return True
    return any(comm.ended or any(call.state == FAILED for call in comm.calls[-3:]) for comm in others)
