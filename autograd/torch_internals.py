"""All private names of torch that this package uses. Only this file uses them.

A comment explains each name. If the installed torch lacks one, using it raises an error that names it, and everything
else keeps working. tests/autograd/test_torch_internals.py checks that all of them exist in the installed torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from pynccl.watch.frames import call_site, is_user_line, walk_outwards

NAMES: list[str] = []  # all names that are looked up below


class Missing:
    """Placeholder for a name that this torch does not have. Raises when it is used."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"torch {torch.__version__} has no {self.__dict__['name']}, which pynccl_autograd needs here; use a torch "
            "version that pynccl_autograd was tested with"
        )

    def __getattr__(self, attribute: str) -> Any:
        return self()


def _find(name: str) -> Any:
    """Return the object of this name, or a `Missing`."""
    NAMES.append(name)
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return Missing(name)


# Tensors.

# Whether a tensor has a storage: zero tensors and tensors of torch's old vmap have none.
has_storage: Callable[[Tensor], bool] = _find("torch._C._has_storage")
# Whether a tensor is a zero tensor without storage, as tangents and cotangents may be.
is_zero_tensor: Callable[[Tensor], bool] = _find("torch.Tensor._is_zerotensor")
# Unwraps a tensor of a torch.func level that has ended.
unwrap_if_dead: Callable[[Tensor], Tensor] = _find("torch._C._functorch.unwrap_if_dead")
# A view that autograd does not treat as one, for tensors without other references.
_unsafe_view = _find("torch.ops.aten._unsafe_view.default")
# All tensors in nested lists, tuples and dicts.
_tree_leaves = _find("torch.utils._pytree.tree_leaves")
# Copies many tensors; on a GPU with few kernels.
copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], object] = _find("torch._foreach_copy_")

_VALUES = frozenset((Tensor, torch.nn.Parameter))


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape x, which must have no other references. autograd does not treat the result as a view, so that it may be
    modified in place."""
    y: Tensor = _unsafe_view(x, tuple(shape))
    return y


def is_traced(x: Tensor) -> bool:
    """Return whether x is a fake or functional tensor. Compares names, because the types need not be imported."""
    return type(x).__name__ in ("FakeTensor", "FunctionalTensor")


def has_no_values(x: Tensor) -> bool:
    """Return whether x has a shape but no values."""
    return x.is_meta or (type(x) not in _VALUES and is_traced(x))


# Tracing by dispatch modes: fake tensors, make_fx, export and selective checkpointing.

# Number of active modes; every call uses it.
dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack")
# The active mode of a kind: fake tensors or make_fx.
_mode_of = _find("torch._C._get_dispatch_mode")
_ModeKey = _find("torch._C._TorchDispatchModeKey")
# The active fake mode, including one that a fake tensor activated.
detect_fake_mode: Callable[[], Any] = _find("torch._guards.detect_fake_mode")


def is_tracing() -> bool:
    """Return whether tensors have no values now: in torch.compile, with fake tensors, in make_fx."""
    if torch.compiler.is_compiling():
        return True
    if not dispatch_modes():
        return False
    return any(_mode_of(key) is not None for key in (_ModeKey.FAKE, _ModeKey.PROXY))


# Operators in the graphs of torch.compile: see compiled.py.

# The mode that traces operators into a graph.
ProxyTorchDispatchMode: Any = _find("torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode")
# The mode of checkpoints that choose by operator what they recompute; all checkpoints, under torch.compile.
CheckpointMode: Any = _find("torch.utils.checkpoint._CachingTorchDispatchMode")
# Registers a function that dead code elimination keeps.
has_side_effect: Callable[[Any], Any] = _find("torch.fx.node.has_side_effect")
# What torch.compile knows about the graph that it is making, and the program's stack there.
_TracingContext = _find("torch._guards.TracingContext")
_graph_stack = _find("torch._guards.TracingContext.extract_stack")
# Of inductor, once it is imported, which takes seconds: how an operator becomes its node, the nodes of collectives,
# which it runs in the order of the graph, and of tensors.
INDUCTOR = (
    "torch._inductor.lowering.register_lowering",
    "torch._inductor.ir._CollectiveKernel.create_out_of_place",
    "torch._inductor.ir.TensorBox.create",
)


def compiled_graph() -> Any:
    """Return an object that identifies the graph that torch.compile is making, or None."""
    return _TracingContext.try_get()


def traced_line() -> str:
    """Return file:line of the innermost user code that torch.compile is tracing."""
    frames = [f"{frame.filename}:{frame.lineno}" for frame in reversed(_graph_stack())]
    return next((frame for frame in frames if is_user_line(frame)), "") or call_site()


def lower_as_collective(operator: Any) -> None:
    """Make inductor, if it is imported, run the calls of this operator in the order of the graph."""
    if "torch._inductor.lowering" in sys.modules:
        _lower_as_collective(operator)


@functools.cache
def _lower_as_collective(operator: Any) -> None:
    register_lowering, create_node, tensor = map(_find, INDUCTOR)

    def lowering(*args: Any) -> list[Any]:
        return [tensor(result) for result in create_node(operator, *args)]

    register_lowering(operator, type_promotion_kind=None)(lowering)


# Of DTensor, which takes a second to import: the shape of this rank's shard, and where it begins.
SHAPE_AND_OFFSET = "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"


def offset_of(x: Any) -> tuple[int, ...]:
    """Return where this rank's shard of a DTensor begins."""
    _, offset = _find(SHAPE_AND_OFFSET)(x.shape, x.device_mesh, x.placements)
    return tuple(offset)


