"""torch.compile, opcheck, checkpointing, autocast, functorch: the collectives under what transforms a program.

Each operation under vmap, jvp and torch.compile is a cell of test_semantics.py; here is what concerns many at once.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from semantics import OPERATIONS, Case, otherwise, tensors
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.operators import FUNCTIONS

DIRECT = {"at_root": (0, None), "halo_reduce": (1, 1, 2)}  # operators that are adjoints only


# Not test_aot_dispatch_dynamic: test_semantics.py compiles each operation, and the network below is of several shapes.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def opcheck(comm: Communicator) -> None:
    x, calls = torch.randn(3, 12, 4, dtype=torch.float64), {}
    for operation in OPERATIONS.values():
        given = tensors(operation, Case(comm.size), 1)[comm.rank]
        _, (function, t, params) = otherwise(operation, given, comm, Case(comm.size), attrgetter("plan"))
        calls[function.name] = (t, params)
    calls |= {name: (x, params) for name, params in DIRECT.items()}
    assert calls.keys() == {function.name for function in FUNCTIONS}
    for name, (t, params) in calls.items():
        operator = getattr(torch.ops.pynccl, name).default
        found = torch.library.opcheck(operator, (t.requires_grad_(), ad.key_of(comm), *params), test_utils=CHECKS)
        assert len(found) == len(CHECKS) and set(found.values()) == {"SUCCESS"}, (name, found)


def test_opcheck_is_clean(ranks: RankPool) -> None:
    ranks.run(2, opcheck)


def network(x: Tensor, w: Tensor, v: Tensor, comm: Communicator) -> Tensor:
    """Sequence-parallel MLP with a distributed softmax-like tail: five kinds of collectives, uneven shapes."""
    h = F.gelu(ad.all_gather(x, comm, grad="sum") @ w)
    y = ad.reduce_scatter(h @ v, comm)
    largest = ad.all_reduce(y.detach(), comm, "max", grad="replicated")
    total = ad.start(ad.all_reduce, (y - largest).exp().sum(0), comm, grad="sum").wait()
    return ad.all_to_all((y * 2).repeat(1, comm.size), comm, 1, 0).sum() + total.log().sum()


def compiled_network(comm: Communicator) -> None:
    """Forward, backward, another shape (dynamic), another communicator: as eager; no graph break."""
    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    other = comm.split(0)
    for rows, at in ((2, comm), (3, comm), (3, other)):
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


@pytest.mark.slow
def test_inductor_compiles_collectives(ranks: RankPool) -> None:
    ranks.run(2, compiled_to_machine_code, timeout=110)


def counting(counted: Counter[str], name: str, method: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        counted[name] += 1
        return method(*args, **options)

    return call


def checkpointed(comm: Communicator) -> list[dict[str, int]]:
    """What each kind of checkpoint sends; test_recompute.py compares gradients."""
    w = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def block(x: Tensor) -> Tensor:
        h = F.gelu(ad.all_gather(x, comm, grad="sum") @ w)
        return ad.reduce_scatter(h @ w, comm).sin()

    def keep_gathered(ctx: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        keep = op is torch.ops.pynccl.all_gather.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    selective = partial(create_selective_checkpoint_contexts, keep_gathered)
    ways: list[Any] = [
        block,
        partial(checkpoint, block, use_reentrant=True),
        partial(checkpoint, block, use_reentrant=False, context_fn=selective),
    ]
    sent = []
    for way in ways:
        x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()
        counted: Counter[str] = Counter()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather", "reduce_scatter"):
                patch.setattr(comm, name, counting(counted, name, getattr(comm, name)), raising=False)
            way(way(x)).square().sum().backward()
        sent.append(dict(counted))
    return sent


def test_checkpointing_reissues_the_collectives_and_a_policy_may_save_them(ranks: RankPool) -> None:
    for plain, reentrant, selective in ranks.run(2, checkpointed):
        assert plain == {"all_gather": 4, "reduce_scatter": 4}
        assert reentrant == {"all_gather": 6, "reduce_scatter": 6}  # each block's forward again
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

    def differentiated(t: Tensor) -> Any:
        return torch.func.grad(lambda u: ad.all_reduce(u * u, comm, grad="sum").sum())(t)

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"call torch\.func outside of torch\.compile"):
        torch.compile(differentiated, fullgraph=True, backend="aot_eager")(x)
    comm.barrier()  # nothing was launched
    rows = torch.randn(2 * comm.size, 3, 2)  # the rule of vmap
    key = ad.key_of(comm)
    traced = torch.func.vmap(lambda t: torch.ops.pynccl.reduce_scatter(t, key, 0, "sum", None, None), in_dims=1)(rows)
    assert torch.equal(traced, ad.reduce_scatter(rows, comm).movedim(1, 0))
    return messages


def test_an_operator_has_vmap_and_refuses_forward_mode_instead_of_dropping_a_tangent(ranks: RankPool) -> None:
    for direct, compiled in ranks.run(2, refusals):
        assert "has no forward mode" in direct
        assert "has no forward mode" in compiled


# Compiled autograd


def compiling(at: Communicator, x: Tensor, dim: int) -> Tensor:
    y = ad.all_gather(x * 2, at, dim, grad="sum").sin()
    z = ad.reduce_scatter(y, at, dim) * ad.all_reduce(x, at, "prod", grad="sum")
    z = z * ad.all_reduce(x, at, "max", grad="sum")
    s = ad.start(ad.all_reduce, x * x, at, grad="sum").wait()
    return ad.anchor((z * s).sum(), ad.all_gather(x, at, grad="sum"))


def compiled_backward(comm: Communicator) -> None:
    """Of two communicators and two dimensions, so that a graph of one is not used for the other."""
    other = comm.split(0, key=-comm.rank)
    assert other is not None
    torch._dynamo.reset()
    for at, dim in ((comm, 0), (other, 1)):
        x = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()
        (eager,) = torch.autograd.grad(compiling(at, x, dim), x)
        loss = compiling(at, x, dim)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        torch.testing.assert_close(x.grad, eager, rtol=1e-12, atol=1e-12)
    other.destroy()


def test_compiled_autograd_gives_the_same_gradients(ranks: RankPool) -> None:
    ranks.run(2, compiled_backward, timeout=110)
