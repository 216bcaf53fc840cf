"""torch_internals.py: its names exist in this torch, say what is wanted of them, and no other file has any."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from pynccl_autograd import torch_internals

FOLDER = Path(torch_internals.__file__).parent
# Beside names of torch: what Python, NumPy's protocol and this package's own classes call theirs.
OWN = {"_replace"}


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


@pytest.mark.parametrize("name", torch_internals.NAMES)
def test_the_name_exists(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize("name", ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"])
def test_modules_have_the_hooks_that_are_looked_at(name: str) -> None:
    module = torch.nn.Linear(1, 1)
    assert not getattr(module, name) and module._compiled_call_impl is None
    assert name in torch_internals._HOOKS and not torch_internals.is_hooked(module)


def test_types_of_traced_tensors_have_the_names_that_are_looked_for() -> None:
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor

    with FakeTensorMode():
        fake = torch.ones(2)
        assert torch_internals.is_tracing() and torch_internals.detect_fake_mode() is not None
    assert type(fake) is FakeTensor and torch_internals.is_traced(fake) and torch_internals.has_no_values(fake)
    assert FunctionalTensor.__name__ == "FunctionalTensor"
    assert not torch_internals.is_traced(torch.ones(2)) and not torch_internals.is_tracing()


def test_applying_a_function_without_its_signature_is_what_torch_does_last() -> None:
    """Collective.apply skips Function.apply, and calls what stands behind it."""
    assert torch.autograd.Function.__mro__[1].__name__ == "_SingleLevelFunction"
    assert "_FunctionBase" in [base.__name__ for base in torch.autograd.Function.__mro__]


def lazily_zero() -> torch.Tensor:
    return torch._efficientzerotensor(3)


def test_a_batch_of_torchs_old_vmap_has_no_storage() -> None:
    seen: list[bool] = []

    def note(g: torch.Tensor) -> torch.Tensor:
        seen.append(torch_internals.has_storage(g))
        return g

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(note)
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    for t in (torch.ones(2), torch.empty(0)):
        note(t)
    assert seen == [False, True, True]


def test_zeros_without_memory_are_seen() -> None:
    x = torch.ones(2)
    assert torch_internals.is_zero_tensor(lazily_zero()) and not torch_internals.is_zero_tensor(x)
    assert torch_internals.unwrap_if_dead(x) is x


def test_a_reshaped_tensor_is_no_view() -> None:
    x = torch.arange(6.0, requires_grad=True)
    y = torch_internals.reshaped(x * 1, (2, 3))
    assert not y._is_view()
    y += 1
    y.sum().backward()
    assert y.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]] and x.grad is not None


def test_levels_of_forward_mode_are_seen() -> None:
    def levels() -> tuple[bool, bool]:
        return torch_internals.in_forward_mode(), torch_internals.forward_mode_is_on()

    assert not torch_internals.in_forward_mode()
    with forward_ad.dual_level():
        assert levels() == (True, True)
        with torch_internals.forward_mode(False):
            assert levels() == (True, False)
    inside: list[Any] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        inside.append(levels())
        return x

    torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),))
    assert inside == [(True, True)]


def test_a_profiler_under_way_is_seen() -> None:
    assert not torch_internals.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_internals.profiler_enabled()


def test_hooks_of_a_trace_are_not_taken_for_hooks() -> None:
    module = torch.nn.Linear(1, 1)
    with torch_internals.hooking_all_modules():
        own = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert not torch_internals.is_hooked(module)
        own.remove()
    assert not torch_internals.is_hooked(module)


def test_unwrapped_tensors_are_plain_within_torch_func() -> None:
    found: list[Any] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch_internals.unwrapped():
            found.append(torch._C._functorch.is_functorch_wrapped_tensor(torch.ones(2)))
        return x.sum()

    torch.func.grad(f)(torch.ones(2))
    assert found == [False]


def test_hooks_of_saved_tensors_are_seen() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert torch_internals.saved_tensors_hooks(False) is not None
    assert torch_internals.saved_tensors_hooks(False) is None


def test_reentrant_checkpoints_are_seen() -> None:
    found: list[Any] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_internals.reentrant_checkpoints())
        return x * 2

    checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=True)
    assert found == [[True]]
    assert issubclass(torch_internals.StopRecomputation, Exception)


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


def test_regions_of_reentrant_checkpoints_are_known_by_the_context_of_their_function() -> None:
    found: list[Any] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_internals.checkpointed_regions())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    ys = [checkpoint(region, x, use_reentrant=True) for _ in range(2)]
    ((first, none),), ((second, _),) = found
    assert none is None and first is not second
    del found[:]
    ys[0].sum().backward()
    ((again, number),) = found[0]
    assert again is first and number >= 0
    with torch.no_grad():
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
    assert not torch_internals.is_hooked(module)
    module.register_forward_hook(lambda *_: None)
    assert torch_internals.is_hooked(module)
    bare = torch.nn.Linear(1, 1)
    del bare._forward_hooks
    assert torch_internals.is_hooked(bare)


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


def private_names(path: Path) -> Iterator[str]:
    """Private names that a file takes from elsewhere: attributes of anything but self and cls, and imports."""
    tree = ast.parse(path.read_text())
    defined = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value)}
    defined |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and not is_own(node.value) and node.attr not in defined | OWN:
                yield f"{path.relative_to(FOLDER)}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(map(is_private, names)) and node.module != "__future__":
                yield f"{path.relative_to(FOLDER)}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import):
            yield from (
                f"{path.relative_to(FOLDER)}:{node.lineno}: import {alias.name}"
                for alias in node.names
                if any(map(is_private, alias.name.split(".")))
            )


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_private_names_are_touched_in_one_file_alone() -> None:
    found = {path.name: list(private_names(path)) for path in sorted(FOLDER.rglob("*.py"))}
    assert found.pop("torch_internals.py")  # the search finds some
    assert [line for lines in found.values() for line in lines] == []
