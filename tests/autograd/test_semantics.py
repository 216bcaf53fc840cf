"""Every property of every collective, compared with torch's derivative of a reference.

Each test is one cell of the table in docs/semantics.md; a skip is a combination that does not exist, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, Operation, cotangents, tensors
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

SIZES = (2, 3, 4)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}

Check = Callable[[Communicator, Operation, Case], None]


def close(found: Tensor, expected: Tensor, what: str, **tolerance: float) -> None:
    torch.testing.assert_close(
        found.detach(), expected.detach(), **(tolerance or CLOSE), msg=lambda text: f"{what}: {text}"
    )


def grad(y: Tensor, x: Any, g: Tensor | None = None, **options: Any) -> Any:
    return torch.autograd.grad(y, x, g, materialize_grads=True, **options)


def leaves(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in xs]


def own_gradient(operation: Operation, gradients: Sequence[Tensor], rank: int) -> Tensor:
    """Return this rank's gradient; if all ranks share one input, the sum of all."""
    return torch.stack(list(gradients)).sum(0) if operation.replicated_input else gradients[rank]


def inner(ys: Sequence[Tensor], gs: Sequence[Tensor]) -> Tensor:
    """Return the real inner product that defines torch's gradient, also for complex numbers."""
    return sum(((g.conj() * y).real.sum() for y, g in zip(ys, gs, strict=True)), torch.zeros(()))


def check_gradient(comm: Communicator, operation: Operation, case: Case, dtype: torch.dtype = torch.float64) -> None:
    """Compare outputs and gradients for random cotangents: of the sum of the losses, or of one replicated loss."""
    xs = leaves(tensors(operation, case, 1, dtype))
    ys = operation.reference(xs, case)
    replicated = case.grad == "replicated"
    gs = cotangents(ys, 2, replicated)
    expected = grad(inner(ys[:1], gs[:1]) if replicated else inner(ys, gs), xs)
    x = xs[comm.rank].detach().clone().requires_grad_()
    before = x.detach().clone()
    y = operation.call(x, comm, case)
    close(y, ys[comm.rank], "output")
    assert y.is_contiguous()
    (dx,) = grad(y, x, gs[comm.rank])
    close(dx, own_gradient(operation, expected, comm.rank), "gradient")
    assert torch.equal(x.detach(), before)


def check_adjoint_sum(comm: Communicator, operation: Operation, case: Case) -> None:
    check_gradient(comm, operation, case)
    if operation.linear and not operation.replicated_input:
        x, replicated = tensors(operation, case, 3)[comm.rank], case.grad == "replicated"
        error = ad.testing.check_adjoint(lambda t: operation.call(t, comm, case), x, comm, replicated=replicated)
        assert error <= 1e-12


def check_replicated(comm: Communicator, operation: Operation, case: Case) -> None:
    check_adjoint_sum(comm, operation, case._replace(grad="replicated"))


def check_double_backward(comm: Communicator, operation: Operation, case: Case) -> None:
    """Compare the gradients of L = sum(y**3) and of <dL/dx, v>."""
    conventions = ("sum",) if "replicated" in operation.cannot else ("sum", "replicated")
    for convention in conventions:
        case = case._replace(grad=convention)
        xs = leaves(tensors(operation, case, 1))
        vs = tensors(operation, case, 5)
        ys = operation.reference(xs, case)
        losses = [(y**3).sum() for y in ys]
        first = grad(losses[0] if convention == "replicated" else torch.stack(losses).sum(), xs, create_graph=True)
        if operation.replicated_input:
            # One shared input has one replicated gradient, so its loss counts once.
            outer = inner([torch.stack(list(first)).sum(0)], vs[:1])
        else:
            outer = inner(first, vs)
        second = grad(outer, xs)
        x = xs[comm.rank].detach().clone().requires_grad_()
        y = operation.call(x, comm, case)
        (dx,) = grad((y**3).sum(), x, create_graph=True)
        (ddx,) = grad((dx * vs[comm.rank]).sum(), x)
        close(dx, own_gradient(operation, first, comm.rank), f"{convention}, first derivative")
        close(ddx, own_gradient(operation, second, comm.rank), f"{convention}, second derivative")


