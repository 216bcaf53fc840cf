"""The modelled link of the host library: what it reads, and the least time that operations take."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from host_calls import Ranks, address, call, split

from pynccl.bindings.abi import DataType, RedOp
from pynccl.host.failure import HostFailure
from pynccl.host.link import VARIABLE, parse

FLOAT32, SUM = DataType.FLOAT32, RedOp.SUM


def test_units_and_garbage() -> None:
    for text, latency, bandwidth in (
        ("latency=50us,bandwidth=1GB/s", 50e-6, 1e9),
        ("bandwidth=2.5MB/s, latency=3ms", 3e-3, 2.5e6),
        ("latency=100ns,bandwidth=10kb", 100e-9, 1e4),
        ("latency=1s,bandwidth=7B/s", 1.0, 7.0),
    ):
        link = parse(text)
        assert link is not None
        assert (link.latency, 1 / link.seconds_per_byte) == pytest.approx((latency, bandwidth)), text
    assert parse("") is None
    for text in (
        "fast", "latency=50", "latency=50us/s", "bandwidth=0GB/s", "bandwidth=1GiB/s", "speed=1GB/s", "latency="
    ):  # fmt: skip
        with pytest.raises(HostFailure, match="latency=50us,bandwidth=1GB/s") as refused:
            parse(text)
        assert repr(text) in refused.value.text


def timed(ranks: Ranks, body: Callable[[int, int], None]) -> float:
    """Least seconds that `body` took on any rank."""

    def clocked(rank: int, comm: int) -> float:
        start = time.perf_counter()
        body(rank, comm)
        return time.perf_counter() - start

    return min(ranks.run(clocked))


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Three ranks with 10 ms a step and 100 ms per MB."""
    monkeypatch.setenv(VARIABLE, "latency=10ms,bandwidth=10MB/s")
    return Ranks(3)


def test_operations_take_the_time_of_the_link(linked: Ranks) -> None:
    count = 60_000  # V = 240 kB
    full, part = [torch.zeros(count) for _ in range(3)], [torch.zeros(count // 3) for _ in range(3)]

    def all_reduce(rank: int, comm: int) -> None:
        call("ncclAllReduce", address(full[rank]), address(full[rank]), count, FLOAT32, SUM, comm, None)

    def all_gather(rank: int, comm: int) -> None:
        call("ncclAllGather", address(part[rank]), address(full[rank]), count // 3, FLOAT32, comm, None)

    def broadcast(rank: int, comm: int) -> None:
        call("ncclBroadcast", address(full[rank]), address(full[rank]), count, FLOAT32, 0, comm, None)

    def ring(rank: int, comm: int) -> None:
        call("ncclGroupStart")
        call("ncclSend", address(full[rank]), count // 3, FLOAT32, (rank + 1) % 3, comm, None)
        call("ncclRecv", address(part[rank]), count // 3, FLOAT32, (rank - 1) % 3, comm, None)
        call("ncclGroupEnd")

    assert timed(linked, all_reduce) >= 4 * 0.010 + 4 / 3 * 0.024
    assert timed(linked, all_gather) >= 2 * 0.010 + 2 / 3 * 0.024
    assert timed(linked, broadcast) >= 2 * 0.010 + 0.024
    assert timed(linked, ring) >= 0.010 + 0.008
    linked.destroy()


def test_a_rank_and_its_splits_share_one_link(linked: Ranks) -> None:
    """Two operations that go on at once, on a communicator and on its split, take the sum of their times."""
    children = linked.run(lambda rank, comm: split(comm, 0, rank))
    data = [[torch.zeros(1), torch.zeros(1)] for _ in range(3)]

    def both(rank: int, comm: int) -> None:
        call("ncclGroupStart")
        for tensor, one in zip(data[rank], (comm, children[rank]), strict=True):
            call("ncclAllReduce", address(tensor), address(tensor), 1, FLOAT32, SUM, one, None)
        call("ncclGroupEnd")

    assert timed(linked, both) >= 2 * 4 * 0.010
    linked.run(lambda rank, comm: call("ncclCommDestroy", children[rank]))
    linked.destroy()
