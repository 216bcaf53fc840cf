"""What the tests of the host library share: the transport of the communicators that a test makes, and two ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from host_calls import Ranks

from pynccl import host


@pytest.fixture(scope="module", params=["shm", "sockets"])
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each in turn; also for processes that a test starts."""
    before = os.environ.get("PYNCCL_HOST_TRANSPORT")
    os.environ["PYNCCL_HOST_TRANSPORT"] = request.param
    yield request.param
    if before is None:
        del os.environ["PYNCCL_HOST_TRANSPORT"]
    else:
        os.environ["PYNCCL_HOST_TRANSPORT"] = before


@pytest.fixture(scope="module", params=[2, 3, 4])
def group(request: pytest.FixtureRequest, transport: str) -> Iterator[Ranks]:
    """Ranks that all tests of a module use, and none ends."""
    ranks = Ranks(request.param)
    yield ranks
    ranks.destroy()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two ranks that a test may break."""
    yield from broken_or_not(2)


@pytest.fixture
def trio() -> Iterator[Ranks]:
    """Three ranks that a test may break."""
    yield from broken_or_not(3)


def broken_or_not(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    yield ranks
    for comm in ranks.comms:
        host.function("ncclCommAbort")(comm)
