"""Why does nobody come? What a rank is doing, how the calls of two ranks disagree, and which rank is to blame.

Most calls that disagree meet in a message, whose header tells them apart (see `transport`). Those that never send
anything to each other, two broadcasts with other roots for example, wait for ever: so ranks that have waited for a
while tell each other what for. What they tell stays true ("my 7th round was all_reduce of 16"), so it cannot mislead
when it is read late. An operation that does not wait costs nothing but a few assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from .connection import HEAD, HEAD_BYTES, Connection, is_collective
from .failure import TransportFailure

_TOLD_MESSAGES = 100  # of a group's sends and receives


class Activity:
    """What a communicator is doing now."""

    def __init__(self) -> None:
        self.describe: Callable[[], str] = str
        self.round = 0
        self.messages: list[tuple[bool, int, int, int]] = []  # sending, peer, its number, bytes
        self.told = False

    def begin(self, describe: Callable[[], str]) -> None:
        self.describe, self.round, self.messages, self.told = describe, 0, [], False

    def status(self) -> dict[str, Any]:
        """What the other ranks are told."""
        return {"round": self.round, "call": self.describe(), "messages": self.messages[:_TOLD_MESSAGES]}


def disagreement(rank: int, mine: Mapping[str, Any], peer: int, theirs: Mapping[str, Any]) -> str | None:
    """One sentence about how two ranks' calls disagree; None if they fit, or cannot be compared."""
    if mine["round"] and mine["round"] == theirs["round"] and mine["call"] != theirs["call"]:
        return other_calls(rank, mine["call"], peer, theirs["call"])
    for sending, to, number, nbytes in mine["messages"]:
        for other_sending, other_to, other_number, other_nbytes in theirs["messages"]:
            same = sending != other_sending and (to, other_to, number) == (peer, rank, other_number)
            if same and nbytes != other_nbytes:
                sender, receiver = (rank, peer) if sending else (peer, rank)
                sent, expected = (nbytes, other_nbytes) if sending else (other_nbytes, nbytes)
                return other_sizes(sender, receiver, sent, expected, number)
    return None


def other_calls(rank: int, mine: str, peer: int, theirs: str) -> str:
    (a, call_a), (b, call_b) = sorted([(rank, mine), (peer, theirs)])
    return f"the calls of the ranks disagree: rank {a} calls {call_a}, rank {b} calls {call_b}"


def other_sizes(sender: int, receiver: int, sent: int, expected: int, number: int) -> str:
    return (
        f"send and recv disagree: rank {sender} sends {sent} bytes to rank {receiver}, "
        f"which expects {expected} (message {number} between them)"
    )


def mismatch(rank: int, call: str, peer: int, head: bytes, expected: bytes) -> TransportFailure:
    """A message has come of a peer, with this header, that belongs to another call than `call`, which waits for it."""
    tag, nbytes, number = HEAD.unpack_from(head)
    own_tag, own_nbytes, own_number = HEAD.unpack_from(expected)
    if not is_collective(tag) and not is_collective(own_tag) and number == own_number:
        return TransportFailure("", verdict=other_sizes(peer, rank, nbytes, own_nbytes, number))
    theirs = head[HEAD.size : HEAD_BYTES].rstrip(b"\0").decode(errors="replace")
    return TransportFailure("", verdict=other_calls(rank, call, peer, theirs))


def waiting(connections: Iterable[Connection]) -> dict[int, Mapping[str, Any]]:
    """What the peers that have waited for a while wait for."""
    return {c.peer: c.status for c in connections if c.status is not None}


def timed_out(connections: Collection[Connection], awaited: Collection[Connection]) -> TransportFailure:
    """Nothing came of some peers: first those that do not wait themselves are to blame, or the one rank of all that is
    behind them."""
    peers = sorted(connection.peer for connection in awaited)
    silent = _silent(awaited)
    behind = silent or _silent(connections)
    others = [f"; rank {peer} last waited in {status['call']}" for peer, status in waiting(connections).items()]
    culprits = silent or (behind if len(behind) == 1 else peers)
    who = f"rank {culprits[0]}" if len(culprits) == 1 else f"ranks {culprits}"
    silence = f"; nothing is known of ranks {behind}" if behind else ""
    text = f"no answer of {who} within the time-out, frozen or late"
    return TransportFailure(text, timed_out=True, culprit=culprits[0], detail="".join(others) + silence)


def _silent(connections: Iterable[Connection]) -> list[int]:
    """The ranks that have not said what they wait for, nor that they are done."""
    return sorted(one.peer for one in connections if one.status is None and not one.finalized)


def culprit_of(rank: int, connections: Sequence[Connection]) -> TransportFailure:
    """The failure that explains the others: first who is gone without a word, then what the others say."""
    lost = [connection for connection in connections if connection.lost]
    said = [connection for connection in lost if connection.failure is not None]
    for connection in said:
        if connection.failure and connection.failure.get("verdict"):
            return TransportFailure("", verdict=str(connection.failure["verdict"]))
    for connection in lost:
        if connection.failure is None:
            return TransportFailure(f"lost rank {connection.peer}: {connection.why}", culprit=connection.peer)
    first = min(said, key=lambda connection: connection.ended_at)
    failure = first.failure or {}
    culprit, why = failure.get("culprit"), str(failure.get("why", ""))
    if culprit is None or culprit == first.peer:
        return TransportFailure(f"lost rank {first.peer}: {why}", culprit=first.peer)
    if culprit == rank:
        return TransportFailure(f"rank {first.peer} gave up on this rank: {why}", culprit=first.peer)
    return TransportFailure(f"lost rank {culprit}: {why} (says rank {first.peer})", culprit=culprit)
