"""halo_exchange with per-rank widths, all_to_all with one list of splits, and their errors when ranks disagree."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def halos(n: int) -> list[tuple[int, int]]:
    """(left, right) of every rank: zero at the ends, all pairs different."""
    return [((2 * r + 1) % 4 if r else 0, (r + 2) % 4 if r + 1 < n else 0) for r in range(n)]


def check_halos(comm: Communicator) -> None:
    """Compare the adjoint with torch's own adjoint of overlapping windows of one tensor."""
    n, r = comm.size, comm.rank
    inner = [4 + q for q in range(n)]
    full = integers(3, sum(inner), seed=1).requires_grad_()
    starts = [sum(inner[:q]) for q in range(n)]
    windows = [full[:, s - a : s + m + b] for s, m, (a, b) in zip(starts, inner, halos(n), strict=True)]
    gs = [integers(*window.shape, seed=20 + q) for q, window in enumerate(windows)]
    (dfull,) = torch.autograd.grad(windows, full, gs)
    pad = partial(torch.nn.functional.pad, pad=halos(n)[r])
    x = pad(full.detach().split(inner, 1)[r]).requires_grad_()

    def call(t: Tensor) -> Tensor:
        return ad.halo_exchange(t, comm, 1, halos(n))

    y = call(x)
    torch.testing.assert_close(y, windows[r], **EXACT)
    (dx,) = torch.autograd.grad(y, x, gs[r])
    torch.testing.assert_close(dx, pad(dfull.split(inner, 1)[r]), **EXACT)
    assert ad.testing.check_gradients(lambda t: call(t.sin()) ** 2, x, comm, samples=2) <= 1
    torch.testing.assert_close(torch.func.jvp(call, (x,), (2 * x,))[1], 2 * y, **EXACT)


def test_halo_widths_can_differ_between_ranks(ranks: RankPool) -> None:
    ranks.run(4, check_halos)


def check_inferred_splits(comm: Communicator) -> None:
    """Rank s sends (s + 2 t) mod (n + 1) rows to rank t, along either dimension; some counts are 0."""
    n, r = comm.size, comm.rank
    rows = [[(s + 2 * t) % (n + 1) for t in range(n)] for s in range(n)]
    sends, recvs = rows[r], [row[r] for row in rows]
    for dim in (0, 1):
        inputs = [integers(*((sum(row), 3) if dim == 0 else (3, sum(row))), seed=s) for s, row in enumerate(rows)]
        expected = torch.cat([x.split(row, dim)[r] for x, row in zip(inputs, rows, strict=True)], dim)
        x = inputs[r].requires_grad_()
        all_to_all = partial(ad.all_to_all, comm=comm, split_dim=dim, concat_dim=dim)
        calls: list[Callable[[Tensor], Tensor]] = [
            partial(all_to_all, send_splits=sends, recv_splits=recvs),
            partial(all_to_all, send_splits=sends),
            partial(all_to_all, recv_splits=recvs),
            lambda t, dim=dim: ad.start(ad.all_to_all, t, comm, dim, dim, send_splits=sends).wait(),  # type: ignore[misc]
            ad.nn.AllToAll(comm, dim, dim, send_splits=torch.tensor(sends)),
        ]
        for call in calls:
            y = call(x)
            torch.testing.assert_close(y, expected, **EXACT)
            (dx,) = torch.autograd.grad(y, x, y.detach())
            torch.testing.assert_close(dx, x.detach(), **EXACT)  # a permutation: the cotangent y goes back to x
        batch = torch.stack([x.detach(), 2 * x.detach()])
        torch.testing.assert_close(torch.func.vmap(calls[1])(batch)[1], 2 * expected, **EXACT)


def test_a_missing_list_of_splits_is_obtained_from_the_other_ranks(ranks: RankPool) -> None:
    ranks.run(4, check_inferred_splits)


def disagreements(world: Communicator) -> list[str]:
    os.environ["PYNCCL_CHECK"] = "1"
    comm, first = world.split(0), world.rank == 0  # unusable afterwards
    assert comm is not None
    x = torch.ones(6)
    calls: list[Callable[[], object]] = [
        lambda: ad.all_to_all(x, comm, send_splits=[3, 3], recv_splits=[3, 3] if first else None),
        lambda: ad.all_to_all(x, comm, send_splits=[3, 3 if first else 2]),
        lambda: ad.halo_exchange(x, comm, 0, [(0, 1), (1, 0)] if first else [(0, 1), (2, 0)]),
        lambda: ad.halo_exchange(x[: 6 if first else 2], comm, 0, [(0, 2), (1, 0)]),
    ]
    messages = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        messages.append(f"{caught.type.__name__}: {caught.value}")
    assert ad.all_to_all(x, comm, send_splits=[3, 3]).tolist() == [1.0] * 6
    return messages


def test_different_splits_or_halos_raise_on_every_rank(doomed: RankPool) -> None:
    for rank, (missing_list, splits, halo, rows) in enumerate(doomed.run(2, disagreements)):
        own, other = ("send, recv", "send") if rank == 0 else ("send", "send, recv")
        assert f"rank {rank}: all_to_all from dimension 0 to 0, splits given: {own} at " in missing_list
        assert f"rank {1 - rank}: all_to_all from dimension 0 to 0, splits given: {other} at " in missing_list
        assert "has size 6, but send_splits (3, 2) add up to 5" in splits
        assert ("on rank 1: ValueError" in splits) == (rank == 0)
        assert "halo=[(0, 1), (2, 0)]" in halo
        assert "halos (1, 0) need size 3 along dim 0" in rows and "but x has 2 on rank 1" in rows
