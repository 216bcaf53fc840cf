"""Slices of a matmul_all_reduce that the caller can use while the next ones are still running."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from pynccl.bindings.resource import destructor

from .lanes import Pass, Point


class Slices(Sequence[Tensor]):
    """The rows of a result, slice by slice. Indexing waits for this slice and all previous ones.

        for y in ad.matmul_all_reduce(x, w, comm, hand_off=True):
            z.append(norm(y))                       # while the next slice is running

    Each slice is a differentiable tensor [rows, out]. `rows` has the positions of the slices in the full result, which
    `whole()` returns. The stream that waits is the one on which the call was made."""

    def __init__(self) -> None:
        self.rows: tuple[slice, ...] = ()
        self._slices: Sequence[Tensor] = ()
        self._points: list[Point | None] = []  # after the work of each slice
        self._waited = 0
        self._lanes: Pass | None = None  # until the last slice has been waited for
        self._open = ExitStack()

    @contextlib.contextmanager
    def _keep_open(self, run: AbstractContextManager[Pass]) -> Iterator[Pass]:
        """Begin a pass that ends when its last slice has been waited for, unless the block raises."""
        with ExitStack() as stack:
            lanes = stack.enter_context(run)
            yield lanes
            self._lanes, self._open = lanes, stack.pop_all()

    def _add(self, lanes: Pass, at: slice) -> None:
        """Add a slice whose work has been issued."""
        self.rows += (at,)
        self._points.append(lanes.comm.record())

    def _of(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return the slices of y, for autograd: none is a view, so each can be modified in place."""
        return tuple(_not_a_view(y[at]) for at in self.rows)

    def _filled(self, slices: Sequence[Tensor]) -> Slices:
        """Return these Slices, with their tensors; a single one may have been computed without lanes."""
        self._slices, self.rows = slices, self.rows or (slice(0, len(slices[0])),)
        return self

    def __len__(self) -> int:
        return len(self._slices)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        while self._waited <= at:
            self._wait()
        return self._slices[at]

    def whole(self) -> Tensor:
        """Return all rows, [s, out]."""
        return torch.cat(list(self))

    def _wait(self) -> None:
        """Let the caller's stream, or on the CPU the caller, wait for the next slice. The last one ends the pass."""
        at = self._waited
        if self._lanes is not None:
            try:
                self._lanes.main.wait(self._points[at])
            except BaseException as error:
                self._lanes = None
                self._open.__exit__(type(error), error, error.__traceback__)
                raise
            if at == len(self._points) - 1:
                self._end()
        self._waited = at + 1

    def _end(self) -> None:
        self._lanes = None
        self._open.close()

    @destructor
    def __del__(self) -> None:
        if getattr(self, "_lanes", None) is not None:  # its memory must not be reused while it is still written to
            with contextlib.suppress(Exception):
                self._end()


def _not_a_view(rows: Tensor) -> Tensor:
    return rows.new_empty(0).set_(rows.untyped_storage(), rows.storage_offset(), rows.shape, rows.stride())
