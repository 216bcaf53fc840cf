"""Every private name of torch that this package uses. They are touched in this file alone.

Each has a comment that says what it is for. In a torch that has it no more it raises when it is used, with its name:
what needs no such name works on. tests/autograd/test_torch_internals.py checks that all of them exist in the installed
torch.
"""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from pynccl.watch.frames import outwards

NAMES: list[str] = []  # all that are looked up below


class Missing:
    """Stands for what this torch does not have; raises when it is used."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"torch {torch.__version__} has no {self.__dict__['name']}, which pynccl_autograd needs here; use a "
            "version of torch that it was tested with"
        )

    def __getattr__(self, attribute: str) -> Any:
        return self()


def _find(name: str) -> Any:
    """What torch calls by this name."""
    NAMES.append(name)
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return Missing(name)


# Tensors.

# Whether a tensor has memory: zero tensors and tensors of torch's old vmap have none.
has_storage: Callable[[Tensor], bool] = _find("torch._C._has_storage")
# Whether a tensor stands for zeros without memory, as tangents and cotangents may.
is_zero_tensor: Callable[[Tensor], bool] = _find("torch.Tensor._is_zerotensor")
# A tensor of a level of torch.func that has ended is what it wraps.
unwrap_if_dead: Callable[[Tensor], Tensor] = _find("torch._C._functorch.unwrap_if_dead")
# A view of a tensor that nobody else has, of which autograd does not know that it is one.
_unsafe_view = _find("torch.ops.aten._unsafe_view.default")
# All tensors in nested lists, tuples and dicts.
_tree_leaves = _find("torch.utils._pytree.tree_leaves")
# Copies many tensors, on a GPU in few kernels.
copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], object] = _find("torch._foreach_copy_")

_VALUES = frozenset((Tensor, torch.nn.Parameter))


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x, which nobody else has, in this shape: no view, so that it may be changed in place."""
    y: Tensor = _unsafe_view(x, tuple(shape))
    return y


def is_traced(x: Tensor) -> bool:
    """Whether x stands for a tensor in a trace. By the names of types, which need not be loaded."""
    return type(x).__name__ in ("FakeTensor", "FunctionalTensor")


def has_no_values(x: Tensor) -> bool:
    """Whether x has a shape only."""
    return x.is_meta or (type(x) not in _VALUES and is_traced(x))


# What traces: dispatch modes, such as fake tensors, make_fx, export and selective checkpointing.

# How many modes are active; asked at every call.
dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack")
# Which of the two that have tensors without values is active.
_mode_of = _find("torch._C._get_dispatch_mode")
_ModeKey = _find("torch._C._TorchDispatchModeKey")
# The mode of fake tensors, also where it was entered by their use.
detect_fake_mode: Callable[[], Any] = _find("torch._guards.detect_fake_mode")


def is_tracing() -> bool:
    """Whether tensors have no values now: torch.compile, fake tensors, make_fx."""
    if torch.compiler.is_compiling():
        return True
    if not dispatch_modes():
        return False
    return any(_mode_of(key) is not None for key in (_ModeKey.FAKE, _ModeKey.PROXY))


# Forward mode.

# A context in which forward mode is on, where torch has switched it off: within the jvp of a Function.
forward_mode: Callable[[bool], contextlib.AbstractContextManager[Any]] = _find(
    "torch.autograd.forward_ad._set_fwd_grad_enabled"
)
# Whether it is on.
forward_mode_is_on: Callable[[], bool] = _find("torch._C._is_fwd_grad_enabled")
# The number that this function reads.
_find("torch.autograd.forward_ad._current_level")


def in_forward_mode() -> bool:
    """Whether a level of forward mode is active, torch.func.jvp's included."""
    return forward_ad._current_level >= 0


# torch.func: its transforms are a stack of interpreters, one for each level.

# Whether any is active; asked at every call.
transforms_active: Callable[[], bool] = _find("torch._C._are_functorch_transforms_active")
# The kinds of levels, and all interpreters, each of which has its kind by key().
_TransformType = _find("torch._C._functorch.TransformType")
_levels = _find("torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters")
# A context in which torch.func does not wrap the tensors that are made; NCCL needs their memory.
unwrapped: Callable[[], Any] = _find("torch._C._DisableFuncTorch")


@torch.compiler.assume_constant_result
def check_compiled() -> None:
    """Raise where torch.compile traces torch.func.grad: operators know torch's own autograd only."""
    if any(level.key() == _TransformType.Grad for level in _levels()):
        raise NotImplementedError(
            "pynccl_autograd within torch.func.grad, vjp or jacrev within torch.compile; call torch.func outside of "
            "torch.compile, or torch.autograd.grad on the compiled function's result"
        )


# Hooks of saved tensors, by which torch.utils.checkpoint works: a stack, each of (pack, unpack).

