"""New groups: their ranks connect at their first call. Each test runs with shared memory and with sockets."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import numbers, process_group
from ranks import HOST, Place, RankPool

import pynccl
from pynccl import NcclError, NcclRemoteError

TRANSPORTS = ("shm", "sockets")


@pytest.fixture(scope="module", params=TRANSPORTS)
def processes(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool({**HOST, "PYNCCL_HOST_TRANSPORT": request.param}, communicators=False)
    yield pool
    pool.close()


class CountingStore(dist.Store):
    """A store that counts its operations."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store, self.count = store, 0

    def _counted(self, name: str, *args: Any) -> Any:
        self.count += 1
        return getattr(self.store, name)(*args)

    def set(self, *args: Any) -> Any:
        return self._counted("set", *args)

    def get(self, *args: Any) -> Any:
        return self._counted("get", *args)

    def add(self, *args: Any) -> Any:
        return self._counted("add", *args)

    def check(self, *args: Any) -> Any:
        return self._counted("check", *args)

    def wait(self, *args: Any) -> Any:
        return self._counted("wait", *args)


def all_calls(place: Place, path: str) -> list[int]:
    """Make groups of every subset of the ranks and call everything in them. Return the store's operations per group."""
    from pynccl.torch_backend.backend import PyncclBackend

    counts = []
    with process_group("pynccl", place, path):
        subsets = [[r for r in range(place.size) if bits >> r & 1] for bits in range(1, 1 << place.size)]
        for members in subsets * 2:
            store = CountingStore(dist.FileStore(path + "groups", 100))
            backend = None
            if place.rank in members:
                backend = PyncclBackend(
                    store,
                    members.index(place.rank),
                    len(members),
                    timedelta(seconds=30),
                    "made",
                    members,
                    default=_default(),
                )
                x = numbers(place.rank, 5)
                backend.allreduce([x]).wait()
                assert torch.equal(x, sum(numbers(r, 5) for r in members))
                if len(members) > 1:
                    first, last, y = members[0], members[-1], numbers(place.rank, 7)
                    if place.rank == last:
                        backend.send([y], 0).wait()
                    elif place.rank == first:
                        backend.recv([y], len(members) - 1).wait()
                        assert torch.equal(y, numbers(last, 7))
                backend.shutdown()
                counts.append(store.count)
    return counts


def _default() -> Any:
    from pynccl.torch_backend import _first_backend

    return _first_backend()


def test_a_group_needs_no_store_once_the_default_group_exists(processes: RankPool, tmp_path: Any) -> None:
    for counts in processes.run(3, all_calls, str(tmp_path / "store")):
        assert set(counts) == {0}


def beside_gloo(place: Place, path: str) -> None:
    """The default group is gloo's: groups are made from the first one of all ranks, also once that is destroyed."""
    with process_group("gloo", place, path):
        last = place.size - 1
        pair = dist.new_group([0, last], backend="pynccl")
        first = dist.new_group(backend="pynccl")
        later = [dist.new_group(backend="pynccl"), dist.new_group([last, 0], backend="pynccl")]
        for turn, group in enumerate([pair, first, *later]):
            if turn == 2:
                dist.destroy_process_group(first)
            if place.rank in dist.get_process_group_ranks(group):
                x = torch.tensor([place.rank + 1.0])
                dist.all_reduce(x, group=group)
                assert x.item() == sum(r + 1 for r in dist.get_process_group_ranks(group))
                peers = dist.get_process_group_ranks(group)
                if place.rank == peers[0]:
                    dist.send(x, peers[-1], group=group)
                elif place.rank == peers[-1]:
                    dist.recv(x, peers[0], group=group)
    with process_group("gloo", place, path + "again"):
        dist.all_reduce(x := torch.ones(1), group=dist.new_group(backend="pynccl"))
        assert x.item() == place.size


def test_groups_beside_another_backend(processes: RankPool, tmp_path: Any) -> None:
    processes.run(3, beside_gloo, str(tmp_path / "store"))


def crossed(place: Place, path: str) -> None:
    """The ranks make the first calls of two groups in opposite orders, without waiting."""
    with process_group("pynccl", place, path):
        for _ in range(3):
            groups = [dist.new_group(), dist.new_group()]
            xs = [numbers(place.rank, 6), numbers(place.rank + 10, 6)]
            order = (0, 1) if place.rank % 2 else (1, 0)
            begun = time.monotonic()
            works: dict[int, Any] = {i: dist.all_reduce(xs[i], group=groups[i], async_op=True) for i in order}
            assert time.monotonic() - begun < 20
            for i in order:
                works[i].wait()
            for i, x in enumerate(xs):
                assert torch.equal(x, sum(numbers(r + 10 * i, 6) for r in range(place.size)))


def test_first_calls_in_opposite_orders(processes: RankPool, tmp_path: Any) -> None:
    processes.run(3, crossed, str(tmp_path / "store"))


def posted(place: Place, path: str) -> float:
    """Rank 0 posts the first call of a group two seconds before the others. Return how long that took."""
    with process_group("pynccl", place, path):
        group = dist.new_group()
        dist.barrier()
        if place.rank:
            time.sleep(2)
        begun, x = time.monotonic(), numbers(place.rank, 3)
        work: Any = dist.all_reduce(x, group=group, async_op=True)
        seconds = time.monotonic() - begun
        work.wait()
        assert torch.equal(x, sum(numbers(r, 3) for r in range(place.size)))
    return seconds


