"""Tensors that have no memory: on the meta device, under FakeTensorMode and torch.compile, wrappers, freed ones; and
messages and lists that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import process_group
from ranks import HOST, Place, RankPool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import P2POp, _functional_collectives as functional
from torch.testing._internal.two_tensor import TwoTensor

from pynccl.torch_backend import c10d


def calls(r: int, n: int, group: Any) -> dict[str, Callable[[Tensor], Any]]:
    """Return calls of torch.distributed on a tensor of shape [2 * n, 3], by name. Each returns its results."""
    after, before = (r + 1) % n, (r - 1) % n

    def filled(call: Callable[..., Any], out: Any, *arguments: Any, **options: Any) -> Any:
        if (work := call(out, *arguments, group=group, **options)) is not None:
            work.wait()
        return out

    def lists(x: Tensor) -> list[Tensor]:
        return [torch.empty_like(x) for _ in range(n)]

    def gathered(x: Tensor) -> Any:
        outs = lists(x) if r == 0 else None
        dist.gather(x, outs, 0, group=group)
        return outs

    def exchanged(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for work in (dist.isend(x, after, group=group), dist.irecv(out, before, group=group)):
            assert work is not None
            work.wait()
        return out

    def passed_on(x: Tensor) -> Tensor:
        if r == 0:
            dist.send(x, 1, group=group)
        if r == 1:
            dist.recv(x, 0, group=group)
        return x

    def future(x: Tensor) -> Any:
        dist.all_reduce(x, group=group, async_op=True).get_future().wait()
        return x

    def summed(x: Tensor) -> Any:
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))

    return {
        "all_reduce": lambda x: filled(dist.all_reduce, x),
        "all_reduce, async_op": lambda x: filled(dist.all_reduce, x, async_op=True),
        "all_reduce, future": future,
        "functional all_reduce": summed,
        "broadcast": lambda x: filled(dist.broadcast, x, 1),
        "reduce": lambda x: filled(dist.reduce, x, 0)[: r == 0],
        "all_gather": lambda x: filled(dist.all_gather, lists(x), x),
        "all_gather_into_tensor": lambda x: filled(dist.all_gather_into_tensor, torch.cat(lists(x)), x),
        "reduce_scatter": lambda x: filled(dist.reduce_scatter, x[:2].clone(), list(x.chunk(n))),
        "reduce_scatter_tensor": lambda x: filled(dist.reduce_scatter_tensor, x[:2].clone(), x),
        "all_to_all": lambda x: filled(dist.all_to_all, lists(x[:2]), list(x.chunk(n))),
        "all_to_all_single": lambda x: filled(dist.all_to_all_single, torch.empty_like(x), x),
        "gather": gathered,
        "scatter": lambda x: filled(dist.scatter, x, [x.clone() + q for q in range(n)] if r == 0 else None, 0),
        "isend, irecv": exchanged,
        "send, recv": passed_on,
    }


def shapes(found: Any) -> Any:
    return [shapes(each) for each in found] if isinstance(found, list) else getattr(found, "shape", None)


def only_shapes(place: Place, path: str) -> None:
    """Calls with tensors without values give the shapes that they give with gloo, and wait for no rank."""
    with process_group("pynccl", place, path):
        gloo = dist.new_group(backend="gloo")
        ours, theirs = (calls(place.rank, place.size, group) for group in (dist.group.WORLD, gloo))
        for name in ours:
            if place.rank != 1:  # a trace of one rank
                x = torch.ones(2 * place.size, 3, device="meta")
                assert shapes(ours[name](x)) == shapes(theirs[name](x)), name
                with FakeTensorMode():
                    y = torch.ones(2 * place.size, 3)
                    assert shapes(ours[name](y)) == shapes(theirs[name](y)), name
        if place.rank != 1:
            with FakeTensorMode():
                dist.barrier()
                dist.barrier(async_op=True).wait()
        dist.barrier()  # the group is as before


def test_tensors_without_values_have_shapes(processes: RankPool, tmp_path: Path) -> None:
    processes.run(3, only_shapes, str(tmp_path / "store"))


def compiled(place: Place, path: str) -> None:
    """torch.compile does not look into the methods of the backend: what it cannot trace runs as without it."""
    with process_group("pynccl", place, path):
        broadcast = calls(place.rank, place.size, dist.group.WORLD)["broadcast"]
        step = torch.compile(lambda x: broadcast(x + 1) + 1, backend="aot_eager")
        assert step(torch.full((2, 3), float(place.rank))).eq(3).all()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo knew only torch's own class of process groups")
@pytest.mark.timeout(180)
def test_compiled_programs(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, compiled, str(tmp_path / "store"), timeout=170)


def without_memory(place: Place, path: str) -> None:
    """Tensors without memory of their own, which torch's operators would ask for theirs, are refused before anything
    is launched, by each way to the library."""
    with process_group("pynccl", place, path):
        freed = torch.ones(4)
        freed.untyped_storage().resize_(0)
        wrong: list[tuple[Tensor, str]] = [(freed, "no dense memory"), (torch.ones(2).to_sparse(), "to_dense")]
        if not c10d.IS_BACKEND:  # later, torch passes what they wrap
            wrong += [(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)), "TwoTensor.*the plain tensor that it wraps")]
            wrong += [(wrong[-1][0].t(), "TwoTensor")]
        for x, text in wrong:
            for call in (
                lambda x: dist.send(x, 1) if place.rank == 0 else dist.recv(x, 0),
                lambda x: dist.all_gather([x, x], x),
                lambda x: dist.broadcast(x, 0),
            ):
                with pytest.raises((TypeError, NotImplementedError), match=text if not x.is_sparse else "(?i)sparse"):
                    call(x)
        dist.barrier()


def test_tensors_without_memory_are_refused(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, without_memory, str(tmp_path / "store"))


def to_itself(place: Place, path: str) -> None:
    """A rank that sends to itself is told so at once, also in a batch and after the first message."""
    with process_group("pynccl", place, path):
        x, y = torch.ones(2), torch.empty(2)
        other, me = 1 - place.rank, place.rank
        for work in dist.batch_isend_irecv([P2POp(dist.isend, x, other), P2POp(dist.irecv, y, other)]):
            work.wait()
        for ops in ([P2POp(dist.isend, x, me), P2POp(dist.irecv, y, me)], [P2POp(dist.irecv, y, me)]):
            with pytest.raises(ValueError, match=f"rank {me} is this rank itself"):
                dist.batch_isend_irecv(ops)
        dist.barrier()


@pytest.mark.parametrize("transport", ["shm", "sockets"])
def test_messages_to_itself_are_refused(transport: str, tmp_path: Path) -> None:
    pool = RankPool({**HOST, "PYNCCL_HOST_TRANSPORT": transport}, communicators=False)
    try:
        pool.run(2, to_itself, str(tmp_path / "store"))
    finally:
        pool.close()


def empty_lists(place: Place, path: str) -> None:
    r, n = place.rank, place.size
    with process_group("pynccl", place, path):
        wrong: list[Callable[[], object]] = [
            lambda: dist.all_reduce_coalesced([]),
            lambda: dist.all_gather_coalesced([[] for _ in range(n)], []),
            lambda: dist.all_to_all([], []),
            lambda: dist.all_to_all([torch.empty(2)] * n, []),
            lambda: dist.all_gather([], torch.empty(2)),
        ]
        for call in wrong:
            with pytest.raises((ValueError, NotImplementedError), match=r"of 0 tensors|empty list|no tensor arguments"):
                call()
        with dist._coalescing_manager():
            pass
        with dist._coalescing_manager(async_ops=True) as manager:
            pass
        manager.wait()
        # Empty tensors on one side: rank 0 alone sends, then rank 0 alone receives.
        for one_sends in (True, False):
            to_all = [2 if (r if one_sends else q) == 0 else 0 for q in range(n)]
            from_all = [2 if (q if one_sends else r) == 0 else 0 for q in range(n)]
            outs = [torch.empty(size) for size in from_all]
            dist.all_to_all(outs, [torch.full((size,), float(r)) for size in to_all])
            assert [out.tolist() for out in outs] == [[float(q)] * size for q, size in enumerate(from_all)]
            out = torch.empty(sum(from_all))
            dist.all_to_all_single(out, torch.full((sum(to_all),), float(r)), from_all, to_all)
            assert torch.equal(out, torch.cat(outs))


def test_empty_lists_and_one_sided_all_to_all(processes: RankPool, tmp_path: Path) -> None:
    processes.run(3, empty_lists, str(tmp_path / "store"))
