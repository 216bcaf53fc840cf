"""Why does nobody come? What a rank is doing, and how the calls of two ranks disagree.

Most calls that disagree meet in a message, whose header tells them apart (see `transport`). Those that never send
anything to each other, two broadcasts with other roots for example, wait for ever: so ranks that have waited for a
while tell each other what for. What they tell stays true ("my 7th round was all_reduce of 16"), so it cannot mislead
when it is read late. An operation that does not wait costs nothing but a few assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
