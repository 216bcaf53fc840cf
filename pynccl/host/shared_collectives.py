"""A round of a collective through shared memory.

It goes in pieces, one a step, which fit into a slot; a rank fills its slot for the next piece before it waits for this
one, so it copies while others still do. What is received is read in place, in the slots of the ranks that sent it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import lru_cache

from .segment import SLOT_BYTES
from .shared import SharedMemory

ALIGNMENT = 64
Block = tuple[int, int, int]  # the peer to which it is sent, or of which it comes; address; bytes
# Takes a piece: start and bytes of it in its block, and where it is, of each source in their order.
Read = Callable[[int, int, Sequence[int]], None]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@lru_cache(256)
def cut(nbytes: int, most: int) -> tuple[int, list[tuple[int, int]]]:
    """As few pieces as can be, of at most `most` bytes and of about the same size: the bytes of a piece, a multiple of
    what a cache line has; start and length of each."""
    most = most // ALIGNMENT * ALIGNMENT
    piece = min(aligned(-(-nbytes // max(-(-nbytes // most), 1))), most) or ALIGNMENT
    return piece, [(start, min(piece, nbytes - start)) for start in range(0, nbytes, piece)]


def block_of(owner: int, reader: int) -> int:
    """Where in the slot of `owner` is what it has for `reader`: it has nothing there for itself."""
    return reader - (reader > owner)


def exchange(
    shared: SharedMemory, apart: bool, most: int, sends: Sequence[Block], sources: Sequence[int], read: Read
) -> None:
    """Send blocks of at most `most` bytes, and read each piece once those of all `sources` are there.

    apart: a slot has a block for each peer of its rank, and not one for all of them. `apart` and `most` are equal on
    all ranks."""
    me, blocks = shared.rank, len(shared.peers) if apart else 1
    if not shared.reserved:
        shared.reserve()
    stride, pieces = cut(most, SLOT_BYTES // blocks)
    put = [(block_of(me, peer) * stride if apart else 0, *block) for peer, *block in (sends if apart else sends[:1])]
    own = shared.segments[me].slots

    def fill(start: int, n: int) -> None:
        target = own[shared.room()]
        for place, address, nbytes in put:
            if start < nbytes:
                memmove(target + place, address + start, min(n, nbytes - start))

    fill(*pieces[0])
    for at, (start, n) in enumerate(pieces):
        slot = shared.post()
        if at + 1 < len(pieces):
            fill(*pieces[at + 1])
        if sources:
            there = [shared.segments[p].slots[slot] + (block_of(p, me) * stride if apart else 0) for p in sources]
            shared.wait(sources)
            read(start, n, there)
