"""What a plan for `parallelize` says of the modules of a model, and what those that stay see of hidden states."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

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
_STAYING = {  # role of a module that stays -> its option
    "shared_input": "input",
    "sequence": None,
    "partial": None,
    "sequence_begin": "input",
    "sequence_end": None,
    "replicated": None,
    "divide": "attributes",
    "attention_dropout": "p",
}
PLACES = ("partial", "sequence", "replicated")  # where a module that stays is; what is said first counts, of several

_Roles = dict[str, dict[str, Any]]  # name -> options
_Function = Callable[..., Any]


class Site(NamedTuple):
    """A module of which the plan says something."""

    path: str
    module: nn.Module
    roles: _Roles
    function: _Function | None
    shared: str  # path of the module around that gathers its input, if one does

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def layer(self) -> str | None:
        """The role by which a layer replaces it."""
        return next((role for role in self.roles if role in LAYERS), None)

    @property
    def options(self) -> dict[str, Any]:
        """Those of the layer."""
        return self.roles[self.layer] if self.layer else {}

    @property
    def is_column(self) -> bool:
        return self.layer in ("column", "key_value")


class Stay(NamedTuple):
    """A module that has parameters and is not replaced."""

    path: str
    module: nn.Module
    role: str | None  # "partial", "sequence" or "replicated": of it, or else of the nearest module around
    by_function: bool  # a function of the plan makes it, or what is around
    shared: str  # path of the module with "shared_input" that it is, or is in
    columns_at: str | None  # path of the nearest module around, or itself, that has "column" layers; "" is the model
    in_sequence: bool  # where each rank has a part of the sequence, with sequence parallelism
    full_width: bool  # it is as wide as the input of these "column" layers

    @property
    def right_role(self) -> str:
        if self.shared or (self.columns_at is not None and not self.full_width):
            return "partial"
        return "sequence" if self.in_sequence else "replicated"


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

    def of_role(self, role: str) -> list[Site]:
        return [site for site in self.sites.values() if role in site.roles]

    def children(self, path: str) -> list[Site]:
        return [site for site in self.sites.values() if site.parent == path]

    def place(self, path: str) -> str | None:
        """Which of PLACES the plan says of a module, or else of the nearest one around."""
        roles = (self.sites[one].roles for one in above(path) if one in self.sites)
        return next((place for of_one in roles for place in PLACES if place in of_one), None)

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

    def is_partial(self, stay: Stay) -> bool:
        """Whether each rank has a part of its gradients."""
        return stay.role == "partial" or (stay.role == "sequence" and self.sequence_parallel)

    def stacks(self) -> list[str]:
        """Paths of the lists of layers in which the sequence is cut; of the one module, where it is not in a list."""
        begins = self.of_role("sequence_begin")
        lists = (isinstance(self.model.get_submodule(site.parent), nn.ModuleList) for site in begins)
        return [site.parent if inside else site.path for site, inside in zip(begins, lists, strict=True)]


# ------------------------------------------------------------------------------------------------- reading


def read(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Site]:
    """The modules that the plan speaks of, by path, in the order of the model."""
    if not isinstance(plan, Mapping):
        raise TypeError(f"{NAME}: plan is {shown(plan)}, expected a dict of patterns and roles, such as ad.plans.llama")
    modules = dict(model.named_modules())
    found: dict[str, tuple[_Roles, _Function | None]] = {}
    for pattern, value in plan.items():
        new, made_by = _roles(pattern, value)
        for path in _fitting(modules, pattern):
            roles, function = found.get(path, ({}, None))
            if made_by is not None or new.keys() & {*LAYERS, *PLACES}:
                # of two patterns the later one says what becomes of the module
                roles = {role: options for role, options in roles.items() if role not in (*LAYERS, *PLACES)}
                function = None
            found[path] = ({**roles, **new}, made_by or function)
    sharing = [path for path, (roles, _) in found.items() if "shared_input" in roles]
    sites = {}
    for path, module in modules.items():
        if path in found:
            shared = next((one for one in sharing if path.startswith(f"{one}.")), "")
            sites[path] = Site(path, module, *found[path], shared)
            _check_roles(sites[path])
    if plan and not any(site.layer or site.function for site in sites.values()):
        raise ValueError(
            f"{NAME}: no module of {type(model).__name__} is cut by this plan: is it that of another model?"
        )
    for one in sharing:
        if not any((site.function or site.is_column) and site.path.startswith(f"{one}.") for site in sites.values()):
            raise ValueError(
                f"{NAME}: the plan says 'shared_input' of {one}, and of no module in it 'column': expected one, since "
                "the gradient of the input is summed over the ranks"
            )
    return sites


def _check_roles(site: Site) -> None:
    """That what is replaced is replaced by one thing, and has no role of a module that stays."""
    others = [role for role in site.roles if role != site.layer]
    if site.layer and (others or site.function):
        more = f"and {others[0]}" if others else "and gives a function"
        raise ValueError(
            f"{NAME}: {site.path}: the plan says {site.layer} {more}; it can be one of them: a role of a module that "
            "stays is that of the module around"
        )
    if site.shared and site.layer in ("vocab_embedding", "vocab_head"):
        raise ValueError(
            f"{NAME}: {site.path} is within {site.shared}, whose input 'column' layers share, and the plan says "
            f"{site.layer} of it, which takes what is equal on all ranks; say 'column'"
        )


def _fitting(modules: Mapping[str, nn.Module], pattern: Any) -> list[str]:
    """Paths of the modules that the pattern fits."""
    if not isinstance(pattern, str):
        raise TypeError(f"{NAME}: the plan has the key {shown(pattern)}, expected a pattern of module paths")
    lists = {path: len(one) for path, one in modules.items() if isinstance(one, (nn.ModuleList, nn.Sequential))}
    paths = [path for path in modules if path and _fits(path.split("."), pattern.split("."), lists, "")]
    if not paths and not pattern.startswith("**."):
        near = [path for path in modules if path.rpartition(".")[2] == pattern.rpartition(".")[2]][:3]
        raise ValueError(
            f"{NAME}: no module fits the pattern {pattern!r}"
            + (f"; there are {', '.join(near)}" if near else "; see [name for name, _ in model.named_modules()]")
        )
    return paths


def _fits(path: list[str], pattern: list[str], lists: Mapping[str, int], around: str) -> bool:
    """around: the path of what has been compared already."""
    if not pattern:
        return not path
    wanted = pattern[0]
    if wanted == "**" and _fits(path, pattern[1:], lists, around):
        return True
    if not path:
        return False
    within = f"{around}.{path[0]}".lstrip(".")
    if wanted == "**":
        return _fits(path[1:], pattern, lists, within)
    if wanted.startswith("-") and around in lists:
        wanted = str(lists[around] + int(wanted))
    return fnmatch.fnmatchcase(path[0], wanted) and _fits(path[1:], pattern[1:], lists, within)


def _roles(pattern: str, value: Any) -> tuple[_Roles, _Function | None]:
    """What the plan says of a pattern: roles with options, and the function, if there is one."""
    found: _Roles = {}
    function = None
    for one in value if isinstance(value, list) else [value]:
        if callable(one):
            function = one
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
    return found, function


# ------------------------------------------------------------------------------------------------- what stays


def staying(planned: Planned) -> list[Stay]:
    model, sites = planned.model, planned.sites
    columns: dict[str, list[Site]] = {}
    for site in sites.values():
        if site.is_column:
            columns.setdefault(site.parent, []).append(site)
    sequences = _parts_of_sequence(planned)
    found = []
    for path, module in model.named_modules():
        own, around = list(module.parameters(recurse=False)), above(path)
        if not own or (path in sites and sites[path].layer):
            continue
        beside = next((one for one in [*around, ""] if one in columns), None)
        widths = [] if beside is None else [widths_of(site.module)[0] for site in columns[beside]]
        stay = Stay(
            path,
            module,
            role=planned.place(path),
            by_function=any(sites[one].function is not None for one in around if one in sites),
            shared=next((one for one in around if one in sites and "shared_input" in sites[one].roles), ""),
            columns_at=beside,
            in_sequence=any(f"{path}.".startswith(f"{one}.") for one in sequences),
            full_width=any(one.dim() and one.shape[-1] in widths for one in own),
        )
        found.append(stay)
    return found


def _parts_of_sequence(planned: Planned) -> list[str]:
    """Paths of the lists of layers in which it is cut, and of the modules at whose ends it is gathered."""
    begins = [site.path for site in planned.of_role("sequence_begin")]
    ends = [site.path for site in planned.of_role("sequence_end")]
    lists = [one for one in planned.stacks() if one not in planned.sites]
    return lists + [end for end in ends if not any(f"{one}.".startswith(f"{end}.") for one in begins)]


def above(path: str) -> list[str]:
    """The path, and those of the modules around."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def common(one: str, other: str) -> str:
    """The path, and a dot, of the smallest module that has both."""
    both = set(above(one)) & set(above(other))
    return f"{max(both, key=len)}." if both else ""


# ------------------------------------------------------------------------------------------------- of a module


def widths_of(linear: Any) -> tuple[int, int]:
    """How many inputs and outputs an nn.Linear has, or transformers' Conv1D."""
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, nn.Linear) else (rows, columns)


def probability(value: Any) -> float:
    """Of an attribute: a number, or a dropout module."""
    return float(getattr(value, "p", value))


def read_by(module: nn.Module) -> set[str] | None:
    """Names in the code of its forward, and of the methods that this names; None: it has none."""
    kind: Any = type(module)
    if kind.forward is nn.Module.forward:
        return None
    found: set[str] = set()
    waiting = ["forward"]
    while waiting:
        code = getattr(inspect.unwrap(getattr(kind, waiting.pop())), "__code__", None)
        new = _names_in(code) - found if code is not None else set()
        found |= new
        waiting += [name for name in new if inspect.isfunction(getattr(kind, name, None))]
    return found


def _names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_in(one) for one in code.co_consts if isinstance(one, CodeType)))
