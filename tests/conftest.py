"""Configuration of all tests: the host library by default, pools of ranks, and one skip for all GPU tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Set before torch is imported. Tests in this process use the host library even if there is a GPU; gpu/conftest.py gives
# the GPU tests the user's, or libnccl (from the environment, which pytest-xdist's workers inherit). One thread per
# process, as there are few cores.
os.environ.setdefault("GPU_TESTS_LIBRARY", os.environ.get("PYNCCL_LIBRARY", "nccl"))
os.environ.setdefault("PYNCCL_LIBRARY", "host")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with SIGINT ignored, and all their children inherit that. Some tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Flight records of killed ranks are removed when the run ends. Each worker of pytest-xdist has its own folder.
if "PYNCCL_WATCH_DIR" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["PYNCCL_WATCH_DIR"] = tempfile.mkdtemp(prefix="pynccl-tests-watch-")
    atexit.register(shutil.rmtree, os.environ["PYNCCL_WATCH_DIR"], ignore_errors=True)

import pytest
from browser import find_browser
from ranks import RankPool

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks on the host library: one pool for the entire run; see ranks.py."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def doomed() -> Iterator[RankPool]:
    """Ranks that the test may kill."""
    pool = RankPool()
    yield pool
    pool.close()


SLOW_SECONDS = 600  # timeout of a slow test without one of its own, for four of them on two cores


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    gpu_tests = [item for item in items if GPU_TESTS in item.path.parents]
    for item in gpu_tests:
        item.add_marker(pytest.mark.gpu)
    if gpu_tests and not _has_gpu():
        _skip_in_one_line(config, items, gpu_tests, "need a CUDA GPU; scripts/gpu/gpu_check.py runs them on one")
    page_tests = [item for item in items if "browser" in getattr(item, "fixturenames", ())]
    if page_tests and find_browser() is None:
        _skip_in_one_line(config, items, page_tests, "open a page in Chromium: apt install chromium")


def _skip_in_one_line(config: pytest.Config, items: list[pytest.Item], skipped: list[pytest.Item], reason: str) -> None:
    """Skip the first item with a reason for all of them, and deselect the others."""
    skipped[0].add_marker(pytest.mark.skip(reason=f"{len(skipped)} tests {reason}"))
    config.hook.pytest_deselected(items=skipped[1:])
    deselected = set(skipped[1:])
    items[:] = [item for item in items if item not in deselected]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable flight recorder and watchdog, for tests of object lifetimes and of shutdown times of tenths of a second.
    The watchdog inspects the main thread's frames, and objects that they hold live until it is done."""
    from pynccl.watch import watchdog

    monkeypatch.setenv("PYNCCL_WATCH", "off")
    watchdog.stop()  # the next communicator of another test restarts it
