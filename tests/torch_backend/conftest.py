"""Rank processes in which tests create process groups of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import HOST, RankPool


@pytest.fixture(scope="module")
def processes() -> Iterator[RankPool]:
    pool = RankPool(HOST, communicators=False)
    yield pool
    pool.close()
