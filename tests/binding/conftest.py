"""The garbage collector leaves out what torch has made by the time a file of tests begins: that takes it long."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
