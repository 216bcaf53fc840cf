"""The communicator of the GPU tests, joined once per run.

Every rank is a process of its own that runs these tests in the same order: started by torchrun or by
scripts/gpu_check.sh, which also lets ranks share a GPU. Plain `pytest tests/gpu` is one rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import pynccl
from pynccl.library import gpu_count


@pytest.fixture(scope="session")
def comm() -> Iterator[pynccl.Communicator]:
    """All ranks of the launch; more ranks than GPUs share them."""
    spec = os.environ.get("PYNCCL_LIBRARY", "host")  # ../conftest.py says host, for the tests beside these
    library = pynccl.load("nccl" if spec == "host" else spec)
    if "RANK" in os.environ:
        device = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])) % gpu_count()
        made = pynccl.init(device=device, library=library)
    else:
        made = pynccl.Communicator.init(1, pynccl.get_unique_id(library), 0, device=0, library=library)
    if not library.is_host:
        torch.cuda.set_device(made.device)
    yield made
    made.destroy()


@pytest.fixture
def child(comm: pynccl.Communicator) -> Iterator[pynccl.Communicator]:
    """A communicator of the same ranks that the test may end."""
    made = comm.split(0, comm.rank)
    assert made is not None
    yield made
    made.destroy()
