"""What all ranks' records say about a communicator that is in trouble: for the watchdog, and for the text of errors."""

from __future__ import annotations

import contextlib
import time

from . import folder, reader, verdict
from .records import DEAD, FAILED, ProcessRecord
from .track import Track

_LONGEST = 1.0  # seconds that an error waits for the other ranks to say what has happened to them
_PAUSE = 0.02


def records(track: Track) -> list[ProcessRecord]:
    """Of all processes on this machine that are in the communicator, or have been."""
    found, _ = reader.read_folder(folder.base(), uid=track.uid)
    return found


def report(track: Track) -> str:
    """Who is missing, and where: of a call that does not return."""
    return _about(records(track), track)


def explain(track: Track) -> str:
    """Why a call of this communicator has failed; "" where nothing is known.

    The rank because of which it failed may be ending this very moment: it is given a second to say so."""
    text, end = "", time.monotonic() + _LONGEST
    while True:
        with contextlib.suppress(Exception):  # the error itself is what counts
            known = records(track)
            text = _about(known, track)
            if any(_tells(one, track) for one in known):
                return text
        if time.monotonic() > end:
            return text
        time.sleep(_PAUSE)


def _about(known: list[ProcessRecord], track: Track) -> str:
    return verdict.about(verdict.judge(known), track.uid, track.rank)


def _tells(process: ProcessRecord, track: Track) -> bool:
    """Whether this process, one of another rank, has ended, or has failed."""
    for comm in process.comms:
        if track.uid in (comm.uid, *comm.aliases) and comm.rank != track.rank:
            failed = any(call.state == FAILED for call in comm.calls[-3:])
            return bool(process.end) or process.state == DEAD or bool(comm.ended) or failed
    return False
