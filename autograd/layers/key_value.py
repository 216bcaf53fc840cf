"""KeyValueLinear: the keys or values of attention that has fewer of their heads than there are ranks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pynccl import Communicator

from ..arguments import check_call, check_comm
from ..ops.all_reduce import copy
from .linear import ColumnParallelLinear


class KeyValueLinear(ColumnParallelLinear):
    """A column-parallel layer whose parts several ranks share: each has the whole of the head that its queries use.

    comm    of as many ranks as there are heads, one for each
    shared  of the ranks that have the same head: the gradients of weight and bias are summed over them

    x is whole already, as with gather_input=False. `Mesh(comm, {"heads": K, "shared": N // K})` has both communicators.
    """

    shared: Communicator

    def __init__(self, in_features: int, out_features: int, comm: Communicator, *args: Any, **options: Any) -> None:
        shared = options.pop("shared", None)
        check_comm("KeyValueLinear: shared", shared)
        super().__init__(in_features, out_features, comm, *args, **{**options, "gather_input": False})
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        check_call("KeyValueLinear", x, self.comm)
        self._check(x, self.in_features, "all of")
        weight = copy(self.weight, self.shared)
        return F.linear(x, weight, None if self.bias is None else copy(self.bias, self.shared))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shared by {self.shared.size}"