# Of torch.distributed.checkpoint.state_dict: with full_state_dict=True, a collective, they expect whole tensors.
STATE_DICTS = (
    "torch.distributed.checkpoint.state_dict._get_model_state_dict",
    "torch.distributed.checkpoint.state_dict._get_optim_state_dict",
)


def whole_state_is_asked() -> bool:
    """Return whether one of these calls state_dict() now, and is to return whole tensors."""
    for frame in walk_outwards(sys._getframe(1)):
        if f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" in STATE_DICTS:
            return bool(frame.f_locals["info"].full_state_dict)
    return False


# Forward mode.

# A context manager that turns forward mode on in the jvp of a Function, where torch has turned it off.
forward_mode: Callable[[bool], contextlib.AbstractContextManager[Any]] = _find(
    "torch.autograd.forward_ad._set_fwd_grad_enabled"
)
# Whether forward mode is on.
forward_mode_is_on: Callable[[], bool] = _find("torch._C._is_fwd_grad_enabled")
# `in_forward_mode` reads this number.
_find("torch.autograd.forward_ad._current_level")


def in_forward_mode() -> bool:
    """Return whether a level of forward mode is active, including those of torch.func.jvp."""
    return forward_ad._current_level >= 0


# torch.func: its transforms are a stack of interpreters, one for each level.

# Whether any transform is active; every call uses it.
transforms_active: Callable[[], bool] = _find("torch._C._are_functorch_transforms_active")
# The kinds of levels, and all interpreters; key() returns the kind of an interpreter.
_TransformType = _find("torch._C._functorch.TransformType")
_levels = _find("torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters")
# A context manager in which torch.func does not wrap new tensors, because NCCL needs their memory.
unwrapped: Callable[[], Any] = _find("torch._C._DisableFuncTorch")
# Whether a tensor is a wrapper of one of these levels, and what it wraps.
_is_wrapper: Callable[[Tensor], bool] = _find("torch._C._functorch.is_functorch_wrapped_tensor")
_wrapped_by: Callable[[Tensor], Tensor] = _find("torch._C._functorch.get_unwrapped")


def plain_values(x: Tensor) -> Tensor:
    """Return the tensor in the wrappers of torch.func, with the dimensions that vmap hides."""
    while _is_wrapper(x):
        x = _wrapped_by(x)
    return x


@torch.compiler.assume_constant_result
def check_compiled() -> None:
    """Raise if torch.compile traces torch.func.grad, because custom operators support only torch.autograd."""
    if any(level.key() == _TransformType.Grad for level in _levels()):
        raise NotImplementedError(
            "pynccl_autograd does not support torch.func.grad, vjp and jacrev under torch.compile; call torch.func "
            "outside of torch.compile, or torch.autograd.grad on the result of the compiled function"
        )


# Saved-tensor hooks, which torch.utils.checkpoint uses: a stack of (pack, unpack).

# (False) -> the innermost pair, or None; every call uses it.
saved_tensors_hooks: Callable[[bool], Any] = _find("torch._C._autograd._top_saved_tensors_default_hooks")
pop_saved_tensors_hooks: Callable[[], None] = _find("torch._C._autograd._pop_saved_tensors_default_hooks")
push_saved_tensors_hooks: Callable[[Any, Any], None] = _find("torch._C._autograd._push_saved_tensors_default_hooks")


def checkpointed_regions() -> list[tuple[Any, Any]]:
    """Return the regions of torch.utils.checkpoint that this thread is in, innermost first. Each is (an object that
    identifies the region, None in its first run or else the number of the backward pass that recomputes it).

    Non-reentrant regions are found in the closures of the hooks, by the variable names of torch. Reentrant ones, whose
    first run is under no_grad, are found in the frames of their Function. If torch changes these names, regions are not
    found."""
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
    """Turn off all saved-tensor hooks within the block. Yields the hooks that were on, innermost first."""
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


