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
    shared: str  # path of the module around that gathers its input, if one does


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
        new, made_by = _roles(pattern, value)
        fitting += bool(paths) and (made_by is not None or any(KINDS[role] for role in new))
        for path in paths:
            roles, function = found.get(path, ({}, None))
            if made_by is not None or new.keys() & _EITHER:  # of two patterns the later one says it
                roles, function = {role: options for role, options in roles.items() if role not in _EITHER}, None
            found[path] = ({**roles, **new}, made_by or function)
    if not fitting and plan:
        raise ValueError(
            f"{NAME}: no module of {type(model).__name__} is cut by this plan: is it that of another model?"
        )
    sharing = {path for path, (roles, _) in found.items() if "shared_input" in roles}
    for one in sharing:
        within = [found[path] for path in found if path.startswith(f"{one}.")]
        if not any(function is not None or roles.keys() & {"column", "key_value"} for roles, function in within):
            raise ValueError(
                f"{NAME}: the plan says 'shared_input' of {one}, and of no module in it 'column': expected one, since "
                "the gradient of the input is summed over the ranks"
            )
    return {
        path: Site(
            path,
            path.rpartition(".")[0],
            modules[path],
            *found[path],
            next((one for one in sharing if path.startswith(f"{one}.")), ""),
        )
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


def above(path: str) -> list[str]:
    """The path, and those of the modules around."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _roles(pattern: str, value: Any) -> tuple[dict[str, dict[str, Any]], Callable[..., Any] | None]:
    """What the plan says of a pattern: roles with options, and the function, if there is one."""
    found: dict[str, dict[str, Any]] = {}
    function = None
    for one in value if isinstance(value, list) else [value]:
        if callable(one):
            function = one
            continue
        name, options = one if isinstance(one, tuple) and len(one) == 2 else (one, {})
        if not isinstance(name, str) or name not in KINDS or not isinstance(options, Mapping):
            raise ValueError(
                f"{NAME}: the plan says {shown(one)} of {pattern!r}, expected a function, or one of "
                f"{', '.join(KINDS)}, or a pair of one and a dict of options"
            )
        unknown = [] if KINDS[name] else [key for key in options if key not in _OPTIONS.get(name, ())]
        if unknown:
            raise ValueError(
                f"{NAME}: the plan gives {name!r} of {pattern!r} the option {shown(unknown[0])}, expected "
                f"{' or '.join(_OPTIONS.get(name, ())) or 'none'}"
            )
        found[name] = dict(options)
    return found, function


PLACES = ("partial", "sequence", "replicated")  # where a module that stays is; what is said first counts, of several
_EITHER = {role for role in KINDS if KINDS[role]} | set(PLACES)

_OPTIONS = {  # of roles of modules that stay
    "shared_input": ("input",),
    "sequence_begin": ("input",),
    "divide": ("attributes",),
    "attention_dropout": ("p",),
}
