"""What the tests of the host library share: the transport of the communicators that a test makes, and some ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_calls import TRANSPORT, Ranks

from pynccl import host


@pytest.fixture(scope="module", params=["shm", "sockets"])
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each in turn; also for processes that a test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRANSPORT, request.param)
        yield request.param


@pytest.fixture(scope="module", params=[2, 3, 4])
def group(request: pytest.FixtureRequest, transport: str) -> Iterator[Ranks]:
    """Ranks that all tests of a module use, and none ends."""
    ranks = Ranks(request.param)
    yield ranks
    ranks.destroy()


def that_a_test_may_break(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    yield ranks
    for comm in ranks.comms:
        host.function("ncclCommAbort")(comm)


@pytest.fixture
def pair() -> Iterator[Ranks]:
    yield from that_a_test_may_break(2)


@pytest.fixture
def trio() -> Iterator[Ranks]:
    yield from that_a_test_may_break(3)
