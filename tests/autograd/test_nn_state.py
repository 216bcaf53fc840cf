"""What modules hold, and what Sequential leaves alone: parameters and sizes of operations, hooks, names, types."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from ranks import RankPool
from torch import Tensor
from torch.nn.utils import prune

import pynccl_autograd as ad
from pynccl import Communicator

EXACT = {"rtol": 0.0, "atol": 0.0}


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def check_scale(comm: Communicator) -> str:
    """PreMul of a parameter: trained, saved, loaded, moved and copied as any; y = sum_q s_q x_q."""
    n, r = comm.size, comm.rank
    scale = torch.nn.Parameter(torch.tensor(r + 1.0))
    module = ad.nn.AllReduce(comm, ad.PreMul(scale), grad="replicated")
    assert dict(module.named_parameters()) == {"scale": scale} and list(module.state_dict()) == ["scale"]
    x = torch.tensor([1.0, 2.0])
    expected = sum(q + 1.0 for q in range(n)) * x
    torch.testing.assert_close(module(x).detach(), expected, **EXACT)
    module(x).sum().backward()
    assert float(scale.grad) == 3.0
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert float(scale.detach()) == r - 2.0
    torch.testing.assert_close(module(x).detach(), sum(q - 2.0 for q in range(n)) * x, **EXACT)

    twin = copy.deepcopy(module, {id(comm): comm})
    assert twin.scale is not scale and twin.scale.tolist() == scale.tolist()
    twin.load_state_dict({"scale": torch.tensor(2.0)}, assign=True)  # another tensor in the place of the old
    torch.testing.assert_close(twin(x).detach(), 2.0 * n * x, **EXACT)
    assert float(scale.detach()) == r - 2.0
    twin.double()
    assert twin(x.double()).dtype is torch.float64
    called = torch.func.functional_call(module, {"scale": torch.tensor(3.0)}, (x,))
    torch.testing.assert_close(called, 3.0 * n * x, **EXACT)
    return repr(module)


def test_a_parameter_that_scales_an_all_reduce_is_the_modules(ranks: RankPool) -> None:
    assert "op='PreMul(scale)'" in ranks.run(2, check_scale)[0]


def check_buffer(comm: Communicator) -> None:
    x = torch.tensor([1.0, 2.0])
    module = ad.nn.AllReduce(comm, ad.PreMul(torch.tensor([2.0, 3.0])), grad="sum")
    assert list(module.parameters()) == [] and [name for name, _ in module.named_buffers()] == ["scale"]
    torch.testing.assert_close(module(x), comm.size * torch.tensor([2.0, 6.0]), **EXACT)
    assert module.half().scale.dtype is torch.float16
    weight = torch.tensor(2.0, requires_grad=True)  # not a parameter, and computed from: its gradient still arrives
    ad.nn.AllReduce(comm, ad.PreMul(weight * 3), grad="replicated")(x).sum().backward()
    assert float(weight.grad) == 9.0
    number = ad.nn.AllReduce(comm, ad.PreMul(2.0), grad="sum")
    assert not number.state_dict() and number(x).tolist() == [2.0 * comm.size, 4.0 * comm.size]
    alone = comm.split(comm.rank)
    assert ad.nn.AllReduce(alone, ad.PreMul(torch.tensor(4.0)), grad="sum")(x).tolist() == [4.0, 8.0]
    alone.destroy()


def test_another_tensor_that_scales_an_all_reduce_is_a_buffer(ranks: RankPool) -> None:
    ranks.run(2, check_buffer)


def check_sizes(comm: Communicator) -> None:
    """Sizes given as a tensor or a list are the module's own afterwards."""
    n, r = comm.size, comm.rank
    sizes = torch.arange(1, n + 1)
    given = sizes.tolist()
    x = integers(int(sizes.sum()), 2, seed=r)
    listed = list(given)
    modules = [
        (ad.nn.ReduceScatter(comm, splits=sizes), lambda t: ad.reduce_scatter(t, comm, splits=given)),
        (ad.nn.Split(comm, splits=listed), lambda t: ad.split(t, comm, splits=given)),
        (ad.nn.Scatter(comm, 0, splits=sizes), lambda t: ad.scatter(t, comm, 0, splits=given)),
        (ad.nn.AllToAll(comm, send_splits=sizes), lambda t: ad.all_to_all(t, comm, send_splits=given)),
        (
            ad.nn.HaloExchange(comm, 0, torch.tensor([[0, 1]] + [[1, 0]] * (n - 1))),
            lambda t: ad.halo_exchange(t, comm, 0, [(0, 1)] + [(1, 0)] * (n - 1)),
        ),
    ]
    sizes.zero_()
    listed.clear()
    for module, function in modules:
        torch.testing.assert_close(module(x), function(x), **EXACT, msg=repr(module))
        assert "tensor" not in repr(module)


def test_sizes_given_as_tensors_are_kept_as_numbers(ranks: RankPool) -> None:
    ranks.run(2, check_sizes)


# What Sequential runs as one must be as if it were run one by one


def pairs(comm: Communicator) -> list[tuple[int, list[torch.nn.Module]]]:
    """(index of the linear layer, modules) of each kind of pair, in float32."""
    torch.manual_seed(comm.rank)
    return [
        (0, [torch.nn.Linear(4, 4, bias=False), ad.nn.ReduceScatter(comm)]),
        (0, [torch.nn.Linear(4, 4, bias=False), ad.nn.AllReduce(comm, grad="replicated")]),
        (1, [ad.nn.AllGather(comm, grad="sum"), torch.nn.Linear(4, 4)]),
    ]


