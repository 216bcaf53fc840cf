"""Slices of a matmul_all_reduce that are handed out while the others are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .lanes import Lanes, Point


class Flight:
    """An all-reduce that the caller waits for slice by slice."""

    def __init__(self) -> None:
        self.rows: list[slice] = []
        self._points: list[Point] = []
        self._lanes: Lanes | None = None
        self._open = ExitStack()

    def depart(self, lanes: Lanes, at: slice) -> None:
        """All that makes these rows was issued."""
        self.rows.append(at)
        self._points.append(lanes.comm.record())

    def take(self, lanes: Lanes, opened: ExitStack) -> None:
        """The lanes, and what ends them."""
        self._lanes, self._open = lanes, opened

    def wait(self, at: int) -> None:
        """The caller's stream, or on the CPU the caller, waits for a slice; with the last one, for all."""
        lanes = self._lanes
        if lanes is None:
            return
        try:
            lanes.main.wait(self._points[at])
        except BaseException as error:
            self._lanes = None
            self._open.__exit__(type(error), error, error.__traceback__)
            raise
        if at == len(self._points) - 1:
            self.end()

    def parts(self, y: Tensor) -> tuple[Tensor, ...]:
        """The slices of y."""
        return tuple(_apart(y[at]) for at in self.rows)

    def end(self) -> None:
        if self._lanes is not None:
            self._lanes = None
            self._open.close()


class Slices(Sequence[Tensor]):
    """The rows of a result, slice by slice: getting one waits until it is there, and for those before it.

        for y in ad.matmul_all_reduce(x, w, comm, hand_off=True):
            z.append(norm(y))                       # while the next slice is under way

    Each slice is a tensor of its own, [rows, out], differentiable; `rows` are where they lie in the whole, `whole()` is
    all of them. The stream that waits is the one under which the call was made."""

    def __init__(self, parts: Sequence[Tensor], flight: Flight) -> None:
        self._parts, self._flight, self._got = parts, flight, 0
        self.rows = tuple(flight.rows) or (slice(0, len(parts[0])),)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        while self._got <= at:
            self._flight.wait(self._got)
            self._got += 1
        return self._parts[at]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[at] for at in range(len(self)))

    def whole(self) -> Tensor:
        """All rows, [s, out]."""
        return torch.cat(list(self))

    def __del__(self) -> None:
        flight = getattr(self, "_flight", None)
        if flight is not None:  # its memory must not be used anew while it is still written to
            with contextlib.suppress(Exception):
                flight.end()


def _apart(rows: Tensor) -> Tensor:
    """The same memory as a tensor that is no view, so that it may be changed in place as any other."""
    return rows.new_empty(0).set_(rows.untyped_storage(), rows.storage_offset(), rows.shape, rows.stride())
