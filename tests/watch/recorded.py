"""Calls as Communicators record them, by hand."""

from __future__ import annotations

import random

from pynccl.watch import recorder
from pynccl.watch.track import Identity, Track, uid_of

ALL_REDUCE = (0, 0, 4, 7, 0)  # as the C function takes them: addresses, count, FLOAT32, SUM


def track_of(own: recorder.Recorder) -> Track:
    return Track(own, Identity(uid_of(), "tp", ""), 1, 4)


def random_calls(track: Track, rng: random.Random, count: int) -> list[tuple[int, str]]:
    """Random calls of all kinds; (number among the collectives or 0, operation) of each."""
    kinds: dict[str, tuple[tuple[int, ...], int]] = {
        "all_reduce": (ALL_REDUCE, 1),
        "broadcast": ((0, 0, 4, 7, 1), 1),
        "recv": ((0, 4, 7, 2), 0),
        "send": ((0, 4, 7, 2), 0),
        "group plan": ((), 3),
        "barrier": ((), 1),
        "finalize": ((), 0),
    }
    made, number = [], 0
    for _ in range(count):
        name = rng.choice([*kinds])
        inputs, weight = kinds[name]
        track.enter(name, inputs, weight=weight if name in ("group plan", "finalize") else -1)
        number += weight
        made.append((number if weight else 0, name))
    return made
