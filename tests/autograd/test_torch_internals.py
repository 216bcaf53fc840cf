"""torch_internals.py: its names exist in this torch and say what is wanted of them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pynccl_autograd import torch_internals


def without(*missing: str) -> ModuleType:
    """torch_internals as it is in a torch that lacks these names."""
    resolve = pkgutil.resolve_name

    def found(name: str) -> Any:
        if name in missing:
            raise AttributeError(name)
        return resolve(name)

    spec = importlib.util.spec_from_file_location("lacking", torch_internals.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", found)
        spec.loader.exec_module(module)
    return module


def test_the_names_exist() -> None:
    for name in torch_internals.NAMES:
        assert pkgutil.resolve_name(name) is not None, name


def test_types_of_traced_tensors_have_the_names_that_are_looked_for() -> None:
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor

    with FakeTensorMode():
        fake = torch.ones(2)
        assert torch_internals.is_tracing() and torch_internals.detect_fake_mode() is not None
    assert type(fake) is FakeTensor and torch_internals.is_traced(fake) and torch_internals.has_no_values(fake)
    assert FunctionalTensor.__name__ == "FunctionalTensor"
    assert not torch_internals.is_traced(torch.ones(2)) and not torch_internals.is_tracing()


def test_a_reshaped_tensor_is_no_view() -> None:
    x = torch.arange(6.0, requires_grad=True)
    y = torch_internals.reshaped(x * 1, (2, 3))
    assert not y._is_view()
    y += 1
    y.sum().backward()
    assert y.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]] and x.grad is not None


def test_regions_of_checkpoints_are_known_by_what_their_hooks_close_over() -> None:
    found: list[Any] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_internals.checkpointed_regions())
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_internals.checkpointed_regions())
        return checkpoint(inner, x, use_reentrant=False).sin()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # of a user: no region
        assert torch_internals.checkpointed_regions() == []
        y = checkpoint(outer, x, use_reentrant=False)
    ((region, none),), ((within, _), around) = found
    assert none is None and around == (region, None) and within is not region
    del found[:]
    y.sum().backward(retain_graph=True)
    (again, number), *_ = found[0]
    assert again is region and number >= 0
    assert any(one == [(within, number)] or (within, number) in one for one in found)
    del found[:]
    y.sum().backward()
    assert found[0][0][0] is region and found[0][0][1] != number  # of another backward pass
    assert torch_internals.checkpointed_regions() == []


def test_the_end_and_the_number_of_a_backward_pass_are_known() -> None:
    seen: list[Any] = []

    def note(g: torch.Tensor) -> None:
        torch_internals.queue_callback(lambda: seen.append("end"))
        seen.append(torch_internals.backward_pass())

    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(note)
        (x * 2).sum().backward()
        seen.append("after")
    (first, end, after), second = seen[:3], seen[3]
    assert (end, after) == ("end", "after")
    assert first != second and torch_internals.backward_pass() == -1
    assert torch_internals.tensors_in({"a": [x, 1], "b": (x,)}) == [x, x]


def test_a_module_with_a_hook_is_hooked_and_where_that_cannot_be_seen_it_is_too() -> None:
    module = torch.nn.Linear(1, 1)
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        assert not torch_internals.is_hooked(module)
        hook = getattr(module, f"register_{register}")(lambda *_: None)
        assert torch_internals.is_hooked(module)
        hook.remove()
    with torch_internals.hooking_all_modules():  # a trace's own are none
        own = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert not torch_internals.is_hooked(module)
        own.remove()
    del module._forward_hooks
    assert torch_internals.is_hooked(module)


def test_what_is_under_way_is_seen() -> None:
    assert torch_internals.is_zero_tensor(torch._efficientzerotensor(3))
    assert not torch_internals.is_zero_tensor(torch.ones(2)) and not torch_internals.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_internals.profiler_enabled()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert torch_internals.saved_tensors_hooks(False) is not None
    assert torch_internals.saved_tensors_hooks(False) is None
    found: list[Any] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        with torch_internals.unwrapped():
            found.append(torch._C._functorch.is_functorch_wrapped_tensor(torch.ones(2)))
        found.append(torch_internals.reentrant_checkpoints())
        return x.sum()

    checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=True)
    torch.func.grad(region)(torch.ones(2))
    assert found == [False, [True], False, []]
    assert issubclass(torch_internals.StopRecomputation, Exception)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("torch._C._len_torch_dispatch_stack", lambda module: module.dispatch_modes()),
        ("torch._C._are_functorch_transforms_active", lambda module: module.transforms_active()),
        ("torch.utils._pytree.tree_leaves", lambda module: module.tensors_in([])),
        (
            "torch.autograd.variable.Variable._execution_engine.queue_callback",
            lambda module: module.queue_callback(lambda: None),
        ),
    ],
)
def test_a_name_that_torch_lacks_is_said_where_it_is_used(name: str, use: Callable[[Any], Any]) -> None:
    lacking = without(name)
    with pytest.raises(NotImplementedError, match=rf"torch {torch.__version__.split('+')[0]}.* has no {name}"):
        use(lacking)
