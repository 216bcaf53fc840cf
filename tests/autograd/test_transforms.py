"""torch.compile, opcheck, checkpointing, autocast, functorch: the collectives under what transforms a program.

Each operation under vmap, jvp and torch.compile is a cell of test_semantics.py; here is what concerns many at once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool, each_size
from semantics import OPERATIONS, Case, tensors
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.operators import FUNCTIONS

# One call for each operator, of a [3, 12, 4] tensor.
CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "all_reduce": (ad.all_reduce, ("avg",), {"grad": "sum"}),
    "copy": (ad.copy, (), {}),
    "reduce_scatter": (ad.reduce_scatter, (1,), {}),
    "all_gather": (ad.all_gather, (1,), {"grad": "sum"}),
    "split": (ad.split, (1,), {}),
    "broadcast": (ad.broadcast, (0,), {"grad": "sum"}),
    "reduce": (ad.reduce, (1,), {}),
    "scatter": (ad.scatter, (0, 1), {}),
    "gather": (ad.gather, (0, 1), {}),
    "all_to_all": (ad.all_to_all, (1, 2), {}),
    "permute": (ad.permute, ([(0, 1), (1, 0), (0, 0)],), {}),
    "halo_exchange": (ad.halo_exchange, (1, (1, 2)), {}),
    "extremum": (ad.all_reduce, ("max",), {"grad": "sum"}),
    "product": (ad.all_reduce, ("prod",), {"grad": "sum"}),
}
DIRECT = {"at_root": (0, None), "halo_reduce": (1, 1, 2)}  # operators that are adjoints only


def arguments(comm: Communicator, name: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(3, 12, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    if name in DIRECT:
        return (x, ad.key_of(comm), *DIRECT[name])
    operation, args, options = CALLS[name]
    _, (function, x, params) = operation.plan(x, comm, *args, **options)
    assert function.name == name
    return (x, ad.key_of(comm), *params)


def opcheck(comm: Communicator, name: str) -> dict[str, str]:
    operator = getattr(torch.ops.pynccl, name).default
    return torch.library.opcheck(operator, arguments(comm, name))


@pytest.mark.parametrize("name", [function.name for function in FUNCTIONS])
def test_opcheck_is_clean(ranks: RankPool, name: str) -> None:
    for found in ranks.run(2, opcheck, name):
        assert len(found) >= 4 and set(found.values()) == {"SUCCESS"}


def network(x: Tensor, w: Tensor, v: Tensor, comm: Communicator) -> Tensor:
    """Sequence-parallel MLP with a distributed softmax-like tail: five kinds of collectives, uneven shapes."""
    h = F.gelu(ad.all_gather(x, comm, grad="sum") @ w)
    y = ad.reduce_scatter(h @ v, comm)
    largest = ad.all_reduce(y.detach(), comm, "max", grad="replicated")
    total = ad.all_reduce((y - largest).exp().sum(0), comm, grad="sum")
    return ad.all_to_all((y * 2).repeat(1, comm.size), comm, 1, 0).sum() + total.log().sum()


def compiled_network(comm: Communicator) -> None:
    """Forward, backward, another shape (dynamic), another communicator: as eager; no graph break."""
    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    other = comm.split(0)
    for rows, at in ((2, comm), (3, comm), (4, comm), (4, other)):
        found = []
        for f in (network, compiled):
            generator = torch.Generator().manual_seed(comm.rank)
            leaves = [
                torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
                for shape in ((rows, 4), (4, 6), (6, 4))
            ]
            loss = f(*leaves, at)
            loss.backward()
            found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        for eager, traced in zip(*found, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-12, atol=1e-12)
    other.destroy()


def test_a_network_compiles_to_one_graph_with_equal_gradients(ranks: RankPool) -> None:
    ranks.run(2, compiled_network)


def compiled_to_machine_code(comm: Communicator) -> None:
    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        return ad.reduce_scatter(ad.all_gather(x * 2, comm, grad="sum").sin(), comm).square().sum()

    x = torch.randn(3, generator=torch.Generator().manual_seed(comm.rank), requires_grad=True)
    (eager,) = torch.autograd.grad(f(x), x)
    (traced,) = torch.autograd.grad(torch.compile(f, fullgraph=True)(x), x)
    torch.testing.assert_close(traced, eager)


def test_inductor_compiles_collectives(ranks: RankPool) -> None:
    ranks.run(2, compiled_to_machine_code, timeout=110)


def compiled_layers(comm: Communicator) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    column = ad.ColumnParallelLinear(4, 8, comm, sequence_parallel=True)
    row = ad.RowParallelLinear(8, 4, comm, sequence_parallel=True)
    model = torch.nn.Sequential(column, torch.nn.GELU(), row)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(comm.rank))
    grads = []
    for f in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        f(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for eager, traced in zip(*grads, strict=True):
        torch.testing.assert_close(traced, eager)


def test_parallel_layers_compile(ranks: RankPool) -> None:
    ranks.run(2, compiled_layers)


def compiled_start(comm: Communicator) -> None:
    def f(x: Tensor) -> Tensor:
        return ad.start(ad.all_gather, x * 2, comm, grad="sum").wait().square().sum()

    torch._dynamo.reset()
    x = torch.full((3,), comm.rank + 1.0, requires_grad=True)
    torch.compile(f, fullgraph=True, backend="aot_eager")(x).backward()
    assert x.grad.tolist() == [8.0 * comm.size * (comm.rank + 1)] * 3


def test_start_and_wait_compile_as_the_plain_operation(ranks: RankPool) -> None:
    ranks.run(2, compiled_start)


def traced_calls(comm: Communicator) -> tuple[Counter[str], tuple[int, ...]]:
    """Fake tensors: shapes without communication; and what a dispatch mode sees."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[str(func)] += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 3, requires_grad=True)
    with Count():
        ad.all_gather(x, comm, grad="sum").sum().backward()
    with FakeTensorMode():  # on one rank only: the others would wait for any communication
        shape = tuple(ad.all_gather(torch.ones(2, 3), comm, 1, grad="sum").shape) if comm.rank == 0 else ()
    return seen, shape


