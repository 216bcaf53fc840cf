"""The modelled link of the host library: what it reads, and the least time that operations take."""

from __future__ import annotations

import time

import pytest
import torch
from host_calls import Ranks, address, call, split

from pynccl.bindings.abi import DataType, RedOp
from pynccl.host.failure import HostFailure
from pynccl.host.link import VARIABLE, parse

FLOAT32, SUM = DataType.FLOAT32, RedOp.SUM
GARBAGE = ["fast", "latency=50", "latency=50us/s", "bandwidth=0GB/s", "bandwidth=1GiB/s", "speed=1GB/s", "latency="]


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
    for text in GARBAGE:
        with pytest.raises(HostFailure, match="latency=50us,bandwidth=1GB/s") as refused:
            parse(text)
        assert repr(text) in refused.value.text


def test_operations_take_the_time_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks with 10 ms a step and 100 ms per MB. A communicator and its split share one link."""
    monkeypatch.setenv(VARIABLE, "latency=10ms,bandwidth=10MB/s")
    ranks, count = Ranks(3), 60_000  # V = 240 kB
    children = ranks.run(lambda rank, comm: split(comm, 0, rank))
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

    def two_at_once(rank: int, comm: int) -> None:
        call("ncclGroupStart")
        for tensor, one in ((full[rank], comm), (part[rank], children[rank])):
            call("ncclAllReduce", address(tensor), address(tensor), 1, FLOAT32, SUM, one, None)
        call("ncclGroupEnd")

    for body, seconds in (
        (all_reduce, 4 * 0.010 + 4 / 3 * 0.024),
        (all_gather, 2 * 0.010 + 2 / 3 * 0.024),
        (broadcast, 2 * 0.010 + 0.024),
        (ring, 0.010 + 0.008),
        (two_at_once, 2 * 4 * 0.010),
    ):

        def timed(rank: int, comm: int) -> float:
            start = time.perf_counter()
            body(rank, comm)  # noqa: B023
            return time.perf_counter() - start

        assert min(ranks.run(timed)) >= seconds, body.__name__
    ranks.run(lambda rank, comm: call("ncclCommDestroy", children[rank]))
    ranks.destroy()
