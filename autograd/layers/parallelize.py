"""parallelize: the modules of a model become tensor-parallel ones, after a plan."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from ..agreement import alike, difference
from ..arguments import as_int, check_comm
from ..overlap.config import Overlap
from ..torch_internals import has_no_values
from ..wire import Dtype
from .hooks import Drawing, Entering, Outputs, SameInput, Sequence, checksum, keep_parts, leave_logits_cut
from .plan import NAME, Planned, is_within, probability, read
from .plan_checks import Stay, check_cut, check_staying, check_tied, staying, tied_parameters, warn_of_silence
from .replace import divide, layer_of, replace, tie
from .shards import Shard, Sharded

_SAMPLE = 16  # elements of each parameter that are compared


def parallelize(
    model: nn.Module,
    comm: Communicator,
    plan: Mapping[str, Any],
    sequence_parallel: bool = True,
    seq_dim: int = 1,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    gather_logits: bool = True,
    init: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Make a model tensor-parallel, in place; returns it. Each rank keeps its part of the weights, which are equal on
    all ranks before. Names of modules and parameters stay.

    plan: {pattern of module paths: role}; `ad.plans` has those of well-known models, and says how patterns are
    written. Each pattern has to fit a module, but for one that begins with "**.". A role is one of these names, a pair
    (name, options), a list of them, or a function `f(module, comm)` that returns what takes the module's place.

    "column"          nn.Linear (or transformers' Conv1D) -> ColumnParallelLinear. Options: of the class; heads: the
                      name in model.config of the number of heads, which N has to divide
    "row"             nn.Linear -> RowParallelLinear
    "key_value"       as "column"; of fewer heads than ranks each is shared by several ranks (`KeyValueLinear`), and
                      num_key_value_groups of the parent becomes what it is on this rank
    "shared_input"    the input of this module is gathered once, for all "column" and "key_value" modules in it.
                      Options: input: the argument's name, where it is not the first tensor
    "vocab_embedding" nn.Embedding -> VocabParallelEmbedding
    "vocab_head"      nn.Linear -> VocabParallelHead
    "sequence"        stays, and sees this rank's part of the sequence: `finish_gradients` sums its gradients
    "partial"         stays, and sees this rank's heads or columns: the same, without sequence parallelism, too
    "sequence_begin"  the input of this module is cut along the sequence. Options: input
    "sequence_end"    the output of this module is gathered along the sequence
    "replicated"      stays
    "divide"          attributes that count what is on all ranks are divided by N. Options: attributes, such as
                      ["num_heads"]; of "config.num_heads" in a copy of config, which modules may share
    "attention_dropout" what this module draws itself is of this rank's heads. Options: p: name of its attribute, a
                      probability or a dropout module, that says how much

    nn.Dropout modules that the plan mentions draw as `ad.rng` does: each rank its own numbers where they are "partial",
    or "sequence" with sequence parallelism; equal ones where they are "replicated", or within a module that is.

    sequence_parallel  between "sequence_begin" and "sequence_end" each rank has 1/N of the sequence, which N has to
                       divide: padded, where it does not. Without gradients (torch.no_grad) other lengths are computed
                       without sequence parallelism, as in generate()
    seq_dim            where hidden states have the sequence: 1 if the batch comes first
    gather_logits      False: a "vocab_head" leaves each rank its words; a model of transformers then has its loss by
                       `vocab_parallel_cross_entropy`
    init               of a model on the meta device. None: its parts stay there, for `load_full_state_dict`; of models
                       of transformers the buffers that no checkpoint has are made. A function
                       of a module, such as `model._init_weights` or `lambda m: m.reset_parameters()`: a layer at a time
                       is drawn whole, and this rank's part kept: as `model.apply(init)` of the unsharded model does
                       with the same seed

    After backward(): `finish_gradients(model)`, then `clip_grad_norm_`. ValueError and TypeError name the module, on
    every rank, before anything is changed; the first forward pass raises ValueError if ranks have other batches.
    UserWarning for modules with parameters, and for dropout, of which the plan says nothing: they are replicated; and
    for weights that are not equal on all ranks.
    """
    check_comm(NAME, comm, model=model)
    comm.check_alive()
    planned = Planned(model, comm, sequence_parallel, seq_dim, overlap, reduce_dtype, gather_logits)
    layers, stays = alike(comm, lambda: _checked(planned, plan, init))
    _check_alike(planned, init)
    warn_of_silence(planned, stays)

    # From here on the model is changed.
    tied, sequence = tied_parameters(model), Sequence(comm, seq_dim)
    for stay in stays:
        for parameter in stay.module.parameters(recurse=False) if planned.is_summed(stay.role) else ():
            parameter.shard = Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]
    entering = _hook_modules(planned, sequence)
    divide(planned)
    replace(planned, layers, entering, init)
    for group in tied:
        tie(model, group)
    sequence.layers = [one for one in model.modules() if getattr(one, "sequence_parallel", None) is True]
    if not sequence_parallel or planned.of_role("sequence_begin"):
        model.register_forward_pre_hook(SameInput(comm), with_kwargs=True)
    _hook_outputs(planned, sequence)
    leave_logits_cut(model, comm)
    keep_parts(model)
    return model


