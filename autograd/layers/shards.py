"""Parameters that are shards, in layers of this package and in modules of the user's.

The layers set `parameter.shard`. A parameter without it is replicated: every rank has all of it, and the same gradient.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import INT_MAX, instance, integer, shown

from ..names import plain_name
from ..overlap.choose import decisions_of
from ..torch_internals import own_parameters
from .dtensors import is_dtensor
from .shard import Shard, ShardTensor, held, taken

Layer = TypeVar("Layer", bound="Sharded")


def checked_seq_dim(name: str, seq_dim: Any) -> int:
    return integer(seq_dim, f"{name}: seq_dim", -INT_MAX, INT_MAX, "a dimension of x, an integer")


class Sharded(nn.Module):
    """Base class of modules with sharded parameters. It sets `parameter.shard`, also after a copy or a move.

    A subclass describes its parameters in `shards`, calls `_make_parameters` at the end of __init__, and draws initial
    values in `reset_parameters`. Every rank draws the full parameter and keeps its shard. So the values depend on the
    seed and not on N, and the ranks' generators stay in step.
    """

    __call__: Callable[..., Tensor]  # for type checkers: nn.Module's returns Any
    comm: Communicator
    weight: nn.Parameter
    bias: nn.Parameter | None

    def shards(self) -> dict[str, Shard]:
        """Return the Shard of each parameter, by name."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        raise NotImplementedError

    def _make_parameters(self, bias: bool, device: Any, dtype: torch.dtype | None) -> None:
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(f"{type(self).__name__}: dtype is {dtype}, expected a floating-point or complex dtype")
        if device is None and torch.get_default_device().type != "meta":  # within `with torch.device("meta")`
            device = self.comm.device
        for name, shard in self.shards().items():
            local = None
            if name != "bias" or bias:
                local = nn.Parameter(torch.empty(shard.local_shape, device=device, dtype=dtype))
            self.register_parameter(name, local)
        self._mark()
        self.reset_parameters()

    def _draw_as_linear(self, in_features: int) -> None:
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        drawn: dict[str, Any] = {}
        for name, shard in self.shards().items():
            local: Tensor | None = getattr(self, name)
            drawn[name] = None if local is None else local.detach().new_empty(shard.shape).uniform_(-bound, bound)
        self.load_full(**drawn)

    def take(self: Layer, module: nn.Module) -> Layer:
        """Replace the parameters with this rank's shards of an unsharded module's, which must be equal on all ranks.
        They keep its device, dtype and requires_grad."""
        instance(module, nn.Module, f"{type(self).__name__}.take: module", "the unsharded torch.nn.Module")
        for name, shard in self.shards().items():
            full: Any = getattr(module, name, None)
            if full is not None or name == "weight":
                shard.check_full(f"{type(self).__name__}.take: module: {name}", full)
                local = shard.local(full.detach()).clone(memory_format=torch.contiguous_format)
                setattr(self, name, nn.Parameter(local, requires_grad=full.requires_grad))
        self._mark()
        return self.train(module.training)

    @torch.no_grad()
    def load_full(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy this rank's shard of an unsharded layer's parameters into the layer."""
        if (bias is None) != (getattr(self, "bias", None) is None):
            raise ValueError(f"load_full: bias is {shown(bias)}, but the layer has {'one' if bias is None else 'none'}")
        shards, given = self.shards(), {"weight": weight, "bias": bias}
        full: Any
        for name, full in given.items():
            if full is not None or name == "weight":
                shards[name].check_full(f"load_full: {name}", full)
                if full.is_meta and not getattr(self, name).is_meta:
                    raise ValueError(f"load_full: {name} is on the meta device, which has no values")
                getattr(self, name).copy_(shards[name].local(full))

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor]:
        """Return the unsharded layer's state_dict, on every rank. A collective: every rank must call it."""
        shards = self.shards()
        return {name: shards[name].gather(one).clone() for name, one in self.named_parameters(recurse=False)}

    def _mark(self) -> None:
        for name, shard in self.shards().items():
            parameter = getattr(self, name, None)
            if isinstance(parameter, nn.Parameter):
                _set(parameter, shard)

    def __setstate__(self, state: Any) -> None:  # of a copy, which has new parameters
        super().__setstate__(state)
        self._mark()

    def _apply(self, *args: Any, **options: Any) -> Any:  # called by to(), to_empty(), share_memory(), ...
        module = super()._apply(*args, **options)
        self._mark()
        return module

    def __delattr__(self, name: str) -> None:  # called by torch's parametrizations, and by the older spectral_norm
        self._check_kept({name})
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        own = own_parameters(self)
        if own and name not in self.shards():  # prune gives a parameter a second name, the older weight_norm removes it
            self._check_kept({one for one in self.shards() if one not in own or (own[one] is param is not None)})
        super().register_parameter(name, param)

    def _check_kept(self, replaced: set[str]) -> None:
        for name, shard in self.shards().items():
            if name in replaced and shard.is_part:
                raise TypeError(
                    f"{type(self).__name__}: {name} is {shard}, so weight_norm, pruning or another "
                    "parametrization would compute with a shard, and so would FullyShardedDataParallel; use them on "
                    "modules that are not sharded, and fully_shard on any"
                )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, shard in self.shards().items():
            value = destination.get(prefix + name)
            if value is not None and not keep_vars:
                destination[prefix + name] = held(value, shard)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _take_shards(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, shard in self.shards().items():
            value, local = state_dict.get(prefix + name), getattr(self, name, None)
            if isinstance(local, Tensor) and isinstance(value, Tensor) and local.shape != value.shape == shard.shape:
                args[-1].append(  # to the errors
                    f"{prefix}{name} is the full parameter, but this model has a shard of it; load it with "
                    "pynccl_autograd.load_full_state_dict(model, state)."
                )
        self._mark()  # assign=True replaces the parameters


def set_shard(parameter: Tensor, shard: Shard | None) -> None:
    """Declare how a parameter of your own module is sharded; None: it is replicated.

        self.weight = torch.nn.Parameter(weight.chunk(comm.size)[comm.rank].clone())
        ad.set_shard(self.weight, ad.Shard(comm, 0, weight.shape))

    `finish_gradients`, `clip_grad_norm_`, checkpoints and `check_model` use it. It sets the attribute
    `parameter.shard`, which type checkers do not know. Copies by copy.deepcopy have it, and state_dict() holds shards.
    Call it again if another parameter replaces this one, or use `keep_shards`; for a buffer also after `module.to()`,
    which replaces buffers. ValueError if the parameter does not have the shape of this rank's shard.
    """
    if shard is not None:
        instance(shard, Shard, "set_shard: shard", "an ad.Shard, or None")
    instance(parameter, Tensor, "set_shard: parameter", "a torch.nn.Parameter")
    _set(parameter, shard)
    for name in ("__deepcopy__", "detach"):
        parameter.__dict__.pop(name, None)
    if shard is not None and not is_dtensor(parameter):
        of = _OwnParameter(parameter)
        parameter.__dict__.update(__deepcopy__=of.copy, detach=of.detach)


def _set(parameter: Tensor, shard: Shard | None) -> None:
    if shard is not None and list(parameter.shape) != shard.local_shape:
        raise ValueError(
            f"set_shard: the parameter has shape {tuple(parameter.shape)}, expected {tuple(shard.local_shape)}, this "
            f"rank's shard of {shard.shape}"
        )
    parameter.shard = shard  # type: ignore[attr-defined]


class _OwnParameter:
    """What copy.deepcopy and Module.state_dict call on a parameter: its own __deepcopy__ and detach.

    Parameters of a module of the user's have them as attributes of the instance, since torch copies a Parameter without
    its attributes. (A Parameter of another class would be slower in torch's optimizers.)"""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)  # weak: no cycle, so that memory is freed at once

    def copy(self, memo: dict[int, Any]) -> Tensor:
        parameter: Any = self.parameter()
        made: Tensor = type(parameter).__deepcopy__(parameter, memo)
        set_shard(made, parameter.shard)
        return made

    def detach(self) -> Tensor:
        parameter: Any = self.parameter()
        detached = Tensor.detach(parameter)
        if torch.compiler.is_compiling() or sys._getframe(1).f_code is not nn.Module._save_to_state_dict.__code__:
            return detached
        return held(detached, parameter.shard)


def shard_of(parameter: Tensor) -> Shard | None:
    """Return the parameter's Shard; None: it is replicated. TypeError for a DTensor on which it was never set."""
    shard = getattr(parameter, "shard", None)
    if shard is None and not hasattr(parameter, "shard") and is_dtensor(parameter):
        raise TypeError(
            f"a parameter of shape {list(parameter.shape)} is a DTensor without `shard`, because torch's fully_shard "
            "replaced the parameter; call fully_shard within `with pynccl_autograd.keep_shards(model):`"
        )
    return shard if isinstance(shard, Shard) else None


@contextlib.contextmanager
def keep_shards(model: nn.Module) -> Iterator[None]:
    """Context manager: parameters that replace others of the same name in the block inherit their `shard`, which
    `finish_gradients`, `clip_grad_norm_` and checkpoints need.

        with ad.keep_shards(model):
            for layer in model.layers:
                fully_shard(layer, mesh=device_mesh["dp"])
            fully_shard(model, mesh=device_mesh["dp"])

    Use it around torch's fully_shard (FSDP2) over another mesh axis than the tensor-parallel one, and around anything
    else that replaces parameters outside of this package's layers, such as load_state_dict(assign=True). It does not
    communicate. TypeError if the model's parameters have lost their `shard` before.
    """
    instance(model, nn.Module, "keep_shards: model", "a torch.nn.Module")
    before = {plain_name(model, name): shard_of(one) for name, one in model.named_parameters(remove_duplicate=False)}
    try:
        yield
    finally:
        for name, one in model.named_parameters(remove_duplicate=False):
            if (plain := plain_name(model, name)) in before:
                set_shard(one, before[plain])  # also None, so that shard_of accepts a DTensor
        for module in model.modules():
            if not isinstance(module, Sharded) and any(map(is_dtensor, own_parameters(module).values())):
                module.register_state_dict_post_hook(_hold_shards)
                module.register_load_state_dict_pre_hook(_take_shards)


def _hold_shards(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    """Replace shards in a state dict by ShardTensors: a state-dict hook of modules whose parameters became DTensors."""
    for name, parameter in own_parameters(module).items():
        shard, value = parameter is not None and shard_of(parameter), state.get(prefix + name)
        if shard and is_dtensor(value) and not isinstance(value, nn.Parameter):
            state[prefix + name] = held(value, shard)


def _take_shards(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Replace ShardTensors in a state dict by what the module's parameters are: a hook before it is loaded."""
    for name, parameter in own_parameters(module).items():
        value, shard = state.get(prefix + name), getattr(parameter, "shard", None)
        if parameter is not None and isinstance(value, ShardTensor) and repr(value.shard) == repr(shard):
            state[prefix + name] = taken(value, parameter)


def describe(model: nn.Module) -> str:
    """Return a table of a model's parameters: path, module type, full shape, shape on this rank, sharded dimension, and
    bytes on this rank with their sum. Tied parameters count once. Use `print(ad.describe(model))`.

    Lines below it show the `overlap` decision for each pass of each layer, or how far its race is."""
    instance(model, nn.Module, "describe: model", "a torch.nn.Module")
    rows = [("parameter", "module", "full", "local", "split", "bytes")]
    seen: dict[int, str] = {}
    total = full_total = 0
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            title, kind = plain_name(model, f"{path}.{name}".lstrip(".")), type(module).__name__
            shard = shard_of(parameter)
            full = list(parameter.shape) if shard is None else list(shard.shape)
            if id(parameter) in seen:
                rows.append((title, kind, str(full), f"is {seen[id(parameter)]}", "", ""))
                continue
            seen[id(parameter)] = title
            sharded = "" if shard is None or shard.dim is None else f"{shard.dim} of {shard.comm.size}"
            if shard is not None and len(shard.blocks) > 1:
                sharded += f", {len(shard.blocks)} blocks"
            if shard is not None and shard.partial:
                sharded = "gradients summed"
            total += parameter.nbytes
            full_total += torch.Size(full).numel() * parameter.element_size()
            rows.append((title, kind, str(full), str(list(parameter.shape)), sharded, f"{parameter.nbytes:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for path, module in model.named_modules():
        for one in decisions_of(module):
            name = f"{plain_name(model, path) or 'model'}, {one.pattern} of {one.m} rows"
            lines.append(f"{name}: {one.schedule if one.settled else 'undecided'}, {one.reason}")
    lines.append(f"{total:,} bytes on this rank, {full_total:,} in the full model")
    return "\n".join(lines)
