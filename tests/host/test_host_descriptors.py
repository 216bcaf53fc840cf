"""A rank that has no descriptor left says so, and so do its peers: nobody is advised on networks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Forks

PROGRAM = """
import os, resource, sys
import torch
import pynccl

comm = pynccl.init(timeout=60)
if comm.rank in map(int, sys.argv[2].split(",")):
    lowest = os.dup(0)
    os.close(lowest)
    most = lowest + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
made = []
try:
    while True:
        made.append(comm.split(0))
        assert made[-1].all_reduce(torch.ones(3)).tolist() == [comm.size] * 3
except pynccl.NcclError as error:
    print(type(error).__name__, error)
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as server:
        yield server


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("left", "limited"), [(0, "0"), (4, "1"), (9, "2"), (4, "0,1")])
def test_a_rank_without_descriptors_is_the_one_to_blame(forks: Forks, tmp_path: Path, left: int, limited: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ranks = 3 if "2" in limited else 2
    own = {"PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": str(tmp_path / "watch"), "PATH": os.environ["PATH"]}
    ended = forks.run((str(tmp_path / "program.py"), str(left), limited), ranks, tmp_path, own)
    for rank, one in enumerate(ended):
        assert one.code == 0, one.err
        assert "NCCL_SOCKET_IFNAME" not in one.out, one.out
        if limited != ",".join(map(str, range(ranks))):  # else who was the first is anybody's
            assert "Too many open files" in one.out, (rank, one.out, one.err)
            assert one.out.startswith("NcclSystemError") == (str(rank) in limited.split(",")), (rank, one.out)
            assert ("ulimit -n" in one.out) == (str(rank) in limited.split(",")), (rank, one.out)
    assert any("Too many open files: this process may have" in one.out for one in ended), ended
