"""Dropout of activations that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import shown

from .. import rng
from ..arguments import check_comm, checked

ELEMENTWISE: dict[type[nn.Module], str] = {nn.Dropout: "dropout", nn.AlphaDropout: "alpha_dropout"}
FUNCTIONS = {  # torch's dropout modules -> functions of torch.nn.functional
    **ELEMENTWISE,
    nn.Dropout1d: "dropout1d",
    nn.Dropout2d: "dropout2d",
    nn.Dropout3d: "dropout3d",
    nn.FeatureAlphaDropout: "feature_alpha_dropout",
}


class Dropout(nn.Dropout):
    """torch.nn.Dropout with the random numbers of `ad.rng`; x [..] -> y [..].

    p        probability of an element to be zeroed in training; the others are scaled by 1 / (1 - p)
    comm     communicator over which x is sharded or replicated
    sharded  True: x is sharded, and each rank draws different numbers. False: x is equal on all ranks, which draw the
             same numbers, also within `ad.rng.sharded(comm)`
    inplace  True: modify x in place. Default: False

    Call `ad.rng.seed(seed, comm)` before training. Otherwise the first forward pass in training compares the ranks'
    generators, and raises RuntimeError if they differ. ValueError if p is not from 0 to 1. It is a graph break for
    torch.compile.
    """

    __call__: Callable[..., Tensor]  # for type checkers: nn.Module's returns Any

    @checked
    def __init__(self, p: float, comm: Communicator, sharded: bool = True, inplace: bool = False) -> None:
        check_comm("Dropout", comm, p=p)
        if not 0 <= p <= 1:
            raise ValueError(f"Dropout: p is {shown(p)}, expected a probability, from 0 to 1")
        super().__init__(p, inplace)
        self.comm, self.sharded = comm, sharded
        self._function = "dropout"

    @classmethod
    def like(cls, module: Any, comm: Communicator, sharded: bool) -> Dropout:
        """Return the layer that replaces one of torch's dropout modules."""
        made = cls(module.p, comm, sharded, module.inplace)
        made._function = FUNCTIONS[type(module)]
        return made.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with dropout in training, else x.   x [..] -> [..]"""
        if not isinstance(x, Tensor) or x.layout is not torch.strided or not (x.is_floating_point() or x.is_complex()):
            raise TypeError(f"Dropout: x is {shown(x)}, expected a dense tensor of floating-point numbers")
        if self.training and self.p > 0:
            return _dropout(self._function, x, self.p, self.comm, self.sharded, self.inplace)
        return F.dropout(x, self.p, False, self.inplace)

    def extra_repr(self) -> str:
        function = "" if self._function == "dropout" else f"{self._function}, "
        return f"{function}{super().extra_repr()}, sharded={self.sharded}, rank {self.comm.rank} of {self.comm.size}"


@torch.compiler.disable
def _dropout(function: str, x: Tensor, p: float, comm: Communicator, sharded: bool, inplace: bool) -> Tensor:
    if not comm.alive:
        comm.check_alive()
    rng.check_equal_states("Dropout", comm)
    with rng.sharded(comm) if sharded else rng.replicated(comm):
        y: Tensor = getattr(F, function)(x, p, True, inplace)
        return y
