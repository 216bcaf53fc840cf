"""What a plan for `parallelize` says of the modules of a model."""

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
from ..overlap.config import Overlap
from ..wire import Dtype

NAME = "parallelize"

_LINEAR = "a torch.nn.Linear or transformers' Conv1D"
LAYERS = {  # role of a module that a layer replaces -> what the module has to be
    "column": _LINEAR,
    "row": _LINEAR,
    "key_value": _LINEAR,
    "vocab_embedding": "a torch.nn.Embedding",
    "vocab_head": "a torch.nn.Linear",
}
PLACES = ("partial", "sequence", "replicated")  # where a module that stays is; of several, the first one counts
_STAYING = {  # role of a module that stays -> its option
    **dict.fromkeys(PLACES),
    "shared_input": "input",
    "sequence_begin": "input",
    "sequence_end": None,
    "divide": "attributes",
    "attention_dropout": "p",
}
_FUNCTION = "a function"  # the role of a module that a function of the plan replaces; its option: "makes"
_DECIDING = {*LAYERS, *PLACES, _FUNCTION}  # of two patterns that fit a module, the later one says which

_Roles = dict[str, dict[str, Any]]  # name -> options


class Site(NamedTuple):
    """A module of which the plan says something."""

    path: str
    module: nn.Module
    roles: _Roles
    shared: str = ""  # path of the module around that gathers its input, if one does

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def layer(self) -> str | None:
        """The role by which a layer replaces it."""
        return next((role for role in self.roles if role in LAYERS), None)

    @property
    def function(self) -> Callable[..., Any] | None:
        return self.roles.get(_FUNCTION, {}).get("makes")

    @property
    def options(self) -> dict[str, Any]:
        """Those of the layer."""
        return self.roles[self.layer] if self.layer else {}

    @property
    def is_column(self) -> bool:
        return self.layer in ("column", "key_value")

    @property
    def divided(self) -> list[str]:
        return list(self.roles.get("divide", {}).get("attributes", ()))


@dataclass
class Planned:
    """A model, the arguments of `parallelize`, and what the plan says of which of its modules."""

    model: nn.Module
    comm: Communicator
    sequence_parallel: bool
    seq_dim: int
    overlap: Overlap
    reduce_dtype: Dtype
    gather_logits: bool
    sites: dict[str, Site] = field(default_factory=dict)  # by path, in the order of the model

    def is_summed(self, place: str | None) -> bool:
        """Whether each rank has a part of the gradients of a module that is there."""
        return place == "partial" or (place == "sequence" and self.sequence_parallel)

    def of_role(self, role: str) -> list[Site]:
        return [site for site in self.sites.values() if role in site.roles]

    def children(self, path: str) -> list[Site]:
        return [site for site in self.sites.values() if site.parent == path]

    def place(self, path: str) -> str | None:
        """Which of PLACES the plan says of a module, or else of the nearest one around."""
        roles = (self.sites[one].roles for one in above(path) if one in self.sites)
        return next((place for of_one in roles for place in PLACES if place in of_one), None)

    def dropouts(self) -> dict[str, str | None]:
        """Path of an nn.Dropout -> its place."""
        modules = self.model.named_modules()
        return {path: self.place(path) for path, module in modules if path and type(module) is nn.Dropout}

    def heads(self, name: str, path: str) -> int:
        """The number of heads that the configuration says: of the model, or of the nearest model around the path."""
        for around in ("", *reversed(above(path))):
            heads = as_int(getattr(getattr(self.model.get_submodule(around), "config", None), name, None))
            if heads is not None:
                return int(heads)
        raise ValueError(f"{NAME}: {path}: the plan names model.config.{name}, which the model does not have")

    def cut_heads(self, site: Site) -> int | None:
        """How many heads the plan says that the outputs of a layer are."""
        return self.heads(site.options["heads"], site.path) if "heads" in site.options else None

    def stacks(self) -> list[str]:
        """Paths of the lists of layers in which the sequence is cut; of the one module, where it is not in a list."""
        begins = self.of_role("sequence_begin")
        lists = (isinstance(self.model.get_submodule(site.parent), nn.ModuleList) for site in begins)
        return [site.parent if inside else site.path for site, inside in zip(begins, lists, strict=True)]


def above(path: str) -> list[str]:
    """The path, and those of the modules around."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def is_within(path: str, around: str) -> bool:
    """Also the path itself is."""
    return not around or f"{path}.".startswith(f"{around}.")


def widths_of(linear: Any) -> tuple[int, int]:
    """How many inputs and outputs an nn.Linear has, or transformers' Conv1D."""
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, nn.Linear) else (rows, columns)


def probability(value: Any) -> float:
    """Of an attribute: a number, or a dropout module."""
    return float(getattr(value, "p", value))


