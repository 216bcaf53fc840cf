"""Plans of `parallelize`: matching the patterns to the modules of a model, and the roles of these modules."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch import nn

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..arguments import as_int
from ..overlap.keys import Overlap
from ..wire import Dtype
from .dropout import FUNCTIONS, Dropout

NAME = "parallelize"

_LINEAR = "a torch.nn.Linear or transformers' Conv1D"
LAYER_ROLES = {  # role of a module that a parallel layer replaces -> the type that the module must have
    "column": _LINEAR,
    "row": _LINEAR,
    "key_value": _LINEAR,
    "vocab_embedding": "a torch.nn.Embedding",
    "vocab_head": "a torch.nn.Linear",
}
PLACEMENTS = ("partial", "sequence", "replicated")  # of a module that is kept; of several, the first one counts
_KEPT_ROLES = {  # role of a module that is kept -> its option
    **dict.fromkeys(PLACEMENTS),
    "shared_input": "input",
    "sequence_begin": "input",
    "sequence_end": None,
    "divide": "attributes",
    "attention_dropout": "p",
}
_FUNCTION = "a function"  # role of a module that a function in the plan replaces; its option: "makes"
_EXCLUSIVE_ROLES = {*LAYER_ROLES, *PLACEMENTS, _FUNCTION}  # if two patterns match a module, the later one decides

_Roles = dict[str, dict[str, Any]]  # name -> options


class Site(NamedTuple):
    """A module that the plan matches, with its roles. path: "" is the model itself"""

    path: str
    module: nn.Module
    roles: _Roles
    shared: str | None = None  # path of the "shared_input" module that contains it, if any

    @property
    def title(self) -> str:
        return title_of(self.path, self.module)

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def layer(self) -> str | None:
        """Its role in LAYER_ROLES; None: no parallel layer replaces it."""
        return next((role for role in self.roles if role in LAYER_ROLES), None)

    @property
    def function(self) -> Callable[..., Any] | None:
        return self.roles.get(_FUNCTION, {}).get("makes")

    @property
    def options(self) -> dict[str, Any]:
        """The options of the parallel layer."""
        return self.roles[self.layer] if self.layer else {}

    @property
    def is_column(self) -> bool:
        return self.layer in ("column", "key_value")

    @property
    def divided(self) -> list[str]:
        return list(self.roles.get("divide", {}).get("attributes", ()))


@dataclass
class PlannedModel:
    """A model, the arguments of `parallelize`, and the modules that the plan matches."""

    model: nn.Module
    comm: Communicator
    sequence_parallel: bool
    seq_dim: int
    overlap: Overlap
    reduce_dtype: Dtype
    gather_logits: bool
    sites: dict[str, Site] = field(default_factory=dict)  # by path, in the order of the model

    def has_partial_gradients(self, placement: str | None) -> bool:
        """Return whether the gradients of a module with this placement must be summed over the ranks."""
        return placement == "partial" or (placement == "sequence" and self.sequence_parallel)

    def of_role(self, role: str) -> list[Site]:
        return [site for site in self.sites.values() if role in site.roles]

    def children(self, path: str) -> list[Site]:
        return [site for site in self.sites.values() if site.parent == path != site.path]

    def placement(self, path: str) -> str | None:
        """Return the placement that the plan gives a module, or the nearest module that contains it."""
        roles = (self.sites[one].roles for one in ancestors(path) if one in self.sites)
        return next((placement for of_one in roles for placement in PLACEMENTS if placement in of_one), None)

    def dropouts(self) -> dict[str, str | None]:
        """Return the placement of each of torch's dropout modules, subclasses included, by path."""
        found = {}
        for path, module in self.model.named_modules():
            by_function = path in self.sites and self.sites[path].function is not None
            if path and isinstance(module, tuple(FUNCTIONS)) and not isinstance(module, Dropout) and not by_function:
                found[path] = self.placement(path)
        return found

    def config_heads(self, name: str, path: str) -> int:
        """Return config.<name> of the full model, or of the outermost module on the path that has it."""
        for around in reversed(ancestors(path)):
            heads = as_int(getattr(getattr(self.model.get_submodule(around), "config", None), name, None))
            if heads is not None:
                return int(heads)
        raise ValueError(
            f"{NAME}: {path}: the plan reads model.config.{name}, which the model does not have; correct the option "
            "'heads' of its role"
        )

    def num_heads(self, site: Site) -> int | None:
        """Return how many heads the layer's outputs are, by the option "heads"; None: the plan does not say."""
        return self.config_heads(site.options["heads"], site.path) if "heads" in site.options else None

    def stacks(self) -> list[str]:
        """Return the paths of the lists of layers that are sequence parallel; or of the single module, if it is not in
        a list."""
        begins = self.of_role("sequence_begin")
        lists = (isinstance(self.model.get_submodule(site.parent), nn.ModuleList) for site in begins)
        return [site.parent if inside else site.path for site, inside in zip(begins, lists, strict=True)]


def ancestors(path: str) -> list[str]:
    """Return the path and those of the modules that contain it, innermost first; the last one is "", the model's."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def title_of(path: str, module: nn.Module) -> str:
    """Return the path as errors name it."""
    return path or f"'' ({type(module).__name__}, the model itself)"


def is_within(path: str, around: str) -> bool:
    """Return whether `path` is `around`, or a module in it."""
    return not around or f"{path}.".startswith(f"{around}.")


def widths_of(linear: Any) -> tuple[int, int]:
    """Return (in_features, out_features) of an nn.Linear or transformers' Conv1D."""
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, nn.Linear) else (rows, columns)


