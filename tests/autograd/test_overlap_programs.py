"""Programs with overlapped layers give the results of overlap="off": second derivatives, torch.func, torch.compile.

Ranks that disagree or leave raise errors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig

ROWS, WIDTH, HIDDEN = 12, 8, 12
CONFIGS = (OverlapConfig("slices", chunks=3), OverlapConfig("ring"), OverlapConfig("bulk", save_gathered=False))
EXACT: dict[str, float] = {"rtol": 1e-11, "atol": 1e-11}


class Block(nn.Module):
    """An MLP of two layers. With sequence parallelism, input and output are this rank's rows."""

    def __init__(self, comm: Communicator, overlap: Any, sequence_parallel: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        options = {"sequence_parallel": sequence_parallel, "overlap": overlap, "dtype": torch.float64, **options}
        self.up = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, **options)
        self.down = ad.RowParallelLinear(HIDDEN, WIDTH, comm, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def own_rows(comm: Communicator, sequence_parallel: bool = True) -> Tensor:
    torch.manual_seed(11 + (comm.rank if sequence_parallel else 0))
    return torch.randn(ROWS // comm.size if sequence_parallel else ROWS, 2, WIDTH, dtype=torch.float64)


def compare_with_off(comm: Communicator, program: Callable[..., list[Tensor]], *args: Any) -> None:
    """Compare the program's results with each schedule to those without overlap."""
    expected = program(comm, "off", *args)
    for config in CONFIGS:
        found = program(comm, config, *args)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, **EXACT, msg=lambda text, config=config: f"{config}: {text}")  # type: ignore[misc]


def step(block: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Return the output and all gradients."""
    y = block(x) if run is None else run(x)
    (y**2).sum().backward()
    return [y, *(t.grad for t in (x, *block.parameters()) if t.grad is not None)]


def second_derivatives(comm: Communicator, overlap: Any, sequence_parallel: bool) -> list[Tensor]:
    block = Block(comm, overlap, sequence_parallel)
    x = own_rows(comm, sequence_parallel).requires_grad_()
    inputs = [x, *block.parameters()]
    first = torch.autograd.grad((block(x) ** 3).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), inputs)  # type: ignore[arg-type]
    return [*first, *second]


def func_transforms(comm: Communicator, overlap: Any) -> list[Tensor]:
    block = Block(comm, overlap)
    x = own_rows(comm)
    state = dict(block.named_parameters())

    def loss(values: dict[str, Tensor], rows: Tensor) -> Tensor:
        return (torch.func.functional_call(block, values, (rows,)) ** 2).sum()

    by_func = torch.func.grad(loss)(state, x)
    tangent = torch.func.jvp(lambda rows: loss(state, rows), (x,), (torch.ones_like(x),))[1]
    batched = torch.func.vmap(block)(torch.stack([x, 2 * x]))
    result: Any = torch.func.vjp(block, x)
    y, pull_back = result
    (rows,) = torch.func.vmap(pull_back)(torch.stack([torch.ones_like(y), y.detach()]))
    return [*by_func.values(), tangent, batched, rows]


def compiled_step(comm: Communicator, overlap: Any) -> list[Tensor]:
    block = Block(comm, overlap)
    return step(block, own_rows(comm).requires_grad_(), torch.compile(block, backend="aot_eager", fullgraph=True))


PROGRAMS: dict[str, tuple[Any, ...]] = {
    "derived again": (second_derivatives, True),
    "derived again, whole": (second_derivatives, False),
    "transforms of torch.func": (func_transforms,),
    "compiled": (compiled_step,),
}


@pytest.mark.parametrize(("name", "n"), list(zip(PROGRAMS, itertools.cycle((3, 2)), strict=False)))
def test_programs_give_the_results_of_overlap_off(ranks: RankPool, name: str, n: int) -> None:
    ranks.run(n, compare_with_off, *PROGRAMS[name])


def check_disagreements(comm: Communicator) -> None:
    """Ranks whose schedules or cotangents differ all raise, and none hangs."""
    child = comm.split(0, comm.rank)
    assert child is not None
    w = torch.ones(4, WIDTH, dtype=torch.float64)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        ad.all_gather_matmul(own_rows(comm), w, child, overlap=OverlapConfig("slices", chunks=2 + comm.rank))
    text = str(caught.value)
    for rank in (0, 1):
        line = f"rank {rank}: all_gather_matmul of m=24, n=4, k=8, OverlapConfig(method='slices', chunks={2 + rank}"
        assert line in text, text
    child.abort()
    os.environ["PYNCCL_CHECK"] = "1"
    child = comm.split(0, comm.rank)
    assert child is not None
    y = ad.matmul_all_reduce(torch.ones(ROWS, 4, requires_grad=True), torch.ones(3, 4), child, overlap=CONFIGS[0])
    with pytest.raises(pynccl.NcclInvalidUsage, match='grad="replicated", but the cotangents differ'):
        y.backward(torch.full((ROWS, 3), float(comm.rank)))
    child.abort()


def test_disagreeing_ranks_raise(ranks: RankPool) -> None:
    ranks.run(2, check_disagreements)


def abort_one_rank(comm: Communicator) -> str:
    child = comm.split(0, comm.rank)
    assert child is not None
    block = Block(child, CONFIGS[0])
    block(own_rows(comm))
    if comm.rank == 1:
        child.abort()
        return "left"
    with pytest.raises(pynccl.NcclError) as caught:
        for _ in range(3):
            block(own_rows(comm))
    child.abort()
    return type(caught.value).__name__


def test_a_rank_that_aborts_raises_on_the_others(ranks: RankPool) -> None:
    assert ranks.run(3, abort_one_rank) == ["NcclRemoteError", "left", "NcclRemoteError"]


def check_types_in_flight(comm: Communicator) -> None:
    """With autocast and without overlap, the types are those of the collective and F.linear, one after the other. Sums
    in float8 are converted once, after the cotangent of the gathered tensor has been added."""
    torch.manual_seed(comm.rank)
    x, w = torch.randn(64, 32), torch.randn(48, 32)
    for overlap, reduce_dtype in itertools.product(("off", "auto"), (None, torch.float32)):
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, gathered = ad.all_gather_matmul(
                mine, w, comm, overlap=overlap, reduce_dtype=reduce_dtype, return_gathered=True
            )  # type: ignore[call-overload]
            expected = F.linear(ad.all_gather(other, comm, 0, grad="sum"), w)
        assert gathered.dtype is torch.float32 and torch.equal(y, expected)
        y.float().square().sum().backward()
        expected.float().square().sum().backward()
        assert mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)
    for config in (OverlapConfig("off"), CONFIGS[0], CONFIGS[2]):  # a ring adds, which torch cannot in float8
        mine = x.clone().requires_grad_()
        y, gathered = ad.all_gather_matmul(
            mine, w, comm, overlap=config, reduce_dtype=torch.float8_e5m2, return_gathered=True
        )  # type: ignore[call-overload]
        (y.mean() + gathered.mean()).backward()
        assert mine.grad is not None and mine.grad.isfinite().all()


def test_types_in_which_tensors_are_communicated(ranks: RankPool) -> None:
    ranks.run(2, check_types_in_flight)
