"""The communicator of the GPU tests, created once per run, and its cleanup after a failed test.

Each rank is a process that runs these tests in the same order. Start the ranks with torchrun (PYNCCL_SHARE_GPU=1 lets
them share GPUs) or with scripts/gpu/gpu_check.py. Plain `pytest tests/gpu` runs one rank.

A rank whose test failed may be out of step with the others, so it must not wait for them again. gpu_check sees to that:
its ranks meet after each test. Without it, the remaining tests of a rank that is not alone fail at once. Communicators
are aborted at the end instead of destroyed.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
import torch

import pynccl

FAILED = pytest.StashKey[str]()  # the first test that failed on this rank


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the examples last: they use most features, and on several ranks no test runs after a failure."""
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
    if item.config.pluginmanager.has_plugin("scripts.gpu.check_plugin"):
        return
    if failed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        pytest.fail(f"not run: {failed} failed on this rank, and the other ranks may still wait in it", pytrace=False)


def close(comm: pynccl.Communicator, config: pytest.Config) -> None:
    """Destroy a communicator, which waits for the other ranks, or abort it if a test has failed on this rank."""
    if FAILED in config.stash:
        comm.abort()
    else:
        comm.destroy()


@pytest.fixture(scope="session")
def gpu_library() -> str:
    """The library of the GPU tests: ../conftest.py sets the host library for the others."""
    return os.environ["GPU_TESTS_LIBRARY"]


@pytest.fixture(scope="module", autouse=True)
def library_of_calls(gpu_library: str) -> Iterator[None]:
    """Calls without library= use the GPU tests' library, in their fixtures too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYNCCL_LIBRARY", gpu_library)
        yield


@pytest.fixture(scope="session")
def comm(pytestconfig: pytest.Config, gpu_library: str) -> Iterator[pynccl.Communicator]:
    """The communicator of all ranks of the launch."""
    library = pynccl.load(gpu_library)
    if "RANK" in os.environ:
        comm = pynccl.init(library=library)
    else:
        device = None if library.is_host else 0
        comm = pynccl.Communicator.init(1, pynccl.get_unique_id(library), 0, device=device, library=library)
    if not library.is_host:
        torch.cuda.set_device(comm.device)
    yield comm
    close(comm, pytestconfig)


@pytest.fixture
def child(comm: pynccl.Communicator, pytestconfig: pytest.Config) -> Iterator[pynccl.Communicator]:
    """A communicator of the same ranks that the test may destroy or abort."""
    child = comm.split(0, comm.rank)
    assert child is not None
    yield child
    close(child, pytestconfig)


@pytest.fixture
def own_launch() -> None:
    """Skip a test that starts its own processes, unless this run has one rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        pytest.skip("starts its own processes: runs only with one rank")
