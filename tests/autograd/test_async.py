"""ad.start and wait(): same results and gradients as the synchronous functions, wherever wait() is called."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ranks import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import work


def order_of_backward(comm: Communicator) -> list[str]:
    """Log the order in which the backward pass starts the adjoint, runs the work in between and waits."""
    log: list[str] = []
    launch, result = work._Pending.launch, work._Pending.result
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work._Pending, "launch", lambda p, x: (log.append(f"launch {p.function.name}"), launch(p, x))[1])
        patch.setattr(work._Pending, "result", lambda p: (log.append(f"result {p.function.name}"), result(p))[1])
        x = torch.randn(2, 3, requires_grad=True)
        handle = ad.start(ad.all_gather, x, comm, grad="sum")
        between = x * 2
        between.register_hook(lambda g: log.append("between"))
        y = handle.wait()
        (y.sum() + between.sum()).backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, comm.size + 2.0))
    return log


def test_the_adjoint_overlaps_the_backward_of_the_work_between_start_and_wait(ranks: RankPool) -> None:
    forward, backward = ["launch all_gather", "result all_gather"], ["launch reduce_scatter", "result reduce_scatter"]
    assert ranks.run(2, order_of_backward) == [[*forward, backward[0], "between", backward[1]]] * 2


def several_in_flight(comm: Communicator) -> None:
    """Wait in another order than started, never wait for one handle, and make a synchronous call in between."""
    xs = [torch.full((4,), float(i), requires_grad=True) for i in range(4)]
    handles = [ad.start(ad.all_reduce, x, comm, grad="sum") for x in xs]
    ad.start(ad.all_reduce, xs[1] * 3, comm, grad="sum")
    between = ad.all_reduce(xs[0], comm, grad="sum")
    ys = [handle.wait() for handle in reversed(handles)][::-1]
    assert [y.tolist() for y in ys] == [[float(comm.size * i)] * 4 for i in range(4)]
    (torch.stack(ys) * torch.arange(1, 5)[:, None] + between).sum().backward()
    assert [x.grad.tolist()[0] for x in xs] == [comm.size * (i + 1.0 + 4 * (i == 0)) for i in range(4)]


def test_several_operations_can_be_in_flight_and_waited_for_in_any_order(ranks: RankPool) -> None:
    ranks.run(2, several_in_flight)


# Where wait() is called


def under_no_grad(handle: ad.Work) -> Tensor:
    with torch.no_grad():
        return handle.wait()


def under_inference_mode(handle: ad.Work) -> Tensor:
    with torch.inference_mode():
        return handle.wait()


def in_a_thread(handle: ad.Work) -> Tensor:
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: under_no_grad(handle), range(2))
    assert first is second
    return first


def in_a_checkpoint(handle: ad.Work) -> Tensor:
    for reentrant in (False, True):
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        assert checkpoint(lambda x: handle.wait().sin() + x, x, use_reentrant=reentrant).requires_grad
    return handle.wait()


def derivatives(comm: Communicator) -> None:
    """Compare first and second derivatives, taken twice, with those of the synchronous operation."""
    for wait in (under_no_grad, under_inference_mode, in_a_thread, in_a_checkpoint):
        found = []
        for asynchronous in (False, True):
            x = torch.arange(3).double().add(comm.rank).requires_grad_()
            if asynchronous:
                handle = ad.start(ad.all_reduce, x * 2, comm, grad="sum")
                y = wait(handle)
                assert handle.wait() is y
            else:
                y = ad.all_reduce(x * 2, comm, grad="sum")
            assert y.requires_grad and not y.is_inference(), wait.__name__
            results = [y.detach()]
            for _ in range(2):
                (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
                results += [dx.detach(), *torch.autograd.grad((dx**2).sum(), x, retain_graph=True)]
            found.append(results)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), wait.__name__


def test_the_gradient_does_not_depend_on_where_the_result_is_waited_for(ranks: RankPool) -> None:
    ranks.run(2, derivatives)