def test_fake_tensors_and_dispatch_modes_see_the_operators(ranks: RankPool) -> None:
    (seen, shape), _ = ranks.run(2, traced_calls)
    assert shape == (2, 6)
    assert seen["pynccl.all_gather.default"] == 1 and seen["pynccl.reduce_scatter.default"] == 1


class Sent(Counter[str]):
    """Counts the collectives that a communicator issues while it is entered."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm, self._names = comm, ("all_gather", "reduce_scatter", "all_reduce")

    def __enter__(self) -> Sent:
        for name in self._names:
            setattr(self._comm, name, self._counted(name))
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self._names:
            delattr(self._comm, name)

    def _counted(self, name: str) -> Any:
        method = getattr(self._comm, name)

        def counted(*args: Any, **options: Any) -> Any:
            self[name] += 1
            return method(*args, **options)

        return counted


def checkpointed(comm: Communicator) -> list[dict[str, int]]:
    """Plain, checkpointed (both kinds), and selectively checkpointed: equal gradients; what each sends."""
    w = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def block(x: Tensor) -> Tensor:
        h = F.gelu(ad.all_gather(x, comm, grad="sum") @ w)
        return ad.reduce_scatter(h @ w, comm).sin()

    def keep_gathered(ctx: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        keep = op is torch.ops.pynccl.all_gather.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def selective() -> Any:
        return create_selective_checkpoint_contexts(keep_gathered)

    ways: list[Any] = [
        block,
        lambda x: checkpoint(block, x, use_reentrant=False),
        lambda x: checkpoint(block, x, use_reentrant=True),
        lambda x: checkpoint(block, x, use_reentrant=False, context_fn=selective),
    ]
    sent, gradients = [], []
    for way in ways:
        x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()
        with Sent(comm) as counted:
            way(way(x)).square().sum().backward()
        sent.append(dict(counted))
        gradients.append(x.grad)
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
    return sent


@each_size
def test_checkpointing_reissues_the_collectives_and_a_policy_may_save_them(ranks: RankPool, n: int) -> None:
    for plain, recomputed, reentrant, selective in ranks.run(n, checkpointed):
        assert plain == {"all_gather": 4, "reduce_scatter": 4}
        # Each block's forward again; the kind that is not reentrant stops once all that backward needs is there.
        assert reentrant == {"all_gather": 6, "reduce_scatter": 6}
        assert recomputed["all_gather"] == 6 and recomputed["reduce_scatter"] in (4, 5, 6)
        assert selective["all_gather"] == 4


def under_autocast(comm: Communicator) -> None:
    """A collective keeps the type of its input; a layer follows autocast, and gradients come in the leaf's type."""
    x = torch.full((2, 4), comm.rank + 0.5, requires_grad=True)
    layer = ad.ColumnParallelLinear(4, 2 * comm.size, comm, sequence_parallel=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ad.all_reduce(x, comm, grad="sum")
        assert y.dtype == torch.float32
        assert ad.all_reduce(x, comm, "max", grad="sum").dtype == torch.float32
        z = layer(x)
        assert z.dtype == torch.bfloat16
    (y.sum() + z.float().sum()).backward()
    assert x.grad.dtype == torch.float32 and layer.weight.grad.dtype == torch.float32


def test_autocast_leaves_collectives_and_reaches_layers(ranks: RankPool) -> None:
    ranks.run(2, under_autocast)


def functorch_beyond_the_cells(comm: Communicator) -> None:
    """Jacobians, Hessians, nested vmap, forward over forward, dual numbers."""
    n, r = comm.size, comm.rank
    x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(r))

    def f(t: Tensor) -> Tensor:
        return ad.all_reduce(t.sin(), comm, grad="sum")

    # The cotangent of row i is one on all ranks at once: d(sum_q y_q[i]) / dx_r.
    torch.testing.assert_close(torch.func.jacrev(f)(x), n * torch.diag(x.cos()))
    hessian = torch.func.hessian(lambda t: (ad.all_reduce(t, comm, grad="sum") ** 2).sum())(x)
    torch.testing.assert_close(hessian, 2.0 * n * n * torch.eye(3, dtype=torch.float64))  # all ranks' x move alike
    nested = torch.func.vmap(torch.func.vmap(lambda t: ad.all_gather(t, comm, grad="sum"), in_dims=1), in_dims=0)
    batch = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(nested(batch), batch.transpose(1, 2).repeat(1, 1, n))
    twice = torch.func.jvp(lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1], (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(twice, ad.all_reduce(-x.sin(), comm, grad="sum"))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x * 2)
        y, t = torch.autograd.forward_ad.unpack_dual(ad.all_gather(dual, comm, grad="sum"))
    torch.testing.assert_close(t, 2 * y)


