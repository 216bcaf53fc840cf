"""Helpers of the trace tests: a model, traced training steps, and a reader of trace files."""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator

Event = dict[str, Any]
WIDTH, HIDDEN, ROWS = 12, 24, 12


class Block(nn.Module):
    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        options: dict[str, Any] = {"sequence_parallel": True, "device": comm.device}
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, **options)
        self.down = ad.RowParallelLinear(HIDDEN, WIDTH, comm, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self, comm: Communicator, recompute: bool = False) -> None:
        super().__init__()
        self.comm, self.recompute = comm, recompute
        self.blocks = nn.ModuleList([Block(comm), Block(comm)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False) if self.recompute else self.blocks[1](x)
        return ad.all_reduce(x.pow(2).sum(), self.comm, grad="sum")


def read(path: Path | str) -> dict[str, Any]:
    path = Path(path)
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def slices(trace: dict[str, Any], category: str = "", pid: int | None = None) -> list[Event]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "X" and (pid is None or event["pid"] == pid)]
    return [event for event in found if event["cat"] == category] if category else found


def lanes_of(trace: dict[str, Any], pid: int) -> dict[int, str]:
    names = [event for event in trace["traceEvents"] if event["name"] == "thread_name" and event["pid"] == pid]
    return {event["tid"]: event["args"]["name"] for event in names}


def steps(comm: Communicator, path: str, count: int, late: int = -1) -> list[tuple[str, int]]:
    """Run traced training steps, in the first of which the rank `late` is 0.2 s late. Return the collective calls as
    (operation, bytes)."""
    torch.manual_seed(0)
    model, x = Model(comm), torch.randn(ROWS // comm.size, 2, WIDTH)
    calls: list[tuple[str, int]] = []

    def listening(name: str, method: Any) -> Any:
        def call(send: Any, *args: Any, **options: Any) -> Any:
            calls.append((name, send.nbytes * (comm.size if name == "all_gather" else 1)))
            return method(send, *args, **options)

        return call

    with ad.trace(path, comm, model=model) as trace, pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            patch.setitem(vars(comm), name, listening(name, getattr(comm, name)))
        for number in range(count):
            with trace.span(f"step {number}"):
                if comm.rank == late and number == 0:
                    time.sleep(0.2)
                model(x).backward()
                x = x + comm.all_reduce(torch.ones(5)).sum()
    return calls


def check_nesting(trace: dict[str, Any]) -> None:
    """Check that the slices of a lane are nested or disjoint, and those of communicators disjoint."""
    by_lane = defaultdict(list)
    for event in slices(trace):
        by_lane[event["pid"], event["tid"]].append(event)
    for found in by_lane.values():
        open_until: list[float] = []
        for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, event
            assert not open_until or event["cat"] != "comm", event
            open_until.append(end)
