"""The layer that takes the place of a module, as the plan says."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..arguments import as_int
from ..mesh import Mesh
from ..overlap.config import Overlap
from ..torch_internals import has_hooks
from ..wire import Dtype
from .dropout import Dropout
from .linear import ColumnParallelLinear, KeyValueLinear, RowParallelLinear
from .model_hooks import Entering
from .plan import KINDS, NAME, Site, above
from .shards import Sharded
from .vocabulary import VocabParallelEmbedding, VocabParallelHead


class Given(NamedTuple):
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
        """The number of heads that the configuration says: of the model, or of the first model in it around the path
        that says it."""
        around = ["", *reversed(above(path))]
        found = (as_int(getattr(getattr(self.model.get_submodule(one), "config", None), name, None)) for one in around)
        heads = next((one for one in found if one is not None), None)
        if heads is None:
            raise ValueError(f"{NAME}: {path}: the plan names model.config.{name}, which the model does not have")
        return int(heads)

    def shared_by(self, heads: int) -> Mesh:
        """The ranks as a grid of heads, and of those that share one."""
        if heads not in self.meshes:
            self.meshes[heads] = Mesh(self.comm, {"heads": heads, "shared": self.comm.size // heads})
        return self.meshes[heads]


def replacement(given: Given, site: Site, dry: bool) -> nn.Module | None:
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
    besides = [one for one in ("shared_input", "sequence_begin", "sequence_end") if one in site.roles]
    if besides:
        raise ValueError(
            f"{NAME}: {site.path}: the plan says {role}, and {besides[0]}, which is for a module that stays; say "
            "that of the module around"
        )
    if site.shared and role.startswith("vocab"):
        raise ValueError(
            f"{NAME}: {site.path} is within {site.shared}, whose input 'column' layers share, and the plan says {role} "
            "of it, which takes what is equal on all ranks; say 'column'"
        )
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
        own = {id(one) for one in module.parameters(recurse=False)}
        tied = [
            name
            for name, one in model.named_modules()
            if one is not module and any(id(each) in own for each in one.parameters(recurse=False))
        ]
        raise TypeError(
            f"{NAME}: {path} is {type(module).__name__} with {' and '.join(more)}, which would be lost in the layer in "
            "its place; say 'replicated'"
            + (f", also of {' and '.join(tied)}, which has the same parameter" if tied else "")
            + ", or give a function that makes the layer"
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


def _make(given: Given, site: Site, role: str, module: Any, dry: bool) -> nn.Module:
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


def dropout(given: Given, module: nn.Module, place: str) -> nn.Module:
    assert isinstance(module, nn.Dropout)
    cut = place == "partial" or (place == "sequence" and given.sequence_parallel)
    return Dropout(module.p, given.comm, cut, module.inplace).train(module.training)
