"""What a plan for `parallelize` says of the modules of a model: patterns of paths, roles, options."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from pynccl.bindings.values import shown

NAME = "parallelize"

KINDS: dict[str, str] = {  # role -> what the module has to be
    "column": "a torch.nn.Linear or transformers' Conv1D",
    "row": "a torch.nn.Linear or transformers' Conv1D",
    "key_value": "a torch.nn.Linear or transformers' Conv1D",
    "vocab_embedding": "a torch.nn.Embedding",
    "vocab_head": "a torch.nn.Linear",
    "shared_input": "",
    "sequence": "",
    "partial": "",
    "sequence_begin": "",
    "sequence_end": "",
    "replicated": "",
    "divide": "",
    "attention_dropout": "",
}


class Site(NamedTuple):
    """A module of which the plan says something."""

    path: str
    parent: str
    module: nn.Module
    roles: dict[str, dict[str, Any]]  # name -> options
    function: Callable[..., Any] | None
    shared: bool  # its input is gathered by its parent


def read(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Site]:
    """The modules that the plan speaks of, by path, in the order of the model."""
    if not isinstance(plan, Mapping):
        raise TypeError(f"{NAME}: plan is {shown(plan)}, expected a dict of patterns and roles, such as ad.plans.llama")
    modules = dict(model.named_modules())
    lists = {path: len(one) for path, one in modules.items() if isinstance(one, (nn.ModuleList, nn.Sequential))}
    found: dict[str, tuple[dict[str, dict[str, Any]], Callable[..., Any] | None]] = {}
    fitting = 0
    for pattern, value in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"{NAME}: the plan has the key {shown(pattern)}, expected a pattern of module paths")
        paths = [path for path in modules if path and _fits(path.split("."), pattern.split("."), lists, "")]
        if not paths and not pattern.startswith("**."):
            near = [path for path in modules if path.rpartition(".")[2] == pattern.rpartition(".")[2]][:3]
            raise ValueError(
                f"{NAME}: no module fits the pattern {pattern!r}"
                + (f"; there are {', '.join(near)}" if near else "; see [name for name, _ in model.named_modules()]")
            )
        cuts = is_function(value) or any(KINDS[role] for role in _roles(pattern, value))
        fitting += bool(paths) and cuts
        for path in paths:
            roles, function = found.get(path, ({}, None))
            found[path] = ({**roles, **_roles(pattern, value)}, value if is_function(value) else function)
    if not fitting and plan:
        raise ValueError(
            f"{NAME}: no module of {type(model).__name__} is cut by this plan: is it that of another model?"
        )
    sharing = {path for path, (roles, _) in found.items() if "shared_input" in roles}
    return {
        path: Site(path, path.rpartition(".")[0], modules[path], *found[path], path.rpartition(".")[0] in sharing)
        for path in modules
        if path in found
    }


def _fits(path: list[str], pattern: list[str], lists: Mapping[str, int], above: str) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        if _fits(path, pattern[1:], lists, above):
            return True
        return bool(path) and _fits(path[1:], pattern, lists, f"{above}.{path[0]}".lstrip("."))
    if not path:
        return False
    wanted = pattern[0]
    if wanted.startswith("-") and above in lists:
        wanted = str(lists[above] + int(wanted))
    return fnmatch.fnmatchcase(path[0], wanted) and _fits(
        path[1:], pattern[1:], lists, f"{above}.{path[0]}".lstrip(".")
    )


def is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, str)


def _roles(pattern: str, value: Any) -> dict[str, dict[str, Any]]:
    if is_function(value):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for one in value if isinstance(value, list) else [value]:
        name, options = one if isinstance(one, tuple) and len(one) == 2 else (one, {})
        if name not in KINDS or not isinstance(options, Mapping):
            raise ValueError(
                f"{NAME}: the plan says {shown(one)} of {pattern!r}, expected a function, or one of "
                f"{', '.join(KINDS)}, or a pair of one and a dict of options"
            )
        found[name] = dict(options)
    return found
