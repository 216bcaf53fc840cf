"""Slices of a matmul_all_reduce that the caller can use while the next ones are still running."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from pynccl.bindings.resource import destructor

from .lanes import Pass, Point


class PendingSlices:
    """An all-reduce that the caller waits for slice by slice."""

    def __init__(self) -> None:
        self.rows: list[slice] = []
        self._points: list[Point | None] = []
        self._lanes: Pass | None = None
        self._open = ExitStack()

    def add(self, lanes: Pass, at: slice) -> None:
        """Add a slice whose work has been issued."""
        self.rows.append(at)
        self._points.append(lanes.comm.record())

    @contextlib.contextmanager
    def keep_open(self, run: contextlib.AbstractContextManager[Pass]) -> Iterator[Pass]:
        """Begin a pass that ends when its last slice has been waited for, unless the block raises."""
        with ExitStack() as stack:
            lanes = stack.enter_context(run)
            yield lanes
            self._lanes, self._open = lanes, stack.pop_all()

    def wait(self, at: int) -> None:
        """Let the caller's stream, or on the CPU the caller, wait for a slice. The last slice waits for all work."""
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

    def slices(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return the slices of y."""
        return tuple(_not_a_view(y[at]) for at in self.rows)

    def end(self) -> None:
        if self._lanes is not None:
            self._lanes = None
            self._open.close()


class Slices(Sequence[Tensor]):
    """The rows of a result, slice by slice. Indexing waits for this slice and all previous ones.

        for y in ad.matmul_all_reduce(x, w, comm, hand_off=True):
            z.append(norm(y))                       # while the next slice is running

    Each slice is a differentiable tensor [rows, out]. `rows` has the positions of the slices in the full result, which
    `whole()` returns. The stream that waits is the one on which the call was made."""

    def __init__(self, slices: Sequence[Tensor], pending: PendingSlices) -> None:
        self._slices, self._pending, self._ready = slices, pending, 0
        self.rows = tuple(pending.rows) or (slice(0, len(slices[0])),)

    def __len__(self) -> int:
        return len(self._slices)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        while self._ready <= at:
            self._pending.wait(self._ready)
            self._ready += 1
        return self._slices[at]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[at] for at in range(len(self)))

    def whole(self) -> Tensor:
        """Return all rows, [s, out]."""
        return torch.cat(list(self))

    @destructor
    def __del__(self) -> None:
        pending = getattr(self, "_pending", None)
        if pending is not None:  # its memory must not be reused while it is still written to
            with contextlib.suppress(Exception):
                pending.end()


def _not_a_view(rows: Tensor) -> Tensor:
    """Return a tensor of the same memory that is not a view for autograd, so that it can be modified in place."""
    return rows.new_empty(0).set_(rows.untyped_storage(), rows.storage_offset(), rows.shape, rows.stride())
