"""Whether a plan fits the model and would give right gradients; what it leaves unsaid."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from torch import nn

from pynccl.bindings.values import shown

from ..arguments import as_int
from .plan import NAME, Planned, Site, Stay, common, probability, read_by, widths_of
from .shards import Sharded


def _refuse(path: str, text: str) -> NoReturn:
    raise ValueError(f"{NAME}: {path}{text}")


# ------------------------------------------------------------------------------------------------- what is cut


def check_cut(planned: Planned) -> None:
    """That the layers that are cut fit what is around them."""
    for site in planned.sites.values():
        _check_attributes(site, planned.comm.size)
    begins, ends = planned.of_role("sequence_begin"), planned.of_role("sequence_end")
    if planned.sequence_parallel and begins and not ends and not any(one.function for one in planned.sites.values()):
        _refuse(
            begins[0].path,
            ": the plan says 'sequence_begin' there, and 'sequence_end' of no module after it, so each rank would go "
            "on with a part of the sequence; say it of the module whose output is to be whole, besides 'sequence'",
        )
    if planned.comm.size > 1:
        for parent in sorted({site.parent for site in planned.sites.values()}):
            _check_counts(planned, parent)
            _check_pieces(planned.children(parent))


def _check_attributes(site: Site, ranks: int) -> None:
    """That the module has those that the plan names, and that they can be divided."""
    drawn = [one.get("p") for role, one in site.roles.items() if role == "attention_dropout"]
    divided = site.roles.get("divide", {}).get("attributes", ())
    for name in [*drawn, *divided]:
        try:
            value = operator.attrgetter(name)(site.module)
        except (AttributeError, TypeError):
            kind = type(site.module).__name__
            _refuse(site.path, f": the plan names its attribute {shown(name)}, which {kind} does not have")
        if name in divided and (as_int(value) is None or value % ranks):
            _refuse(
                site.path,
                f": the plan names its attribute {name!r}, which is {shown(value)}: expected an integer that {ranks} "
                "ranks divide",
            )


_COUNTS = re.compile(r"heads$|^n_?head$|num_heads|num_key_value_heads")


def _check_counts(planned: Planned, parent: str) -> None:
    """That the forward of a module whose heads are cut does not count them by an attribute that says them all."""
    heads = {planned.cut_heads(site) for site in planned.children(parent)} - {None}
    module, around = planned.model.get_submodule(parent), planned.sites.get(parent)
    if not heads or (around is not None and around.function is not None):
        return
    read = read_by(module) or set()
    config = getattr(module, "config", None) if "config" in read else None
    divided = around.roles.get("divide", {}).get("attributes", ()) if around is not None else ()
    missing = []
    for name in sorted(filter(_COUNTS.search, read)):
        owner, said = (module, name) if hasattr(module, name) else (config, f"config.{name}")
        if getattr(owner, name, None) in heads and said not in divided:
            missing.append(said)
    if missing:
        _refuse(
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
            _refuse(
                site.path,
                f" has {outputs} outputs, and {rows[0].path} beside it reads {most}, so they are several things in one "
                "matrix, such as queries, keys and values; say how they lie: ('column', {'blocks': 3}) one after the "
                "other, {'heads': 'num_heads'} head by head, {'blocks': 1} if it is one",
            )


# ------------------------------------------------------------------------------------------------- what stays


def check_staying(planned: Planned, stays: Iterable[Stay]) -> None:
    """That what the plan says of a module that stays, or leaves unsaid, gives right gradients."""
    for stay in stays:
        if stay.by_function:
            continue
        trains = any(one.requires_grad for one in stay.module.parameters(recurse=False))
        wrong = _wrong_place(planned, stay) if trains or stay.role == "partial" else None
        if wrong is not None:
            said = f"the plan says {stay.role!r} of it" if stay.role else "the plan says nothing of it"
            _refuse(stay.path or type(stay.module).__name__, f" {wrong[0]}, and {said}; say {wrong[1]}")
        sees_parts = stay.role == "partial" or (stay.shared and not trains)  # a frozen one computes, too
        if sees_parts and planned.comm.size > 1:
            _check_sizes(planned, stay)


def _wrong_place(planned: Planned, stay: Stay) -> tuple[str, str] | None:
    """What the module sees that does not fit what the plan says, and what to say instead; None: it fits."""
    right = repr(stay.right_role)
    if stay.shared and stay.role != "partial":
        return f"is within {stay.shared}, whose input 'column' layers share: its gradients are partial", right
    if stay.role == "partial" and not stay.shared and stay.columns_at is None:
        return "is beside no 'column' layer, so it does not see heads or columns of this rank alone", right
    if stay.role is None and stay.columns_at is not None and not stay.full_width:
        return "is beside 'column' layers", "'partial' if it sees this rank's heads, 'sequence' if all of them"
    if planned.sequence_parallel and stay.in_sequence and stay.role in (None, "replicated"):
        return "sees a part of the sequence on each rank, so its gradients are partial", right
    if planned.sequence_parallel and stay.role == "sequence" and _is_outside(planned, stay):
        return "is not between 'sequence_begin' and 'sequence_end', so it sees the whole sequence", "'replicated'"
    return None


def _is_outside(planned: Planned, stay: Stay) -> bool:
    """Whether it cannot be between "sequence_begin" and "sequence_end": not within the module that has both."""
    ends = [site.path for site in planned.of_role("sequence_end")]
    if stay.in_sequence or not ends:
        return False
    around = (max(common(one, end) for end in ends) for one in planned.stacks())
    return isinstance(stay.module, nn.Embedding) or not any(f"{stay.path}.".startswith(one) for one in around)


def _check_sizes(planned: Planned, stay: Stay) -> None:
    """That a module between layers that are cut is not made for what all ranks have there: as wide as that, or one of
    a list of one for each head."""
    path, ranks, beside = stay.path, planned.comm.size, []
    if stay.columns_at is not None:
        beside = planned.children(stay.columns_at)
    columns = [site for site in beside if site.is_column]
    shapes = [one.shape for one in stay.module.parameters(recurse=False)]
    cut = {widths_of(site.module)[1]: site.path for site in columns if planned.cut_heads(site) != 1}
    cut |= {widths_of(site.module)[0]: site.path for site in beside if site.layer == "row"}
    heads = {planned.cut_heads(site) for site in columns} - {None, 1}
    if isinstance(stay.module, nn.Linear) or type(stay.module).__name__ == "Conv1D":
        inputs, outputs = widths_of(stay.module)
        _check_heads(planned, stay, columns, inputs, outputs)
        sizes, each = {outputs} | ({inputs} - {widths_of(site.module)[0] for site in columns}), set()
    else:
        sizes = {shape[0] for shape in shapes if len(shape) == 1}
        each = {shape[0] for shape in shapes if len(shape) > 1}
    each |= sizes if path == stay.columns_at else set()
    parent = planned.model.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, (nn.ModuleList, nn.ParameterList)):
        each.add(len(parent))
    for size in sorted(sizes & cut.keys()):
        _refuse(
            path,
            f" is as wide as {cut[size]}, {size}, which the plan cuts over {ranks} ranks, so it would see a part of "
            "what it is made for; give a function in the plan that makes a layer for it, or leave what it sees whole",
        )
    for count in each & heads:
        _refuse(
            path,
            f" has one of each for {count} heads, which the plan cuts over {ranks} ranks; give a function in the plan "
            "that makes a layer of this rank's heads",
        )


def _check_heads(planned: Planned, stay: Stay, columns: Iterable[Site], inputs: int, outputs: int) -> None:
    """That a linear layer does not make all heads on every rank of what others beside it make by heads that are cut."""
    for site in columns:
        own_inputs, own_outputs = widths_of(site.module)
        width = own_outputs // (planned.cut_heads(site) or 1)
        if own_inputs == inputs and width != own_outputs and outputs > width and outputs % width == 0:
            _refuse(
                stay.path,
                f" has {outputs // width} heads of {width}, all on every rank, and {site.path} beside it is cut by "
                f"heads over {planned.comm.size} ranks: theirs would meet the wrong ones; say ('key_value', "
                "{'heads': ...}) or ('column', {'heads': ...}) of it",
            )


# ------------------------------------------------------------------------------------------------- tied parameters


class User(NamedTuple):
    path: str  # of the module
    name: str  # of its parameter


def tied_parameters(model: nn.Module) -> list[list[User]]:
    """Of parameters that several modules have: all of these modules."""
    users: dict[int, list[User]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append(User(path, name))
    return [one for one in users.values() if len(one) > 1]


def check_tied(planned: Planned, stays: Iterable[Stay], layers: Mapping[str, Sharded | None]) -> None:
    """That each of these would be cut, or summed, in one way wherever it is used. What holds a parameter and does not
    read it, as the head of BERT the bias of its decoder, has what the others have."""
    staying = {stay.path: stay for stay in stays}
    for group in tied_parameters(planned.model):
        becomes: dict[str, str] = {}
        for path, name in group:
            read = read_by(planned.model.get_submodule(path))
            stay, site = staying.get(path), planned.sites.get(path)
            made = site is not None and site.function is not None
            if made or (stay is not None and (stay.by_function or (read is not None and name not in read))):
                continue  # tie() looks at it
            said = " and ".join(map(repr, site.roles)) if site is not None else "of which it says nothing"
            user = f"{f'{path}.{name}'.lstrip('.')} ({said})"
            if stay is not None:
                becomes[user] = "summed" if planned.is_partial(stay) else "whole"
            elif site is not None:
                layer = layers[path]
                shard: Any = None if layer is None else layer.shards().get(name)
                becomes[user] = repr(site.roles) if shard is None else f"{shard} {shard.splits}"
        if len(set(becomes.values())) > 1:
            raise ValueError(
                f"{NAME}: {' and '.join(becomes)} are one parameter, of which the plan makes different things; "
                "expected 'vocab_embedding' and 'vocab_head', one role of both, or a parameter of its own for each"
            )


# ------------------------------------------------------------------------------------------------- what is unsaid


def dropouts(planned: Planned) -> dict[str, str | None]:
    """path of an nn.Dropout -> what the plan says of it, or of the module that it is in; None: nothing."""
    modules = planned.model.named_modules()
    return {path: planned.place(path) for path, module in modules if path and type(module) is nn.Dropout}


def warn_of_silence(planned: Planned, stays: Iterable[Stay]) -> None:
    """Of what has parameters, or draws, and is not mentioned: which role is right for it."""
    right: dict[str, list[str]] = {}
    for stay in stays:
        if stay.role is None and not stay.by_function and stay.path not in planned.sites:
            right.setdefault(stay.right_role, []).append(stay.path or type(planned.model).__name__)
    for path, said in dropouts(planned).items():
        if said is None and probability(planned.model.get_submodule(path)) > 0:
            right.setdefault("replicated' or 'sequence", []).append(path)
    if right:
        listed = {role: ", ".join(paths[:10]) + (", ..." if paths[10:] else "") for role, paths in right.items()}
        warnings.warn(
            f"{NAME}: the plan says nothing of {', '.join(listed.values())}: replicated on every rank; to be clear, "
            "say " + ", and ".join(f"{role!r} of {paths}" for role, paths in listed.items()),
            UserWarning,
            stacklevel=3,
        )
