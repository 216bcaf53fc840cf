"""parallelize: the modules of a model become tensor-parallel ones, after a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from ..agreement import raise_alike
from ..arguments import as_int, check_comm
from ..overlap.config import Overlap
from ..wire import Dtype
from .alike import SameInput, check_alike
from .model_hooks import CausalLoss, Drawing, Entering, FromShared, Leaving, NoLabels, NoLogits, Outputs, Sequence
from .parts import keep_parts
from .plan import NAME, Site, read
from .plan_checks import (
    check_attributes,
    check_counts,
    check_ends,
    check_pieces,
    check_staying,
    cut_heads,
    dropouts,
    probability,
    warn_of_silence,
)
from .regions import Stay, read_by, stacks, staying
from .replacement import Given, dropout, replacement
from .shards import Shard
from .vocabulary import VocabParallelHead
from .weights import check_tied, draw, is_computed, put, stages, tie, tied_parameters

_Made = dict[str, nn.Module | None]


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
    given = Given(model, comm, sequence_parallel, seq_dim, overlap, reduce_dtype, gather_logits, {}, {})
    problem: Exception | None = None
    try:
        sites, made, stays = _looked_at(given, plan, init)
    except (ValueError, TypeError) as error:
        problem = error
    raise_alike(comm, problem)
    check_alike(model, sites, (sequence_parallel, seq_dim, overlap, reduce_dtype, gather_logits, init is None), comm)
    warn_of_silence(model, stays, sites)
    sequence, tied, recording = Sequence(), tied_parameters(model), _recording(given, sites)
    for stay in stays:
        if stay.is_partial(sequence_parallel):
            for parameter in stay.module.parameters(recurse=False):
                parameter.shard = Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]
    for path, site in sites.items():
        _hook(given, site, [one for one in sites.values() if one.parent == path], sequence)
    for path, cut in dropouts(model, sites).items():
        if cut is not None:
            put(model, path, dropout(given, model.get_submodule(path), cut))
    init_of: Any = getattr(model, "_init_weights", None)  # of transformers
    for within in stages(model):
        for module in within.values():
            if init is not None:
                draw(module, comm, init)
            elif init_of is not None and is_computed(module):
                draw(module, comm, init_of)
        for one in within:
            if one in sites and made[one] is not None:
                layer = replacement(given, sites[one], dry=False)
                assert layer is not None
                if sites[one].shared and getattr(layer, "gather_input", None) is False:
                    looking = FromShared(one, given.entering[sites[one].shared])
                    layer.register_forward_pre_hook(looking)
                put(model, one, layer)
    for group in tied:
        tie(model, group)
    sequence.find(model)
    if not sequence_parallel or any("sequence_begin" in site.roles for site in sites.values()):
        model.register_forward_pre_hook(SameInput(comm), with_kwargs=True)
    for one, heads in recording.items():
        model.get_submodule(one).register_forward_hook(Outputs(comm, seq_dim, sequence, heads))
    _cut_logits(model, comm)
    keep_parts(model)
    return model


def _looked_at(given: Given, plan: Mapping[str, Any], init: Any) -> tuple[dict[str, Site], _Made, list[Stay]]:
    """What the plan says, the layers that it makes on the meta device, and what stays; what cannot be is an error."""
    model = given.model
    if not isinstance(model, nn.Module):
        raise TypeError(f"{NAME}: model is {shown(model)}, expected a torch.nn.Module")
    for name, flag in (("sequence_parallel", given.sequence_parallel), ("gather_logits", given.gather_logits)):
        instance(flag, bool, f"{NAME}: {name}", "True or False")
    instance(given.seq_dim, int, f"{NAME}: seq_dim", "a dimension of hidden states, such as 1")
    if given.reduce_dtype is not None:
        instance(given.reduce_dtype, torch.dtype, f"{NAME}: reduce_dtype", "a torch.dtype, such as torch.float32")
    if init is not None and not callable(init):
        raise TypeError(f"{NAME}: init is {shown(init)}, expected a function of a module, such as model._init_weights")
    sites = read(model, plan)
    made = {path: replacement(given, site, dry=True) for path, site in sites.items()}
    for site in sites.values():
        check_attributes(site, given.comm.size)
    check_ends(given, sites)
    check_counts(given, sites)
    check_pieces(given, sites)
    stays = staying(model, sites)
    check_staying(given, stays, sites)
    check_tied(given, stays, sites, made)
    return sites, made, stays


def _hook(given: Given, site: Site, within: list[Site], sequence: Sequence) -> None:
    """What is done for a module that stays: its input, its output, its parameters, its attributes."""
    comm, module, roles = given.comm, site.module, site.roles
    if "sequence_begin" in roles and given.sequence_parallel:
        name = roles["sequence_begin"].get("input")
        entering = Entering(site.path, comm, given.seq_dim, "cut", sequence, name)
        module.register_forward_pre_hook(entering, with_kwargs=True)
    if "shared_input" in roles:
        how = "gathered" if given.sequence_parallel else "copied"
        name = roles["shared_input"].get("input")
        entering = given.entering[site.path] = Entering(site.path, comm, given.seq_dim, how, sequence, name)
        module.register_forward_pre_hook(entering, with_kwargs=True)
        module.register_forward_hook(entering.forget, always_call=True)
    if "sequence_end" in roles and given.sequence_parallel:
        module.register_forward_hook(Leaving(comm, given.seq_dim, sequence))
    if "attention_dropout" in roles and probability(getattr(module, roles["attention_dropout"]["p"])) > 0:
        drawing = Drawing(comm)
        module.register_forward_pre_hook(drawing.begin)
        module.register_forward_hook(drawing.end, always_call=True)
    for name in roles.get("divide", {}).get("attributes", ()):
        _divide(module, name, comm.size)
    for one in within:
        options = one.roles.get("key_value")
        groups = getattr(module, "num_key_value_groups", None)
        if options is not None and "heads" in options and groups is not None:
            heads = given.heads(options["heads"], one.path)
            if heads < comm.size:
                whole = given.heads("num_attention_heads", one.path)
                module.num_key_value_groups = whole // comm.size  # type: ignore[assignment]


def _divide(module: Any, name: str, ranks: int) -> None:
    """An attribute of the module, or one within an object that it shares with others: then in a copy of that."""
    first, _, rest = name.partition(".")
    if rest:
        own = copy.copy(getattr(module, first))
        setattr(module, first, own)
        _divide(own, rest, ranks)
    else:
        setattr(module, name, getattr(module, name) // ranks)


def _recording(given: Given, sites: Mapping[str, Site]) -> dict[str, set[int]]:
    """Modules around the layers that are cut, of one stack of them, that may give what these made -> heads there."""
    found: dict[str, set[int]] = {}
    lists = set(stacks(given.model, sites))
    columns = [site for site in sites.values() if site.roles.keys() & {"column", "key_value"}]
    for path, module in given.model.named_modules():
        prefix = f"{path}." if path else ""
        within = [site for site in columns if site.path.startswith(prefix)]
        cut = [one for one in lists if f"{one}.".startswith(prefix)]
        layer = any(path.startswith(f"{one}.") for one in lists)
        if not within or len(cut) > 1 or layer or not (cut or hasattr(module, "config") or not path):
            continue
        said = {cut_heads(given, site) for site in within if "column" in site.roles} - {None}
        configs = (getattr(one, "config", None) for one in module.modules())
        theirs = (as_int(getattr(one, "num_attention_heads", None)) for one in configs)
        found[path] = {int(one) for one in said or {next((one for one in theirs if one), None)} if one}
    return found


def _cut_logits(model: nn.Module, comm: Communicator) -> None:
    """Of models of transformers whose head leaves each rank its words: their loss, and no generate()."""
    for module in model.modules():
        cut = any(isinstance(one, VocabParallelHead) and not one.gather_output for one in module.modules())
        if not cut or not (module is model or hasattr(module, "save_pretrained")):
            continue
        theirs = getattr(module, "loss_function", None) if "loss_function" in (read_by(module) or ()) else None
        if getattr(theirs, "__name__", "") == "ForCausalLMLoss":
            module.loss_function = CausalLoss(comm)  # type: ignore[assignment]
        elif hasattr(module, "save_pretrained"):
            module.register_forward_pre_hook(NoLabels(), with_kwargs=True)
        if hasattr(module, "generate"):
            module.generate = NoLogits()  # type: ignore[assignment]
