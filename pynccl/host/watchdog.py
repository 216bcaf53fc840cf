"""Why a wait does not end: calls that disagree, and which rank is to blame.

A message whose header belongs to another call is an error with both calls. Ranks that wait for each other in calls of
which neither has reached the other's exchange no messages; so a rank that has waited for a while tells its peers what
for. That stays true for as long as it has not got what it needs, so it cannot mislead when it is read late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from .connection import HEAD, HEAD_BYTES, Connection, Form, Status
from .failure import TransportFailure


class Activity:
    """What a communicator is doing now."""

    def __init__(self, size: int) -> None:
        self.describe: Callable[[], str] = str
        self.rounds = 0  # collectives so far
        self.sent, self.received = [0] * size, [0] * size  # messages so far, to and from each rank
        self.round = 0
        self.messages: list[tuple[bool, int, int]] = []
        self.told = False

    def begin(self, describe: Callable[[], str]) -> None:
        self.describe, self.round, self.messages, self.told = describe, 0, [], False

    def begin_collective(self) -> int:
        """Its number."""
        self.rounds += 1
        self.round = self.rounds
        return self.round

    def begin_message(self, sending: bool, peer: int) -> int:
        """Its number between the two ranks."""
        counters = self.sent if sending else self.received
        counters[peer] += 1
        self.messages.append((sending, peer, counters[peer]))
        return counters[peer]

    def status(self, needs: Sequence[int]) -> Status:
        return Status(self.describe(), self.round, self.messages, list(needs))


def disagreement(rank: int, mine: Activity, peer: int, theirs: Status) -> TransportFailure | None:
    """This rank waits for `peer`, which has said that it waits: in another call of the same number, or for something
    that this rank has not come to, and cannot before the peer goes on. None if the calls may fit."""
    call = mine.describe()
    same_round = mine.round and mine.round == theirs.round and call != theirs.call
    if mine.round:
        unmet = any(
            to == rank and number > (mine.received if sending else mine.sent)[peer]
            for sending, to, number in theirs.messages
        )
    else:
        unmet = theirs.round > mine.rounds
    return other_calls(rank, call, peer, theirs.call) if same_round or (unmet and rank in theirs.needs) else None


def other_calls(rank: int, mine: str, peer: int, theirs: str) -> TransportFailure:
    (a, call_a), (b, call_b) = sorted([(rank, mine), (peer, theirs)])
    text = f"the calls of the ranks disagree: rank {a} calls {call_a}, rank {b} calls {call_b}"
    return TransportFailure("", verdict=text)


def mismatch(rank: int, call: str, peer: int, head: bytes, expected: bytes) -> TransportFailure:
    """A message has come of a peer, with this header, that belongs to another call than `call`, which waits for it."""
    form, nbytes, number = HEAD.unpack_from(head)
    own_form, own_nbytes, own_number = HEAD.unpack_from(expected)
    if form == own_form == Form.MESSAGE and number == own_number:
        text = (
            f"send and recv disagree: rank {peer} sends {nbytes} bytes to rank {rank}, which expects {own_nbytes} "
            f"(message {number} between them)"
        )
        return TransportFailure("", verdict=text)
    theirs = head[HEAD.size : HEAD_BYTES].rstrip(b"\0").decode(errors="replace")
    return other_calls(rank, call, peer, theirs)


def timed_out(connections: Iterable[Connection], awaited: Collection[Connection]) -> TransportFailure:
    """Nothing came of some peers. To blame are those of them that do not wait themselves, else whom they wait for."""
    peers = {connection.peer: connection for connection in connections}
    pending, behind, said = sorted(connection.peer for connection in awaited), dict[int, Connection](), ""
    while pending:
        peer = pending.pop(0)
        if peer in peers and peer not in behind:
            behind[peer] = one = peers[peer]
            if one.status is not None:
                pending += one.status.needs
                said += f"; rank {peer} waits in {one.status.call}"
    silent = [peer for peer, one in behind.items() if one.status is None and not one.finalized]
    culprits = sorted(silent or (connection.peer for connection in awaited))
    who = f"rank {culprits[0]}" if len(culprits) == 1 else f"ranks {culprits}"
    text = f"no answer of {who} within the time-out, frozen or late{said}"
    return TransportFailure(text, timed_out=True, culprit=culprits[0])


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
