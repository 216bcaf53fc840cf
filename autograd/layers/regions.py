"""What the modules that stay see: whole hidden states, a part of the sequence, or this rank's heads and columns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from .plan import KINDS, PLACES, Site, above


class Stay(NamedTuple):
    """A module that has parameters, under one of its names, and is not replaced."""

    path: str
    module: nn.Module
    said: str | None  # "partial", "sequence" or "replicated": of it, or else of the nearest module around
    made: bool  # a function of the plan makes it, or what is around
    shared: str  # path of the module with "shared_input" that it is, or is in
    beside: str | None  # path of the nearest module around, or itself, that has "column" layers; "" is the model
    inside: bool  # where each rank has a part of the sequence, with sequence parallelism
    whole: bool  # it is as wide as the input of these "column" layers

    def is_partial(self, sequence_parallel: bool) -> bool:
        """Whether each rank has a part of its gradients."""
        return self.said == "partial" or (self.said == "sequence" and sequence_parallel)

    @property
    def right(self) -> str:
        """The role that is right for it."""
        if self.shared or (self.beside is not None and not self.whole):
            return "partial"
        return "sequence" if self.inside else "replicated"


def staying(model: nn.Module, sites: Mapping[str, Site]) -> list[Stay]:
    """Modules of several names are there under each."""
    first = names(model)
    columns: dict[str, list[Site]] = {}
    for site in sites.values():
        if site.roles.keys() & {"column", "key_value"}:
            columns.setdefault(site.parent, []).append(site)
    parts = _parts_of_sequence(sites, model)
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        own = list(module.parameters(recurse=False))
        around = [first[one] for one in above(path)]
        sited = [sites[one] for one in around if one in sites]
        if not own or (sited and sited[0].path == first[path] and any(KINDS[role] for role in sited[0].roles)):
            continue
        beside = next((one for one in [*around, ""] if one in columns), None)
        widths = {widths_of(site.module)[0] for site in columns.get(beside or "", ())} if beside is not None else set()
        found.append(
            Stay(
                path,
                module,
                next((place for site in sited for place in PLACES if place in site.roles), None),
                any(site.function is not None for site in sited),
                next((site.path for site in sited if "shared_input" in site.roles), ""),
                beside,
                any(one in parts for one in around),
                any(one.dim() and one.shape[-1] in widths for one in own),
            )
        )
    return found


def names(model: nn.Module) -> dict[str, str]:
    """Every path of a module -> its first one."""
    first = {id(module): path for path, module in model.named_modules()}
    return {path: first[id(module)] for path, module in model.named_modules(remove_duplicate=False)}


def stacks(model: nn.Module, sites: Mapping[str, Site]) -> list[str]:
    """Paths of the lists of layers in which the sequence is cut; of the one module, where it is not in a list."""
    begins = [site for site in sites.values() if "sequence_begin" in site.roles]
    lists = [isinstance(model.get_submodule(site.parent), nn.ModuleList) and site.parent for site in begins]
    return [one or site.path for one, site in zip(lists, begins, strict=True)]


def _parts_of_sequence(sites: Mapping[str, Site], model: nn.Module) -> set[str]:
    """Paths of the layers of these lists, and of the modules at whose ends the sequence is gathered."""
    lists = {one for one in stacks(model, sites) if one not in sites}
    begins = [site.path for site in sites.values() if "sequence_begin" in site.roles]
    ends = {site.path for site in sites.values() if "sequence_end" in site.roles}
    layers = {path for path, _ in model.named_modules() if path.rpartition(".")[0] in lists}
    return layers | {end for end in ends if not any(f"{one}.".startswith(f"{end}.") for one in begins)}


def outside(stay: Stay, model: nn.Module, sites: Mapping[str, Site]) -> bool:
    """Whether it cannot be between "sequence_begin" and "sequence_end": not within the module that has both."""
    ends = [site.path for site in sites.values() if "sequence_end" in site.roles]
    if stay.inside or not ends:
        return False
    if isinstance(stay.module, nn.Embedding):
        return True
    return not any(f"{stay.path}.".startswith(max(common(one, end) for end in ends)) for one in stacks(model, sites))


def common(one: str, other: str) -> str:
    """The path, and a dot, of the smallest module that has both."""
    found = ""
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        found += f"{a}."
    return found


def widths_of(linear: Any) -> tuple[int, int]:
    """How many inputs and outputs an nn.Linear has, or transformers' Conv1D."""
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, nn.Linear) else (rows, columns)


def read_by(module: nn.Module) -> set[str] | None:
    """Names in the code of its forward, and of the methods that this names; None: it has none."""
    kind: Any = type(module)
    if kind.forward is nn.Module.forward:
        return None
    found: set[str] = set()
    waiting = ["forward"]
    while waiting:
        code = getattr(inspect.unwrap(getattr(kind, waiting.pop())), "__code__", None)
        new = _names(code) - found if code is not None else set()
        found |= new
        waiting += [name for name in new if inspect.isfunction(getattr(kind, name, None))]
    return found


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))