@each_size
def test_jacobians_hessians_nested_vmap_and_dual_numbers(ranks: RankPool, n: int) -> None:
    ranks.run(n, functorch_beyond_the_cells)


def refusals(comm: Communicator) -> list[str]:
    """A tangent at an operator, directly and compiled; a communicator that is gone."""
    x = torch.ones(3)
    torch._dynamo.reset()

    def compiled(t: Tensor) -> Any:
        return torch.func.jvp(lambda u: ad.all_reduce(u, comm, grad="sum") * u, (t,), (t,))

    messages = []
    for call in (
        lambda: torch.func.jvp(lambda t: torch.ops.pynccl.copy(t, ad.key_of(comm), None), (x,), (x,)),
        lambda: torch.compile(compiled, fullgraph=True, backend="aot_eager")(x),
    ):
        with pytest.raises(Exception) as caught:  # torch.compile wraps what is raised while it traces
            call()
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="names no communicator"):
        torch.ops.pynccl.copy(x, "gone", None)
    return messages


def test_an_operator_refuses_forward_mode_instead_of_dropping_a_tangent(ranks: RankPool) -> None:
    for direct, compiled in ranks.run(2, refusals):
        assert "has no forward mode" in direct
        assert "has no forward mode" in compiled


def vmap_of_compiled_operators(comm: Communicator) -> None:
    case = Case(comm.size)
    operation = OPERATIONS["reduce_scatter"]
    xs = torch.stack([tensors(operation, case, seed)[comm.rank] for seed in range(3)], 2)
    eager = torch.func.vmap(lambda t: operation.call(t, comm, case), in_dims=2)(xs)
    key = ad.key_of(comm)
    traced = torch.func.vmap(lambda t: torch.ops.pynccl.reduce_scatter(t, key, 0, "sum", None, None), in_dims=2)(xs)
    assert torch.equal(eager, traced)


def test_operators_have_a_vmap_rule(ranks: RankPool) -> None:
    ranks.run(2, vmap_of_compiled_operators)
