"""What a plan says of a model: whether that can be, and what it leaves unsaid."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from pynccl.bindings.values import shown

from ..arguments import as_int
from .plan import KINDS, NAME, Site


def check_attributes(site: Site, ranks: int) -> None:
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


def check_between(model: nn.Module, sites: Mapping[str, Site]) -> None:
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


def dropouts(model: nn.Module, sites: Mapping[str, Site]) -> dict[str, str | None]:
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


def probability(value: Any) -> float:
    """Of an attribute: a number, or a dropout module."""
    return float(getattr(value, "p", value))


def warn_of_silence(model: nn.Module, sites: Mapping[str, Site]) -> None:
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
        for path, said in dropouts(model, sites).items()
        if said is None and probability(model.get_submodule(path)) > 0
    ]
    if silent:
        listed = ", ".join(path or type(model).__name__ for path in silent[:10]) + (", ..." if silent[10:] else "")
        warnings.warn(
            f"{NAME}: the plan says nothing of {listed}: replicated on every rank; name them in the plan, as "
            "'replicated' or 'sequence', to be clear",
            UserWarning,
            stacklevel=3,
        )
