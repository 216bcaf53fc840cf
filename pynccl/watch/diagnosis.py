"""What all ranks' records say about a communicator that is in trouble: for the watchdog, and for the text of errors.

The records of this machine are read from their files. Those of other machines come through the store, where there is
one: `exchange` of a track.
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

_LONGEST = 1.0  # seconds that an error waits for the other ranks to say what has happened to them
_LONGEST_ACROSS = 2.0  # the same where they are on other machines, which look once a second whether they are asked
_MOST_ASKED = 256  # ranks: of more, not all that fail at once can read the records of all
_PAUSE = 0.02


def meet(track: Track, store: Any, serves: bool) -> None:
    """The ranks of this communicator, which have met at this store, ask each other there where they are. A process has
    one exchange at a store, also where several of its threads are ranks.

    serves  the store goes with this process"""
    own = track.recorder
    with own.sharing:
        known = (*(other.exchange for other in own.tracks), own.exchange)
        found = next((one for one in known if one is not None and one.store is store), None)
        track.exchange = own.exchange = found or Exchange(store, track.uid, track.size)
    track.exchange.serves = track.exchange.serves or serves


def records(uid: str) -> list[ProcessRecord]:
    """Of all processes on this machine that are in the communicator, or have been."""
    found, _ = reader.read_folder(folder.base(), uid=uid)
    return found


def own_answer(uid: str, path: str) -> list[ProcessRecord]:
    """What this process, whose file is `path`, answers for itself and for those of its machine that cannot."""
    own = [reader.read_file(path)] if path else []
    return own + [one for one in records(uid) if one.pid != os.getpid() and one.state != RUNNING]


def all_here(track: Track) -> bool:
    """Whether all ranks of the communicator have their files on this machine, so that nobody need be asked."""
    return reader.ranks(folder.base(), track.uid) >= set(range(track.size))


def report(track: Track, answered: list[ProcessRecord] | None = None) -> str:
    """Who is missing, and where: of a call that does not return.

    answered  by the ranks on all machines; None: this machine's records are all that there is"""
    exchange = track.exchange
    here, _, found = _judged(track, [] if answered is None else [*exchange.ends(), *answered])
    from .verdict import about  # which takes long to import, and is seldom needed

    text = about(found, track.uid, track.rank)
    for one in _running(here, found, track):
        folder.tell(one.path, text)
    if answered is not None and exchange.out_of_reach:
        return f"{text}\nthe ranks on other machines could not be asked: {exchange.out_of_reach}"
    return text


def explain(track: Track, patient: bool) -> str:
    """Why a call of this communicator has failed; "" where nothing is known.

    patient  the rank because of which it failed may be ending this very moment: it is given a second to say so"""
    text, question, began = "", 0, time.monotonic()
    elsewhere = track.exchange if track.exchange is not None and not all_here(track) else None
    if elsewhere and track.recorder.path:  # the ranks there want to know, too
        with contextlib.suppress(Exception):
            elsewhere.tell_end(reader.read_file(track.recorder.path))
            question, _ = elsewhere.ask() if elsewhere.size <= _MOST_ASKED else (0, False)
    end = began + (_LONGEST_ACROSS if question else _LONGEST if patient else 0.0)
    while True:
        began, certain = time.monotonic(), False
        with contextlib.suppress(Exception):  # the error itself is what counts
            text, certain = _why(track, elsewhere, question)
        now = time.monotonic()
        if certain or now > end:
            return text
        time.sleep(max(_PAUSE, now - began))  # so that half the time is the other threads'


def _why(track: Track, elsewhere: Exchange | None, question: int) -> tuple[str, bool]:
    """What is known now, and whether it is all that there is to say: not only that others have failed, too, since then
    whoever caused it has yet to say so."""
    from . import verdict

    told = []
    if elsewhere:
        for one in records(track.uid):
            if one.state == DEAD:  # it may have been killed, and so cannot tell it
                elsewhere.tell_end(one)
        told = [*elsewhere.ends(), *(elsewhere.answers(question) if question else [])]
    _, known, found = _judged(track, told)
    text = verdict.about(found, track.uid, track.rank)
    others = [one for one in known if any(comm.rank != track.rank for comm in one.of(track.uid))]
    if not others and not elsewhere:
        return text, True
    heard = {comm.rank for one in known for comm in one.of(track.uid)}
    blamed = {rank for uid, rank in found.culprits if uid == track.uid}
    both_sides = found.kind in ("mismatch", "crossed")
    certain = both_sides or (any(_tells(one, track) for one in others) and found.kind != "failed")
    return text, certain and found.wrong and blamed <= heard


def _judged(track: Track, elsewhere: Sequence[ProcessRecord]) -> tuple[list[ProcessRecord], list[ProcessRecord], Any]:
    """The records of this machine and of all, and the verdict on them, once those to blame have said where they are."""
    from .verdict import judge

    for asked in (False, True):
        here = records(track.uid)
        everywhere: dict[tuple[str, str, int], ProcessRecord] = {}
        for one in (*here, *elsewhere):
            everywhere.setdefault(identity(one), one)
        found = judge(list(everywhere.values()), uid=track.uid)
        if asked or not reader.ask(_running(here, found, track)):
            break
    return here, list(everywhere.values()), found


def _running(known: list[ProcessRecord], found: Any, track: Track) -> list[ProcessRecord]:
    """Of those to blame the ones that run, and so can say where they are."""
    return [
        one
        for one in known
        if one.state == RUNNING and any((comm.uid, comm.rank) in found.culprits for comm in one.of(track.uid))
    ]


def _tells(process: ProcessRecord, track: Track) -> bool:
    """Whether this process, one of another rank, has ended, or has failed."""
    others = [comm for comm in process.of(track.uid) if comm.rank != track.rank]
    if others and (process.end or process.state == DEAD):
        return True
    return any(comm.ended or any(call.state == FAILED for call in comm.calls[-3:]) for comm in others)
