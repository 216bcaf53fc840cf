"""scripts/examples/: each is short, runs on any number of ranks, notices mistakes, and prints what its page says."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import TORCHRUN, RankPool
from schedule import Event, Log, access, races, redundant_waits
from stub_driver import over_driver

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "examples"
PAGE = (ROOT / "docs" / "examples.md").read_text()
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
IN_THE_POOL = [name for name in NAMES if name != "dead_rank"]  # which ends a process
ENVIRONMENT = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
sys.path.append(str(FOLDER))

import ring  # noqa: E402


def verified(comm: Communicator, name: str) -> str:
    """What main() returns, which raises where something is not as it should be."""
    line: str = importlib.import_module(name).main(comm)
    return line


def on_the_page(name: str) -> tuple[int, list[str]]:
    """How many ranks the command of the page starts, and what it prints there."""
    starts = (
        rf"^    (?:PYNCCL_HOST_LINK=\S+ )?torchrun --standalone --nproc-per-node=(\d) scripts/examples/{name}\.py\n"
    )
    found = re.findall(starts + r"((?:    .+\n)+)", PAGE, re.MULTILINE)
    assert len(found) == 1, f"docs/examples.md has {len(found)} commands with {name}.py, each followed by its output"
    ranks, output = found[0]
    return int(ranks), [line.strip() for line in output.splitlines()]


def steady(lines: list[str]) -> list[str]:
    """Without what is of one machine or one run: names of hosts, where the repository lies, milliseconds."""
    bare = [re.sub(r"( of )[\w.-]+(: the sum)", r"\1HOST\2", line.strip()) for line in lines]
    return [re.sub(r"\d+\.\d ms", "-- ms", re.sub(r" at \S+/", " at ", line)) for line in bare]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", IN_THE_POOL)
def test_example_is_right_on_any_number_of_ranks(ranks: RankPool, name: str, n: int) -> None:
    lines = ranks.run(n, verified, name)
    assert all(line.startswith(f"{name}: ") for line in lines)
    if name != "hello":
        assert len(set(lines)) == 1 or name == "errors"  # which names the rank itself first
        lines = lines[:1]
    shown, printed = on_the_page(name)
    if n == shown:
        assert steady("\n".join(lines).splitlines()) == steady(printed)


def test_examples_are_short_say_how_they_are_run_and_start_alike() -> None:
    for name in NAMES:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) < 80, name
        docstring = ast.get_docstring(ast.parse(text)) or ""
        command = re.search(
            r"^ {4}torchrun --standalone --nproc-per-node=(\d) (\S+)\n {4}(.+)", docstring, re.MULTILINE
        )
        assert command and command[2] == f"scripts/examples/{name}.py", name
        ranks, printed = on_the_page(name)
        assert int(command[1]) == ranks
        assert any(line.startswith(command[3].removesuffix(" ...")) for line in printed), command[3]
        assert "comm.device" in text, name
    one_line = "        verified = main(world)\n        if world.rank == 0:\n            print(verified)\n"
    ends = {(FOLDER / f"{name}.py").read_text().partition("__main__")[2] for name in NAMES}
    assert f'":\n    with pynccl.init() as world:\n{one_line}' in ends
    assert len(ends) == 3  # those of hello and dead_rank, which are run below


# As a user starts them


def run(*command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, env=ENVIRONMENT, cwd=ROOT, check=False)


def test_hello_prints_a_line_per_rank_under_torchrun() -> None:
    n, printed = on_the_page("hello")
    done = run(*TORCHRUN, f"--nproc-per-node={n}", "scripts/examples/hello.py")
    assert done.returncode == 0, done.stderr
    assert sorted(steady(done.stdout.splitlines())) == steady(printed)


def test_the_ranks_go_on_without_the_one_that_dies_under_torchrun() -> None:
    n, printed = on_the_page("dead_rank")
    done = run(*TORCHRUN, f"--nproc-per-node={n}", "scripts/examples/dead_rank.py")
    assert done.returncode == 0, done.stderr
    error, result = done.stdout.splitlines()
    for line in (error, printed[0]):  # the process and the seconds are not the same twice
        assert re.match(rf"NcclRemoteError in step 3: .*\brank {n - 1}\b", line)
    assert result == printed[1]


@pytest.mark.parametrize("name", ["ring"])
def test_example_without_torchrun_says_how_it_is_started(name: str) -> None:
    done = run(f"scripts/examples/{name}.py")
    assert done.returncode == 1 and done.stdout == ""
    message = done.stderr.partition("pynccl.NcclInvalidUsage: ")[2]
    assert "was not started by torchrun. Start it with\n" in message
    assert f"  torchrun --standalone --nproc-per-node=2 scripts/examples/{name}.py\n" in message
    assert "pynccl.init_all()" in message


# Each of them can fail


def doubled(name: str) -> Any:
    """The method of a communicator, whose result is twice what it should be."""
    right = getattr(Communicator, name)

    def wrong(self: Communicator, *args: Any, **options: Any) -> Any:
        result = right(self, *args, **options)
        if isinstance(result, torch.Tensor):
            result.mul_(2)
        return result

    return wrong


@contextlib.contextmanager
def spoiled(name: str) -> Iterator[None]:
    """The example with a mistake in it, of the kind that it is about."""
    module = importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        if name == "hello":
            patch.setattr(Communicator, "all_reduce", doubled("all_reduce"))
        elif name == "ring":
            patch.setattr(module, "use", lambda total, block, source: total.add_(block))
        elif name == "custom_layer":  # as if forward were its own adjoint
            backward = staticmethod(lambda ctx, g: (module.CumulativeSum.apply(g, ctx.comm, ctx.reverse), None, None))
            patch.setattr(module.CumulativeSum, "backward", backward)
        elif name == "sequence_parallel_mlp":
            patch.setattr(ad, "finish_gradients", lambda model: None)
        elif name == "cuda_graph":  # a replay too few
            plan = SimpleNamespace(all_reduce=lambda send, recv: recv.zero_)
            patch.setattr(Communicator, "plan", plan)
        elif name == "gradient_buckets":
            patch.setattr(module.GradientBuckets, "arrived", lambda *_: None)
        elif name == "raw_pointers":
            patch.setitem(module.WAYS, "numpy", ("cpu", lambda comm, values: values))
        elif name == "one_sided":
            put = Communicator.put_signal
            patch.setattr(
                Communicator, "put_signal", lambda self, x, peer, w, at, stream: put(self, x, peer, w, stream=stream)
            )
        elif name == "low_precision":  # a sum that is a little off
            patch.setattr(ad, "all_reduce", lambda x, comm, **_: x + 2**-7)
        elif name == "overlap":  # the part of this rank alone
            patch.setattr(ad, "start", lambda operation, x, *_, **__: SimpleNamespace(wait=lambda: x))
        elif name == "errors":  # one that is no mistake
            patch.setitem(module.MISTAKES, lambda comm: comm.barrier(), ValueError)
        elif name == "checkpoint":
            state = ad.full_state_dict
            patch.setattr(ad, "full_state_dict", lambda model: {name: x + 1 for name, x in state(model).items()})
        yield


def notices(comm: Communicator, name: str) -> bool:
    with spoiled(name):
        try:
            importlib.import_module(name).main(comm)
        except AssertionError:
            return True
        return False


@pytest.mark.parametrize("name", IN_THE_POOL)
def test_example_notices_a_mistake(ranks: RankPool, name: str) -> None:
    # Only rank 0 loads the checkpoint by torch; the other leaves the communicator in order.
    assert True in ranks.run(2, notices, name)


# Memory of a GPU, as far as there is none


def test_memory_of_cuda_core_is_handed_over_with_its_stream() -> None:
    """cuda.core itself, over a driver and a libnccl that compute nothing: what is copied there comes back."""
    printed = over_driver(
        """
