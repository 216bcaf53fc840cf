"""What programs do with overlapped layers: derivatives of any order, tracing, frozen weights, errors; each gives what
overlap="off" gives."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz.overlap_programs import all_are_tried
from ranks import RankPool
from torch import Tensor, nn

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import decisions
from pynccl_autograd.overlap.trials import MOST_CALLS

ROWS, WIDTH, HIDDEN = 12, 8, 12
WAYS = (OverlapConfig("slices", chunks=3), OverlapConfig("ring"), OverlapConfig("bulk", save_gathered=False))
EXACT: dict[str, float] = {"rtol": 1e-11, "atol": 1e-11}


class Block(nn.Module):
    """Two layers, as in an MLP; sequence-parallel ones also take and give this rank's rows only."""

    def __init__(self, comm: Communicator, overlap: Any, sequence_parallel: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        options = {"sequence_parallel": sequence_parallel, "overlap": overlap, "dtype": torch.float64, **options}
        self.up = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, **options)
        self.down = ad.RowParallelLinear(HIDDEN, WIDTH, comm, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def own_rows(comm: Communicator, dtype: torch.dtype = torch.float64, sequence_parallel: bool = True) -> Tensor:
    torch.manual_seed(11 + (comm.rank if sequence_parallel else 0))
    return torch.randn(ROWS // comm.size if sequence_parallel else ROWS, 2, WIDTH, dtype=dtype)


def alike(comm: Communicator, program: Callable[..., list[Tensor]], *args: Any) -> None:
    """The program's results with each way of overlap are those without."""
    expected = program(comm, "off", *args)
    for way in WAYS:
        found = program(comm, way, *args)
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, **EXACT, msg=lambda text, way=way: f"{way}: {text}")  # type: ignore[misc]


def gradients(block: nn.Module, x: Tensor) -> list[Tensor]:
    return [t.grad for t in (x, *block.parameters()) if t.grad is not None]


def twice_derived(comm: Communicator, overlap: Any, sequence_parallel: bool) -> list[Tensor]:
    block = Block(comm, overlap, sequence_parallel)
    x = own_rows(comm, sequence_parallel=sequence_parallel).requires_grad_()
    inputs = [x, *block.parameters()]
    first = torch.autograd.grad((block(x) ** 3).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), inputs)  # type: ignore[arg-type]
    return [*first, *second]


def changed_in_place(comm: Communicator) -> None:
    expected = Block(comm, "off")
    with all_are_tried():
        block = Block(comm, "auto")
        for _ in range(MOST_CALLS + 1):
            x, own = (own_rows(comm).requires_grad_() for _ in range(2))
            y, hidden = expected(x) * 2, block.up(own)
            hidden.mul_(1)
            found = block.down(F.gelu(hidden)).mul_(2)
            torch.testing.assert_close(found, y, **EXACT)
            for one in (y, found):
                (one**2).sum().backward()
            torch.testing.assert_close(own.grad, x.grad, **EXACT)
    assert all(one.settled and len(one.tried) > 3 for layer in (block.up, block.down) for one in decisions(layer))


def test_what_each_way_of_a_trial_returns_may_be_changed_in_place(ranks: RankPool) -> None:
    ranks.run(2, changed_in_place)


def frozen_parts(comm: Communicator, overlap: Any, which: str) -> list[Tensor]:
    """Some need no gradient, on all ranks or on one: the others communicate as ever."""
    block = Block(comm, overlap)
    x = own_rows(comm).requires_grad_("x" not in which)
    if "w" in which and (comm.rank == 0 or "all" in which):
        block.up.weight.requires_grad_(False)
        block.down.weight.requires_grad_(False)
    if "b" in which:
        block.up.bias.requires_grad_(False)
        block.down.bias.requires_grad_(False)
    y = block(x)
    (y**2).sum().backward()
    return [y, *gradients(block, x)]


def odd_tensors(comm: Communicator, overlap: Any) -> list[Tensor]:
    """Strides, more dimensions, cotangents of zeros that take no memory, parts that are not used, integers in shape."""
    block = Block(comm, overlap)
    x = own_rows(comm).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    flat = own_rows(comm).flatten(0, 1).requires_grad_()
    four = own_rows(comm)[:, :, None].expand(-1, -1, 3, -1).clone().requires_grad_()
    y = block(x)
    y.sum().backward()  # an expanded cotangent
    (block(flat) * 2).sum().backward()
    block(four).pow(2).mean().backward()
    unused = ad.all_gather_matmul(flat, block.up.weight, comm, overlap=overlap, return_gathered=True)[1]
    (unused * 3).sum().backward()
    with torch.no_grad():
        quiet = block(x)
    with torch.inference_mode():
        inference = block(x).clone()
    return [y, quiet, torch.tensor(inference.tolist()), flat.grad, four.grad, *gradients(block, x)]  # type: ignore[list-item]


