"""What torch has made by the time a file of tests begins is no business of the garbage collector, which is slow with it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
