"""The bits of passes that are to be deterministic: the same in every call, also where others would be tried."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from tried import FUNCTIONS, IN, OF_FUNCTION, OUT, ROWS, Ways, tried_small

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observing import observing
from pynccl_autograd import OverlapConfig

MANY_ROWS = 4 * ROWS  # more than BLAS adds up in one go


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def same_bits(
    comm: Communicator, name: str, overlap: Any, of_torch: bool, dtype: torch.dtype, fused: bool
) -> dict[str, list[str]]:
    """25 calls with the same tensors; the ways that were taken."""
    ways, layer = Ways(), nn.Identity()
    with (
        tried_small(comm.rank),
        observing(ways),
        deterministic_algorithms() if of_torch else contextlib.nullcontext(),
    ):
        torch.manual_seed(comm.rank)
        x = torch.randn(MANY_ROWS // comm.size if name == "all_gather_matmul" else MANY_ROWS, IN).to(dtype)
        torch.manual_seed(7)
        w, bias = torch.randn(OUT, IN).to(dtype).requires_grad_(), torch.randn(OUT).to(dtype).requires_grad_()
        if name == "copy_matmul":
            comm.broadcast(x, x, 0)
        x.requires_grad_()
        first: list[Tensor] = []
        for _ in range(25):
            if fused:
                torch.manual_seed(8)
                w.main_grad = torch.randn(OUT, IN)  # type: ignore[attr-defined]
            y = getattr(ad, name)(x, w, comm, bias, overlap=overlap, owner=layer, grad_accumulation_fusion=fused)
            torch.manual_seed(9)
            y.backward(torch.randn(y.shape).to(dtype))
            dw = w.main_grad if fused else w.grad  # type: ignore[attr-defined]
            found = [t.detach().clone() for t in (y, x.grad, dw, bias.grad)]  # type: ignore[union-attr]
            x.grad = w.grad = bias.grad = None
            first = first or found
            for what, mine, its in zip(("y", "dx", "dw", "dbias"), found, first, strict=True):
                assert torch.equal(mine, its), (name, what, ways.took[-2:], float((mine - its).abs().max()))
    assert all(one.settled for one in ad.overlap.decisions(layer))
    return {pattern: list(dict.fromkeys(ways.of(pattern))) for pattern in OF_FUNCTION[name]}


@pytest.mark.parametrize(("n", "dtype", "fused"), [(2, torch.bfloat16, False), (3, torch.float32, True)])
def test_deterministic_algorithms_of_torch_have_the_same_bits_in_a_trial(
    ranks: RankPool, n: int, dtype: torch.dtype, fused: bool
) -> None:
    """Only what rounds alike is tried: the uncut collective beside a matmul that does not need it."""
    for name in FUNCTIONS:
        for found in ranks.run(n, same_bits, name, "auto", True, dtype, fused):
            for pattern, ways in found.items():
                assert ways == ["off"], pattern


@pytest.mark.parametrize(("n", "dtype", "fused"), [(2, torch.bfloat16, False), (3, torch.float32, True)])
def test_deterministic_sums_are_those_in_the_order_of_the_ranks(
    ranks: RankPool, n: int, dtype: torch.dtype, fused: bool
) -> None:
    """Nothing is tried: sums by exchange, in one piece, and gathers off."""
    for name in FUNCTIONS:
        for found in ranks.run(n, same_bits, name, OverlapConfig(deterministic=True), False, dtype, fused):
            gathers = ("all_gather_matmul", "row_backward")
            assert found == {pattern: ["off" if pattern in gathers else "exchange 1"] for pattern in found}