def transformed(comm: Communicator, overlap: Any) -> list[Tensor]:
    block = Block(comm, overlap)
    x = own_rows(comm)
    state = dict(block.named_parameters())

    def loss(values: dict[str, Tensor], rows: Tensor) -> Tensor:
        return (torch.func.functional_call(block, values, (rows,)) ** 2).sum()

    by_func = torch.func.grad(loss)(state, x)
    tangent = torch.func.jvp(lambda rows: loss(state, rows), (x,), (torch.ones_like(x),))[1]
    batched = torch.func.vmap(block)(torch.stack([x, 2 * x]))
    made: Any = torch.func.vjp(block, x)
    y, pull_back = made
    (rows,) = torch.func.vmap(pull_back)(torch.stack([torch.ones_like(y), y.detach()]))
    return [*by_func.values(), tangent, batched, rows]


def compiled(comm: Communicator, overlap: Any) -> list[Tensor]:
    block = Block(comm, overlap)
    x = own_rows(comm).requires_grad_()
    y = torch.compile(block, backend="aot_eager", fullgraph=True)(x)
    (y**2).sum().backward()
    return [y, *gradients(block, x)]


def checked(comm: Communicator, overlap: Any) -> list[Tensor]:
    """With PYNCCL_CHECK=1, on a communicator that has read it."""
    os.environ["PYNCCL_CHECK"] = "1"
    child = comm.split(0, comm.rank)
    assert child is not None and child.checking
    results = []
    for sequence_parallel in (True, False):
        block = Block(child, overlap, sequence_parallel)
        x = own_rows(child, sequence_parallel=sequence_parallel).requires_grad_()
        y = block(x)
        (y**2).sum().backward()
        results += [y, *gradients(block, x)]
    child.destroy()
    return results


def by_keys(comm: Communicator, overlap: Any) -> list[Tensor]:
    """By TransformerEngine's defaults and keys, whose limits of CTAs a communicator of its own keeps around a ring."""
    results = []
    for keys in ({}, {"fprop": {"method": "ring_exchange"}, "dgrad": {"method": "pipeline", "num_splits": 3}}):
        block = Block(comm, "off" if overlap == "off" else keys)
        x = own_rows(comm).requires_grad_()
        y = block(x)
        (y**2).sum().backward()
        results += [y, *gradients(block, x)]
    return results


PROGRAMS: dict[str, tuple[Any, ...]] = {
    "derived again": (twice_derived, True),
    "derived again, whole": (twice_derived, False),
    **{f"frozen {which}": (frozen_parts, which) for which in ("x", "w", "w all", "b", "x w b", "x w all")},
    "tensors of other forms": (odd_tensors,),
    "transforms of torch.func": (transformed,),
    "keys of TransformerEngine": (by_keys,),
    "compiled": (compiled,),
    "PYNCCL_CHECK": (checked,),
}


@pytest.mark.parametrize(("name", "n"), list(zip(PROGRAMS, itertools.cycle((3, 2)), strict=False)))
def test_programs_give_what_they_give_without_overlap(ranks: RankPool, name: str, n: int) -> None:
    ranks.run(n, alike, *PROGRAMS[name])


def cut_differently(comm: Communicator) -> None:
    child = comm.split(0, comm.rank)
    assert child is not None
    w = torch.ones(4, WIDTH, dtype=torch.float64)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        ad.all_gather_matmul(own_rows(comm), w, child, overlap=OverlapConfig("slices", chunks=2 + comm.rank))
    text = str(caught.value)
    assert "rank 0: all_gather_matmul of m=24, n=4, k=8, by OverlapConfig(method='slices', chunks=2" in text, text
    assert "rank 1: all_gather_matmul of m=24, n=4, k=8, by OverlapConfig(method='slices', chunks=3" in text, text
    child.abort()


def test_ranks_that_cut_differently_are_told_so_and_none_hangs(ranks: RankPool) -> None:
    ranks.run(2, cut_differently)


