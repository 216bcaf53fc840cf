"""Whether a plan fits the model and would give right gradients; what it leaves unsaid."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from pynccl.bindings.values import shown

from ..arguments import as_int
from .plan import NAME, Planned, Site, above, is_within, names_read, probability, reads, refuse, widths_of
from .shards import Sharded

# ------------------------------------------------------------------------------------------------- what is cut


def check_cut(planned: Planned) -> None:
    """That the layers that are cut fit what is around them."""
    ranks, sites = planned.comm.size, planned.sites
    for site in sites.values():
        _check_attributes(site, ranks)
    begins, ends = planned.of_role("sequence_begin"), planned.of_role("sequence_end")
    if planned.sequence_parallel and begins and not ends and not any(one.function for one in sites.values()):
        refuse(
            begins[0].path,
            ": the plan says 'sequence_begin' there, and 'sequence_end' of no module after it, so each rank would go "
            "on with a part of the sequence; say it of the module whose output is to be whole, besides 'sequence'",
        )
    if ranks > 1:
        for parent in sorted({site.parent for site in sites.values()}):
            _check_counts(planned, parent)
            _check_pieces(planned.children(parent))


def _check_attributes(site: Site, ranks: int) -> None:
    """That the module has those that the plan names, and that they can be divided."""
    drawn: list[Any] = [site.roles["attention_dropout"].get("p")] if "attention_dropout" in site.roles else []
    for name in [*drawn, *site.divided]:
        try:
            value = operator.attrgetter(name)(site.module)
        except (AttributeError, TypeError):
            kind = type(site.module).__name__
            refuse(site.path, f": the plan names its attribute {shown(name)}, which {kind} does not have")
        if name in site.divided and (as_int(value) is None or value % ranks):
            refuse(
                site.path,
                f": the plan names its attribute {name!r}, which is {shown(value)}: expected an integer that {ranks} "
                "ranks divide",
            )


_COUNTS = re.compile(r"heads$|^n_?head$")


def _check_counts(planned: Planned, parent: str) -> None:
    """That the forward of a module whose heads are cut does not count them by an attribute that says them all."""
    heads = {planned.cut_heads(site) for site in planned.children(parent)} - {None}
    module, around = planned.model.get_submodule(parent), planned.sites.get(parent)
    if not heads or (around is not None and around.function is not None):
        return
    read, divided = names_read(module), around.divided if around is not None else []
    config = getattr(module, "config", None) if "config" in read else None
    missing = []
    for name in sorted(filter(_COUNTS.search, read)):
        owner, said = (module, name) if hasattr(module, name) else (config, f"config.{name}")
        if getattr(owner, name, None) in heads and said not in divided:
            missing.append(said)
    if missing:
        refuse(
            parent,
            f": the forward of {type(module).__name__} counts heads by {' and '.join(missing)}, those of all ranks, "
            f"and the plan cuts them over {planned.comm.size} ranks; say ('divide', {{'attributes': "
            f"{[*divided, *missing]}}}) of it",
        )


def _check_pieces(sites: list[Site]) -> None:
    """That the plan says what lies side by side in the outputs of a layer, where they are more than one thing."""
    rows = [site for site in sites if site.layer == "row"]
    for site in sites:
        if not site.is_column or not rows or site.options.keys() & {"heads", "blocks"}:
            continue
        outputs, most = widths_of(site.module)[1], max(widths_of(one.module)[0] for one in rows)
        if outputs > most:
            refuse(
                site.path,
                f" has {outputs} outputs, and {rows[0].path} beside it reads {most}, so they are several things in one "
                "matrix, such as queries, keys and values; say how they lie: ('column', {'blocks': 3}) one after the "
                "other, {'heads': 'num_heads'} head by head, {'blocks': 1} if it is one",
            )


# ------------------------------------------------------------------------------------------------- what stays


class Stay(NamedTuple):
    """A module that has parameters and is not replaced."""

    path: str
    module: nn.Module
    role: str | None  # its place as the plan says
    right: str | None  # the one that fits what is around; None: a function of the plan makes that, so nobody knows
    why: str


def staying(planned: Planned) -> list[Stay]:
    sites, found = planned.sites, []
    for path, module in planned.model.named_modules():
        if next(module.parameters(recurse=False), None) is None or (path in sites and sites[path].layer):
            continue
        by_function = any(sites[one].function is not None for one in above(path) if one in sites)
        right = (None, "") if by_function else _right_place(planned, path, module)
        found.append(Stay(path, module, planned.place(path), *right))
    return found


_BESIDE, _AFTER = "is beside 'column' layers", "may see a part of the sequence on each rank"
_NOT_KNOWN = {  # what it sees: then any role will do, if the plan says one
    _BESIDE: "'partial' if it sees this rank's heads or columns, 'sequence' if all of them",
    _AFTER: "'sequence' if it does, 'replicated' if not",
}


def _right_place(planned: Planned, path: str, module: nn.Module) -> tuple[str, str]:
    """Which place fits what is around a module that stays, and why."""
    for around in planned.of_role("shared_input"):
        if is_within(path, around.path):
            return "partial", f"is within {around.path}, whose input 'column' layers share"
    widths = [widths_of(site.module)[0] for site in _beside(planned, path) if site.is_column]
    if widths and not any(one.dim() and one.shape[-1] in widths for one in module.parameters(recurse=False)):
        return "partial", _BESIDE
    begins, ends = ([site.path for site in planned.of_role(f"sequence_{one}")] for one in ("begin", "end"))
    parts = [one for one in planned.stacks() if one not in planned.sites or one in ends]
    parts += [end for end in ends if not any(is_within(begin, end) for begin in begins)]
    if any(is_within(path, one) for one in parts):
        return "sequence", "sees a part of the sequence on each rank"
    at = {one: index for index, (one, _) in enumerate(planned.model.named_modules())}
    for begin in begins:
        if at[begin] < at[path] < min((at[end] for end in ends if at[end] > at[begin]), default=0 if ends else len(at)):
            return "sequence", _AFTER
    return "replicated", "is not between 'sequence_begin' and 'sequence_end', nor between layers that are cut"


def _beside(planned: Planned, path: str) -> list[Site]:
    """What the plan says of the modules in the nearest one around, or in itself, that has "column" layers."""
    for around in [*above(path), ""]:
        children = planned.children(around)
        if any(site.is_column for site in children):
            return children
    return []


def check_staying(planned: Planned, stays: Iterable[Stay]) -> None:
    """That what the plan says of a module that stays, or leaves unsaid, gives right gradients."""
    for stay in stays:
        if stay.right is None:
            continue
        expected = _NOT_KNOWN.get(stay.why, repr(stay.right))
        fits = planned.is_summed(stay.role) == planned.is_summed(stay.right)
        fits &= (stay.role == "partial") == (stay.right == "partial")
        fits |= stay.why in _NOT_KNOWN and stay.role is not None
        if stay.role == "sequence" and stay.right == "replicated" and not planned.of_role("sequence_begin"):
            continue  # the caller cuts the sequence
        if not fits:
            said = f"the plan says {stay.role!r} of it" if stay.role else "the plan says nothing of it"
            layer = ", or 'column' or 'row' if it is to be cut" if isinstance(stay.module, nn.Linear) else ""
            refuse(stay.path or type(stay.module).__name__, f" {stay.why}, and {said}; say {expected}{layer}")
        if stay.role == "partial" and planned.comm.size > 1:
            _check_sizes(planned, stay)


def _check_sizes(planned: Planned, stay: Stay) -> None:
    """That a module between layers that are cut is not made for what all ranks have there: as wide as that, or with
    one of each for all heads."""
    beside = _beside(planned, stay.path)
    columns = [site for site in beside if site.is_column]
    cut = {widths_of(site.module)[1]: site.path for site in columns if planned.cut_heads(site) != 1}
    cut |= {widths_of(site.module)[0]: site.path for site in beside if site.layer == "row"}
    heads = {planned.cut_heads(site): site.path for site in columns}
    shapes = [one.shape for one in stay.module.parameters(recurse=False)]
    sizes = {shape[0] for shape in shapes if len(shape) == 1}
    counts = {shape[0] for shape in shapes if len(shape) > 1}
    if isinstance(stay.module, nn.Linear) or type(stay.module).__name__ == "Conv1D":
        inputs, outputs = widths_of(stay.module)
        sizes, counts = {outputs} | ({inputs} - {widths_of(site.module)[0] for site in columns}), set()
        _check_heads(planned, stay.path, columns, inputs, outputs)
    if stay.path in {site.parent for site in columns}:  # its own parameters
        counts |= sizes
    parent = planned.model.get_submodule(stay.path.rpartition(".")[0])
    if isinstance(parent, (nn.ModuleList, nn.ParameterList)):
        counts.add(len(parent))
    too_large = {size: path for size, path in cut.items() if size in sizes}
    too_large |= {count: path for count, path in heads.items() if count in counts and count not in (None, 1)}
    for size, path in too_large.items():
        refuse(
            stay.path,
            f" is made for all {size} of {path}, which the plan cuts over {planned.comm.size} ranks; cut it, too, "
            "or give a function in the plan that makes a layer of this rank's part",
        )


def _check_heads(planned: Planned, path: str, columns: Iterable[Site], inputs: int, outputs: int) -> None:
    """That a linear layer does not make all its heads on every rank, where a layer of the same input is cut by heads:
    queries of this rank would meet keys of other heads."""
    for site in columns:
        own_inputs, own_outputs = widths_of(site.module)
        width = own_outputs // (planned.cut_heads(site) or 1)
        if own_inputs == inputs and width != own_outputs and outputs > width and outputs % width == 0:
            refuse(
                path,
                f" makes {outputs // width} heads of {width} on every rank, and {site.path}, which has the same input, "
                f"is cut by heads over {planned.comm.size} ranks: they would meet the wrong ones; say ('key_value', "
                "{'heads': ...}) or ('column', {'heads': ...}) of it",
            )


# ------------------------------------------------------------------------------------------------- tied parameters


def tied_parameters(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Of parameters that several modules have: the paths of all these modules, and its name in each."""
    users: dict[int, list[tuple[str, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append((path, name))
    return [one for one in users.values() if len(one) > 1]


def check_tied(planned: Planned, stays: Iterable[Stay], layers: Mapping[str, Sharded | None]) -> None:
    """That each of these would be cut, or summed, in one way wherever it is used. What holds a parameter and does not
    read it, as the head of BERT the bias of its decoder, has what the others have; tie() looks at what functions make.
    """
    staying = {stay.path: stay for stay in stays}
    for group in tied_parameters(planned.model):
        becomes: dict[str, str] = {}
        for path, name in group:
            stay, site = staying.get(path), planned.sites.get(path)
            said = " and ".join(map(repr, site.roles)) if site is not None else "of which it says nothing"
            user = f"{f'{path}.{name}'.lstrip('.')} ({said})"
            if stay is not None:
                if stay.right is not None and reads(stay.module, name):
                    becomes[user] = "summed" if planned.is_summed(stay.role) else "whole"
            elif site is not None and site.function is None:
                layer = layers[path]
                shard = None if layer is None else layer.shards().get(name)
                becomes[user] = repr(site.roles) if shard is None else f"{shard} {shard.splits}"
        if len(set(becomes.values())) > 1:
            raise ValueError(
                f"{NAME}: {' and '.join(becomes)} are one parameter, of which the plan makes different things; "
                "expected 'vocab_embedding' and 'vocab_head', one role of both, or a parameter of its own for each"
            )


# ------------------------------------------------------------------------------------------------- what is unsaid


def warn_of_silence(planned: Planned, stays: Iterable[Stay]) -> None:
    """Of what has parameters, or draws, and is not mentioned."""
    names = [stay.path or type(stay.module).__name__ for stay in stays if stay.role is None and stay.right is not None]
    for path, place in planned.dropouts().items():
        if place is None and probability(planned.model.get_submodule(path)) > 0:
            names.append(path)
    names = [name for name in names if name not in planned.sites]
    if names:
        warnings.warn(
            f"{NAME}: the plan says nothing of {', '.join(names[:10])}{', ...' if names[10:] else ''}: replicated on "
            "every rank; to be clear, say 'replicated' of them, or 'sequence' where they see a part of it",
            UserWarning,
            stacklevel=3,
        )