def names_read(module: nn.Module) -> tuple[str, ...]:
    """Names in the code of its forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code.co_names if code is not None else ()


def reads(module: nn.Module, name: str) -> bool:
    """Whether it uses its parameter, and does not hold it for a module within alone."""
    return next(module.children(), None) is None or name in names_read(module)


def refuse(path: str, text: str) -> NoReturn:
    raise ValueError(f"{NAME}: {path}{text}")


# ------------------------------------------------------------------------------------------------- reading


def read(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Site]:
    """The modules that the plan speaks of, by path, in the order of the model."""
    if not isinstance(plan, Mapping):
        raise TypeError(f"{NAME}: plan is {shown(plan)}, expected a dict of patterns and roles, such as ad.plans.llama")
    modules = dict(model.named_modules())
    found: dict[str, _Roles] = {}
    for pattern, value in plan.items():
        new = _roles(pattern, value)
        for path in _fitting(modules, pattern):
            earlier = found.setdefault(path, {})
            for role in earlier.keys() & _DECIDING if new.keys() & _DECIDING else ():
                del earlier[role]
            earlier.update(new)
    sharing = [path for path, roles in found.items() if "shared_input" in roles]
    sites = {}
    for path, module in modules.items():
        if path in found:
            shared = next((one for one in sharing if path != one and is_within(path, one)), "")
            sites[path] = Site(path, module, found[path], shared)
            _check_roles(sites[path])
    if plan and not any(site.layer or site.function for site in sites.values()):
        refuse("", f"no module of {type(model).__name__} is cut by this plan: is it that of another model?")
    for one in sharing:
        if not any((site.function or site.is_column) and site.shared == one for site in sites.values()):
            refuse(
                one,
                ": the plan says 'shared_input' of it, and of no module in it 'column': expected one, since the "
                "gradient of the input is summed over the ranks",
            )
    return sites


def _check_roles(site: Site) -> None:
    """That what is replaced is replaced by one thing, and has no role of a module that stays."""
    others = [role for role in site.roles if role != site.layer]
    if site.layer and others:
        more = "gives a function" if others[0] == _FUNCTION else others[0]
        refuse(
            site.path,
            f": the plan says {site.layer} and {more}; it can be one of them: a role of a module that stays is that "
            "of the module around",
        )
    if site.shared and site.layer in ("vocab_embedding", "vocab_head"):
        refuse(
            site.path, f": the plan says {site.layer} of it, within the 'shared_input' of {site.shared}; say 'column'"
        )


def _fitting(modules: Mapping[str, nn.Module], pattern: Any) -> list[str]:
    """Paths of the modules that the pattern fits."""
    if not isinstance(pattern, str):
        raise TypeError(f"{NAME}: the plan has the key {shown(pattern)}, expected a pattern of module paths")
    paths = [path for path in modules if path and _fits(_names(modules, path), pattern.split("."))]
    if not paths and not pattern.startswith("**."):
        near = [path for path in modules if path.rpartition(".")[2] == pattern.rpartition(".")[2]][:3]
        there = f"there are {', '.join(near)}" if near else "see [name for name, _ in model.named_modules()]"
        refuse("", f"no module fits the pattern {pattern!r}; {there}")
    return paths


def _names(modules: Mapping[str, nn.Module], path: str) -> list[tuple[str, ...]]:
    """Of each part of a path: its name, and in a list also how many from the end it is, "-1" the last one."""
    found: list[tuple[str, ...]] = []
    for one in reversed(above(path)):
        parent, _, name = one.rpartition(".")
        around = modules[parent]
        if isinstance(around, (nn.ModuleList, nn.Sequential)) and name.isdigit():
            found.append((name, str(int(name) - len(around))))
        else:
            found.append((name,))
    return found


def _fits(names: list[tuple[str, ...]], pattern: list[str]) -> bool:
    if not names or not pattern:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _fits(names, pattern[1:]) or _fits(names[1:], pattern)
    return any(fnmatch.fnmatchcase(name, pattern[0]) for name in names[0]) and _fits(names[1:], pattern[1:])


def _roles(pattern: str, value: Any) -> _Roles:
    """What the plan says of a pattern."""
    found: _Roles = {}
    for one in value if isinstance(value, list) else [value]:
        if callable(one):
            found[_FUNCTION] = {"makes": one}
            continue
        name, options = one if isinstance(one, tuple) and len(one) == 2 else (one, {})
        if name not in (*LAYERS, *_STAYING) or not isinstance(options, Mapping):
            raise ValueError(
                f"{NAME}: the plan says {shown(one)} of {pattern!r}, expected a function, or one of "
                f"{', '.join((*LAYERS, *_STAYING))}, or a pair of one and a dict of options"
            )
        unknown = [key for key in options if name in _STAYING and key != _STAYING[name]]
        if unknown:
            raise ValueError(
                f"{NAME}: the plan gives {name!r} of {pattern!r} the option {shown(unknown[0])}, expected "
                f"{_STAYING[name] or 'none'}"
            )
        found[name] = dict(options)
    return found
