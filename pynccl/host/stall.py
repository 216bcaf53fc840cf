"""Why does nobody come? Compares the calls of ranks that have been waiting for a while.

Calls that disagree never meet (see `transport`), so their ranks would wait for ever. One thread per process looks at
its communicators a few times a second; a rank that has waited for STALL_SECONDS writes into the store what it waits for
and reads what the others wrote. What is written stays true ("my 7th round was all_reduce of 16"), so it cannot mislead
when it is read late. An operation that does not wait costs nothing but a few assignments.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .failure import exiting, invalid_usage
from .rendezvous import Place

if TYPE_CHECKING:
    from .comm import Comm
    from .operation import Operation

STALL_SECONDS = 0.5
_TICK_SECONDS = 0.2
_STORE_SECONDS = 5.0
_VERDICT = "stall/verdict"


class Activity:
    """What a communicator is doing now: written by the thread that does it, read by the one that watches."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.ops: Sequence[Operation] = ()
        self.round = 0
        self.messages: list[tuple[bool, int, int, int]] = []  # sending, peer, its number, bytes
        self.published = False

    def begin(self, ops: Sequence[Operation]) -> None:
        self.ops, self.round, self.messages, self.published = ops, 0, [], False
        self.since = time.monotonic()

    def describe(self) -> str:
        return ", ".join(op.describe() for op in self.ops)

    def end(self) -> None:
        self.since = None


_watched: weakref.WeakSet[Comm] = weakref.WeakSet()
_lock = threading.Lock()
_watcher: tuple[int, threading.Thread] | None = None  # with its process: a forked child has no threads of its parent


def watch(comm: Comm) -> None:
    global _watcher
    with _lock:
        _watched.add(comm)
        if _watcher is None or _watcher[0] != os.getpid():
            _watcher = os.getpid(), threading.Thread(target=_watch, name="pynccl-host-stall", daemon=True)
            _watcher[1].start()


def stop(timeout: float) -> None:
    """At exit, after `exiting` was set: wait for the thread to notice."""
    if _watcher is not None and _watcher[0] == os.getpid():
        _watcher[1].join(timeout)


def _watch() -> None:
    while not exiting.wait(_TICK_SECONDS):
        with _lock:
            comms = list(_watched)
        for comm in comms:
            since = comm.activity.since
            if since is not None and time.monotonic() - since > STALL_SECONDS and comm.failure is None:
                with contextlib.suppress(Exception):  # the store's process is gone: gloo will tell who died
                    if comm.place is not None:
                        _look_into(comm, comm.place)


def _look_into(comm: Comm, place: Place) -> None:
    activity = comm.activity
    mine = {"round": activity.round, "call": activity.describe(), "messages": list(activity.messages)}
    with place.open(_STORE_SECONDS) as store:
        if not activity.published:
            store.set(f"stall/{comm.rank}", json.dumps(mine))
            activity.published = True
        text = store.get(_VERDICT).decode() if store.check([_VERDICT]) else None
        for peer, theirs in _written(store, comm).items():
            text = text or disagreement(comm.rank, mine, peer, theirs)
        if text:
            store.set(_VERDICT, text)  # before closing: the others shall read this, not about a closed connection
    if text:
        comm.fail(invalid_usage(text))


def _written(store: dist.Store, comm: Comm) -> dict[int, dict[str, Any]]:
    """What the peers that have waited for a while wrote."""
    return {p: json.loads(store.get(f"stall/{p}")) for p in comm.peers if store.check([f"stall/{p}"])}


def disagreement(rank: int, mine: dict[str, Any], peer: int, theirs: dict[str, Any]) -> str | None:
    """One sentence about how two ranks' calls disagree; None if they fit, or cannot be compared."""
    if mine["round"] and mine["round"] == theirs["round"] and mine["call"] != theirs["call"]:
        (a, call_a), (b, call_b) = sorted([(rank, mine["call"]), (peer, theirs["call"])])
        return f"the calls of the ranks disagree: rank {a} calls {call_a}, rank {b} calls {call_b}"
    for sending, to, number, nbytes in mine["messages"]:
        for other_sending, other_to, other_number, other_nbytes in theirs["messages"]:
            same = sending != other_sending and (to, other_to, number) == (peer, rank, other_number)
            if same and nbytes != other_nbytes:
                sender, receiver = (rank, peer) if sending else (peer, rank)
                sent, expected = (nbytes, other_nbytes) if sending else (other_nbytes, nbytes)
                return (
                    f"send and recv disagree: rank {sender} sends {sent} bytes to rank {receiver}, "
                    f"which expects {expected} (message {number} between them)"
                )
    return None


def verdict(comm: Comm) -> str | None:
    """What a peer found out before it closed its connections."""
    with contextlib.suppress(Exception):  # no store, no verdict
        if comm.place is not None:
            with comm.place.open(_STORE_SECONDS) as store:
                return store.get(_VERDICT).decode() if store.check([_VERDICT]) else None
    return None


def where_peers_are(comm: Comm) -> str:
    """For a time-out: what the peers that wait as well have written."""
    with contextlib.suppress(Exception):  # no store, no knowledge
        if comm.place is not None:
            with comm.place.open(_STORE_SECONDS) as store:
                known = _written(store, comm)
            silent = [peer for peer in comm.peers if peer not in known]
            calls = "".join(f"; rank {peer} last waited in {theirs['call']}" for peer, theirs in known.items())
            return calls + (f"; nothing is known of ranks {silent}" if silent else "")
    return ""