def check_jvp(comm: Communicator, operation: Operation, case: Case) -> None:
    xs, ts = tensors(operation, case, 1), tensors(operation, case, 6)
    expected = torch.func.jvp(lambda *t: tuple(operation.reference(t, case)), tuple(xs), tuple(ts))[1]

    def f(t: Tensor) -> Tensor:
        return operation.call(t, comm, case)

    change = torch.func.jvp(f, (xs[comm.rank],), (ts[comm.rank],))[1]
    close(change, expected[comm.rank], "tangent")
    # Forward over reverse: the tangent of a gradient.
    if not operation.replicated_input:

        def loss_gradient(*t: Tensor) -> Any:
            return torch.func.grad(
                lambda *u: sum((v**3).sum() for v in operation.reference(u, case)), argnums=tuple(range(case.n))
            )(*t)

        expected = torch.func.jvp(loss_gradient, tuple(xs), tuple(ts))[1]
        own = torch.func.grad(lambda t: (f(t) ** 3).sum())
        change = torch.func.jvp(own, (xs[comm.rank],), (ts[comm.rank],))[1]
        close(change, expected[comm.rank], "tangent of the gradient")


def check_vmap(comm: Communicator, operation: Operation, case: Case) -> None:
    """Compare outputs and per-sample gradients, with the batch in a middle dimension."""
    batch = 3
    xs = [tensors(operation, case, 10 + b) for b in range(batch)]
    ys = [operation.reference(x, case) for x in xs]
    x = torch.stack([sample[comm.rank] for sample in xs], 1)
    y = torch.func.vmap(lambda t: operation.call(t, comm, case), in_dims=1)(x)
    close(y, torch.stack([sample[comm.rank] for sample in ys]), "vmap")

    per_sample = torch.func.vmap(torch.func.grad(lambda t: (operation.call(t, comm, case) ** 3).sum()), in_dims=1)(x)
    for b in range(batch):
        inputs = leaves(xs[b])
        outputs = operation.reference(inputs, case)
        expected = grad(torch.stack([(out**3).sum() for out in outputs]).sum(), inputs)
        close(per_sample[b], own_gradient(operation, expected, comm.rank), f"gradient of sample {b}")


def check_compile(comm: Communicator, operation: Operation, case: Case) -> None:
    xs = leaves(tensors(operation, case, 1))
    ys = operation.reference(xs, case)
    expected = grad(torch.stack([(y**3).sum() for y in ys]).sum(), xs)

    torch._dynamo.reset()  # each operation recompiles the same code; torch limits recompilations

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(t: Tensor) -> Tensor:
        return operation.call(t * 2, comm, case) ** 3

    x = (xs[comm.rank].detach() / 2).requires_grad_()
    y = compiled(x)
    close(y, ys[comm.rank] ** 3, "output")
    (dx,) = grad(y.sum(), x)
    close(dx, 2 * own_gradient(operation, expected, comm.rank), "gradient")


def check_uneven(comm: Communicator, operation: Operation, case: Case) -> None:
    for dim in (0, 1):
        check_gradient(comm, operation, case._replace(uneven=True, dim=dim))
    check_double_backward(comm, operation, case._replace(uneven=True))


def check_any_dim(comm: Communicator, operation: Operation, case: Case) -> None:
    for dim in (0, 1, 2, -1, -3):
        check_gradient(comm, operation, case._replace(dim=dim))


