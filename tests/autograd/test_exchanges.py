"""halo_exchange with widths of each rank, all_to_all with one list of splits; and what they say when ranks disagree."""

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
    """(left, right) of every rank: none at the ends, and no two pairs alike."""
    return [((2 * r + 1) % 4 if r else 0, (r + 2) % 4 if r + 1 < n else 0) for r in range(n)]


def check_halos(comm: Communicator) -> None:
    """The adjoint beside torch's own, of the windows that all ranks see of one line."""
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


def test_halos_may_have_a_width_of_their_own_on_every_rank(ranks: RankPool) -> None:
    ranks.run(4, check_halos)


def check_learnt(comm: Communicator) -> None:
    """Rank s sends (s + 2 t) mod (n + 1) rows to rank t, along either dimension; some none."""
    n, r = comm.size, comm.rank
    rows = [[(s + 2 * t) % (n + 1) for t in range(n)] for s in range(n)]
    sends, recvs = rows[r], [row[r] for row in rows]
    for dim in (0, 1):
        inputs = [integers(*((sum(row), 3) if dim == 0 else (3, sum(row))), seed=s) for s, row in enumerate(rows)]
        wanted = torch.cat([x.split(row, dim)[r] for x, row in zip(inputs, rows, strict=True)], dim)
        x = inputs[r].requires_grad_()
        given = partial(ad.all_to_all, comm=comm, split_dim=dim, concat_dim=dim)
        ways: list[Callable[[Tensor], Tensor]] = [
            partial(given, send_splits=sends, recv_splits=recvs),
            partial(given, send_splits=sends),
            partial(given, recv_splits=recvs),
            lambda t, dim=dim: ad.start(ad.all_to_all, t, comm, dim, dim, send_splits=sends).wait(),  # type: ignore[misc]
            ad.nn.AllToAll(comm, dim, dim, send_splits=torch.tensor(sends)),
        ]
        for way in ways:
            y = way(x)
            torch.testing.assert_close(y, wanted, **EXACT)
            (dx,) = torch.autograd.grad(y, x, y.detach())
            torch.testing.assert_close(dx, x.detach(), **EXACT)  # a permutation: the cotangent y goes back to x
        batch = torch.stack([x.detach(), 2 * x.detach()])
        torch.testing.assert_close(torch.func.vmap(ways[1])(batch)[1], 2 * wanted, **EXACT)


def test_a_missing_list_of_splits_is_learnt_from_the_other_ranks(ranks: RankPool) -> None:
    ranks.run(4, check_learnt)


def disagreements(world: Communicator) -> list[str]:
    os.environ["PYNCCL_CHECK"] = "1"
    comm, first = world.split(0), world.rank == 0  # of no use afterwards
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


def test_ranks_that_pass_other_splits_or_halos_are_told_on_every_rank(doomed: RankPool) -> None:
    for rank, (one, splits, halo, rows) in enumerate(doomed.run(2, disagreements)):
        own, other = ("send, recv", "send") if rank == 0 else ("send", "send, recv")
        assert f"rank {rank}: all_to_all from dimension 0 to 0, splits given: {own} at " in one
        assert f"rank {1 - rank}: all_to_all from dimension 0 to 0, splits given: {other} at " in one
        assert "has 6 rows, but send_splits (3, 2) add up to 5" in splits
        assert ("on rank 1: ValueError" in splits) == (rank == 0)
        assert "halo=[(0, 1), (2, 0)]" in halo
        assert "on rank 1 has 2 rows, of which 1 are the interior" in rows
