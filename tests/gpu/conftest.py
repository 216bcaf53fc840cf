"""The communicator of the GPU tests, joined once per run, and what becomes of it once a test has failed.

Every rank is a process of its own that runs these tests in the same order: started by torchrun or by
scripts/gpu/gpu_check.py, which also lets ranks share a GPU. Plain `pytest tests/gpu` is one rank.

A rank whose test has failed has left the others behind in the middle of it. From there on nothing may wait for them:
with several ranks the tests that follow fail at once, and communicators are aborted at the end instead of destroyed.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
import torch

import pynccl
from pynccl.bindings.library import gpu_count

FAILED = pytest.StashKey[str]()  # the first test that failed on this rank


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The examples come last: they need a little of everything, and nothing runs on several ranks behind a failure."""
    items.sort(key=lambda item: item.path.name == "test_gpu_examples.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.config.stash.setdefault(FAILED, item.nodeid)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    failed = item.config.stash.get(FAILED, "")
    if failed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        pytest.fail(f"not run: {failed} failed on this rank, and the other ranks may be waiting in it", pytrace=False)


def close(comm: pynccl.Communicator, config: pytest.Config) -> None:
    """At its end: destroyed, which waits for the other ranks; aborted once a test has failed here."""
    if FAILED in config.stash:
        comm.abort()
    else:
        comm.destroy()


@pytest.fixture(scope="session")
def comm(pytestconfig: pytest.Config) -> Iterator[pynccl.Communicator]:
    """All ranks of the launch; more ranks than GPUs share them."""
    spec = os.environ.get("PYNCCL_LIBRARY", "host")  # ../conftest.py says host, for the tests beside these
    library = pynccl.load("nccl" if spec == "host" else spec)
    if "RANK" in os.environ:
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        device = None if library.is_host else local % gpu_count()
        made = pynccl.init(device=device, library=library)
    else:
        device = None if library.is_host else 0
        made = pynccl.Communicator.init(1, pynccl.get_unique_id(library), 0, device=device, library=library)
    if not library.is_host:
        torch.cuda.set_device(made.device)
    yield made
    close(made, pytestconfig)


@pytest.fixture
def child(comm: pynccl.Communicator, pytestconfig: pytest.Config) -> Iterator[pynccl.Communicator]:
    """A communicator of the same ranks that the test may end."""
    made = comm.split(0, comm.rank)
    assert made is not None
    yield made
    close(made, pytestconfig)


@pytest.fixture
def own_launch() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        pytest.skip("starts processes of its own: for a run of these tests with one rank")