def check_reduce_dtype(comm: Communicator, operation: Operation, case: Case) -> None:
    """bfloat16 tensors reduced in float32 are as exact as one rounding of the float32 result."""
    xs = leaves([x.to(torch.bfloat16).double() for x in tensors(operation, case, 1)])
    ys = operation.reference(xs, case)
    gs = [g.to(torch.bfloat16).double() for g in cotangents(ys, 2, False)]
    expected = own_gradient(operation, grad(inner(ys, gs), xs), comm.rank)
    x = xs[comm.rank].detach().to(torch.bfloat16).requires_grad_()
    y = operation.call(x, comm, case._replace(reduce_dtype=torch.float32))
    assert y.dtype == torch.bfloat16
    (dx,) = grad(y, x, gs[comm.rank].to(torch.bfloat16))
    assert dx.dtype == torch.bfloat16
    # Half a unit in the last place for a single rounding; premul, avg and nonlinear ones round twice more.
    plain = operation.linear and operation.call is not OPERATIONS["all_reduce premul"].call
    tolerance = {"rtol": 2.0**-7 if plain else 1.6e-2, "atol": 1e-3 if plain else 4e-2}
    close(y.double(), ys[comm.rank], "output", **tolerance)
    close(dx.double(), expected, "gradient", **tolerance)


def check_complex(comm: Communicator, operation: Operation, case: Case) -> None:
    check_gradient(comm, operation, case, torch.complex128)


def check_non_contiguous(comm: Communicator, operation: Operation, case: Case) -> None:
    """A transposed input, a transposed cotangent and one of stride 0."""
    xs = leaves(tensors(operation, case, 1))
    ys = operation.reference(xs, case)
    x = xs[comm.rank].detach().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    assert not x.is_contiguous() or x.numel() == 0
    y = operation.call(x, comm, case)
    close(y, ys[comm.rank], "output")
    transposed = cotangents(ys, 2, False)
    unit = torch.ones(()).double()
    for name, gs in (("transposed", transposed), ("stride 0", [unit.expand(out.shape) for out in ys])):
        expected = own_gradient(operation, grad(inner(ys, gs), xs, retain_graph=True), comm.rank)
        g = gs[comm.rank]
        if name == "transposed":
            g = g.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        (dx,) = grad(y, x, g, retain_graph=True)
        close(dx, expected, f"gradient of a {name} cotangent")


def check_zero_size(comm: Communicator, operation: Operation, case: Case) -> None:
    """Use a tensor with 0 columns and nonzero other dimensions."""
    shape = list(operation.shape(comm.rank, case))
    shape[1] = 0
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = operation.call(x, comm, case)
    expected = list(operation.reference(tensors(operation, case, 1), case)[comm.rank].shape)
    expected[1] = 0
    assert list(y.shape) == expected
    (dx,) = grad(y.sum(), x)
    assert dx.shape == x.shape


PROPERTIES: dict[str, tuple[Check, tuple[int, ...]]] = {
    "adjoint sum": (check_adjoint_sum, SIZES),
    "replicated": (check_replicated, SIZES),
    "double backward": (check_double_backward, SIZES),
    "jvp": (check_jvp, (3,)),
    "vmap": (check_vmap, (3,)),
    "compile": (check_compile, (2,)),
    "uneven": (check_uneven, (2, 4)),
    "any dim": (check_any_dim, (3,)),
    "reduce_dtype": (check_reduce_dtype, (3,)),
    "complex": (check_complex, (3,)),
    "non-contiguous": (check_non_contiguous, (3,)),
    "zero-size": (check_zero_size, (3,)),
}


def run_cell(comm: Communicator, operation: str, what: str) -> bool:
    check, _ = PROPERTIES[what]
    check(comm, OPERATIONS[operation], Case(comm.size))
    return True


@pytest.mark.parametrize("what", PROPERTIES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_cell(ranks: RankPool, record_property: Callable[[str, object], None], operation: str, what: str) -> None:
    record_property("operation", operation)
    record_property("property", what)
    if reason := OPERATIONS[operation].cannot.get(what):
        pytest.skip(reason)
    for n in PROPERTIES[what][1]:
        assert ranks.run(n, run_cell, operation, what) == [True] * n
