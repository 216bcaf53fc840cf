"""start and wait: results and gradients of the synchronous functions, wherever wait() is called and however often."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, start, tensors
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import work

LINEAR = {name: operation for name, operation in OPERATIONS.items() if operation.linear}


def same_as_synchronous(comm: Communicator) -> None:
    """Output, first and second derivatives, bit by bit; of uneven slices where there are slices."""
    for name, operation in LINEAR.items():
        case = Case(comm.size, uneven="uneven" not in operation.cannot)
        found = []
        for asynchronous in (False, True):
            leaf = tensors(operation, case, 1)[comm.rank].requires_grad_()
            if asynchronous:
                handle = start(operation, leaf * 2, comm, case)
                y = handle.wait()
                assert handle.wait() is y
            else:
                y = operation.call(leaf * 2, comm, case)
            (dx,) = torch.autograd.grad((y**3).sum(), leaf, create_graph=True)
            (ddx,) = torch.autograd.grad((dx**2).sum(), leaf)
            found.append((y.detach(), dx.detach(), ddx))
        for kind, now, later in zip(("output", "gradient", "second derivative"), *found, strict=True):
            assert torch.equal(now, later), f"{name}, {kind}"


@pytest.mark.parametrize("n", [2, 4])
def test_results_and_derivatives_equal_the_synchronous_ones(ranks: RankPool, n: int) -> None:
    ranks.run(n, same_as_synchronous)


def order_of_backward(comm: Communicator) -> list[str]:
    """What runs while the adjoint is under way: the work between start and wait, backwards."""
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


def test_the_adjoint_starts_before_the_backward_of_the_work_between_and_is_waited_for_after_it(ranks: RankPool) -> None:
    forward, backward = ["launch all_gather", "result all_gather"], ["launch reduce_scatter", "result reduce_scatter"]
    assert ranks.run(2, order_of_backward) == [[*forward, backward[0], "between", backward[1]]] * 2


def several_under_way(comm: Communicator) -> None:
    """Waited for in another order than started, with synchronous calls in between; retained graphs run twice."""
    xs = [torch.full((4,), float(comm.rank + i), dtype=torch.float64, requires_grad=True) for i in range(4)]
    handles = [ad.start(ad.all_reduce, x, comm, grad="sum") for x in xs]
    between = ad.all_reduce(xs[0], comm, grad="sum")
    ys = [handle.wait() for handle in reversed(handles)][::-1]
    ranks = sum(range(comm.size))
    for i, y in enumerate(ys):
        assert y.tolist() == [float(ranks + comm.size * i)] * 4
    loss = (torch.stack(ys) * torch.arange(1, 5).double()[:, None]).sum() + between.sum()
    for times in (1, 2):
        loss.backward(retain_graph=True)
        expected = [comm.size * (i + 1.0 + (i == 0)) * times for i in range(4)]
        assert [x.grad.tolist()[0] for x in xs] == expected


def test_several_may_be_under_way_and_waited_for_in_any_order(ranks: RankPool) -> None:
    ranks.run(2, several_under_way)


def unsupported(comm: Communicator) -> list[str]:
    x = torch.ones(2 * comm.size + 1)
    messages = []
    calls: list[Callable[[], object]] = [
        lambda: ad.start(ad.all_reduce, x, comm, "max", grad="sum"),
        lambda: ad.start(torch.sum, x),
        lambda: ad.start(ad.reduce_scatter, x, comm),
    ]
    for call in calls:
        with pytest.raises((NotImplementedError, TypeError, ValueError)) as caught:
            call()
        messages.append(str(caught.value))
    comm.barrier()  # nothing was launched
    return messages


def test_errors_come_from_start(ranks: RankPool) -> None:
    for extremum, no_collective, rows in ranks.run(2, unsupported):
        assert "ad.all_reduce" in extremum and "max" in extremum
        assert "no collective of pynccl_autograd" in no_collective
        assert "not divisible by 2 ranks" in rows


def within_levels(comm: Communicator) -> list[list[float]]:
    x = torch.full((2,), comm.rank + 1.0)

    def started(t: Tensor) -> Tensor:
        return ad.start(ad.all_reduce, t * t, comm, grad="sum").wait()

    with forward_ad.dual_level():
        change = forward_ad.unpack_dual(started(forward_ad.make_dual(x, x))).tangent
    return [
        torch.func.jvp(started, (x,), (x,))[1].tolist(),
        change.tolist(),
        torch.func.grad(lambda t: started(t).sum())(x).tolist(),
        torch.func.vmap(started)(x).tolist(),
    ]


def test_within_forward_mode_and_torch_func_it_is_done_at_once(ranks: RankPool) -> None:
    for rank, (jvp, dual, grad, vmap) in enumerate(ranks.run(2, within_levels)):
        assert jvp == dual == [2.0 * (1 + 4)] * 2
        assert grad == [2.0 * 2 * (rank + 1)] * 2
        assert vmap == [1.0 + 4] * 2


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
    "no_grad": under_no_grad,
    "inference_mode": under_inference_mode,
    "thread": in_a_thread,
    "checkpoint": in_a_checkpoint(False),
    "reentrant checkpoint": in_a_checkpoint(True),
    "torch.func": within_torch_func,
    "hook": within_a_hook,
}


def derivatives(comm: Communicator) -> None:
    for way in WAITS:
        now, later = derivatives_of(comm, way)
        assert len(now) == 6 and all(torch.equal(a, b) for a, b in zip(now, later, strict=True)), way


def derivatives_of(comm: Communicator, way: str) -> list[list[Tensor]]:
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


def test_the_gradient_does_not_depend_on_where_the_result_is_waited_for(ranks: RankPool) -> None:
    ranks.run(2, derivatives)


def kept_and_dropped(comm: Communicator) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        first = ad.start(ad.all_reduce, x, comm, grad="sum")
    with torch.inference_mode():
        second = ad.start(ad.all_reduce, x, comm, grad="sum")
    y, z = first.wait(), second.wait()
    assert y.tolist() == z.tolist() == [float(comm.size)] * 2
    assert (y.requires_grad, z.requires_grad, z.is_inference()) == (False, False, True)
    y = ad.start(ad.all_reduce, x * 2, comm, grad="sum").wait()
    ad.start(ad.all_reduce, x * 3, comm, grad="sum")  # dropped before its result is there; its backward never entered
    z = ad.start(ad.all_gather, y, comm, grad="replicated")
    z.wait().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * 2


def test_a_result_outlives_its_handle_and_has_the_gradient_that_start_recorded(ranks: RankPool) -> None:
    ranks.run(2, kept_and_dropped)