import numpy as np
import raw_pointers
values = np.arange(10, dtype=np.float32)
found = raw_pointers.with_cuda_core(stub.comm(), values)
(call,) = stub.calls()
print(found.tolist() == values.tolist(), call.name, call.args["send"] == call.args["recv"] > 0, call.args["count"])
print(call.args["dtype"], call.args["stream"] > 2)
""",
        str(FOLDER),
    )
    assert printed.split() == ["True", "ncclAllReduce", "True", "10", str(int(pynccl.DataType.FLOAT32)), "True"]


# The ring's waits


class Recorded:
    """A stream that notes what it is asked for."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def wait(self, other: Recorded) -> None:
        point = len(self.log.events)
        self.log.events += [
            Event("recorded", other.name, point=point),
            Event("waited", self.name, other.name, point=point),
        ]


class Ranks:
    """A communicator that notes which memory its calls touch."""

    rank, size, device = 1, 4, "cpu"

    def __init__(self, log: Log) -> None:
        self.log = log

    def send(self, x: torch.Tensor, peer: int, stream: Recorded) -> None:
        self.log.events.append(Event("ran", stream.name, f"send to {peer}", reads=(access(x),)))

    def recv(self, x: torch.Tensor, peer: int, stream: Recorded) -> None:
        self.log.events.append(Event("ran", stream.name, f"recv from {peer}", writes=(access(x),)))


def test_the_ring_needs_each_of_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the order alone that the waits make, whichever stream is faster: as on a GPU."""
    log = Log()
    streams = {
        "create_stream": lambda device: Recorded("side", log),
        "current_stream": lambda device: Recorded("main", log),
    }
    monkeypatch.setattr(ring, "pynccl", SimpleNamespace(group=contextlib.nullcontext, **streams))

    def use(total: torch.Tensor, block: torch.Tensor, source: int) -> None:
        log.events.append(Event("ran", "main", f"use of {source}", reads=(access(block),), writes=(access(total),)))

    monkeypatch.setattr(ring, "use", use)
    kept = ring.ring(torch.zeros(8), Ranks(log))  # type: ignore[arg-type]
    assert kept.shape == (8,)
    assert len(log.waits) == 2 * (Ranks.size - 1) and races(log) == []
    assert redundant_waits(log) == []
    for at in log.waits:
        assert races(log.without(at)), log.events[at]


def ring_without_its_second_wait(comm: Communicator) -> bool:
    """Whether the ring is right, where the transfers come after all the work on what they bring."""
    used, done = [], threading.Event()
    create, use = pynccl.create_stream, ring.use
    current = type(pynccl.current_stream(comm.device))
    ahead = type("Ahead", (current,), {"wait": lambda self, other: None})
    with pytest.MonkeyPatch.context() as patch:

        def late(device: str) -> Any:
            side: Any = create(device)
            side.submit(done.wait)
            return side

        def counted(*args: Any) -> None:
            use(*args)
            used.append(args)
            if len(used) == comm.size:
                done.set()

        patch.setattr(pynccl, "create_stream", late)
        patch.setattr(pynccl, "current_stream", lambda device: ahead())
        patch.setattr(ring, "use", counted)
        try:
            ring.main(comm)
        except AssertionError:
            return False
        return True


def test_the_ring_reads_too_early_without_its_second_wait(ranks: RankPool) -> None:
    assert ranks.run(3, ring_without_its_second_wait) == [False] * 3
    assert len(set(ranks.run(3, verified, "ring"))) == 1  # the communicator is in order
