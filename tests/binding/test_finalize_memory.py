"""What the end of a communicator leaves until it has returned: memory that NCCL may use, graphs that it waits for."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.graphs import forget_graphs
from libraries import Stub
from processes import A_FORK_WITH_THREADS, DESTROYED, HANGS, comes_back, process, wait_for

import pynccl
from pynccl import Communicator

pytestmark = pytest.mark.usefixtures("unwatched")

# The memory of barrier(), which must outlive what NCCL may be doing with it

END = ("ncclCommAbort", "ncclCommDestroy", "ncclGroupEnd")


class Watched:
    """Stands for a communicator's scratch: says when it is freed."""

    nbytes = 1 << 20

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def __del__(self) -> None:
        self.order.append("freed")


def watched(stub: Stub, count: int = 1) -> tuple[list[Communicator], list[str]]:
    """Communicators with such memory, and the order of what has returned and what was freed."""
    order: list[str] = []

    def telling(name: str) -> Callable[..., int]:
        function = getattr(stub.library, name)

        def call(*args: Any) -> int:
            code = int(function(*args))
            order.append(name)
            return code

        return call

    for name in END:
        setattr(stub.library, name, telling(name))
    comms = [stub.comm(rank=rank) for rank in range(count)]
    for comm in comms:
        comm._scratch = Watched(order)  # type: ignore[assignment]
    return comms, order


ENDS: dict[str, tuple[Callable[[list[Communicator]], None], list[str]]] = {
    "abort": (lambda comms: comms[0].abort(), ["ncclCommAbort", "freed"]),
    "destroy": (lambda comms: comms[0].destroy(), ["ncclCommDestroy", "freed"]),
    "several": (pynccl.abort, ["ncclCommAbort", "ncclCommAbort", "ncclGroupEnd", "freed", "freed"]),
}


@pytest.mark.parametrize("end", ENDS)
def test_memory_is_freed_when_the_end_has_returned(end: str) -> None:
    run, expected = ENDS[end]
    comms, order = watched(Stub(), 2 if end == "several" else 1)
    run(comms)
    assert order == expected


def test_memory_outlives_an_end_that_goes_on_in_the_background() -> None:
    stub = Stub()
    (comm,), order = watched(stub)
    comm.timeout = 0.1
    stub.linger("ncclCommDestroy", 0.5)
    with pytest.raises(pynccl.NcclTimeout):
        comm.destroy()
    assert order == []
    comes_back("ncclCommDestroy")
    assert order == ["ncclCommDestroy", "freed"]


def test_memory_outlives_the_abort_after_a_finalize_that_hangs() -> None:
    stub = Stub()
    (comm,), order = watched(stub)
    comm.timeout = 0.1
    stub.linger("ncclCommFinalize", 0.5)
    with pytest.raises(pynccl.NcclTimeout, match="aborted instead"):
        comm.destroy()
    assert order == ["ncclCommAbort", "freed"]


def test_memory_that_is_slow_to_free_does_not_hold_up_an_abort() -> None:
    """As where freeing waits for a GPU that a collective of another communicator keeps busy."""
    (comm,), order = watched(Stub())
    go_on = threading.Event()

    class Slow(Watched):
        def __del__(self) -> None:
            go_on.wait(HANGS)
            super().__del__()

    comm._scratch = Slow(order)  # type: ignore[assignment]
    order.clear()  # the one that it replaces was freed
    try:
        with pytest.warns(RuntimeWarning, match="goes on in the background"):
            pynccl.abort([comm], timeout=0.1)
        assert order == ["ncclCommAbort"]
    finally:
        go_on.set()
    wait_for(lambda: order == ["ncclCommAbort", "freed"])


WATCHED = """
class Watched:
    nbytes = 1 << 20
    def __del__(self):
        print("freed after", *(line.split()[0] for line in stub.stub_record().decode().splitlines()), flush=True)
comms = [make(0), make(1)]
for comm in comms:
    comm._scratch = Watched()
del comm
stub.stub_clear()
"""


def test_memory_is_freed_last_at_an_exit_by_an_exception(tmp_path: Path) -> None:
    ended = process(tmp_path, WATCHED + "raise KeyError\n")
    assert ended.out == "freed after ncclCommAbort ncclCommAbort\n" * 2


def test_memory_of_a_collected_communicator_is_freed_after_its_abort_at_exit(tmp_path: Path) -> None:
    source = 'comms.pop()\ngc.collect()\nprint("collected", flush=True)\n'
    ended = process(tmp_path, WATCHED + source)
    assert ended.calls == ["ncclCommAbort", *DESTROYED]
    lines = [f"freed after {' '.join(ended.calls)}"] * 2
    assert ended.out.splitlines() == ["collected", *lines]


def test_a_forked_child_frees_no_memory(tmp_path: Path) -> None:
    source = """
leaked = comms.pop()
del leaked
child = os.fork()
if not child:
    del comms
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("child has ended", flush=True)
"""
    ended = process(tmp_path, WATCHED + source, *A_FORK_WITH_THREADS)
    assert ended.out.startswith("child has ended\nfreed") and ended.out.count("freed") == 2


# CUDA graphs, for which NCCL waits


class Graph:
    """Stands for torch.cuda.CUDAGraph."""


def test_an_end_that_does_not_come_names_the_graphs_that_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    said = r"torch.cuda.CUDAGraph objects alive: 2.*reduce-overhead.*until torch._dynamo.reset()"

    def failing(slow: str) -> str:
        comm = stub.comm()
        comm.timeout = 0.1
        stub.linger(slow, 0.3)
        with pytest.raises(pynccl.NcclTimeout) as caught:
            comm.destroy()
        comes_back(slow)
        return str(caught.value)

    assert all("CUDAGraph" not in failing(slow) for slow in ("ncclCommFinalize", "ncclCommDestroy"))
    graphs = [Graph(), Graph()]
    comm = stub.comm()
    comm.timeout = 0.05
    stub.progress("ncclCommFinalize", polls=1 << 30)
    with pytest.raises(pynccl.NcclTimeout, match=said):
        comm.finalize()
    comm.abort()
    stub.progress("ncclCommFinalize", polls=0)
    assert all(re.search(said, failing(slow)) for slow in ("ncclCommFinalize", "ncclCommDestroy"))
    comm = stub.comm()
    stub.linger("ncclCommAbort", 0.3)
    with pytest.warns(RuntimeWarning, match=said):
        pynccl.abort([comm], timeout=0.1)
    comes_back("ncclCommAbort")
    assert len(graphs) == 2


def test_what_torch_compile_made_lives_until_dynamo_is_reset() -> None:
    """So do the graphs of mode="reduce-overhead": to drop the compiled function is not enough."""
    made: list[weakref.ref[Any]] = []

    def use() -> None:
        def backend(module: Any, inputs: Any) -> Callable[..., Any]:
            graph = Graph()  # which what is compiled keeps
            made.append(weakref.ref(graph))
            return lambda *args: graph and module.forward(*args)

        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    use()
    gc.collect()
    assert [graph() is not None for graph in made] == [True]
    forget_graphs()
    assert [graph() is not None for graph in made] == [False]