def refused(comm: Communicator) -> None:
    w, x = torch.ones(4, WIDTH), torch.ones(ROWS, WIDTH)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"overlap": "on"}, ValueError, r"overlap is 'on', expected \"auto\", \"off\", an OverlapConfig"),
        ({"overlap": 3}, ValueError, "overlap is 3, expected"),
        ({"overlap": {"method": "tree"}}, ValueError, "method is 'tree', expected one of ring_exchange"),
        ({"overlap": {"num_split": 4}}, ValueError, "no key 'num_split', expected some of method, num_splits"),
        ({"overlap": {"num_splits": 0, "method": "pipeline"}}, ValueError, "chunks is 0, expected an integer >= 1"),
        ({"reduce_dtype": torch.int32}, TypeError, "reduce_dtype is torch.int32"),
        ({"reduce_dtype": "float32"}, TypeError, "reduce_dtype is 'float32'"),
        ({"grad_accumulation_fusion": True}, ValueError, "weight.main_grad, which is None"),
    ]
    for function in (ad.all_gather_matmul, ad.matmul_reduce_scatter, ad.matmul_all_reduce, ad.copy_matmul):
        call: Any = function
        for options, kind, text in wrong:
            with pytest.raises(kind, match=text):
                call(x, w, comm, **options)
        with pytest.raises(ValueError, match=rf"{function.__name__}: x has shape \(12, 3\), expected \[\.\., 8\]"):
            call(x[:, :3], w, comm, overlap=WAYS[0])
        with pytest.raises(TypeError, match=r"x is torch\.float64, the weight torch\.float32"):
            call(x.double(), w, comm, overlap=WAYS[0])
    with pytest.raises(ValueError, match=r"dimension 0 of \(11, 8\) has 11 rows, not divisible by 2 ranks"):
        ad.matmul_reduce_scatter(x[:11], w, comm, overlap=WAYS[0])
    with pytest.raises(ValueError, match="hand_off=True hands out rows of a matrix"):
        ad.matmul_all_reduce(x[None], w, comm, hand_off=True)
    for options, text in (
        ({"method": "tree"}, "method is 'tree', expected one of auto, slices"),
        ({"chunks": 1.5}, "chunks is 1.5, expected"),
        ({"compute_streams": 3}, "compute_streams is 3, expected an integer >= 1 and <= 2"),
        ({"method": "ring", "deterministic": True}, "deterministic=True sums by method"),
    ):
        with pytest.raises(ValueError, match=text):
            OverlapConfig(**options)  # type: ignore[arg-type]


def test_what_has_no_meaning_is_refused_before_anything_is_launched(ranks: RankPool) -> None:
    ranks.run(2, refused)


def failing(comm: Communicator) -> str:
    """A rank that leaves in the middle is an error of the others, and the layer hangs on none."""
    child = comm.split(0, comm.rank)
    assert child is not None
    block = Block(child, WAYS[0])
    block(own_rows(comm))
    if comm.rank == 1:
        child.abort()
        return "left"
    with pytest.raises(pynccl.NcclError) as caught:
        for _ in range(3):
            block(own_rows(comm))
    child.abort()
    return type(caught.value).__name__


def test_a_rank_that_leaves_is_an_error_of_the_others(ranks: RankPool) -> None:
    found = ranks.run(3, failing)
    assert found == ["NcclRemoteError", "left", "NcclRemoteError"]


def differing_cotangents(comm: Communicator) -> None:
    os.environ["PYNCCL_CHECK"] = "1"
    child = comm.split(0, comm.rank)
    assert child is not None
    x, w = torch.ones(ROWS, 4, requires_grad=True), torch.ones(3, 4)
    y = ad.matmul_all_reduce(x, w, child, overlap=WAYS[0])
    with pytest.raises(pynccl.NcclInvalidUsage, match='grad="replicated", but the cotangents differ'):
        y.backward(torch.full((ROWS, 3), float(comm.rank)))
    child.abort()


def test_cotangents_that_differ_are_found(ranks: RankPool) -> None:
    ranks.run(2, differing_cotangents)


def on_a_stream_of_his(comm: Communicator) -> list[str]:
    """Communication runs on the stream that was given, and on no other; too late, it is refused."""
    child = comm.split(0, comm.rank)
    assert child is not None
    stream: Any = pynccl.create_stream(library=comm.library)
    with pytest.raises(TypeError, match=r"set_side_stream: stream is 3, expected one that pynccl\.create_stream"):
        ad.set_side_stream(child, 3)
    ad.set_side_stream(child, stream)
    names: list[str] = []
    submit = stream.submit

    def counted(work: Any) -> None:
        names.append("submitted")
        submit(work)

    stream.submit = counted
    w = torch.randn(4, WIDTH, dtype=torch.float64)
    x = own_rows(comm)
    found = ad.all_gather_matmul(x, w, child, overlap=WAYS[0])
    torch.testing.assert_close(found, ad.all_gather_matmul(x, w, child, overlap="off"), rtol=1e-11, atol=1e-11)
    with pytest.raises(RuntimeError, match="has used its own side stream; call it before that"):
        ad.set_side_stream(child, stream)
    child.destroy()
    return names


def test_the_callers_own_stream_carries_the_communication(ranks: RankPool) -> None:
    for names in ranks.run(2, on_a_stream_of_his):
        assert len(names) >= 3  # a collective for each slice
