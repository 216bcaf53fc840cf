"""start and wait: the result belongs to the graph of start(), wherever wait() is called and however often."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from ranks import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator


def plainly(handle: ad.Work) -> Tensor:
    return handle.wait()


def under_no_grad(handle: ad.Work) -> Tensor:
    with torch.no_grad():
        return handle.wait()


def under_inference_mode(handle: ad.Work) -> Tensor:
    with torch.inference_mode():
        return handle.wait()


def in_a_thread(handle: ad.Work) -> Tensor:
    found: list[Tensor] = []

    def wait() -> None:
        with torch.no_grad():
            found.append(handle.wait())

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]
    return found[0]


def in_a_checkpoint(reentrant: bool) -> Callable[[ad.Work], Tensor]:
    def wait(handle: ad.Work) -> Tensor:
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        y: Tensor = checkpoint(lambda x: handle.wait().sin() + x, x, use_reentrant=reentrant)
        assert y.requires_grad
        return handle.wait()

    return wait


def within_torch_func(handle: ad.Work) -> Tensor:
    """Once it was waited for outside; before that, it raises."""

    def f(t: Tensor) -> Tensor:
        return (handle.wait() * t).sum()

    one = torch.ones(3, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="wait outside"):
        torch.func.grad(f)(one)
    y = handle.wait()
    assert torch.equal(torch.func.grad(f)(one), y)
    return y


def within_a_hook(handle: ad.Work) -> Tensor:
    """In the backward pass of something else, where no graph is recorded."""
    x = torch.ones(1, requires_grad=True)
    found: list[Tensor] = []
    x.register_hook(lambda g: found.append(handle.wait()))
    x.sum().backward()
    return found[0]


WAITS: dict[str, Callable[[ad.Work], Tensor]] = {
    "plain": plainly,
    "no_grad": under_no_grad,
    "inference_mode": under_inference_mode,
    "thread": in_a_thread,
    "checkpoint": in_a_checkpoint(False),
    "reentrant checkpoint": in_a_checkpoint(True),
    "torch.func": within_torch_func,
    "hook": within_a_hook,
}


def derivatives(comm: Communicator, way: str) -> list[list[Tensor]]:
    """First and second derivatives, twice, beside those of the synchronous operation."""
    found = []
    for asynchronous in (False, True):
        x = torch.arange(3).double().add(comm.rank).requires_grad_()
        if asynchronous:
            handle = ad.start(ad.all_reduce, x * 2, comm, grad="sum")
            y = WAITS[way](handle)
            assert handle.wait() is y and handle.wait() is y
        else:
            y = ad.all_reduce(x * 2, comm, grad="sum")
        assert y.requires_grad and not y.is_inference()
        results = [y.detach()]
        for _ in range(2):
            (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            results += [dx.detach(), *torch.autograd.grad((dx**2).sum(), x, retain_graph=True)]
        y.sum().backward()
        assert x.grad is not None
        found.append([*results, x.grad])
    return found


@pytest.mark.parametrize("way", WAITS)
def test_the_gradient_does_not_depend_on_where_the_result_is_waited_for(ranks: RankPool, way: str) -> None:
    for now, later in ranks.run(2, derivatives, way):
        assert len(now) == 6
        assert all(torch.equal(a, b) for a, b in zip(now, later, strict=True))


def started_without_a_graph(comm: Communicator) -> list[bool]:
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        first = ad.start(ad.all_reduce, x, comm, grad="sum")
    with torch.inference_mode():
        second = ad.start(ad.all_reduce, x, comm, grad="sum")
    y, z = first.wait(), second.wait()
    assert y.tolist() == z.tolist() == [float(comm.size)] * 3
    return [y.requires_grad, z.requires_grad, z.is_inference()]


def test_what_is_started_without_a_graph_has_no_gradient(ranks: RankPool) -> None:
    assert ranks.run(2, started_without_a_graph) == [[False, False, True]] * 2


def of_a_dropped_handle(comm: Communicator) -> list[float]:
    """Its result is kept; another handle is dropped before its result is there, and its backward never entered."""
    x = torch.ones(2, requires_grad=True)
    y = ad.start(ad.all_reduce, x * 2, comm, grad="sum").wait()
    ad.start(ad.all_reduce, x * 3, comm, grad="sum")
    z = ad.start(ad.all_gather, y, comm, grad="replicated")
    z.wait().sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def test_a_result_outlives_its_handle(ranks: RankPool) -> None:
    assert ranks.run(2, of_a_dropped_handle) == [[4.0] * 2] * 2
