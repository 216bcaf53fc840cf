"""halo_exchange with widths of each rank, all_to_all with one list of splits; and what they say when ranks disagree."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


# Halos of each rank's own width


def halos(n: int) -> list[tuple[int, int]]:
    """(left, right) of every rank: none at the ends, and no two pairs alike."""
    return [((2 * r + 1) % 4 if r else 0, (r + 2) % 4 if r + 1 < n else 0) for r in range(n)]


def interior(rank: int) -> int:
    return 4 + rank


def line(n: int) -> list[Tensor]:
    """The ranks' interiors, of the whole line."""
    return [integers(3, interior(r), seed=r) for r in range(n)]


def padded(x: Tensor, halo: tuple[int, int]) -> Tensor:
    return torch.nn.functional.pad(x, halo)


def check_halos(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    whole = torch.cat(line(n), 1)
    start = sum(interior(q) for q in range(r))
    left, right = halos(n)[r]
    x = padded(line(n)[r], (left, right)).requires_grad_()
    y = ad.halo_exchange(x, comm, 1, halos(n))
    torch.testing.assert_close(y, whole[:, start - left : start + interior(r) + right], **EXACT)
    assert not y._is_view() and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    # The adjoint beside torch's own, of the windows that all ranks see of one line.
    full = whole.clone().requires_grad_()
    starts = [sum(interior(q) for q in range(p)) for p in range(n)]
    windows = [full[:, s - a : s + interior(q) + b] for q, (s, (a, b)) in enumerate(zip(starts, halos(n), strict=True))]
    gs = [integers(*window.shape, seed=20 + q) for q, window in enumerate(windows)]
    (dfull,) = torch.autograd.grad(windows, full, gs)
    (dx,) = torch.autograd.grad(y, x, gs[r])
    torch.testing.assert_close(dx, padded(dfull[:, start : start + interior(r)], (left, right)), **EXACT)

    def call(t: Tensor) -> Tensor:
        return ad.halo_exchange(t, comm, 1, halos(n))

    assert ad.testing.check_adjoint(call, x, comm) <= 1e-12
    assert ad.testing.check_gradients(lambda t: call(t.sin()) ** 2, x, comm, samples=2) <= 1
    batch = torch.stack([x.detach(), 2 * x.detach()])
    torch.testing.assert_close(torch.func.vmap(call)(batch), torch.stack([y, 2 * y]).detach(), **EXACT)
    torch.testing.assert_close(torch.func.jvp(call, (x,), (2 * x,))[1], 2 * y, **EXACT)


@pytest.mark.parametrize("n", [2, 4])
def test_halos_may_have_a_width_of_their_own_on_every_rank(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_halos)


# One list of splits


def counts(n: int) -> list[list[int]]:
    """counts[s][t]: rows from rank s to rank t; some none."""
    return [[(s + 2 * t) % (n + 1) for t in range(n)] for s in range(n)]


def check_learnt(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    rows = counts(n)
    sends, recvs = rows[r], [row[r] for row in rows]
    for dim in (0, 1):
        shape = [3, 3]
        shape[dim] = sum(sends)
        x = integers(*shape, seed=r).requires_grad_()
        expected = ad.all_to_all(x, comm, dim, dim, send_splits=sends, recv_splits=recvs)
        g = integers(*expected.shape, seed=10 + r)
        (wanted,) = torch.autograd.grad(expected, x, g)
        given = partial(ad.all_to_all, comm=comm, split_dim=dim, concat_dim=dim)
        ways: list[Callable[[Tensor], Tensor]] = [
            partial(given, send_splits=sends),
            partial(given, recv_splits=recvs),
            lambda t, dim=dim: ad.start(ad.all_to_all, t, comm, dim, dim, send_splits=sends).wait(),
            ad.nn.AllToAll(comm, dim, dim, send_splits=torch.tensor(sends)),
        ]
        for way in ways:
            y = way(x)
            torch.testing.assert_close(y, expected, **EXACT)
            (dx,) = torch.autograd.grad(y, x, g)
            torch.testing.assert_close(dx, wanted, **EXACT)
        batch = torch.stack([x.detach(), 2 * x.detach()])
        torch.testing.assert_close(torch.func.vmap(ways[0])(batch)[1], 2 * expected.detach(), **EXACT)
        torch.testing.assert_close(torch.func.jvp(ways[0], (x.detach(),), (x.detach(),))[1], expected.detach(), **EXACT)


@pytest.mark.parametrize("n", [2, 4])
def test_a_missing_list_of_splits_is_learnt_from_the_other_ranks(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_learnt)


def wrong_on_one_rank(comm: Communicator) -> list[str]:
    """Rank 1 passes wrong sizes: it says how, the others whose."""
    x = torch.ones(3)
    first = comm.rank != 1
    options: list[dict[str, Any]] = [
        {"send_splits": [1, 1, 1] if first else [1, 1, 2]},
        {"send_splits": [1, 1, 1] if first else [3]},
        {"recv_splits": [1, 1, 1] if first else [1, 2, 1]},  # rank 1 expects more than rank 1 has
        {"recv_splits": [1, 1, 1] if first else [1, -1, 1]},
    ]
    messages = []
    for option in options:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            ad.all_to_all(x, comm, **option)
        messages.append(str(caught.value))
    comm.barrier()
    return messages


def test_wrong_splits_on_one_rank_raise_on_all_where_they_are_learnt(ranks: RankPool) -> None:
    first, second, third = ranks.run(3, wrong_on_one_rank)
    assert first == third and all("on rank 1: ValueError" in message for message in first)
    for text, message in zip(
        [
            "has 3 rows, but send_splits (1, 1, 2) add up to 4",
            "expected one size for each of 3 ranks",
            "has 3 rows, but what the other ranks expect of it, (1, 2, 1) add up to 4",
            "expected sizes >= 0",
        ],
        second,
        strict=True,
    ):
        assert text in message


def learnt_while_tracing(comm: Communicator) -> list[str]:
    """On rank 0 only: nothing may be asked of the others."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if comm.rank:
        return []
    torch._dynamo.reset()
    messages = []
    with FakeTensorMode(), pytest.raises(ValueError) as caught:
        ad.all_to_all(torch.ones(4), comm, send_splits=[1, 3])
    messages.append(str(caught.value))
    compiled = torch.compile(lambda t: ad.all_to_all(t, comm, send_splits=[1, 3]), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception) as wrapped:  # torch.compile wraps what is raised while it traces
        compiled(torch.ones(4))
    return [*messages, str(wrapped.value)]


def test_nothing_is_asked_of_other_ranks_under_torch_compile_and_fake_tensors(ranks: RankPool) -> None:
    for message in ranks.run(2, learnt_while_tracing)[0]:
        assert "both are needed where nothing can be asked of the other ranks" in message


# Ranks that disagree, with PYNCCL_CHECK=1


def disagreements(world: Communicator) -> list[str]:
    # Without PYNCCL_CHECK one that passes both lists where the other passes one is not left waiting.
    mine, first = world.split(0), world.rank == 0  # of no use afterwards
    assert mine is not None
    with pytest.raises((ValueError, pynccl.NcclError), match="disagree"):
        ad.all_to_all(torch.ones(10), mine, send_splits=[5, 5], recv_splits=[5, 5] if first else None)
    mine.abort()
    os.environ["PYNCCL_CHECK"] = "1"
    comm = world.split(0)
    assert comm is not None
    x = torch.ones(6)
    calls: list[Callable[[], object]] = [
        lambda: ad.all_to_all(x, comm, send_splits=[3, 3], recv_splits=[3, 3] if first else None),
        lambda: ad.all_to_all(x, comm, send_splits=[3, 3] if first else None),
        lambda: ad.all_to_all(x, comm, send_splits=[3, 3 if first else 2], recv_splits=[3, 3]),
        lambda: ad.halo_exchange(x, comm, 0, [(0, 1), (1, 0)] if first else [(0, 1), (2, 0)]),
        lambda: ad.halo_exchange(x[: 6 if first else 2], comm, 0, [(0, 2), (1, 0)]),
        lambda: ad.halo_exchange(x, comm, 0, [(0, 0)] * (800 if first else 900)),  # more than a record holds
    ]
    messages = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        messages.append(f"{caught.type.__name__}: {caught.value}")
    good = ad.all_to_all(x, comm, send_splits=[3, 3])
    right = ad.halo_exchange(x, comm, 0, [(0, 1), (2, 0)])
    assert good.tolist() == [1.0] * 6 and right.tolist() == [1.0] * 6
    return messages


def test_ranks_that_pass_other_splits_or_halos_are_told_on_every_rank(doomed: RankPool) -> None:
    for rank, messages in enumerate(doomed.run(2, disagreements)):
        own, other = ("send, recv", "send") if rank == 0 else ("send", "send, recv")
        assert f"rank {rank}: all_to_all from dimension 0 to 0, splits given: {own} at " in messages[0]
        assert f"rank {1 - rank}: all_to_all from dimension 0 to 0, splits given: {other} at " in messages[0]
        assert "test_exchanges.py" in messages[0]
        assert messages[1].startswith("NcclInvalidUsage") and "splits given: none" in messages[1]
        assert "has 6 rows, but send_splits (3, 2) add up to 5" in messages[2]
        assert ("on rank 1: ValueError" in messages[2]) == (rank == 0)
        assert "halo=[(0, 1), (2, 0)]" in messages[3]
        assert "on rank 1 has 2 rows, of which 1 are the interior" in messages[4]
        assert "expected a pair (left, right) for each of 2 ranks" in messages[5]
