"""send, recv, isend, irecv and batches with "pynccl": any order, tag and size, also if both ranks send first."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process_groups import process_group
from ranks import HOST, Place, RankPool

from pynccl import NcclInvalidUsage
from pynccl.torch_backend.c10d import IS_BACKEND


def in_any_order(place: Place, path: str, seed: int) -> None:
    """Send to all other ranks, then receive, then wait, each in a different order."""
    r, n, rng = place.rank, place.size, random.Random(seed)
    with process_group("pynccl", place, path):
        for _ in range(4):
            shape, dtype = (
                rng.choice([(3,), (), (0,), (500, 200)]),
                rng.choice([torch.float32, torch.bool, torch.int16]),
            )
            mixed = random.Random(seed + r)
            peers = [peer for peer in range(n) if peer != r]
            sends = [
                dist.isend(torch.full(shape, r, dtype=torch.int32).to(dtype), p) for p in mixed.sample(peers, n - 1)
            ]
            found = {peer: torch.empty(shape, dtype=dtype) for peer in peers}
            recvs = [dist.irecv(found[peer], peer) for peer in mixed.sample(peers, n - 1)]
            works = [work for work in (*sends, *recvs) if work is not None]
            for work in mixed.sample(works, len(works)):
                work.wait()
                assert work.is_completed() or IS_BACKEND  # torch 2.14 does not query a Python backend
            for peer in peers:
                expected = torch.full(shape, peer, dtype=torch.int32).to(dtype)
                assert torch.equal(found[peer], expected), (seed, peer, shape, dtype)


@pytest.mark.parametrize("n", (2, 4))
def test_send_recv_in_any_order(processes: RankPool, n: int, tmp_path: Path) -> None:
    processes.run(n, in_any_order, str(tmp_path / "store"), 20261125)


def by_tag(place: Place, path: str) -> None:
    with process_group("pynccl", place, path):
        if place.rank == 0:
            works = [dist.isend(torch.full((tag + 1,), float(tag)), 1, tag=tag) for tag in range(6)]
            for work in works:
                assert work is not None
                work.wait()
            x = torch.arange(6.0).view(2, 3)
            dist.send(x.t(), 1)
        elif place.rank == 1:
            for tag in (3, 5, 0, 1, 4, 2):
                x = torch.empty(tag + 1)
                assert dist.recv(x, 0, tag=tag) == 0
                assert x.tolist() == [float(tag)] * (tag + 1)
            y = torch.empty(3, 2)
            dist.recv(y, src=0)
            assert torch.equal(y, torch.arange(6.0).view(2, 3).t())


def test_send_recv_match_by_tag(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, by_tag, str(tmp_path / "store"))


def other_size(place: Place, path: str) -> None:
    with process_group("pynccl", place, path):
        if place.rank == 0:
            dist.send(torch.ones(4), 1)
            dist.send(torch.ones(2), 1)
        else:
            with pytest.raises(NcclInvalidUsage, match=r"from rank 0 to rank 1 \(tag 0\) has 16 bytes.* has 8"):
                dist.recv(torch.empty(2), 0)
            x = torch.empty(2)
            dist.recv(x, 0)  # the next message
            assert x.tolist() == [1, 1]
        x = torch.ones(1)
        dist.all_reduce(x)  # collectives use separate communicators
        assert x.item() == place.size


def test_recv_of_different_size_raises(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, other_size, str(tmp_path / "store"))


@pytest.mark.parametrize("variable", ("PYNCCL_HOST_TRANSPORT=sockets", "PYNCCL_HOST_LINK=latency=10us"))
def test_messages_of_ranks_that_do_not_share_memory(tmp_path: Path, variable: str) -> None:
    name, _, value = variable.partition("=")
    pool = RankPool({**HOST, name: value}, communicators=False)
    pool.run(3, in_any_order, str(tmp_path / "store"), 20261128)
    pool.run(2, by_tag, str(tmp_path / "tags"))
    pool.run(2, other_size, str(tmp_path / "sizes"))
    pool.close()


def batches(place: Place, path: str) -> None:
    r, n = place.rank, place.size
    with process_group("pynccl", place, path):
        for _ in range(3):
            x, left, right = torch.full((2,), float(r)), torch.empty(2), torch.empty(2)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, (r + 1) % n),
                    dist.P2POp(dist.isend, x, (r - 1) % n),
                    dist.P2POp(dist.irecv, right, (r + 1) % n),
                    dist.P2POp(dist.irecv, left, (r - 1) % n),
                ]
            )
            for work in works:
                work.wait()
            assert left.tolist() == [(r - 1) % n] * 2 and right.tolist() == [(r + 1) % n] * 2
        objects = [{"of": r}] if r == 0 else [None]
        if r == 0:
            dist.send_object_list(objects, 1)
        elif r == 1:
            dist.recv_object_list(objects, 0)
            assert objects == [{"of": 0}]


def test_batch_isend_irecv_and_objects(processes: RankPool, tmp_path: Path) -> None:
    processes.run(3, batches, str(tmp_path / "store"))


def groups(place: Place, path: str) -> None:
    """Use subgroups, whose ranks are numbered differently, destroy one, and create the default group again."""
    r = place.rank
    with process_group("pynccl", place, path):
        pairs = [dist.new_group([3, 1], backend="pynccl"), dist.new_group([2, 0])]
        group = pairs[1 - r % 2]
        x = torch.tensor([float(r)])
        dist.all_reduce(x, group=group)
        assert x.item() == (4 if r % 2 else 2)
        if r in (0, 1):
            dist.send(torch.tensor([r + 10.0]), r + 2, group=group)
        else:
            dist.recv(x, r - 2, group=group)
            assert x.item() == r + 8
        dist.barrier(group)
        dist.destroy_process_group(group)
        dist.all_reduce(x)
    with process_group("pynccl", place, path + "again"):
        dist.all_reduce(x)


def test_subgroups_and_repeated_process_groups(processes: RankPool, tmp_path: Path) -> None:
    processes.run(4, groups, str(tmp_path / "store"))
