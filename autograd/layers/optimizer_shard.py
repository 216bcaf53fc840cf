"""OptimizerShard: an optimizer for this rank's part of each bucket, whose state is 1/N of the whole (ZeRO, stage 1).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from ..agreement import alike
from .buckets import Bucket, Named, as_real
from .gradients import clip_factor, partial_over, total_norm

MakeOptimizer = Callable[[list[Named]], torch.optim.Optimizer]


class _Part(NamedTuple):
    """What this rank has of a parameter."""

    name: str
    parameter: nn.Parameter
    own: nn.Parameter  # [k], which the optimizer has
    grad: Tensor  # [k]


class _Owned(NamedTuple):
    """This rank's part of a bucket."""

    values: Tensor  # [n], of all ranks: the parameters are views of it
    own: Tensor  # [n/N], of that
    grad: Tensor  # [n/N]
    parts: list[_Part]


class OptimizerShard:
    """Holds all parameters in flat tensors, of which each rank steps its own block.

    make   what the user gave: [(name, part)] -> optimizer; a part is a parameter [k] of this rank, of the named one
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator, make: MakeOptimizer) -> None:
        self.comm, self._buckets = comm, buckets
        self._owned = [_own(bucket, comm) for bucket in buckets]
        self._parts = [part for owned in self._owned for part in owned.parts]
        self.optimizer = alike(comm, lambda: self._made(make))

    def _made(self, make: MakeOptimizer) -> torch.optim.Optimizer:
        if not self._parts:
            raise ValueError(
                f"DataParallelGradients: the model is too small to be cut over {self.comm.size} ranks: the optimizer "
                f"of rank {self.comm.rank} would have no parameter; leave out shard_optimizer"
            )
        optimizer = make([(part.name, part.own) for part in self._parts])
        instance(
            optimizer,
            torch.optim.Optimizer,
            "DataParallelGradients: what shard_optimizer returned",
            "an optimizer, as of lambda params: torch.optim.AdamW(params)",
        )
        return optimizer

    def take(self, index: int, block: Tensor) -> None:
        """This rank's block [n/N] of the averaged gradients of a bucket, made whole: added to what is there."""
        owned = self._owned[index]
        over = partial_over(self._buckets[index].pieces[0].parameter)
        if over is not None:  # here, before it is added: so it is summed once, whatever comes before the step
            block = block.to(as_real(owned.grad).dtype)
            over.all_reduce(block, block)
        if any(part.own.grad is not None for part in owned.parts):
            as_real(owned.grad).add_(block)
        else:
            as_real(owned.grad).copy_(block)
        for part in owned.parts:
            part.own.grad = part.grad

    def step(self) -> None:
        """Step the parts, and gather all ranks'."""
        self.optimizer.step()
        for owned in self._owned:
            self.comm.all_gather(as_real(owned.own), as_real(owned.values))

    def zero_grad(self) -> None:
        for part in self._parts:
            part.own.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        """See DataParallelGradients.clip_grad_norm_."""
        own = {id(part.parameter): part.own.grad for part in self._parts}
        parameters = [piece.parameter for bucket in self._buckets for piece in bucket.pieces]
        norm = total_norm([(one, own.get(id(one))) for one in parameters], norm_type, self.comm.device, self.comm)
        factor = clip_factor(norm, max_norm)
        for owned in self._owned:
            if any(part.own.grad is not None for part in owned.parts):
                owned.grad.mul_(factor)
        return norm.float()

    def state_dict(self) -> dict[str, Any]:
        """This rank's."""
        return {"rank": self.comm.rank, "size": self.comm.size, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        instance(state, Mapping, "load_state_dict: state", "what state_dict() returned")
        found = (state.get("rank"), state.get("size"))
        if found != (self.comm.rank, self.comm.size):
            raise ValueError(
                f"load_state_dict: state is of rank {shown(found[0])} of {shown(found[1])}, expected that of rank "
                f"{self.comm.rank} of {self.comm.size}: each rank saves its own part, and loads it"
            )
        self.optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def _own(bucket: Bucket, comm: Communicator) -> _Owned:
    """The parameters of the bucket become views of one tensor, of which this rank owns a block."""
    values = torch.zeros_like(bucket.flat)
    for piece, view in zip(bucket.pieces, bucket.views_of(values), strict=True):
        view.copy_(piece.parameter)
        piece.parameter.data = view
    size = len(values) // comm.size
    begin = comm.rank * size
    own = values[begin : begin + size]
    grad = torch.zeros_like(own)
    parts = []
    for piece in bucket.pieces:
        start, stop = max(piece.start - begin, 0), min(piece.stop - begin, size)
        if start < stop:
            parts.append(_Part(piece.name, piece.parameter, nn.Parameter(own[start:stop]), grad[start:stop]))
    return _Owned(values, own, grad, parts)
