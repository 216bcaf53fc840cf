"""Fixtures for tests of the host library: transports and groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_calls import TRANSPORT, Ranks

from pynccl import host


@pytest.fixture(scope="module", params=["shm", "sockets"])
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the module's tests with each transport, which also applies to processes that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRANSPORT, request.param)
        yield request.param


@pytest.fixture(scope="module", params=[2, 3, 4])
def group(request: pytest.FixtureRequest, transport: str) -> Iterator[Ranks]:
    """Ranks shared by all tests of a module. No test may end them."""
    ranks = Ranks(request.param)
    yield ranks
    ranks.destroy()


def breakable_ranks(size: int) -> Iterator[Ranks]:
    """Yield ranks that a test may break: they are aborted at the end."""
    ranks = Ranks(size)
    yield ranks
    for comm in ranks.comms:
        host.function("ncclCommAbort")(comm)


@pytest.fixture
def pair() -> Iterator[Ranks]:
    yield from breakable_ranks(2)


@pytest.fixture
def trio() -> Iterator[Ranks]:
    yield from breakable_ranks(3)
