"""parallelize: the modules of a model become tensor-parallel ones, after a plan."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..agreement import raise_alike
from ..arguments import as_int, check_comm
from ..mesh import Mesh
from ..overlap.config import Overlap
from ..torch_internals import has_hooks
from ..wire import Dtype
from .alike import SameInput, check_alike
from .dropout import Dropout
from .key_value import KeyValueLinear
from .linear import ColumnParallelLinear, RowParallelLinear
from .model_hooks import CausalLoss, Drawing, Entering, FromShared, Leaving, NoLogits, Outputs, Sequence
from .parts import keep_parts
from .plan import KINDS, NAME, Site, read
from .shards import Shard, Sharded, shard_of
from .vocabulary import VocabParallelEmbedding, VocabParallelHead

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
    given = _Given(model, comm, bool(sequence_parallel), seq_dim, overlap, reduce_dtype, gather_logits, {}, {})
    problem: Exception | None = None
    try:
        sites, made, tied = _looked_at(given, plan)
    except (ValueError, TypeError) as error:
        problem = error
    raise_alike(comm, problem)
    check_alike(model, sites, (sequence_parallel, seq_dim, overlap, reduce_dtype, gather_logits, init is None), comm)
    _warn(model, sites)
    sequence = Sequence()
    for path, site in sites.items():
        _hook(given, site, [one for one in sites.values() if one.parent == path], sequence)
    for path, cut in _dropouts(model, sites).items():
        if cut is not None:
            _put(model, path, _dropout(given, model.get_submodule(path), cut))
    init_of: Any = getattr(model, "_init_weights", None)  # of transformers
    for within in _stages(model):
        for module in within.values():
            if init is not None:
                _draw(module, comm, init)
            elif init_of is not None and _is_computed(module):
                _draw(module, comm, init_of)
        for one in within:
            if one in sites and made[one] is not None:
                replacement = _replacement(given, sites[one], dry=False)
                assert replacement is not None
                if sites[one].shared and getattr(replacement, "gather_input", None) is False:
                    looking = FromShared(one, given.entering[sites[one].shared])
                    replacement.register_forward_pre_hook(looking)
                _put(model, one, replacement)
    for group in tied:
        _tie(model, group)
    sequence.find(model)
    if not sequence_parallel or any("sequence_begin" in site.roles for site in sites.values()):
        model.register_forward_pre_hook(SameInput(comm), with_kwargs=True)
    model.register_forward_hook(Outputs(comm, seq_dim, sequence, _heads(model)))
    if any(isinstance(one, VocabParallelHead) and not one.gather_output for one in model.modules()):
        theirs = getattr(model, "loss_function", None)
        if getattr(theirs, "__name__", "") == "ForCausalLMLoss":
            model.loss_function = CausalLoss(comm)  # type: ignore[assignment]
        if hasattr(model, "generate"):
            model.generate = NoLogits()  # type: ignore[assignment]
    keep_parts(model)
    return model


def _looked_at(given: _Given, plan: Mapping[str, Any]) -> tuple[dict[str, Site], _Made, list[list[_User]]]:
    """What the plan says, the layers that it makes on the meta device, and parameters that several modules have; what
    cannot be is an error."""
    model = given.model
    if not isinstance(model, nn.Module):
        raise TypeError(f"{NAME}: model is {shown(model)}, expected a torch.nn.Module")
    sites = read(model, plan)
    made = {path: _replacement(given, site, dry=True) for path, site in sites.items()}
    for site in sites.values():
        _check_attributes(site, given.comm.size)
    if given.sequence_parallel:
        _check_between(model, sites)
    tied = _tied(model)
    _check_tied(tied, made)
    return sites, made, tied


class _Given(NamedTuple):
    model: nn.Module
    comm: Communicator
    sequence_parallel: bool
    seq_dim: int
    overlap: Overlap
    reduce_dtype: Dtype
    gather_logits: bool
    meshes: dict[int, Mesh]
    entering: dict[str, Entering]  # of modules whose input is shared

    def heads(self, name: str, path: str) -> int:
        """The number of heads that the model's configuration says."""
        config = getattr(self.model, "config", None)
        heads = as_int(getattr(config, name, None))
        if heads is None:
            raise ValueError(f"{NAME}: {path}: the plan names model.config.{name}, which the model does not have")
        return int(heads)

    def shared_by(self, heads: int) -> Mesh:
        """The ranks as a grid of heads, and of those that share one."""
        if heads not in self.meshes:
            self.meshes[heads] = Mesh(self.comm, {"heads": heads, "shared": self.comm.size // heads})
        return self.meshes[heads]


def _replacement(given: _Given, site: Site, dry: bool) -> nn.Module | None:
    """What takes the module's place; None: it stays. dry: on the meta device, to see whether it can be made."""
    kinds = [role for role in site.roles if KINDS[role]]
    if site.function is not None:
        if kinds:
            raise ValueError(
                f"{NAME}: {site.path}: the plan says {kinds[0]} and gives a function; it can be one of them"
            )
        if dry:
            return site.module
        made = site.function(site.module, given.comm)
        if made is not None and not isinstance(made, nn.Module):
            raise TypeError(f"{NAME}: {site.path}: the plan's function returned {shown(made)}, expected a module")
        return made or site.module
    if not kinds:
        return None
    if len(kinds) > 1:
        raise ValueError(f"{NAME}: {site.path}: the plan says {' and '.join(kinds)}; a module can be one of them")
    (role,) = kinds
    module = given.model.get_submodule(site.path)
    fits = isinstance(module, nn.Embedding if role == "vocab_embedding" else nn.Linear)
    fits = fits or (type(module).__name__ == "Conv1D" and "Conv1D" in KINDS[role])
    if isinstance(module, Sharded):
        raise TypeError(f"{NAME}: {site.path} is {type(module).__name__} already; make a model parallel once")
    _check_alone(given.model, site.path, module)
    if not fits:
        raise TypeError(
            f"{NAME}: {site.path} is {type(module).__name__}, and the plan says {role!r}: expected {KINDS[role]}"
        )
    try:
        return _make(given, site, role, _on_meta(module) if dry else module, dry)
    except (ValueError, TypeError) as error:
        if str(error).startswith(NAME):
            raise
        shape = next((list(one.shape) for one in module.parameters(recurse=False)), [])
        raise type(error)(f"{NAME}: {site.path}, weight {shape}: {error}") from None


def _check_alone(model: nn.Module, path: str, module: nn.Module) -> None:
    """That nothing is lost with the module, and that it is called: not its weight used by what is around."""
    more = []
    if any(isinstance(module, one) and type(module).forward is not one.forward for one in (nn.Linear, nn.Embedding)):
        more.append("a forward of its own")
    if has_hooks(module):
        more.append("hooks")
    if parametrize.is_parametrized(module):
        more.append("parametrizations")
    if isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention):
        more.append("a weight that nn.MultiheadAttention uses without calling it")
    if more:
        raise TypeError(
            f"{NAME}: {path} is {type(module).__name__} with {' and '.join(more)}, which would be lost in the layer in "
            "its place; say 'replicated', or give a function that makes the layer"
        )


class Conv1D(nn.Module):
    """What stands for transformers' Conv1D, on the meta device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(weight, device="meta"))
        self.bias = None if bias is None else nn.Parameter(torch.empty_like(bias, device="meta"))


def _on_meta(module: Any) -> nn.Module:
    """A module of the same kind without its memory."""
    kind = module.weight.dtype
    if isinstance(module, nn.Linear):
        return nn.Linear(module.in_features, module.out_features, module.bias is not None, "meta", kind)
    if not isinstance(module, nn.Embedding):
        return Conv1D(module.weight, module.bias)
    return nn.Embedding(
        module.num_embeddings,
        module.embedding_dim,
        module.padding_idx,
        module.max_norm,
        module.norm_type,
        module.scale_grad_by_freq,
        module.sparse,
        device="meta",
        dtype=kind,
    )


def _make(given: _Given, site: Site, role: str, module: Any, dry: bool) -> nn.Module:
    comm, options = given.comm, dict(site.roles[role])
    if role == "vocab_embedding":
        return VocabParallelEmbedding.from_embedding(module, comm, reduce_dtype=given.reduce_dtype, **options)
    if role == "vocab_head":
        return VocabParallelHead.from_linear(module, comm, **{"gather_output": given.gather_logits, **options})
    named = options.pop("heads", None)
    heads = comm.size if named is None else given.heads(named, site.path)
    both: dict[str, Any] = {
        "seq_dim": given.seq_dim,
        "overlap": given.overlap,
        "reduce_dtype": given.reduce_dtype,
        **options,
    }
    sequence_parallel = both.pop("sequence_parallel", given.sequence_parallel)
    if role == "row":
        return RowParallelLinear.from_linear(module, comm, sequence_parallel, **both)
    if site.shared:
        both.setdefault("gather_input", False)
    if role == "key_value" and heads < comm.size and comm.size % heads == 0:
        if not site.shared:
            raise ValueError(f"{heads} heads on {comm.size} ranks need 'shared_input' of the module around")
        if dry:  # the ranks that share a head are found together
            return module if module.weight.shape[0] % heads == 0 else _fail(module, heads)
        mesh = given.shared_by(heads)
        return KeyValueLinear.from_linear(module, mesh["heads"], shared=mesh["shared"], **both)
    if heads % comm.size:
        expected = "one to be a multiple of the other" if role == "key_value" else "a multiple of the ranks"
        raise ValueError(f"model.config.{named} is {heads}, on {comm.size} ranks; expected {expected}")
    return ColumnParallelLinear.from_linear(module, comm, sequence_parallel, **both)


def _fail(module: Any, heads: int) -> nn.Module:
    raise ValueError(f"{module.weight.shape[0]} outputs are not divisible by {heads} heads")


def _check_attributes(site: Site, ranks: int) -> None:
    """That the module has those that the plan names, and that they can be divided."""
    where = f"{NAME}: {site.path}: the plan names its attribute"
    kind = type(site.module).__name__
    for name in site.roles.get("divide", {}).get("attributes", ()):
        try:
            count = operator.attrgetter(name)(site.module)
        except (AttributeError, TypeError):
            raise ValueError(f"{where} {shown(name)}, which {kind} does not have") from None
        if as_int(count) is None or count % ranks:
            raise ValueError(
                f"{where} {name!r}, which is {shown(count)}: expected an integer that {ranks} ranks divide"
            )
    if "attention_dropout" in site.roles:
        name = site.roles["attention_dropout"].get("p")
        if not isinstance(name, str) or not hasattr(site.module, name):
            raise ValueError(f"{where} {shown(name)}, which {kind} does not have")


def _divide(module: Any, name: str, ranks: int) -> None:
    """An attribute of the module, or one within an object that it shares with others: then in a copy of that."""
    first, _, rest = name.partition(".")
    if rest:
        own = copy.copy(getattr(module, first))
        setattr(module, first, own)
        _divide(own, rest, ranks)
    else:
        setattr(module, name, getattr(module, name) // ranks)


def _check_between(model: nn.Module, sites: Mapping[str, Site]) -> None:
    """That what sees a part of the sequence, of its own parameters, is said to be so: their gradients are partial."""
    lists = {
        site.parent
        for site in sites.values()
        if "sequence_begin" in site.roles and isinstance(model.get_submodule(site.parent), nn.ModuleList)
    }
    for path, module in model.named_modules():
        if not any(path.startswith(f"{one}.") for one in lists if one):
            continue
        around = [sites[one] for one in _above(path) if one in sites]
        if any(
            site.function is not None
            or site.roles.keys() & {"sequence", "partial", "shared_input"}
            or any(KINDS[role] for role in site.roles)
            for site in around
        ):
            continue
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            raise ValueError(
                f"{NAME}: {path} sees a part of the sequence on each rank, so its gradients are partial; say "
                "'sequence' of it in the plan, or pass sequence_parallel=False"
            )


def _above(path: str) -> list[str]:
    """The path, and those of the modules around."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _hook(given: _Given, site: Site, within: list[Site], sequence: Sequence) -> None:
    """What is done for a module that stays: its input, its output, its parameters, its attributes."""
    comm, module, roles = given.comm, site.module, site.roles
    if "partial" in roles or ("sequence" in roles and given.sequence_parallel):
        for parameter in module.parameters():
            parameter.shard = Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]
    if "sequence_begin" in roles and given.sequence_parallel:
        name = roles["sequence_begin"].get("input")
        entering = Entering(site.path, comm, given.seq_dim, "cut", sequence, name)
        module.register_forward_pre_hook(entering, with_kwargs=True)
    if "shared_input" in roles:
        how = "gathered" if given.sequence_parallel else "copied"
        name = roles["shared_input"].get("input")
        entering = given.entering[site.path] = Entering(site.path, comm, given.seq_dim, how, sequence, name)
        module.register_forward_pre_hook(entering, with_kwargs=True)
    if "sequence_end" in roles and given.sequence_parallel:
        module.register_forward_hook(Leaving(comm, given.seq_dim, sequence))
    if "attention_dropout" in roles and _probability(getattr(module, roles["attention_dropout"]["p"])) > 0:
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


