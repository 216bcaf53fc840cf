"""Fixtures of the binding tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from ranks import RankPool


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Exclude the objects that exist when a file starts (mostly torch's) from garbage collection, which is slow."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def processes() -> Iterator[RankPool]:
    """Rank processes without communicators."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()