def test_a_posted_first_call_does_not_wait_for_the_other_ranks(processes: RankPool, tmp_path: Any) -> None:
    assert processes.run(2, posted, str(tmp_path / "store"))[0] < 1


def same_names(place: Place, path: str) -> None:
    """Make, use and destroy groups whose names torch derives from their ranks, so that all have the same one."""
    with process_group("pynccl", place, path):
        for turn in range(4):
            members = [0, 2]
            if place.rank in members:
                group = dist.new_group(members, use_local_synchronization=True)
                x = torch.tensor([turn + place.rank + 0.0])
                if turn != 1:  # a group without a call
                    dist.all_reduce(x, group=group)
                    assert x.item() == 2 * turn + 2
                dist.destroy_process_group(group)


def test_groups_of_the_same_name(processes: RankPool, tmp_path: Any) -> None:
    processes.run(3, same_names, str(tmp_path / "store"))


def ended(place: Place, path: str, end: str) -> str:
    """The last rank is killed, or exits, before the first call of a group. Return the error of that call."""
    with process_group("pynccl", place, path, timeout=30):
        groups = [dist.new_group(), dist.new_group([0, 1])]
        dist.barrier()
        if place.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else os._exit(3)
        with pytest.raises(NcclRemoteError) as raised:
            dist.all_reduce(torch.ones(2), group=groups[0])
        x = torch.ones(2)
        dist.all_reduce(x, group=groups[1])  # without the lost rank
        assert x.tolist() == [2, 2]
    return str(raised.value)


@pytest.mark.parametrize("end", ["killed", "exited"])
def test_a_lost_rank_ends_the_first_call(processes: RankPool, tmp_path: Any, end: str) -> None:
    begun = time.monotonic()
    outcomes = processes.outcomes(3, ended, str(tmp_path / "store"), end)
    assert time.monotonic() - begun < 25
    for outcome in outcomes[:2]:
        assert not outcome.report and re.search(r"rank 2\b", outcome.value), outcome


def never_called(place: Place, path: str) -> list[str]:
    """A rank does not make the first call: its timeout names it, and the group's other calls fail at once."""
    texts: list[str] = []
    with process_group("pynccl", place, path):
        group = dist.new_group(timeout=timedelta(seconds=1.5))
        dist.barrier()
        for _ in range(2 * bool(place.rank)):
            with pytest.raises(NcclError) as raised:
                dist.all_reduce(torch.ones(2), group=group)
            texts.append(str(raised.value))
        dist.barrier()
        x = torch.ones(1)
        dist.all_reduce(x, group=dist.new_group())  # others are not affected
        assert x.item() == place.size
    return texts


def test_a_first_call_that_a_rank_does_not_make(processes: RankPool, tmp_path: Any) -> None:
    _, *others = processes.run(3, never_called, str(tmp_path / "store"))
    assert any(re.search("rank 0:? never entered all_reduce #1", first) for first, _ in others), others


def after_the_default_group_failed(place: Place, path: str) -> None:
    """The default group's communicator is aborted; groups work, old and new, also if a rank then dies."""
    with process_group("pynccl", place, path, timeout=30):
        old = dist.new_group()
        dist.all_reduce(torch.ones(1), group=old)
        dist.barrier()
        pynccl.Communicator.from_process_group(dist.group.WORLD).abort()
        for group in (old, dist.new_group(use_local_synchronization=True)):
            x = numbers(place.rank, 4)
            dist.all_reduce(x, group=group)
            assert torch.equal(x, sum(numbers(r, 4) for r in range(place.size)))
            dist.barrier(group=group)
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(NcclRemoteError, match="rank 1"):
            dist.all_reduce(torch.ones(1), group=old)


def test_groups_outlive_the_default_groups_communicator(processes: RankPool, tmp_path: Any) -> None:
    outcome = processes.outcomes(2, after_the_default_group_failed, str(tmp_path / "store"))[0]
    assert not outcome.report, outcome.report


def windows(place: Place, path: str) -> None:
    """One-sided operations, splits and shrinks of a group's communicator."""
    with process_group("pynccl", place, path):
        comm = pynccl.Communicator.from_process_group(dist.new_group())
        after, before = (place.rank + 1) % place.size, (place.rank - 1) % place.size
        for _ in range(2):
            x = pynccl.mem_alloc(4096, device="cpu")
            window = comm.window(x)
            comm.put_signal(torch.full((8,), place.rank, dtype=torch.uint8), after, window, 8, stream=0)
            comm.wait_signal(before, stream=0)
            assert torch.from_dlpack(x)[8:16].tolist() == [before] * 8
            dist.barrier()
            window.close()
        child = comm.split(place.rank % 2, place.rank)
        x = numbers(place.rank, 3)
        child.all_reduce(x, x)
        assert torch.equal(x, sum(numbers(r, 3) for r in range(place.rank % 2, place.size, 2)))
        child.destroy()


def many(place: Place, path: str) -> int:
    """Return how many descriptors 20 groups take."""
    with process_group("pynccl", place, path):
        dist.barrier()
        before = len(os.listdir("/proc/self/fd"))
        for group in [dist.new_group() for _ in range(20)]:
            dist.barrier(group=group)
        return len(os.listdir("/proc/self/fd")) - before


def test_groups_with_shared_memory_open_no_sockets(tmp_path: Any) -> None:
    pool = RankPool(HOST, communicators=False)
    found = pool.run(2, many, str(tmp_path / "store"))
    pool.close()
    assert max(found) <= 2 * 20 + 5, found