def _checked(planned: Planned, plan: Mapping[str, Any], init: Any) -> tuple[dict[str, Sharded | None], list[Stay]]:
    """The layers that take the places of modules, and the modules that stay, if the plan is right."""
    _check_arguments(planned, init)
    planned.sites = read(planned.model, plan)
    layers = {path: layer_of(planned, site) for path, site in planned.sites.items()}
    stays = staying(planned)
    check_cut(planned)
    check_staying(planned, stays)
    check_tied(planned, stays, layers)
    return layers, stays


def _check_arguments(planned: Planned, init: Any) -> None:
    instance(planned.model, nn.Module, f"{NAME}: model", "a torch.nn.Module")
    for name in ("sequence_parallel", "gather_logits"):
        instance(getattr(planned, name), bool, f"{NAME}: {name}", "True or False")
    instance(planned.seq_dim, int, f"{NAME}: seq_dim", "a dimension of hidden states, such as 1")
    if planned.reduce_dtype is not None:
        instance(planned.reduce_dtype, torch.dtype, f"{NAME}: reduce_dtype", "a torch.dtype, such as torch.float32")
    if init is not None and not callable(init):
        raise TypeError(f"{NAME}: init is {shown(init)}, expected a function of a module, such as model._init_weights")


def _check_alike(planned: Planned, init: Any) -> None:
    """ValueError, on all ranks, if they would make other models; UserWarning if they have other weights, which a
    checkpoint that is loaded afterwards may put right."""
    model, comm = planned.model, planned.comm
    if comm.size == 1:
        return

    text = partial(json.dumps, default=lambda one: type(one).__name__)  # equal where the value is
    names = ("sequence_parallel", "seq_dim", "overlap", "gather_logits")
    samples = []
    for one in model.parameters():
        if one.numel() and not has_no_values(one) and one.layout == torch.strided:
            step = max(1, one.numel() // _SAMPLE)
            samples.append(one.detach().reshape(-1)[::step][:_SAMPLE].to(torch.float64))
    values = {
        "what the plan says of the modules": text(
            [(path, site.roles, site.function is not None) for path, site in planned.sites.items()]
        ),
        "the options": text([*(getattr(planned, name) for name in names), str(planned.reduce_dtype), init is None]),
        "names, shapes, types or devices of the parameters": [
            f"{name} {list(one.shape)} {one.dtype} {one.is_meta}" for name, one in model.named_parameters()
        ],
        "the weights": checksum([torch.cat(samples)] if samples else []),
    }
    other = difference(comm, values)
    if other is not None and other.what != "the weights":
        raise ValueError(f"{NAME}: {other}; expected the same on all ranks")
    if other is not None:
        warnings.warn(
            f"{NAME}: rank {other.rank} and rank 0 have other weights, and each will keep its part of its own: call "
            "torch.manual_seed(seed) before the model is made, or load a checkpoint afterwards by load_full_state_dict",
            UserWarning,
            stacklevel=3,
        )


def _hook_modules(planned: Planned, sequence: Sequence) -> dict[str, Entering]:
    """Register what is done for the input and the output of modules that stay. Returns the hooks of those whose input
    is shared, by path."""
    entering = {}
    for path, site in planned.sites.items():
        module, roles = site.module, site.roles
        if "sequence_begin" in roles and planned.sequence_parallel:
            Entering(path, "cut", sequence, roles["sequence_begin"].get("input")).register(module)
        if "shared_input" in roles:
            how = "gathered" if planned.sequence_parallel else "copied"
            entering[path] = Entering(path, how, sequence, roles["shared_input"].get("input"))
            entering[path].register(module)
        if "sequence_end" in roles and planned.sequence_parallel:
            module.register_forward_hook(sequence.end)
        if "attention_dropout" in roles and probability(getattr(module, roles["attention_dropout"]["p"])) > 0:
            Drawing(planned.comm).register(module)
    return entering


def _hook_outputs(planned: Planned, sequence: Sequence) -> None:
    """Of modules around one stack of layers that are cut, which may give what these made; without a stack, of the
    models. Their numbers of heads are those that the plan says, or else the configuration."""
    stacks = set(planned.stacks())
    for path, module in planned.model.named_modules():
        around = sum(is_within(one, path) for one in stacks)
        if around == 1 or (not stacks and (not path or hasattr(module, "config"))):
            heads = {planned.cut_heads(one) for one in planned.of_role("column") if is_within(one.path, path)}
            configs = (getattr(one, "config", None) for one in module.modules())
            theirs = (as_int(getattr(one, "num_attention_heads", None)) for one in configs)
            module.register_forward_hook(
                Outputs(sequence, heads - {None} or {next((one for one in theirs if one), None)})
            )
