"""parallelize: the modules of a model become tensor-parallel ones, after a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..arguments import as_int, check_comm
from ..mesh import Mesh
from ..ops.all_gather import all_gather, split
from ..ops.all_reduce import copy
from ..overlap.config import Overlap
from ..wire import Dtype
from .key_value import KeyValueLinear
from .linear import ColumnParallelLinear, RowParallelLinear
from .parts import keep_parts
from .plan import KINDS, NAME, Site, read
from .shards import Shard, Sharded, shard_of
from .vocabulary import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy


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
    "shared_input"    the input of this module is gathered once, for all "column" and "key_value" modules right in it
    "vocab_embedding" nn.Embedding -> VocabParallelEmbedding
    "vocab_head"      nn.Linear -> VocabParallelHead
    "sequence"        stays, and sees this rank's part of the sequence: `finish_gradients` sums its gradients
    "partial"         stays, and sees this rank's heads or columns: the same, without sequence parallelism, too
    "sequence_begin"  the input of this module is cut along the sequence
    "sequence_end"    the output of this module is gathered along the sequence
    "replicated"      stays
    "divide"          attributes that count what is on all ranks are divided by N. Options: attributes

    sequence_parallel  between "sequence_begin" and "sequence_end" each rank has 1/N of the sequence, which N has to
                       divide: padded, where it does not
    seq_dim            where hidden states have the sequence: 1 if the batch comes first
    gather_logits      False: a "vocab_head" leaves each rank its words; a model of transformers then has its loss by
                       `vocab_parallel_cross_entropy`
    init               of a model on the meta device. None: its parts stay there, for `load_full_state_dict`; of models
                       of transformers the buffers that no checkpoint has are made. A function
                       of a module, such as `model._init_weights` or `lambda m: m.reset_parameters()`: a layer at a time
                       is drawn whole, and this rank's part kept: as `model.apply(init)` of the unsharded model does
                       with the same seed

    After backward(): `finish_gradients(model)`, then `clip_grad_norm_`. ValueError and TypeError name the module,
    before anything is changed. UserWarning for modules with parameters of which the plan says nothing: they are
    replicated.
    """
    check_comm(NAME, comm)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{NAME}: model is {shown(model)}, expected a torch.nn.Module")
    given = _Given(model, comm, bool(sequence_parallel), seq_dim, overlap, reduce_dtype, gather_logits, {})
    sites = read(model, plan)
    made = {path: _replacement(given, site, dry=True) for path, site in sites.items()}
    tied = _tied(model)
    _check_tied(tied, made)
    _warn(model, sites)
    for path, site in sites.items():
        _hook(given, site, [one for one in sites.values() if one.parent == path])
    theirs: Any = getattr(model, "_init_weights", None)  # of transformers
    for within in _stages(model):
        for module in within.values():
            if init is not None:
                _draw(module, comm, init)
            elif theirs is not None and _is_computed(module):
                _draw(module, comm, theirs)
        for one in within:
            if one in sites and made[one] is not None:
                replacement = _replacement(given, sites[one], dry=False)
                assert replacement is not None
                _put(model, one, replacement)
    for group in tied:
        _tie(model, group)
    if not gather_logits and hasattr(model, "loss_function"):
        model.loss_function = _CausalLoss(comm)  # type: ignore[assignment]
    keep_parts(model)
    return model


class _Given(NamedTuple):
    model: nn.Module
    comm: Communicator
    sequence_parallel: bool
    seq_dim: int
    overlap: Overlap
    reduce_dtype: Dtype
    gather_logits: bool
    meshes: dict[int, Mesh]

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
    if site.function is not None:
        if dry:
            return site.module
        made = site.function(site.module, given.comm)
        if made is not None and not isinstance(made, nn.Module):
            raise TypeError(f"{NAME}: {site.path}: the plan's function returned {shown(made)}, expected a module")
        return made or site.module
    kinds = [role for role in site.roles if KINDS[role]]
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
    if role == "row":
        return RowParallelLinear.from_linear(module, comm, given.sequence_parallel, **both)
    if site.shared:
        both["gather_input"] = False
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
    return ColumnParallelLinear.from_linear(module, comm, given.sequence_parallel, **both)


