"""What every test has: the host library by default, the pool of ranks, one skip for all GPU tests without a GPU."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before anything loads torch. The tests of this process run on the host library also where there is a GPU; GPU tests
# choose their library through the environment of their own ranks. Two cores are few: no thread team per process.
os.environ.setdefault("PYNCCL_LIBRARY", "host")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with SIGINT ignored, which all of their children inherit; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What killed ranks leave of their flight recorders goes when the run ends; a worker of pytest-xdist has its own folder.
if "PYNCCL_WATCH_DIR" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["PYNCCL_WATCH_DIR"] = tempfile.mkdtemp(prefix="pynccl-tests-watch-")
    atexit.register(shutil.rmtree, os.environ["PYNCCL_WATCH_DIR"], ignore_errors=True)

import pytest
from ranks import RankPool

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks on the host library, one pool for the whole run; see ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def doomed() -> Iterator[RankPool]:
    """Ranks that this test may end."""
    pool = RankPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if GPU_TESTS in item.path.parents]
    for item in gpu_tests:
        item.add_marker(pytest.mark.gpu)
    if gpu_tests and not _has_gpu():
        _skip_in_one_line(
            config, items, gpu_tests, "need a CUDA GPU; scripts/gpu/gpu_check.py runs them where there is one"
        )


def _skip_in_one_line(config: pytest.Config, items: list[pytest.Item], some: list[pytest.Item], what: str) -> None:
    """The first of them is skipped and speaks for all; the others are deselected."""
    some[0].add_marker(pytest.mark.skip(reason=f"{len(some)} tests {what}"))
    config.hook.pytest_deselected(items=some[1:])
    left_out = set(some[1:])
    items[:] = [item for item in items if item not in left_out]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recorder and no watchdog: for tests of how long objects live, and of how long an end takes to the tenth of a
    second. The watchdog looks at the frames of the main thread, and what they hold lives until it has looked."""
    from pynccl.watch import watchdog

    monkeypatch.setenv("PYNCCL_WATCH", "off")
    watchdog.stop()  # the next communicator of another test starts it again
