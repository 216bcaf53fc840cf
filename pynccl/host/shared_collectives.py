"""One round of a collective through shared memory.

Data is split into chunks that fit into a slot, one chunk per step. A rank fills its slot for the next chunk before it
waits for the current one, so copies of different ranks overlap. Receivers read in place, from the senders' slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import lru_cache

from .segment import SLOT_BYTES
from .shared import SharedMemory

ALIGNMENT = 64
Block = tuple[int, int, int]  # (destination or source peer, address, nbytes)
# Reads a chunk: (start in its block, nbytes, its address in the slot of each source, in their order).
Read = Callable[[int, int, Sequence[int]], None]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@lru_cache(256)
def split_chunks(nbytes: int, max_nbytes: int) -> tuple[int, list[tuple[int, int]]]:
    """Split a block into the fewest chunks of at most `max_nbytes` bytes and nearly equal size.

    Returns the chunk size, a multiple of ALIGNMENT, and (start, nbytes) of each chunk."""
    max_nbytes = max_nbytes // ALIGNMENT * ALIGNMENT
    chunk = min(aligned(-(-nbytes // max(-(-nbytes // max_nbytes), 1))), max_nbytes) or ALIGNMENT
    return chunk, [(start, min(chunk, nbytes - start)) for start in range(0, nbytes, chunk)]


def block_index(owner: int, reader: int) -> int:
    """Return the index of the block for `reader` in the slot of `owner`, which has none for itself."""
    return reader - (reader > owner)


def exchange(
    shared: SharedMemory, per_peer: bool, max_nbytes: int, sends: Sequence[Block], sources: Sequence[int], read: Read
) -> None:
    """Send blocks of at most `max_nbytes` bytes, and read each chunk once those of all `sources` have arrived.

    per_peer: a slot has one block per peer, instead of one block for all peers. `per_peer` and `max_nbytes` are equal
    on all ranks."""
    me, blocks = shared.rank, len(shared.peers) if per_peer else 1
    stride, chunks = split_chunks(max_nbytes, SLOT_BYTES // blocks)
    if stride * blocks > shared.reserved:
        shared.reserve(stride * blocks)
    outgoing = [
        (block_index(me, peer) * stride if per_peer else 0, *block)
        for peer, *block in (sends if per_peer else sends[:1])
    ]
    own = shared.segments[me].slots

    def fill(start: int, n: int) -> None:
        target = own[shared.acquire_slot()]
        for offset, address, nbytes in outgoing:
            if start < nbytes:
                memmove(target + offset, address + start, min(n, nbytes - start))

    fill(*chunks[0])
    for at, (start, n) in enumerate(chunks):
        slot = shared.post()
        if at + 1 < len(chunks):
            fill(*chunks[at + 1])
        if sources:
            addresses = [
                shared.segments[p].slots[slot] + (block_index(p, me) * stride if per_peer else 0) for p in sources
            ]
            shared.wait(sources)
            read(start, n, addresses)
