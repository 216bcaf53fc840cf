"""Diagnosis of waits that do not end: mismatched calls, and the culprit rank.

A message whose header belongs to a different call is an error that names both calls. Ranks that wait for each other in
different calls may exchange no messages at all, so a rank that has waited for a while sends its peers a status: its
call and the ranks that it waits for. A status holds until the wait ends, so reading it late is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ..bindings import errors
from .connection import HEAD, HEAD_BYTES, Connection, Form, Status
from .failure import TransportFailure


class Activity:
    """The current call of a communicator."""

    def __init__(self, size: int) -> None:
        self.describe: Callable[[], str] = str
        self.rounds = 0  # number of collectives so far
        self.sent, self.received = [0] * size, [0] * size  # number of messages so far, per peer
        self.round = 0
        self.messages: list[tuple[bool, int, int]] = []
        self.status_sent = False

    def begin(self, describe: Callable[[], str]) -> None:
        self.describe, self.round, self.messages, self.status_sent = describe, 0, [], False

    def begin_collective(self) -> int:
        """Return the sequence number of the new collective."""
        self.rounds += 1
        self.round = self.rounds
        return self.round

    def begin_message(self, sending: bool, peer: int) -> int:
        """Return the sequence number of the new message between the two ranks."""
        counters = self.sent if sending else self.received
        counters[peer] += 1
        self.messages.append((sending, peer, counters[peer]))
        return counters[peer]

    def status(self, needs: Sequence[int], peer: int) -> Status:
        return Status(self.describe(), self.round, self.messages, list(needs), self.sent[peer], self.received[peer])


def disagreement(rank: int, mine: Activity, peer: int, theirs: Status) -> TransportFailure | None:
    """Compare this rank's call with that of `peer`, when each waits for the other. None if the calls may match.

    They disagree if they have the same sequence number and differ, or if the peer waits for a call that this rank
    cannot reach before the peer proceeds. It can if the peer has begun its part of this call: the rest is on its way,
    which may take seconds if packets are lost."""
    call = mine.describe()
    same_round = mine.round and mine.round == theirs.round and call != theirs.call
    if mine.round:
        unmet = any(
            to == rank and number > (mine.received if sending else mine.sent)[peer]
            for sending, to, number in theirs.messages
        )
    else:
        ours = [(sending, number) for sending, to, number in mine.messages if to == peer]
        begun = bool(ours) and all(number <= (theirs.received if sending else theirs.sent) for sending, number in ours)
        unmet = theirs.round > mine.rounds and not begun
    return call_mismatch(rank, call, peer, theirs.call) if same_round or (unmet and rank in theirs.needs) else None


def call_mismatch(rank: int, mine: str, peer: int, theirs: str) -> TransportFailure:
    (a, call_a), (b, call_b) = sorted([(rank, mine), (peer, theirs)])
    return TransportFailure("", verdict=errors.disagreement([f"rank {a} calls {call_a}", f"rank {b} calls {call_b}"]))


def mismatch(rank: int, call: str, peer: int, head: bytes, expected: bytes) -> TransportFailure:
    """Return the error for a received header `head` that does not match `call`, which expected another one."""
    form, nbytes, number = HEAD.unpack_from(head)
    own_form, own_nbytes, own_number = HEAD.unpack_from(expected)
    if form == own_form == Form.MESSAGE and number == own_number:
        both = [f"rank {peer} sends {nbytes} bytes to rank {rank}", f"which expects {own_nbytes}"]
        return TransportFailure("", verdict=errors.disagreement(both, f" about message {number} between two of them"))
    theirs = head[HEAD.size : HEAD_BYTES].rstrip(b"\0").decode(errors="replace")
    return call_mismatch(rank, call, peer, theirs)


def timed_out(connections: Iterable[Connection], awaited: Collection[Connection]) -> TransportFailure:
    """Return the error for a timeout. The culprits are the awaited peers, or the ranks that these wait for in turn,
    that are not waiting themselves."""
    peers = {connection.peer: connection for connection in connections}
    pending, visited, waiting = sorted(connection.peer for connection in awaited), dict[int, Connection](), ""
    while pending:
        peer = pending.pop(0)
        if peer in peers and peer not in visited:
            visited[peer] = connection = peers[peer]
            if connection.status is not None:
                pending += connection.status.needs
                waiting += f"; rank {peer} waits in {connection.status.call}"
    silent = [peer for peer, connection in visited.items() if connection.status is None and not connection.finalized]
    culprits = sorted(silent or (connection.peer for connection in awaited))
    names = f"rank {culprits[0]}" if len(culprits) == 1 else f"ranks {culprits}"
    text = f"no response from {names} within the timeout (frozen or late){waiting}"
    return TransportFailure(text, timed_out=True, culprit=culprits[0])


def culprit_of(rank: int, connections: Sequence[Connection]) -> TransportFailure:
    """Return the failure that explains the others: a rank that exited silently, else the peers' notices."""
    failed = [connection for connection in connections if connection.peer_failed]
    notified = [connection for connection in failed if connection.failure is not None]
    for connection in notified:
        if connection.failure and connection.failure.get("verdict"):
            return TransportFailure("", verdict=str(connection.failure["verdict"]))
    for connection in failed:
        if connection.failure is None:
            return TransportFailure(f"lost rank {connection.peer}: {connection.end_reason}", culprit=connection.peer)
    first = min(notified, key=lambda connection: connection.ended_at)
    failure = first.failure or {}
    culprit, why = failure.get("culprit"), str(failure.get("why", ""))
    if culprit is None or culprit == first.peer:
        return TransportFailure(f"lost rank {first.peer}: {why}", culprit=first.peer)
    if culprit == rank:
        return TransportFailure(f"rank {first.peer} gave up on this rank: {why}", culprit=first.peer)
    return TransportFailure(f"lost rank {culprit}: {why} (reported by rank {first.peer})", culprit=culprit)