# (False) -> the innermost, or None; asked at every call.
saved_tensors_hooks: Callable[[bool], Any] = _find("torch._C._autograd._top_saved_tensors_default_hooks")
pop_saved_tensors_hooks: Callable[[], None] = _find("torch._C._autograd._pop_saved_tensors_default_hooks")
push_saved_tensors_hooks: Callable[[Any, Any], None] = _find("torch._C._autograd._push_saved_tensors_default_hooks")


def checkpointed_regions() -> list[tuple[Any, Any]]:
    """The regions of torch.utils.checkpoint that this thread is in, innermost first: each an object, and None while it
    runs first, or the number of the backward pass that it is computed anew for.

    They are what the hooks' functions close over, by torch's names, and of the reentrant kind, whose first pass runs
    without gradients, what its Function is given; where those are others, no region is seen."""
    regions: list[tuple[Any, Any]] = []
    if saved_tensors_hooks(False) is not None:
        with without_hooks() as hooks:
            regions += [region for pack, _ in hooks if (region := _region_of(inspect.unwrap(pack))) is not None]
    number = backward_pass()
    if number >= 0 or not torch.is_grad_enabled():
        regions += [(ctx, number if again else None) for ctx, again in _reentrant()]
    return regions


@contextlib.contextmanager
def without_hooks() -> Iterator[list[tuple[Any, Any]]]:
    """Within, no hooks of saved tensors are on; those that were, innermost first."""
    hooks: list[tuple[Any, Any]] = []
    try:
        while (top := saved_tensors_hooks(False)) is not None:
            hooks.append(top)
            pop_saved_tensors_hooks()
        yield hooks
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_tensors_hooks(pack, unpack)


def _region_of(pack: Any) -> tuple[Any, Any] | None:
    names = pack.__code__.co_freevars if inspect.isfunction(pack) else ()
    cells = zip(names, getattr(pack, "__closure__", None) or (), strict=False)
    held = {name: cell.cell_contents for name, cell in cells if name in ("frame", "target_frame_ref", "gid")}
    if "target_frame_ref" in held and (region := held["target_frame_ref"]()) is not None:
        return region, held.get("gid", 0)
    return (held["frame"], None) if hasattr(held.get("frame"), "weak_holders") else None


# What a checkpoint raises where the part that it computes anew is complete.
StopRecomputation: type[Exception] = _find("torch.utils.checkpoint._StopRecomputationError")
# The Function of the reentrant checkpoint.
_CheckpointFunction = _find("torch.utils.checkpoint.CheckpointFunction")


def reentrant_checkpoints() -> list[bool]:
    """For each reentrant checkpoint whose forward pass is under way: whether an input of it needs a gradient here."""
    return [any(ctx.needs_input_grad) for ctx, again in _reentrant() if not again]


def _reentrant() -> Iterator[tuple[Any, bool]]:
    """Of each reentrant checkpoint that is under way its context, and whether it is computed anew; innermost first."""
    first, again = _CheckpointFunction.forward.__code__, _CheckpointFunction.backward.__code__
    for frame in outwards(sys._getframe(1)):
        if frame.f_code is first or frame.f_code is again:
            yield frame.f_locals["ctx"], frame.f_code is again


# Backward passes.

# Has a function called at the end of the backward pass that is under way.
queue_callback: Callable[[Callable[[], None]], None] = _find(
    "torch.autograd.variable.Variable._execution_engine.queue_callback"
)
# The number of that pass; a reentrant checkpoint has one of its own.
backward_pass: Callable[[], int] = _find("torch._C._current_graph_task_id")

# Whether that pass comes to a node; RuntimeError for the leaf of a gradient that torch.autograd.grad returns.
_comes_to = _find("torch._C._will_engine_execute_node")


def accumulates(leaf: Tensor) -> bool:
    """Whether the backward pass under way adds to a leaf's gradient: torch.autograd.grad, and backward(inputs=..)
    without it, do not."""
    if not leaf.requires_grad:
        return False
    if torch.compiler.is_compiling():
        return True
    try:
        return bool(_comes_to(get_gradient_edge(leaf).node))
    except RuntimeError:
        return False


# Whether a torch.profiler is under way in this thread.
profiler_enabled: Callable[[], bool] = _find("torch.autograd._profiler_enabled")


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in _tree_leaves(value) if isinstance(leaf, Tensor)]


# Modules.

# Whether hooks on all modules are registered.
_any_hook_on_all = _find("torch.nn.modules.module._has_any_global_hook")
_traced: list[bool] = []  # while traces have hooks on all modules: whether others had some before
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether calling a module is more than running its forward: a hook on it or on all, or its own torch.compile."""
    if (_traced[0] if _traced else _any_hook_on_all()) or module._compiled_call_impl is not None:
        return True
    return has_hooks(module)


@contextlib.contextmanager
def hooking_all_modules() -> Iterator[None]:
    """For a trace, whose hooks on all modules change nothing: for `is_hooked` those are none."""
    _traced.append(_any_hook_on_all())
    try:
        yield
    finally:
        _traced.pop()


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a hook was registered on it. Where that cannot be seen, it was."""
    return any(getattr(module, name, True) for name in _HOOKS)


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Where the module keeps its parameters: the dict itself."""
    return module._parameters
