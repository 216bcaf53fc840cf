"""What a plan says of a model: whether that can be, and what it leaves unsaid."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from pynccl.bindings.values import shown

from ..arguments import as_int
from .plan import NAME, PLACES, Site
from .regions import Stay, common, outside, read_by, stacks, widths_of
from .replacement import Given


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


def check_ends(given: Given, sites: Mapping[str, Site]) -> None:
    """That the sequence is gathered again after the layers in which it is cut."""
    lists, ends = stacks(given.model, sites), [site.path for site in sites.values() if "sequence_end" in site.roles]
    if not given.sequence_parallel or any(site.function is not None for site in sites.values()):
        return
    for one in lists:
        if not any(len(common(one, end)) == max(len(common(other, end)) for other in lists) for end in ends):
            raise ValueError(
                f"{NAME}: {one}: the plan says 'sequence_begin' there, and 'sequence_end' of no module after it, so "
                "each rank would go on with a part of the sequence; say it of the module whose output is to be whole, "
                "besides 'sequence', or pass sequence_parallel=False"
            )


def check_staying(given: Given, stays: Iterable[Stay], sites: Mapping[str, Site]) -> None:
    """That what the plan says of a module that stays, or leaves unsaid, gives right gradients."""
    for stay in stays:
        trains = any(one.requires_grad for one in stay.module.parameters(recurse=False))
        what = f"{NAME}: {stay.path or type(stay.module).__name__}"
        if stay.made or (not trains and stay.said != "partial"):
            if stay.shared and not stay.made:  # frozen: what it computes has to be right all the same
                _check_sizes(given, stay, sites, what)
            continue
        said = f"the plan says {stay.said!r} of it" if stay.said else "the plan says nothing of it"
        if stay.shared and stay.said != "partial":
            raise ValueError(
                f"{what} is within {stay.shared}, whose input 'column' layers share, so each rank has a part of its "
                f"gradients, and {said}; say 'partial'"
            )
        if stay.said == "partial" and not stay.shared and stay.beside is None:
            raise ValueError(
                f"{what} is beside no 'column' layer, so it does not see heads or columns of this rank alone, and "
                f"{said}; say {stay.right!r}"
            )
        if stay.said is None and stay.beside is not None and not stay.whole:
            raise ValueError(
                f"{what} is beside 'column' layers, and {said}; say 'partial' if it sees this rank's heads or columns, "
                "'sequence' if it sees whole hidden states"
            )
        if given.sequence_parallel and stay.inside and stay.said in (None, "replicated"):
            raise ValueError(
                f"{what} sees a part of the sequence on each rank, so its gradients are partial, and {said}; say "
                f"{stay.right!r} of it in the plan, or pass sequence_parallel=False"
            )
        if given.sequence_parallel and stay.said == "sequence" and outside(stay, given.model, sites):
            raise ValueError(
                f"{what} is not between 'sequence_begin' and 'sequence_end', so it sees the whole sequence, and "
                f"{said}; say 'replicated'"
            )
        if stay.said == "partial":
            _check_sizes(given, stay, sites, what)


def _check_sizes(given: Given, stay: Stay, sites: Mapping[str, Site], what: str) -> None:
    """That a module between layers that are cut is not as wide as what all ranks have there, and not one of a list of
    one for each head."""
    beside = [site for site in sites.values() if site.parent == stay.beside]
    columns = [site for site in beside if site.roles.keys() & {"column", "key_value"}]
    wide = {widths_of(site.module)[1]: site.path for site in columns if cut_heads(given, site) != 1}
    wide |= {widths_of(site.module)[0]: site.path for site in beside if "row" in site.roles}
    heads = {cut_heads(given, site) for site in columns} - {None, 1}
    if given.comm.size == 1:
        return
    sizes = {one.shape[0] for one in stay.module.parameters(recurse=False) if one.dim() == 1}
    linear = isinstance(stay.module, nn.Linear) or type(stay.module).__name__ == "Conv1D"
    if linear:
        inputs, outputs = widths_of(stay.module)
        sizes = {outputs} | ({inputs} - {widths_of(site.module)[0] for site in columns})
    for site in columns if linear else ():
        width = widths_of(site.module)[1] // (cut_heads(given, site) or 1)
        reads_the_same = widths_of(site.module)[0] == inputs and width != widths_of(site.module)[1]
        if reads_the_same and outputs > width and outputs % width == 0:
            raise ValueError(
                f"{what} has {outputs // width} heads of {width}, all on every rank, and {site.path} beside it is cut "
                f"by heads over {given.comm.size} ranks: theirs would meet the wrong ones; say ('key_value', "
                "{'heads': ...}) or ('column', {'heads': ...}) of it"
            )
    for size in sorted(sizes & wide.keys()):
        raise ValueError(
            f"{what} is as wide as {wide[size]}, {size}, which the plan cuts over {given.comm.size} ranks, so it would "
            "see a part of what it is made for; give a function in the plan that makes a layer for it, or leave the "
            "layers that it sees whole"
        )
    parent = given.model.get_submodule(stay.path.rpartition(".")[0])
    each = len(parent) if isinstance(parent, (nn.ModuleList, nn.ParameterList)) else None
    many = [one.shape[0] for one in stay.module.parameters(recurse=False) if one.dim() > 1 and not linear]
    own = (sizes if stay.path == stay.beside else set()).union(many) & heads
    each = next(iter(own), each)
    if each in heads:
        raise ValueError(
            f"{what} has one of each for {each} heads, which the plan cuts over {given.comm.size} ranks; give a "
            "function in the plan that makes a layer of this rank's heads"
        )


def cut_heads(given: Given, site: Site) -> int | None:
    """How many heads the plan says that the outputs of a layer are."""
    options = site.roles.get("column", site.roles.get("key_value", {}))
    return given.heads(options["heads"], site.path) if "heads" in options else None


def check_pieces(given: Given, sites: Mapping[str, Site]) -> None:
    """That the plan says what lies side by side in the outputs of a layer, where they are more than one thing."""
    for site in sites.values():
        options = next((site.roles[role] for role in ("column", "key_value") if role in site.roles), None)
        beside = [one for one in sites.values() if one.parent == site.parent and "row" in one.roles]
        if options is None or options.keys() & {"heads", "blocks"} or not beside or given.comm.size == 1:
            continue
        outputs, most = widths_of(site.module)[1], max(widths_of(one.module)[0] for one in beside)
        if outputs > most:
            raise ValueError(
                f"{NAME}: {site.path} has {outputs} outputs, and {beside[0].path} beside it reads {most}, so they are "
                "several things in one matrix, such as queries, keys and values; say how they lie: ('column', "
                "{'blocks': 3}) one after the other, {'heads': 'num_heads'} head by head, {'blocks': 1} if it is one"
            )


_COUNTS = re.compile(r"heads$|^n_?head$|num_heads|num_key_value_heads")


def check_counts(given: Given, sites: Mapping[str, Site]) -> None:
    """That the forward of a module whose heads are cut does not count them by an attribute that says them all."""
    for parent in sorted({site.parent for site in sites.values()}):
        heads = {cut_heads(given, site) for site in sites.values() if site.parent == parent} - {None}
        module, around = given.model.get_submodule(parent), sites.get(parent)
        if not heads or given.comm.size == 1 or (around is not None and around.function is not None):
            continue
        read = read_by(module) or set()
        counts = [name for name in read if _COUNTS.search(name) and getattr(module, name, None) in heads]
        counts += [
            f"config.{name}"
            for name in read
            if "config" in read and _COUNTS.search(name) and not hasattr(module, name)
            if getattr(getattr(module, "config", None), name, None) in heads
        ]
        divided = around.roles.get("divide", {}).get("attributes", ()) if around is not None else ()
        missing = sorted(name for name in counts if name not in divided)
        if missing:
            raise ValueError(
                f"{NAME}: {parent}: the forward of {type(module).__name__} counts heads by {' and '.join(missing)}, "
                f"those of all ranks, and the plan cuts them over {given.comm.size} ranks; say ('divide', "
                f"{{'attributes': {[*divided, *missing]}}}) of {parent}, besides what the plan says of it"
            )


def dropouts(model: nn.Module, sites: Mapping[str, Site]) -> dict[str, str | None]:
    """path of an nn.Dropout -> what the plan says of it, or of the module that it is in; None: nothing."""
    found: dict[str, str | None] = {}
    for path, module in model.named_modules():
        if type(module) is not nn.Dropout or not path:
            continue
        around = path
        while around and not (around in sites and sites[around].roles.keys() & set(PLACES)):
            around = around.rpartition(".")[0]
        roles = sites[around].roles if around else {}
        found[path] = next((place for place in PLACES if place in roles), None)
    return found


def probability(value: Any) -> float:
    """Of an attribute: a number, or a dropout module."""
    return float(getattr(value, "p", value))


def warn_of_silence(model: nn.Module, stays: Iterable[Stay], sites: Mapping[str, Site]) -> None:
    """Of what has parameters, or draws, and is not mentioned: which role is right for it."""
    right: dict[str, list[str]] = {}
    for stay in stays:
        if stay.said is None and not stay.made and stay.path not in sites:
            right.setdefault(stay.right, []).append(stay.path or type(model).__name__)
    for path, said in dropouts(model, sites).items():
        if said is None and probability(model.get_submodule(path)) > 0:
            right.setdefault("replicated' or 'sequence", []).append(path)
    if right:
        listed = {role: ", ".join(paths[:10]) + (", ..." if paths[10:] else "") for role, paths in right.items()}
        warnings.warn(
            f"{NAME}: the plan says nothing of {', '.join(listed.values())}: replicated on every rank; to be clear, "
            "say " + ", and ".join(f"{role!r} of {paths}" for role, paths in listed.items()),
            UserWarning,
            stacklevel=3,
        )