def check_as_plain(comm: Communicator) -> None:
    """Types under autocast, names in the state, copies, replaced weights: as torch.nn.Sequential has them."""
    x = torch.randn(2 * comm.size, 4, generator=torch.Generator().manual_seed(comm.rank))
    for at, modules in pairs(comm):
        fused, plain = ad.nn.Sequential(*modules), torch.nn.Sequential(*modules)
        assert fused.fused_pairs() == [(0, 1)] and list(fused.state_dict()) == list(plain.state_dict())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, expected = fused(x), plain(x)
        assert y.dtype is expected.dtype is torch.bfloat16
        torch.testing.assert_close(y, expected, **EXACT)
        twin: Any = copy.deepcopy(fused, {id(comm): comm})
        assert type(twin) is ad.nn.Sequential and twin.fused_pairs() == [(0, 1)]
        with torch.no_grad():
            twin[at].get_parameter("weight").mul_(2)
        assert not torch.equal(twin[at].get_parameter("weight"), fused[at].get_parameter("weight"))
        torch.testing.assert_close(twin(x), torch.nn.Sequential(*twin)(x), **EXACT)
        state = {f"{at}.weight": torch.eye(4)}
        called: Any = torch.func.functional_call(fused, state, (x,))
        torch.testing.assert_close(called, torch.func.functional_call(plain, state, (x,)), **EXACT)
        part: Any = fused[:2]
        assert part.fused_pairs() == [(0, 1)]  # a slice is a Sequential of the same kind


def test_a_fused_pair_is_as_one_run_one_by_one_in_types_names_and_copies(ranks: RankPool) -> None:
    ranks.run(2, check_as_plain)


class Counted:
    """A hook that counts, whatever it is given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1


class Halved(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def tripled(linear: torch.nn.Module) -> None:
    linear.forward = lambda t: torch.nn.functional.linear(t, linear.weight * 3)  # type: ignore[operator]


COMPUTED: dict[str, Callable[[Any], object]] = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral": torch.nn.utils.spectral_norm,
    "parametrization": lambda linear: torch.nn.utils.parametrize.register_parametrization(linear, "weight", Halved()),
    "prune": lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    "forward": tripled,
}


def check_left_alone(comm: Communicator) -> None:
    """Hooks of every kind fire, and weights that are computed anew at every call are."""
    x = torch.randn(2 * comm.size, 4, generator=torch.Generator().manual_seed(comm.rank))
    for kind in range(3):
        for change in ("pre, kwargs", "always", "global", *COMPUTED):
            at, modules = pairs(comm)[kind]
            linear = modules[at]
            hook, handle = Counted(), None
            if change == "pre, kwargs":
                linear.register_forward_pre_hook(hook, with_kwargs=True)
            elif change == "always":
                modules[1 - at].register_forward_hook(hook, always_call=True)
            elif change == "global":
                handle = torch.nn.modules.module.register_module_forward_hook(hook)
            else:
                COMPUTED[change](linear)
            block = ad.nn.Sequential(*modules)
            torch.manual_seed(0)
            linear.eval()  # spectral_norm iterates while training
            y = block(x)
            assert block.fused_pairs() == [], change
            torch.testing.assert_close(y, torch.nn.Sequential(*modules)(x), **EXACT)
            if handle is not None:
                handle.remove()
            assert hook.calls >= 2 or change in COMPUTED, change


def test_hooks_and_computed_weights_keep_a_pair_apart(ranks: RankPool) -> None:
    ranks.run(2, check_left_alone)


def replaced_forward(comm: Communicator) -> list[float]:
    """A library that replaces nn.Linear.forward for all layers."""
    x = torch.ones(2, 4)
    block = ad.nn.Sequential(torch.nn.Linear(4, 1, bias=False), ad.nn.AllReduce(comm, grad="replicated"))
    original = torch.nn.Linear.forward
    setattr(torch.nn.Linear, "forward", lambda self, t: torch.full((2, 1), 7.0))  # noqa: B010
    try:
        values: list[float] = block(x).flatten().tolist()
    finally:
        setattr(torch.nn.Linear, "forward", original)  # noqa: B010
    return values


def test_a_forward_replaced_in_the_class_is_called(ranks: RankPool) -> None:
    assert ranks.run(2, replaced_forward) == [[14.0, 14.0]] * 2


def compiled(comm: Communicator) -> None:
    torch._dynamo.reset()
    x = torch.randn(2 * comm.size, 4, generator=torch.Generator().manual_seed(comm.rank))
    scale = torch.nn.Parameter(torch.tensor(comm.rank + 1.0))
    modules = [*pairs(comm)[0][1], *pairs(comm)[2][1], ad.nn.AllReduce(comm, ad.PreMul(scale), grad="replicated")]
    block = ad.nn.Sequential(*modules)
    found = []
    for f in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        block.zero_grad()
        y = f(x)
        y.square().sum().backward()
        found.append([y.detach(), *(parameter.grad.clone() for parameter in block.parameters())])
    assert len(found[0]) == 5
    torch.testing.assert_close(found[1], found[0])


def test_pairs_and_parameters_of_operations_compile(ranks: RankPool) -> None:
    ranks.run(2, compiled)
