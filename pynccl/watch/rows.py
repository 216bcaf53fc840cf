"""What a call is, described once for all the times that it is made: the table of a communicator in the flight recorder.

A description is a row: of the table, for what is called again and again, or of a slot's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import layout

# Which of the C arguments of an operation are its count, operator and rank (root or peer); -1: none. How many
# collective calls it is: sends and what not every rank calls are not numbered.
_BOTH = (2, -1, -1, 1)  # send, recv, count, type
SHAPES: dict[str, tuple[int, int, int, int]] = {
    "all_reduce": (2, 4, -1, 1),
    "reduce_scatter": (2, 4, -1, 1),
    "reduce": (2, 4, 5, 1),
    "broadcast": (2, -1, 4, 1),
    "gather": (2, -1, 4, 1),
    "scatter": (2, -1, 4, 1),
    "all_gather": _BOTH,
    "all_to_all": _BOTH,
    "alltoall": _BOTH,
    "send": (1, -1, 3, 0),
    "recv": (1, -1, 3, 0),
    "put_signal": (1, -1, 3, 0),
    "signal": (-1, -1, 0, 0),
    "wait_signal": (-1, -1, -1, 0),
}
COUNT_AT = {operation: shape[0] for operation, shape in SHAPES.items() if shape[0] >= 0}
_MOST_RECENT = 128
_PEERS = ("send", "recv", "put_signal", "signal")


def weight_of(operation: str) -> int:
    """How many collective calls this one counts as, on every rank."""
    return SHAPES.get(operation, _BOTH)[3]


class Rows:
    """The table of one communicator, in `memory`, which is its region; `string` gives the row of a text."""

    def __init__(self, memory: memoryview, region: layout.Region, string: Callable[[str], int]) -> None:
        self._memory, self._region, self._string = memory, region, string
        self._ring = memory[region.ring : region.ring + 2 * region.slots].cast("H")
        self._weights: dict[int, int] = {}  # of the rows that count as another number of collective calls than 0 or 1
        self._unused = {kind: iter(kind) for kind in (layout.ONE, layout.NONE, layout.OTHER)}
        # Rows that were given back, and in which segment.
        self._free: dict[range, list[tuple[int, int]]] = {kind: [] for kind in self._unused}
        self._on_streams: dict[tuple[int, int], int] = {}
        self.known: dict[Any, int] = {}  # rows of calls that nobody keeps, by what they are called with
        self.segment = 0  # that is being written

    def describe(
        self,
        operation: str,
        inputs: tuple[Any, ...],
        stream: int,
        *,
        weight: int | None = None,
        detail: str = "",
        site: str = "",
        plan: bool = False,
    ) -> int:
        """The row of a call which will be made again; 0: there is none left."""
        weight = weight_of(operation) if weight is None else weight
        row = self._take(weight)
        if row:
            self.write(self._at(row), operation, inputs, stream, weight, detail, site, 0, plan)
        return row

    def recent(self, operation: str, inputs: tuple[Any, ...], stream: int) -> int:
        """The row of a call that may be made again; 0: there is none left, or this operation has none."""
        at = COUNT_AT.get(operation)
        if at is None:  # what it is called with is no part of its description
            return 0
        key = (operation, inputs[at:], int(stream))  # a handle may hold its stream
        row = self.known.get(key)
        if row is None:
            if len(self.known) >= _MOST_RECENT:
                for old in self.known.values():
                    self.give_back(old)
                self.known.clear()
            row = self.describe(operation, inputs, stream)
            if row:
                self.known[key] = row
        return row

    def on_stream(self, row: int, stream: int) -> int:
        """The row of the same call on another stream; the same row where there is none left."""
        other = self._on_streams.get((row, stream))
        if other is None:
            values = list(layout.ROW.unpack_from(self._memory, self._at(row)))
            other = self._take(values[4])
            if other:
                values[9] = stream
                layout.ROW.pack_into(self._memory, self._at(other), *values)
            other = self._on_streams[row, int(stream)] = other or row  # a handle may hold its stream
        return other

    def give_back(self, row: int) -> None:
        """The row is not needed any more."""
        rows = [row]
        for key in [key for key in self._on_streams if key[0] == row]:
            rows.append(self._on_streams.pop(key))
        for one in dict.fromkeys(rows):
            for kind, free in self._free.items():
                if one in kind:
                    free.append((one, self.segment))

    def _take(self, weight: int) -> int:
        """A row for what counts as so many collective calls; 0: there is none left."""
        kind = (layout.NONE, layout.ONE)[weight] if 0 <= weight <= 1 else layout.OTHER
        free = self._free[kind]
        if free and free[0][1] + self._region.segments < self.segment:  # no slot holds it any more
            row = free.pop(0)[0]
        else:
            row = next(self._unused[kind], 0)
        if row in layout.OTHER:
            self._weights[row] = weight
        return row

    def _at(self, row: int) -> int:
        return self._region.table + row * layout.ROW.size

    def stream_of(self, slot: int) -> int:
        """That of the call in this slot."""
        row = self._ring[slot]
        at = self._region.inline + slot * layout.ROW.size if row >= layout.ROWS else self._at(row)
        stream: int = layout.ROW.unpack_from(self._memory, at)[9]
        return stream

    def numbered_in(self, first: int) -> int:
        """The collective calls in the full segment that begins with this slot."""
        length, at = self._region.segment, self._region.ring + 2 * first
        kinds = bytes(self._memory[at : at + 2 * length])[layout.HIGH :: 2]
        numbered = length - kinds.count(layout.NONE.start >> 8) - kinds.count(layout.INLINE_UNNUMBERED >> 8)
        if kinds.count(layout.OTHER.start >> 8):
            rows = self._ring[first : first + length].tolist()
            numbered += sum(self._weights[row] - 1 for row in rows if row in layout.OTHER)
        return numbered

    def write(
        self,
        at: int,
        operation: str,
        inputs: tuple[Any, ...],
        stream: int,
        weight: int,
        detail: str,
        site: str,
        group: int,
        plan: bool,
    ) -> None:
        """Write a description there."""
        count_at, op_at, rank_at, _ = SHAPES.get(operation, (-1, -1, -1, 1))
        string = self._string
        flags = (layout.PLAN if plan else 0) | (
            layout.PEER if operation in _PEERS else layout.ROOT if rank_at >= 0 else 0
        )
        rank = inputs[rank_at] if rank_at >= 0 and inputs else -1
        if operation == "wait_signal" and inputs and inputs[0] == 1:  # of several peers none is named
            flags, rank = flags | layout.PEER, inputs[1][0].peer
        count, dtype = (inputs[count_at], inputs[count_at + 1]) if count_at >= 0 and inputs else (layout.NO_COUNT, -1)
        layout.ROW.pack_into(
            self._memory,
            at,
            string(operation),
            string(detail) if detail else 0,
            flags,
            dtype,
            weight,
            inputs[op_at] if op_at >= 0 and inputs else -1,
            rank,
            group,
            count,
            stream,
            string(site) if site else 0,
        )
