"""What the tests of the host library share: the transport of the communicators that a test makes, and two ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from host_calls import Ranks

from pynccl.host import comm as comms


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


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two ranks that share memory."""
    ranks = Ranks(2)
    assert all(comms.find(comm).shared is not None for comm in ranks.comms)
    yield ranks
    for comm in ranks.comms:
        comms.find(comm).abort()
