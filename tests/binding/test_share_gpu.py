"""PYNCCL_SHARE_GPU=1 lets ranks share a GPU, whatever starts them, and NCCL's refusal names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from libraries import HEADER_VERSION, compiled
from stub_driver import over_driver

from pynccl.bindings.errors import NcclInvalidUsage, from_result

ROOT = Path(__file__).resolve().parents[2]

# What NCCL reads, here, in a child that inherits it, and in a fork.
PROGRAM = """
import json, os, subprocess, sys, warnings
found = []

def host():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import pynccl
        pynccl.load(); pynccl.load()
    names = ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE")
    return [os.environ.get(name) for name in names] + [[str(one.message) for one in caught]]

found.append(host())
if len(sys.argv) < 2:
    child = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True, check=True, timeout=60)
    found += json.loads(child.stdout)
    read, write = os.pipe()
    if not os.fork():
        os.write(write, json.dumps(host()).encode())
        os._exit(0)
    os.wait()
    found.append(json.loads(os.read(read, 10000)))
print(json.dumps(found))
"""


def hosts(folder: Path, **variables: str) -> list[tuple[str | None, str | None, list[str]]]:
    """Return NCCL's host id, its switch and the warnings, in a process, its child and its fork."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "PYNCCL_", "RANK"))}
    environment = {**kept, "PYNCCL_LIBRARY": compiled(HEADER_VERSION), "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(row) for row in json.loads(done.stdout)]


def test_each_process_is_a_host_of_its_own(tmp_path: Path) -> None:
    found = hosts(tmp_path, PYNCCL_SHARE_GPU="1")
    assert len({host for host, _, _ in found}) == 3 and all(host for host, _, _ in found)
    assert [switch for _, switch, _ in found] == ["1"] * 3
    assert [len(warned) for _, _, warned in found] == [1] * 3
    assert "good for trying, not for speed" in found[0][2][0]


def test_only_rank_0_warns_and_a_host_id_of_the_user_is_kept(tmp_path: Path) -> None:
    assert [warned for _, _, warned in hosts(tmp_path, PYNCCL_SHARE_GPU="1", RANK="1")] == [[]] * 3
    assert hosts(tmp_path, PYNCCL_SHARE_GPU="1", NCCL_HOSTID="mine") == [("mine", "1", [])] * 3


@pytest.mark.parametrize(
    "variables", [{}, {"PYNCCL_SHARE_GPU": "0"}, {"PYNCCL_SHARE_GPU": "1", "PYNCCL_LIBRARY": "host"}]
)
def test_nothing_changes_without_it_or_on_the_cpu(tmp_path: Path, variables: dict[str, str]) -> None:
    assert hosts(tmp_path, **variables) == [(None, None, [])] * 3


WAYS = """
import os
from datetime import timedelta
import torch
from torch.distributed import HashStore
from pynccl import Communicator, UniqueId
from pynccl.compat.wrapper import NCCLLibrary
from pynccl.torch_backend.backend import PyncclBackend
library = pynccl.load()
unset = []
for name, make in {
    "get_unique_id": pynccl.get_unique_id,
    "init": lambda: Communicator.init(1, UniqueId(), 0, device=0, library=library),
    "from_store": lambda: pynccl.from_store(HashStore(), 0, 1, device=0),
    "from_store, library=": lambda: pynccl.from_store(HashStore(), 0, 1, device=0, library=library),
    "init_all": lambda: Communicator.init_all([0]),
    "join_grown": lambda: Communicator.join_grown(2, UniqueId(), 1, device=0),
    "vLLM's wrapper": NCCLLibrary,
    "the backend": lambda: PyncclBackend(HashStore(), 0, 1, timedelta(seconds=9), "g")._lane(torch.device("cuda:0")),
}.items():
    os.environ.pop("NCCL_HOSTID", None)
    make()
    unset += [] if "NCCL_HOSTID" in os.environ else [name]
print(unset)
"""


def test_every_way_to_make_a_communicator_reads_it() -> None:
    said = over_driver(WAYS, PYNCCL_SHARE_GPU="1", PYNCCL_LIBRARY=compiled(HEADER_VERSION), PYNCCL_WATCH="off")
    assert said.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "detail",
    [
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60",
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1",
    ],
)
def test_two_ranks_on_one_gpu_are_told_how_to_share_it(detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def remedy() -> str:
        error = from_result(5, "ncclCommInitRankConfig(rank=1, nranks=2)", "invalid usage", detail)
        assert type(error) is NcclInvalidUsage
        return str(error).splitlines()[-1]

    monkeypatch.delenv("PYNCCL_SHARE_GPU", raising=False)
    assert remedy() == (
        "  give each rank its own GPU (device=), or set PYNCCL_SHARE_GPU=1 on all ranks: good for trying, slow"
    )
    monkeypatch.setenv("PYNCCL_SHARE_GPU", "1")
    assert remedy().startswith("  PYNCCL_SHARE_GPU was set after this process's first use of NCCL, or NCCL_HOSTID is")
