"""Dropout of activations that are cut over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from .. import rng
from ..arguments import check_comm


class Dropout(nn.Dropout):
    """torch.nn.Dropout that draws as `ad.rng` does; x [..] -> y [..].

    p        how likely an element is to be zero, in training; the others are scaled by 1 / (1 - p)
    comm     over which x is cut
    cut      True: each rank draws its own numbers. False: x is equal on all ranks, and they draw the same ones, also
             within `ad.rng.cut(comm)`
    inplace  x is changed

    ValueError if p is not from 0 to 1. The first forward in training compares the ranks' generators, unless
    ad.rng.seed(seed, comm) was called, and raises RuntimeError where they differ.
    Under torch.compile the drawing is a graph break.
    """

    __call__: Callable[..., Tensor]  # for type checkers, to whom that of nn.Module gives Any

    def __init__(self, p: float, comm: Communicator, cut: bool = True, inplace: bool = False) -> None:
        check_comm("Dropout", comm, p=p)
        instance(p, (int, float), "Dropout: p", "a probability, from 0 to 1")
        if not 0 <= p <= 1:
            raise ValueError(f"Dropout: p is {shown(p)}, expected a probability, from 0 to 1")
        super().__init__(p, inplace)
        self.comm, self.cut = comm, cut

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.p > 0:
            return _drawn(x, self.p, self.comm, self.cut, self.inplace)
        return F.dropout(x, self.p, False, self.inplace)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cut={self.cut}, rank {self.comm.rank} of {self.comm.size}"


@torch.compiler.disable
def _drawn(x: Tensor, p: float, comm: Communicator, cut: bool, inplace: bool) -> Tensor:
    if not comm.alive:
        comm.check_alive()
    rng.agree("Dropout", comm)
    with rng.cut(comm) if cut else rng.equal(comm):
        return F.dropout(x, p, True, inplace)
