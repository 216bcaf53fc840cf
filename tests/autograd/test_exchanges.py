"""halo_exchange with widths of each rank, all_to_all with one list of splits; and what they say when ranks disagree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool, each_size
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
    torch.testing.assert_close(ad.start(ad.halo_exchange, x, comm, 1, halos(n)).wait(), y, **EXACT)
    torch.testing.assert_close(ad.nn.HaloExchange(comm, 1, halos(n))(x), y, **EXACT)


@each_size
def test_halos_may_have_a_width_of_their_own_on_every_rank(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_halos)


def compiled_halos(comm: Communicator) -> None:
    torch._dynamo.reset()
    halo = halos(comm.size)
    x = padded(line(comm.size)[comm.rank], halo[comm.rank]).requires_grad_()

    def f(t: Tensor) -> Tensor:
        return ad.halo_exchange(t * 2, comm, 1, halo).square().sum()

    (eager,) = torch.autograd.grad(f(x), x)
    (traced,) = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(x), x)
    torch.testing.assert_close(traced, eager, **EXACT)
    key, params = (
        ad.key_of(comm),
        (1, *halo[comm.rank], [halo[0][1] if comm.rank else 0, 0 if comm.rank else halo[1][0]]),
    )
    for name in ("halo_exchange", "halo_reduce"):
        operator = getattr(torch.ops.pynccl, name).default
        found = torch.library.opcheck(operator, (x, key, *params))
        assert set(found.values()) == {"SUCCESS"}


def test_halos_of_each_ranks_own_width_compile(ranks: RankPool) -> None:
    ranks.run(2, compiled_halos)


def wrong_halos(comm: Communicator) -> list[str]:
    x = torch.ones(6, 2)
    messages = []
    for halo in ([(0, 1)], [(0, 1), (1, -1)], [(0, 1), 2], "ab", [(0, 5), (5, 0)], (1, 2, 3), -1):
        with pytest.raises((ValueError, TypeError)) as caught:
            ad.halo_exchange(x, comm, 0, halo)
        messages.append(str(caught.value))
    comm.barrier()
    return messages


def test_wrong_halos_are_named_on_every_rank(ranks: RankPool) -> None:
    expected = [
        "halo is [(0, 1)], expected a pair (left, right) for each of 2 ranks",
        "halo is [(0, 1), (1, -1)]",
        "halo is [(0, 1), 2], expected a width, or a pair (left, right) of them, or a list of such pairs",
        "halo is 'ab', expected a width",
        "of which 1 are the interior; expected widths >= 0, and an interior of at least 5",
        "halo is (1, 2, 3), expected a width",
        "halo is -1 and dimension 0",
    ]
    for messages in ranks.run(2, wrong_halos):
        for text, message in zip(expected, messages, strict=True):
            assert text in message


# One list of splits


def counts(n: int) -> list[list[int]]:
    """counts[s][t]: rows from rank s to rank t; some none."""
    return [[(s + 2 * t) % (n + 1) for t in range(n)] for s in range(n)]


def given(comm: Communicator, dim: int, splits: dict[str, Any], x: Tensor) -> Tensor:
    return ad.all_to_all(x, comm, dim, dim, **splits)


def started(comm: Communicator, dim: int, splits: dict[str, Any], x: Tensor) -> Tensor:
    return ad.start(ad.all_to_all, x, comm, dim, dim, **splits).wait()


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
        ways: list[Callable[[Tensor], Tensor]] = [
            partial(given, comm, dim, {"send_splits": sends}),
            partial(given, comm, dim, {"recv_splits": recvs}),
            partial(given, comm, dim, {"send_splits": torch.tensor(sends)}),
            partial(started, comm, dim, {"send_splits": sends}),
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
        assert ad.testing.check_gradients(lambda t, way=ways[0]: way(t.sin()) ** 2, x, comm, samples=1) <= 1


@each_size
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


def one_rank_with_both(comm: Communicator, size: int) -> str:
    """Rank 0 passes both lists, rank 1 one: without PYNCCL_CHECK. What is sent is `size` numbers to each rank."""
    mine = comm.split(0)  # it is of no use afterwards
    sizes = [size, size]
    try:
        y = ad.all_to_all(torch.ones(2 * size), mine, send_splits=sizes, recv_splits=sizes if comm.rank == 0 else None)
        return f"none: {y.tolist()}"
    except (ValueError, pynccl.NcclError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        mine.abort()


def test_a_rank_that_passes_both_lists_where_the_others_pass_one_does_not_leave_them_waiting(ranks: RankPool) -> None:
    for message in ranks.run(2, one_rank_with_both, 5):
        assert "disagree" in message


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


@pytest.fixture(scope="module")
def checked() -> Any:
    pool = RankPool({"PYNCCL_LIBRARY": "host", "PYNCCL_CHECK": "1"})
    yield pool
    pool.close()


def disagreements(comm: Communicator) -> list[str]:
    first = comm.rank == 0
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


def test_ranks_that_pass_other_splits_or_halos_are_told_on_every_rank(checked: RankPool) -> None:
    for rank, messages in enumerate(checked.run(2, disagreements)):
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
