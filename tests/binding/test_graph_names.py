"""Messages about an abort that does not return name the CUDA graphs that may block it."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import pynccl
from pynccl.comm import finalize
from pynccl.comm.finalize import graph_hint


class CUDAGraph:
    """In place of torch.cuda.CUDAGraph."""


class Trainer:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Inline:
    """Its attributes are in the object, not in a dict, in Python 3.11 and later."""

    def __init__(self, graph: CUDAGraph) -> None:
        self.step, self.graph = 0, graph


@pytest.fixture(autouse=True)
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)


def named() -> str:
    """Return what the hint says before its advice."""
    line, _, advice = graph_hint().removeprefix("\n  torch.cuda.CUDAGraph objects alive: ").partition(". ")
    assert not line or advice.startswith("NCCL waits for those that captured the communicator: call reset() on them")
    return line


def test_a_graph_is_named_as_the_program_holds_it() -> None:
    assert named() == ""
    trainer: Any = Trainer(step=0, graph=CUDAGraph())
    assert named() == "1 (Trainer.graph)"
    trainer = Inline(CUDAGraph())
    assert named() == "1 (Inline.graph)"
    trainer = Trainer(graphs={8: CUDAGraph()})
    assert named() == "1 (Trainer.graphs[..])"
    trainer = Trainer(graphs=[CUDAGraph()])
    assert named() == "1 (Trainer.graphs[..])"
    trainer = CUDAGraph()
    assert named() == "1"
    trainer = None
    module = ModuleType("training")
    module.__dict__["graph"] = CUDAGraph()
    assert named() == "1 (training.graph)"
    del module
    assert trainer is None and named() == ""


def test_three_graphs_are_named_and_the_others_counted() -> None:
    held = [Trainer(**{f"graph{number}": CUDAGraph()}) for number in range(5)]
    assert named() == "5 (Trainer.graph0, Trainer.graph1, Trainer.graph2, ..)"
    del held[3:]
    assert named() == "3 (Trainer.graph0, Trainer.graph1, Trainer.graph2)"
    hidden = (lambda graph: lambda: graph)(CUDAGraph())  # in a closure, which has no name
    del held[:]
    assert named() == "1" and isinstance(hidden(), CUDAGraph)


def test_survivors_names_the_graph_that_blocks_the_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = pynccl.from_store(HashStore(), 0, 1, elastic=True)
    trainer: Any = Trainer(graph=CUDAGraph())
    reset, abort = threading.Event(), finalize._abort_all

    def abort_after_reset(*arguments: Any) -> None:
        reset.wait()
        abort(*arguments)

    monkeypatch.setattr(finalize, "_abort_all", abort_after_reset)
    with pytest.raises(
        pynccl.NcclTimeout, match=r"reset\(\) the graph(.|\n)* alive: 1 \(Trainer\.graph\)\. NCCL waits"
    ):
        comm.survivors(timeout=0.2)
    trainer.graph = None
    reset.set()
    with comm.survivors() as again:
        assert again.generation == 1 and again.size == 1