def probability(value: Any) -> float:
    """Return the probability of an attribute that is a number or a dropout module."""
    return float(getattr(value, "p", value))


def names_read(module: nn.Module) -> tuple[str, ...]:
    """Return the names in the bytecode of its forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code.co_names if code is not None else ()


def reads(module: nn.Module, name: str) -> bool:
    """Return whether the module itself uses its parameter, rather than only holding it for a submodule."""
    return next(module.children(), None) is None or name in names_read(module)


def reject(path: str, text: str) -> NoReturn:
    raise ValueError(f"{NAME}: {path}{text}")


# ------------------------------------------------------------------------------------------------- reading


def read(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Site]:
    """Return the modules that the plan matches, by path, in the order of the model."""
    if not isinstance(plan, Mapping):
        raise TypeError(f"{NAME}: plan is {shown(plan)}, expected a dict of patterns and roles, such as ad.plans.llama")
    modules = dict(model.named_modules())
    found: dict[str, _Roles] = {}
    for pattern, value in plan.items():
        new = _roles(pattern, value)
        for path in _matching(modules, pattern):
            earlier = found.setdefault(path, {})
            for role in earlier.keys() & _EXCLUSIVE_ROLES if new.keys() & _EXCLUSIVE_ROLES else ():
                del earlier[role]
            earlier.update(new)
    sharing = [path for path, roles in found.items() if "shared_input" in roles]
    sites = {}
    for path, module in modules.items():
        if path in found:
            shared = next((one for one in sharing if path != one and is_within(path, one)), None)
            sites[path] = Site(path, module, found[path], shared)
            _check_roles(sites[path])
    if plan and not any(site.layer or site.function for site in sites.values()):
        reject("", f"the plan shards no module of {type(model).__name__}; pass the plan of this model")
    for one in sharing:
        if not any((site.function or site.is_column) and site.shared == one for site in sites.values()):
            reject(
                title_of(one, modules[one]),
                " is 'shared_input', but no module in it is 'column'; expected one, since the gradient of the input is "
                "summed over the ranks: remove 'shared_input'",
            )
    return sites


def _check_roles(site: Site) -> None:
    """Check that a module is replaced by one layer only, and then has no role of a module that is kept."""
    if site.layer and not site.path:
        reject(
            site.title,
            f" is {site.layer!r} in the plan, but only modules in a model are replaced; make the layer with "
            "from_linear(model, comm), or put the model into a torch.nn.Sequential",
        )
    others = [role for role in site.roles if role != site.layer]
    if site.layer and others:
        other = "a function" if others[0] == _FUNCTION else repr(others[0])
        reject(
            site.title,
            f" is both {site.layer!r} and {other} in the plan; keep one of them (roles of modules that are not "
            "replaced go to the module that contains it)",
        )
    if site.shared is not None and site.layer in ("vocab_embedding", "vocab_head"):
        around = site.shared or "the model"
        reject(site.path, f" is {site.layer!r}, but it is within {around}, which is 'shared_input'; use 'column'")


def _matching(modules: Mapping[str, nn.Module], pattern: Any) -> list[str]:
    """Return the paths of the modules that the pattern matches."""
    if not isinstance(pattern, str):
        raise TypeError(f"{NAME}: the plan has the key {shown(pattern)}, expected a pattern of module paths (a str)")
    paths = [path for path in modules if _matches(_names(modules, path), pattern.split(".") if pattern else [])]
    if not paths and not pattern.startswith("**."):
        near = [path for path in modules if path and path.rpartition(".")[2] == pattern.rpartition(".")[2]][:3]
        there = f"similar: {', '.join(near)}" if near else "see [name for name, _ in model.named_modules()]"
        reject("", f"the pattern {pattern!r} matches no module; {there}, or begin it with '**.' if it may match none")
    return paths


def _names(modules: Mapping[str, nn.Module], path: str) -> list[tuple[str, ...]]:
    """Return the names of each part of a path: its own, and in a list also its index from the end ("-1" the last)."""
    found: list[tuple[str, ...]] = []
    for one in reversed(ancestors(path)[:-1]):
        parent, _, name = one.rpartition(".")
        around = modules[parent]
        if isinstance(around, (nn.ModuleList, nn.Sequential)) and name.isdigit():
            found.append((name, str(int(name) - len(around))))
        else:
            found.append((name,))
    return found


def _matches(names: list[tuple[str, ...]], pattern: list[str]) -> bool:
    if not names or not pattern:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or _matches(names[1:], pattern)
    return any(fnmatch.fnmatchcase(name, pattern[0]) for name in names[0]) and _matches(names[1:], pattern[1:])


def _roles(pattern: str, value: Any) -> _Roles:
    """Return the roles that the plan gives a pattern, with their options."""
    found: _Roles = {}
    for one in value if isinstance(value, list) else [value]:
        if callable(one):
            found[_FUNCTION] = {"makes": one}
            continue
        name, options = one if isinstance(one, tuple) and len(one) == 2 else (one, {})
        known = isinstance(name, str) and name in (*LAYER_ROLES, *_KEPT_ROLES)
        if not known or not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
            raise ValueError(
                f"{NAME}: the plan has the role {shown(one)} for {pattern!r}, expected a function, or one of "
                f"{', '.join((*LAYER_ROLES, *_KEPT_ROLES))}, or a pair of one and a dict of options"
            )
        unknown = [key for key in options if name in _KEPT_ROLES and key != _KEPT_ROLES[name]]
        if unknown:
            raise ValueError(
                f"{NAME}: the role {name!r} for {pattern!r} has the option {shown(unknown[0])}, expected "
                f"{_KEPT_ROLES[name] or 'none'}"
            )
        found[name] = dict(options)
    return found