def _heads(model: nn.Module) -> int | None:
    """Of attention, if its configuration says."""
    heads = as_int(getattr(getattr(model, "config", None), "num_attention_heads", None))
    return None if heads is None else int(heads)


def _probability(value: Any) -> float:
    """Of an attribute: a number, or a dropout module."""
    return float(getattr(value, "p", value))


def _dropouts(model: nn.Module, sites: Mapping[str, Site]) -> dict[str, str | None]:
    """path of an nn.Dropout -> what the plan says of it, or of the module that it is in; None: nothing."""
    found: dict[str, str | None] = {}
    for path, module in model.named_modules():
        if type(module) is not nn.Dropout or not path:
            continue
        around = path
        while around and not (around in sites and sites[around].roles.keys() & set(_PLACES)):
            around = around.rpartition(".")[0]
        roles = sites[around].roles if around else {}
        found[path] = next((place for place in _PLACES if place in roles), None)
    return found


_PLACES = ("partial", "sequence", "replicated")  # what is said first counts, of several


def _dropout(given: _Given, module: nn.Module, place: str) -> nn.Module:
    assert isinstance(module, nn.Dropout)
    cut = place == "partial" or (place == "sequence" and given.sequence_parallel)
    return Dropout(module.p, given.comm, cut, module.inplace).train(module.training)