def _fail(module: Any, heads: int) -> nn.Module:
    raise ValueError(f"{module.weight.shape[0]} outputs are not divisible by {heads} heads")


def _hook(given: _Given, site: Site, within: list[Site]) -> None:
    """What is done for a module that stays: its input, its output, its parameters, its attributes."""
    comm, module, roles = given.comm, site.module, site.roles
    if "partial" in roles or ("sequence" in roles and given.sequence_parallel):
        for parameter in module.parameters():
            parameter.shard = Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]
    if "sequence_begin" in roles and given.sequence_parallel:
        module.register_forward_pre_hook(_Entering(site.path, comm, given.seq_dim, "cut"), with_kwargs=True)
    if "shared_input" in roles:
        how = "gathered" if given.sequence_parallel else "copied"
        module.register_forward_pre_hook(_Entering(site.path, comm, given.seq_dim, how), with_kwargs=True)
    if "sequence_end" in roles and given.sequence_parallel:
        module.register_forward_hook(_Leaving(comm, given.seq_dim))
    for name in roles.get("divide", {}).get("attributes", ()):
        setattr(module, name, getattr(module, name) // comm.size)
    for one in within:
        options = one.roles.get("key_value")
        groups = getattr(module, "num_key_value_groups", None)
        if options is not None and "heads" in options and groups is not None:
            heads = given.heads(options["heads"], one.path)
            if heads < comm.size:
                whole = given.heads("num_attention_heads", one.path)
                module.num_key_value_groups = whole // comm.size  # type: ignore[assignment]


class _Entering:
    """A hook: the first tensor of a module's input is gathered along the sequence, or cut, or copied."""

    def __init__(self, path: str, comm: Communicator, seq_dim: int, how: str) -> None:
        self.path, self.comm, self.seq_dim, self.how = path, comm, seq_dim, how

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for at, x in enumerate(args):
            if isinstance(x, Tensor):
                return (*args[:at], self._changed(x), *args[at + 1 :]), kwargs
        for name, x in kwargs.items():
            if isinstance(x, Tensor):
                return args, {**kwargs, name: self._changed(x)}
        raise TypeError(f"{NAME}: {self.path} was called without a tensor, which was to be {self.how}")

    def _changed(self, x: Tensor) -> Tensor:
        if self.how == "copied":
            y: Tensor = copy(x, self.comm)
        elif self.how == "gathered":
            y = all_gather(x, self.comm, self.seq_dim, grad="sum")
        else:
            if x.dim() <= self.seq_dim or x.shape[self.seq_dim] % self.comm.size:
                raise ValueError(
                    f"{self.path}: hidden states of shape {list(x.shape)} cannot be cut along the sequence, dimension "
                    f"{self.seq_dim}, on {self.comm.size} ranks: pad it to a multiple of {self.comm.size}, or call "
                    "parallelize with sequence_parallel=False"
                )
            y = split(x, self.comm, self.seq_dim)
        return y


class _Leaving:
    """A hook: the first tensor of a module's output is gathered along the sequence."""

    def __init__(self, comm: Communicator, seq_dim: int) -> None:
        self.comm, self.seq_dim = comm, seq_dim

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self(_, args, output[0]), *output[1:])
        return all_gather(output, self.comm, self.seq_dim, grad="replicated")


class _CausalLoss:
    """The loss of a language model of transformers, of logits that are cut over the vocabulary."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        first, columns = vocab_size % self.comm.size, vocab_size // self.comm.size
        splits = [columns + (rank < first) for rank in range(self.comm.size)]
        mean = num_items_in_batch is None
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels,
            self.comm,
            ignore_index=ignore_index,
            reduction="mean" if mean else "sum",
            splits=splits,
        )
        return loss if mean else loss / num_items_in_batch


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
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
