"""Small messages of collectives: receives that wait before the message is sent, and a header that tells calls apart.

A message that meets no posted receive costs gloo three trips between the ranks and as many thread switches; on busy
cores each may take a scheduler tick (2 to 4 ms instead of 0.1 measured). So every rank keeps SLOTS receives posted
for every peer, and a small message goes out at once, as [tag, bytes, payload]. All mail fits a slot, so what gloo does
with a message that is too long cannot happen; the tag says whether sender and receiver are in the same call.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

SLOTS = 2
PAYLOAD_BYTES = 4096
FAREWELL = -1  # in place of a tag: the sender is about to close

_HEAD = struct.Struct("<qq")
_MAIL_TAG = (1 << 31) - 2


class Mailbox:
    """Mail to and from one peer, in order."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer
        size = _HEAD.size + PAYLOAD_BYTES
        self._out = torch.zeros(size, dtype=torch.uint8)
        self._out_bytes = _bytes_of(self._out)
        self._out_parts: dict[int, list[Tensor]] = {}
        self._slots = [[torch.zeros(size, dtype=torch.uint8)] for _ in range(SLOTS)]
        self._slot_bytes = [_bytes_of(slot[0]) for slot in self._slots]
        self._posted = [group.recv(slot, peer, _MAIL_TAG) for slot in self._slots]
        self._next = 0

    @property
    def nbytes(self) -> int:
        return self._out.nbytes + sum(slot[0].nbytes for slot in self._slots)

    def send(self, tag: int, address: int, nbytes: int) -> Any:
        """Post `nbytes` from `address`; the one before must have completed."""
        _HEAD.pack_into(self._out_bytes, 0, tag, nbytes)
        ctypes.memmove(self._out.data_ptr() + _HEAD.size, address, nbytes)
        part = self._out_parts.get(nbytes)
        if part is None:
            part = self._out_parts[nbytes] = [self._out[: _HEAD.size + nbytes]]
        return self._group.send(part, self._peer, _MAIL_TAG)

    def receive(self, tag: int, address: int, nbytes: int, limit: Any) -> bool:
        """Wait for the next mail and copy it to `address`; False if it belongs to another call."""
        i = self._next
        self._posted[i].wait(limit)
        fits = _HEAD.unpack_from(self._slot_bytes[i]) == (tag, nbytes)
        if fits:
            ctypes.memmove(address, self._slots[i][0].data_ptr() + _HEAD.size, nbytes)
            self._posted[i] = self._group.recv(self._slots[i], self._peer, _MAIL_TAG)
            self._next = (i + 1) % SLOTS
        return fits


def _bytes_of(tensor: Tensor) -> Any:
    return (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