# Parameters that several modules have


class _User(NamedTuple):
    path: str  # of the module
    name: str  # of its parameter


def _tied(model: nn.Module) -> list[list[_User]]:
    users: dict[int, list[_User]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), []).append(_User(path, name))
    return [one for one in users.values() if len(one) > 1]


def _check_tied(tied: list[list[_User]], made: Mapping[str, nn.Module | None]) -> None:
    for group in tied:
        shards = {}
        for path, name in group:
            layer = made.get(path)
            if layer is not None:
                shards[f"{path}.{name}"] = shard_of(getattr(layer, name))
        cuts = {shard and (shard.dim, shard.shape, shard.splits) for shard in shards.values()}
        if len(cuts) > 1:
            raise ValueError(
                f"{NAME}: {' and '.join(shards)} are one parameter, and the plan cuts them in different ways; expected "
                "'vocab_embedding' and 'vocab_head', or 'replicated' for all"
            )


def _tie(model: nn.Module, group: list[_User]) -> None:
    """Make them one parameter again: the one that was drawn last, if they were drawn."""
    parameters = [getattr(model.get_submodule(path), name) for path, name in group]
    kept = next((one for one in reversed(parameters) if shard_of(one) is not None), parameters[-1])
    for path, name in group:
        setattr(model.get_submodule(path), name, kept)


