"""What tests of the binding share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from ranks import RankPool


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """The garbage collector leaves out what torch has made by the time a file begins: that takes it long."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """Processes that have not met."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()
