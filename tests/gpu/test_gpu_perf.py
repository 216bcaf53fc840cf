"""`python -m pynccl perf` on one GPU: times by events, data checked, CUDA graphs. In processes of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpu.launches import alone

from pynccl import Communicator
from pynccl.tools.perf.cases import Case, call_of
from pynccl.tools.perf.measure import captured

pytestmark = pytest.mark.usefixtures("own_launch")


@pytest.mark.parametrize(
    ("collective", "way"),
    [("all_reduce", []), ("all_gather", ["--plan"]), ("send_recv", ["-G", "2"]), ("all_reduce", ["-G", "2", "--plan"])],
    ids=["plain", "plan", "graph", "graph of a plan"],
)
def test_one_gpu(tmp_path: Path, collective: str, way: list[str]) -> None:
    file = tmp_path / "perf.json"
    words = [collective, "-b", "1K", "-e", "1M", "-f", "32", "-n", "5", "-c", "1", "--json", str(file), *way]
    done = alone(["-m", "pynccl", "perf", *words])
    assert done.code == 0, done.err
    found = json.loads(file.read_text())
    assert (found["library"], found["clock"], found["summary"]["wrong"]) == ("NCCL", "CUDA events", 0)
    assert all(row["out_of_place"]["time_s"] > 0 for row in found["rows"])


@pytest.mark.parametrize("planned", [False, True])
def test_what_is_timed_as_a_graph_has_the_calls(comm: Communicator, planned: bool) -> None:
    send, recv = torch.arange(1000.0, device=comm.device), torch.zeros(1000, device=comm.device)
    row = Case("all_gather", "float", "sum", 0, comm.size, 1000)
    graph = captured(comm, lambda: call_of(comm, row, (send, recv), planned), 2)
    try:
        recv.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(recv, send)
    finally:
        graph.reset()