def _warn(model: nn.Module, sites: Mapping[str, Site]) -> None:
    """Of what has parameters and is not mentioned."""
    silent = [
        path
        for path, module in model.named_modules()
        if path not in sites
        and any(True for _ in module.parameters(recurse=False))
        and not any(path.startswith(f"{one}.") for one in sites if sites[one].roles.keys() & {"sequence", "replicated"})
    ]
    silent += [
        path
        for path, said in _dropouts(model, sites).items()
        if said is None and _probability(model.get_submodule(path)) > 0
    ]
    if silent:
        listed = ", ".join(path or type(model).__name__ for path in silent[:10]) + (", ..." if silent[10:] else "")
        warnings.warn(
            f"{NAME}: the plan says nothing of {listed}: replicated on every rank; name them in the plan, as "
            "'replicated' or 'sequence', to be clear",
            UserWarning,
            stacklevel=3,
        )


def _stages(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """The modules in the order of model.apply, in pieces: all of a layer of a list, since the function that draws it
    may draw in its children once more; else each by itself."""
    kept: dict[str, nn.Module] = {}
    lists = [f"{path}." for path, one in model.named_modules() if isinstance(one, nn.ModuleList) and path]
    for path, module in list(_post_order(model)):
        kept[path] = module
        above = next((one for one in lists if path.startswith(one)), None)
        if above is None or "." not in path[len(above) :]:
            yield kept
            kept = {}


def _post_order(model: nn.Module, above: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        yield from _post_order(child, f"{above}.{name}".lstrip("."))
    yield above, model


def _is_computed(module: nn.Module) -> bool:
    """Whether it has nothing but buffers that no checkpoint has, such as the frequencies of rotary embeddings."""
    buffers = dict(module.named_buffers(recurse=False))
    if any(True for _ in module.parameters(recurse=False)) or not any(one.is_meta for one in buffers.values()):
        return False
    return buffers.keys().isdisjoint(module.state_dict())


def _draw(module: nn.Module, comm: Communicator, init: Callable[[nn.Module], Any]) -> None:
    """Give a module of the meta device memory, whole, and its initial values."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    marks = {name: shard_of(one) for name, one in module.named_parameters(recurse=False)}
    if any(one.is_meta for one in own):
        module.to_empty(device=comm.device, recurse=False)
    init(module)
    for name, one in module.named_parameters(recurse=False):
        if marks[name] is not None:
            one.shard = marks[name]  # type: ignore[attr-defined]


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    old = model.get_submodule(path)
    for parent in list(model.modules()):  # it may have several names
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, module)
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0  # no fast path, which uses weights and calls no layer
