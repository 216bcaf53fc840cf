"""torch.compile keeps every collective, in the order of the program, on all ranks alike.

test_fuzz_autograd.py compiles random programs; test_transforms.py and test_semantics.py compare values."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz.rank_side import recorded_calls
from ranks import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator, NcclInvalidUsage

Program = Callable[[Communicator, Tensor, Tensor], Tensor]


def exchanged(comm: Communicator, a: Tensor, b: Tensor) -> Tensor:
    """Two sums of one shape; the compiler would order them by the lengths of a and b, which differ between ranks."""
    s = ad.all_reduce(a.exp().mean(0), comm, grad="sum")
    t = ad.all_reduce(b.exp().mean(0), comm, grad="sum")
    return torch.stack([(t * b.exp()).mean(0), (s * a.exp()).mean(0)])


def unused(comm: Communicator, a: Tensor, b: Tensor) -> Tensor:
    """Results that no rank uses, and one that only rank 1 uses."""
    ad.all_reduce(a.detach().sum(0), comm, grad="sum")
    u = ad.all_reduce(b.detach().mean(0), comm, grad="sum").detach()
    s = ad.all_reduce(a.mean(0), comm, grad="sum")
    return s * a * (u if comm.rank == 1 else 1)


def merged(comm: Communicator, a: Tensor, b: Tensor) -> Tensor:
    """Equal calls on rank 0; on rank 1 they have different inputs."""
    w = ad.all_reduce(a[:4], comm, grad="sum")
    v = ad.all_reduce(a[:4] if comm.rank == 0 else a[4:8], comm, grad="sum")
    return b[:4] * w + v


def empty(comm: Communicator, a: Tensor, b: Tensor) -> Tensor:
    """Results without elements: of a gather on rank 1, and of an exchange in which a rank receives nothing."""
    s, t = ad.gather(a.mean(0), comm, 0), ad.gather(b.mean(0), comm, 0)
    lengths = [(0, 3), (0, 2)]  # rank 0 receives nothing
    r = ad.all_to_all(a[: sum(lengths[comm.rank])], comm, send_splits=lengths[comm.rank],
                      recv_splits=[row[comm.rank] for row in lengths])  # fmt: skip
    return s.sum() + t.sum() + r.exp().sum()


def constants(comm: Communicator, a: Tensor, b: Tensor) -> Tensor:
    """Inputs that are known when the program is compiled."""
    c = ad.all_reduce(torch.ones(4, dtype=a.dtype) * 2, comm, grad="sum").detach()
    d = ad.all_reduce(torch.zeros(4, dtype=a.dtype), comm, grad="sum").detach()
    return (a * c).mean(0) + (b + d).mean(0)


def extrema(comm: Communicator, a: Tensor, b: Tensor) -> Tensor:
    """Backward passes with a call that does not depend on the cotangent: they count the ties."""
    m = ad.all_reduce(a.exp().mean(0), comm, "max", grad="sum")
    n = ad.all_reduce(b.exp().mean(0), comm, "max", grad="sum")
    return (m * b.exp()).mean(0) + (n * a.exp()).mean(0)


def checkpointed(comm: Communicator, a: Tensor, b: Tensor) -> Tensor:
    """A checkpoint in which ranks use different results."""

    def region(x: Tensor) -> Tensor:
        y = ad.all_reduce(x.detach().mean(0), comm, grad="sum").detach()
        x = x * y if comm.rank == 1 else x + 1
        z: Tensor = ad.all_reduce(x.exp().mean(0), comm, "max", grad="sum") * x
        return z

    return checkpoint(region, a * a, use_reentrant=False).sum(0) + (b * b).sum(0)  # type: ignore[no-any-return]


PROGRAMS: list[Program] = [exchanged, unused, merged, empty, constants, extrema, checkpointed]
# In eager mode constants have a backward pass too, and a checkpoint makes its calls again.
FEWER_BACKWARD = (constants, checkpointed)


def inputs(comm: Communicator) -> list[Tensor]:
    generator, rows = torch.Generator().manual_seed(comm.rank), (64, 1024) if comm.rank == 0 else (1024, 64)
    return [torch.randn(n, 4, dtype=torch.float64, generator=generator, requires_grad=True) for n in rows]


def calls_since(comm: Communicator, entry: int) -> list[tuple[str, str, str, str]]:
    """Return (operation, function, line of the forward call, line) of the collective calls after this entry."""
    calls = [call for call in recorded_calls(comm) if call.entry > entry and call.collective]
    return [(call.operation, call.function, call.forward_site, call.site) for call in calls]


def results(comm: Communicator, program: Any, grad: bool) -> tuple[list[Tensor], list[tuple[str, str, str, str]]]:
    leaves, before = inputs(comm), recorded_calls(comm)[-1].entry
    with torch.set_grad_enabled(grad):
        y = program(comm, *leaves)
    if grad:
        y.sum().backward()
    found = [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return found, calls_since(comm, before)


def run_compiled(comm: Communicator, program: Program, backend: str) -> list[Any]:
    """Compare the program with eager mode, with and without gradients; return its calls."""
    found = []
    for grad in (True, False):
        torch._dynamo.reset()
        expected, eager = results(comm, program, grad)
        values, calls = results(comm, torch.compile(program, fullgraph=True, backend=backend), grad)
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
        if not grad or program not in FEWER_BACKWARD:
            assert [call[:2] for call in calls] == [call[:2] for call in eager], (grad, calls, eager)
        found.append(calls)
    return found


CASES = [
    pytest.param(program, backend, id=f"{program.__name__}-{backend}", marks=[pytest.mark.slow] if slow else [])
    for program in PROGRAMS
    for backend, slow in (("aot_eager", False), ("inductor", program not in (exchanged, unused)))
]


@pytest.mark.timeout(320)  # inductor compiles with a cold cache
@pytest.mark.parametrize("program, backend", CASES)
def test_compiled_programs_make_the_calls_of_the_program_in_its_order(
    ranks: RankPool, program: Program, backend: str
) -> None:
    first, second = ranks.run(2, run_compiled, program, backend, timeout=300)
    assert first == second


def with_a_memory_budget(comm: Communicator, budget: float) -> list[Any]:
    with torch._functorch.config.patch(activation_memory_budget=budget):
        torch._dynamo.reset()
        expected, eager = results(comm, exchanged, True)
        values, calls = results(comm, torch.compile(exchanged, fullgraph=True, backend="aot_eager"), True)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == len(eager) or not budget
    return calls


@pytest.mark.parametrize("budget", [0.1, 0.0])
def test_the_memory_budget_recomputes_no_collective(ranks: RankPool, budget: float) -> None:
    """With a budget of 0 torch recomputes everything from the inputs, its own collectives too: alike on all ranks."""
    first, second = ranks.run(2, with_a_memory_budget, budget, timeout=110)
    assert first == second


def lines_of_calls(comm: Communicator) -> list[tuple[str, str, str, str]]:
    return results(comm, torch.compile(exchanged, fullgraph=True, backend="aot_eager"), True)[1]


def test_the_flight_recorder_has_the_lines_of_compiled_calls(ranks: RankPool) -> None:
    code = exchanged.__code__
    line = f"{code.co_filename}:{code.co_firstlineno + 2}"
    loss = f"{results.__code__.co_filename}:{results.__code__.co_firstlineno + 5}"
    for calls in ranks.run(2, lines_of_calls, timeout=110):
        assert calls[0] == ("all_reduce", "AllReduce.forward", "", line)
        assert calls[-1] == ("all_reduce", "AllReduce.backward", line, loss)


def exchange_calls(comm: Communicator) -> str:
    """Run two equal operators as if torch.compile had exchanged them on rank 0."""
    os.environ["PYNCCL_CHECK"] = "1"
    checked = comm.split(0)
    del os.environ["PYNCCL_CHECK"]
    assert checked is not None
    lines = ["1 AllReduce.forward model.py:1", "2 AllReduce.forward model.py:2"]
    for call in lines:  # in the order of the program: no error
        torch.ops.pynccl.all_reduce(torch.ones(2), ad.key_of(checked), call, "sum", "sum", None)
    try:
        for call in lines[::-1] if comm.rank == 0 else lines:
            torch.ops.pynccl.all_reduce(torch.ones(2), ad.key_of(checked), call, "sum", "sum", None)
    except NcclInvalidUsage as error:
        return str(error)
    finally:
        checked.destroy()
    return ""


def test_the_check_finds_equal_calls_that_are_exchanged(ranks: RankPool) -> None:
    for text in ranks.run(2, exchange_calls):
        assert "call 2 of the program, run as call 1 by torch.compile at model.py:2" in text, text
        assert "all_reduce(count=2, FLOAT32, SUM) at model.py:1" in text, text


def gathered_lengths(comm: Communicator) -> list[Any]:
    """Gather tensors whose length differs by step and rank: one rank may recompile where another does not."""
    torch._dynamo.reset()
    expected: list[list[Tensor | None]] = []
    found: list[list[Tensor | None]] = []

    def program(x: Tensor, splits: list[int]) -> Tensor:
        y = ad.gather(x * 2, comm, 0, splits=splits)
        z: Tensor = y.sum() + ad.all_reduce(x.mean(), comm, grad="sum")
        return z

    compiled = torch.compile(program, backend="aot_eager")
    before = recorded_calls(comm)[-1].entry
    for step in range(12):
        splits = [3 + step % 5, 4 + (step * step) % 7]
        x = torch.arange(float(splits[comm.rank])).requires_grad_()
        for function, into in ((program, expected), (compiled, found)):
            x.grad = None
            y = function(x, splits)
            y.backward()
            into.append([y.detach(), x.grad])
    torch.testing.assert_close(found, expected)
    return [call[:3] for call in calls_since(comm, before)]


def test_lengths_that_differ_by_rank_and_step_do_not_change_the_calls(ranks: RankPool) -> None:
    first, second = ranks.run(2, gathered_lengths, timeout=110)
    assert first == second and len(first) > 24