# Raised by a checkpoint when it has recomputed all that it needs.
StopRecomputation: type[Exception] = _find("torch.utils.checkpoint._StopRecomputationError")
# The Function of the reentrant checkpoint.
_CheckpointFunction = _find("torch.utils.checkpoint.CheckpointFunction")


@torch.compiler.assume_constant_result
def reentrant_checkpoints() -> list[bool]:
    """Return, for each reentrant checkpoint in its forward pass, whether one of its inputs requires grad."""
    return [any(ctx.needs_input_grad) for ctx, again in _reentrant() if not again]


def _reentrant() -> Iterator[tuple[Any, bool]]:
    """Yield (context, whether it is being recomputed) of each active reentrant checkpoint, innermost first."""
    first, again = _CheckpointFunction.forward.__code__, _CheckpointFunction.backward.__code__
    for frame in walk_outwards(sys._getframe(1)):
        if frame.f_code is first or frame.f_code is again:
            yield frame.f_locals["ctx"], frame.f_code is again


# Backward passes.

# Registers a function to call at the end of the current backward pass.
queue_callback: Callable[[Callable[[], None]], None] = _find(
    "torch.autograd.variable.Variable._execution_engine.queue_callback"
)
# The number of that pass; a reentrant checkpoint has a different one.
backward_pass: Callable[[], int] = _find("torch._C._current_graph_task_id")

# Whether that pass executes a node; RuntimeError for a leaf whose gradient torch.autograd.grad returns.
_will_execute_node = _find("torch._C._will_engine_execute_node")


def accumulates(leaf: Tensor) -> bool:
    """Return whether the current backward pass accumulates into leaf.grad. torch.autograd.grad does not, and neither
    does backward(inputs=..) without this leaf."""
    if not leaf.requires_grad:
        return False
    if torch.compiler.is_compiling():
        return True
    try:
        return bool(_will_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:
        return False


# What GradScaler overrides: it unscales the gradients, and returns whether an inf was found, by device.
_find("torch.amp.GradScaler._unscale_grads_")

# Whether a torch.profiler is active in this thread.
profiler_enabled: Callable[[], bool] = _find("torch.autograd._profiler_enabled")


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, dicts and dataclasses."""
    found: list[Tensor] = []
    for leaf in _tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, one.name) for one in dataclasses.fields(leaf)])
    return found


# Modules.

# Whether global module hooks are registered.
_any_hook_on_all = _find("torch.nn.modules.module._has_any_global_hook")
_traced: list[bool] = []  # one entry per active trace: whether there were other global hooks before it
# The hooks of a module that look at its inputs and outputs, with their options; those of its gradients and states.
FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# The hooks of a tensor's gradient.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def is_hooked(module: torch.nn.Module) -> bool:
    """Return whether calling a module does more than run its forward: it has hooks, there are global hooks, or it is
    compiled with module.compile()."""
    if (_traced[0] if _traced else _any_hook_on_all()) or module._compiled_call_impl is not None:
        return True
    return has_any(module, (*FORWARD_HOOKS, *BACKWARD_HOOKS))


# Classes of modules that wrap another module, and the attribute that holds it. They need not be imported.
FSDP1 = "_fsdp_wrapped_module"
WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": FSDP1,
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
}
WRAPPED_MODULES = frozenset(WRAPPERS.values())


def wrapped_in(module: object) -> str | None:
    """Return the name of the attribute that holds the module that this one wraps; None: it wraps none."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__)
    return next((WRAPPERS[name] for name in names if name in WRAPPERS), None)


def uncompiled(model: Any) -> Any:
    """Return the module that torch.compile wraps, and compiles when it is called; any other object as it is."""
    return model._orig_mod if wrapped_in(model) == "_orig_mod" else model


@contextlib.contextmanager
def hooking_all_modules() -> Iterator[None]:
    """Make `is_hooked` ignore the global hooks of a trace, which do not change results."""
    _traced.append(_any_hook_on_all())
    try:
        yield
    finally:
        _traced.pop()


def has_any(owner: object, hooks: Sequence[str]) -> bool:
    """Return whether such a hook is registered on the module or tensor; True if this torch has no such attribute."""
    return any(getattr(owner, name, True) for name in hooks)


def move_forward_hooks(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Give the hooks of a module's inputs and outputs to the new module that replaces it, which has none. Both have the
    same dicts, so that a handle of the old one removes its hook."""
    for name in FORWARD_HOOKS:
        setattr(new, name, getattr(old, name))


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the dict in which the module stores its own parameters (not a copy)."""
    return module._parameters
