"""Whether what a plan says of a model can be, and would give right gradients; what it leaves unsaid."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from pynccl.bindings.values import shown

from ..arguments import as_int
from .plan import NAME, PLACES, Planned, Site, Stay, common, names, read_by, widths_of
from .shards import Shard, Sharded

# ------------------------------------------------------------------------------------------------- what is cut


def check_cut(planned: Planned) -> None:
    """That the layers that are cut fit what is around them."""
    for site in planned.sites.values():
        _check_attributes(site, planned.comm.size)
    _check_ends(planned)
    if planned.comm.size > 1:
        _check_counts(planned)
        _check_pieces(planned)


def _check_attributes(site: Site, ranks: int) -> None:
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


def _check_ends(planned: Planned) -> None:
    """That the sequence is gathered again after the layers in which it is cut."""
    if not planned.sequence_parallel or any(site.function is not None for site in planned.sites.values()):
        return
    lists, ends = planned.stacks(), [site.path for site in planned.of_role("sequence_end")]
    for one in lists:
        if not any(len(common(one, end)) == max(len(common(other, end)) for other in lists) for end in ends):
            raise ValueError(
                f"{NAME}: {one}: the plan says 'sequence_begin' there, and 'sequence_end' of no module after it, so "
                "each rank would go on with a part of the sequence; say it of the module whose output is to be whole, "
                "besides 'sequence', or pass sequence_parallel=False"
            )


_COUNTS = re.compile(r"heads$|^n_?head$|num_heads|num_key_value_heads")


def _check_counts(planned: Planned) -> None:
    """That the forward of a module whose heads are cut does not count them by an attribute that says them all."""
    for parent in sorted({site.parent for site in planned.sites.values()}):
        heads = {planned.cut_heads(site) for site in planned.children(parent)} - {None}
        module, around = planned.model.get_submodule(parent), planned.sites.get(parent)
        if not heads or (around is not None and around.function is not None):
            continue
        read = read_by(module) or set()
        config = getattr(module, "config", None) if "config" in read else None
        counts = []
        for name in filter(_COUNTS.search, read):
            if getattr(module, name, None) in heads:
                counts.append(name)
            elif not hasattr(module, name) and getattr(config, name, None) in heads:
                counts.append(f"config.{name}")
        divided = around.roles.get("divide", {}).get("attributes", ()) if around is not None else ()
        missing = sorted(name for name in counts if name not in divided)
        if missing:
            raise ValueError(
                f"{NAME}: {parent}: the forward of {type(module).__name__} counts heads by {' and '.join(missing)}, "
                f"those of all ranks, and the plan cuts them over {planned.comm.size} ranks; say ('divide', "
                f"{{'attributes': {[*divided, *missing]}}}) of {parent}, besides what the plan says of it"
            )


def _check_pieces(planned: Planned) -> None:
    """That the plan says what lies side by side in the outputs of a layer, where they are more than one thing."""
    for site in planned.sites.values():
        rows = [one for one in planned.children(site.parent) if "row" in one.roles]
        options = site.roles.get("column", site.roles.get("key_value", {}))
        if not site.is_column or not rows or not options.keys().isdisjoint(("heads", "blocks")):
            continue
        outputs, most = widths_of(site.module)[1], max(widths_of(one.module)[0] for one in rows)
        if outputs > most:
            raise ValueError(
                f"{NAME}: {site.path} has {outputs} outputs, and {rows[0].path} beside it reads {most}, so they are "
                "several things in one matrix, such as queries, keys and values; say how they lie: ('column', "
                "{'blocks': 3}) one after the other, {'heads': 'num_heads'} head by head, {'blocks': 1} if it is one"
            )


# ------------------------------------------------------------------------------------------------- what stays


def check_staying(planned: Planned, stays: Iterable[Stay]) -> None:
    """That what the plan says of a module that stays, or leaves unsaid, gives right gradients."""
    for stay in stays:
        what = f"{NAME}: {stay.path or type(stay.module).__name__}"
        trains = any(one.requires_grad for one in stay.module.parameters(recurse=False))
        if stay.by_function:
            continue
        if trains or stay.role == "partial":
            wrong = _wrong_place(planned, stay)
            if wrong is not None:
                said = f"the plan says {stay.role!r} of it" if stay.role else "the plan says nothing of it"
                raise ValueError(f"{what} {wrong[0]}, and {said}; say {wrong[1]}")
            sees_parts = stay.role == "partial"
        else:  # frozen: what it computes has to be right all the same
            sees_parts = bool(stay.shared)
        if sees_parts and planned.comm.size > 1:
            _check_sizes(planned, stay, what)


def _wrong_place(planned: Planned, stay: Stay) -> tuple[str, str] | None:
    """What the module sees that does not fit what the plan says, and what to say instead; None: it fits."""
    if stay.shared and stay.role != "partial":
        why = f"is within {stay.shared}, whose input 'column' layers share, so each rank has a part of its gradients"
        return why, "'partial'"
    if stay.role == "partial" and not stay.shared and stay.columns_at is None:
        why = "is beside no 'column' layer, so it does not see heads or columns of this rank alone"
        return why, repr(stay.expected_role)
    if stay.role is None and stay.columns_at is not None and not stay.full_width:
        return (
            "is beside 'column' layers",
            "'partial' if it sees this rank's heads or columns, 'sequence' if it sees whole hidden states",
        )
    if planned.sequence_parallel and stay.in_sequence and stay.role in (None, "replicated"):
        why = "sees a part of the sequence on each rank, so its gradients are partial"
        return why, f"{stay.expected_role!r} of it in the plan, or pass sequence_parallel=False"
    if planned.sequence_parallel and stay.role == "sequence" and _is_outside(planned, stay):
        why = "is not between 'sequence_begin' and 'sequence_end', so it sees the whole sequence"
        return why, "'replicated'"
    return None


def _is_outside(planned: Planned, stay: Stay) -> bool:
    """Whether it cannot be between "sequence_begin" and "sequence_end": not within the module that has both."""
    ends = [site.path for site in planned.of_role("sequence_end")]
    if stay.in_sequence or not ends:
        return False
    if isinstance(stay.module, nn.Embedding):
        return True
    around = (max(common(one, end) for end in ends) for one in planned.stacks())
    return not any(f"{stay.path}.".startswith(one) for one in around)


def _check_sizes(planned: Planned, stay: Stay, what: str) -> None:
    """That a module between layers that are cut is not made for what all ranks have there: as wide as that, or one of
    a list of one for each head."""
    ranks = planned.comm.size
    beside = [] if stay.columns_at is None else planned.children(stay.columns_at)
    columns = [site for site in beside if site.is_column]
    linear = isinstance(stay.module, nn.Linear) or type(stay.module).__name__ == "Conv1D"
    if linear:
        _check_heads(planned, stay, columns, what)
        inputs, outputs = widths_of(stay.module)
        sizes = {outputs} | ({inputs} - {widths_of(site.module)[0] for site in columns})
    else:
        sizes = {one.shape[0] for one in stay.module.parameters(recurse=False) if one.dim() == 1}
    cut = {widths_of(site.module)[1]: site.path for site in columns if planned.cut_heads(site) != 1}
    cut |= {widths_of(site.module)[0]: site.path for site in beside if "row" in site.roles}
    for size in sorted(sizes & cut.keys()):
        raise ValueError(
            f"{what} is as wide as {cut[size]}, {size}, which the plan cuts over {ranks} ranks, so it would "
            "see a part of what it is made for; give a function in the plan that makes a layer for it, or leave the "
            "layers that it sees whole"
        )
    each = {one.shape[0] for one in stay.module.parameters(recurse=False) if one.dim() > 1 and not linear}
    each |= sizes if stay.path == stay.columns_at else set()
    parent = planned.model.get_submodule(stay.path.rpartition(".")[0])
    if isinstance(parent, (nn.ModuleList, nn.ParameterList)):
        each.add(len(parent))
    for heads in each & ({planned.cut_heads(site) for site in columns} - {None, 1}):
        raise ValueError(
            f"{what} has one of each for {heads} heads, which the plan cuts over {ranks} ranks; give a "
            "function in the plan that makes a layer of this rank's heads"
        )


def _check_heads(planned: Planned, stay: Stay, columns: Iterable[Site], what: str) -> None:
    """That a linear layer does not make all heads on every rank of what others beside it make by heads that are cut."""
    inputs, outputs = widths_of(stay.module)
    for site in columns:
        own_inputs, own_outputs = widths_of(site.module)
        width = own_outputs // (planned.cut_heads(site) or 1)
        if own_inputs == inputs and width != own_outputs and outputs > width and outputs % width == 0:
            raise ValueError(
                f"{what} has {outputs // width} heads of {width}, all on every rank, and {site.path} beside it is cut "
                f"by heads over {planned.comm.size} ranks: theirs would meet the wrong ones; say ('key_value', "
                "{'heads': ...}) or ('column', {'heads': ...}) of it"
            )


# ------------------------------------------------------------------------------------------------- tied parameters


class User(NamedTuple):
    path: str  # of the module
    name: str  # of its parameter


def tied_parameters(model: nn.Module) -> list[list[User]]:
    """Of parameters that several modules have: all of these modules, under each of their names."""
    users: dict[int, list[User]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append(User(path, name))
    return [one for one in users.values() if len(one) > 1]


def check_tied(planned: Planned, stays: Iterable[Stay], layers: Mapping[str, Sharded | None]) -> None:
    """That each of these would be cut, or summed, in one way wherever it is used. What holds a parameter and does not
    read it, as the head of BERT the bias of its decoder, has what the others have."""
    first, staying = names(planned.model), {stay.path: stay for stay in stays}
    for group in tied_parameters(planned.model):
        becomes: dict[User, Any] = {}
        for user in group:
            module = planned.model.get_submodule(user.path)
            read = read_by(module)
            stay, site = staying.get(user.path), planned.sites.get(first[user.path])
            if (site is not None and site.function is not None) or (stay is not None and stay.by_function):
                continue  # tie() looks at it
            if stay is not None and (read is None or user.name in read):
                whole = getattr(module, user.name).shape
                becomes[user] = Shard(planned.comm, None, whole, partial=True) if planned.is_partial(stay) else None
            elif stay is None and site is not None:
                layer = layers[site.path]
                becomes[user] = site.roles if layer is None else layer.shards().get(user.name)
        if len({_text(one) for one in becomes.values()}) > 1:
            said = " and ".join(_said(planned, user, first) for user in becomes)
            raise ValueError(
                f"{NAME}: {said} are one parameter, of which the plan makes different things; expected "
                f"{', or '.join(_ways(planned, list(becomes), staying))}"
            )


def _text(becomes: Any) -> str:
    return f"{becomes} {becomes.splits}" if isinstance(becomes, Shard) else repr(becomes)


def _said(planned: Planned, user: User, first: Mapping[str, str]) -> str:
    site = planned.sites.get(first[user.path])
    roles = " and ".join(map(repr, site.roles)) if site is not None else ""
    return f"{f'{user.path}.{user.name}'.lstrip('.')} ({roles or 'of which it says nothing'})"


def _ways(planned: Planned, group: list[User], staying: Mapping[str, Stay]) -> list[str]:
    """What the plan may say of all of them."""
    whole = {staying[path].expected_role if path in staying else "replicated" for path, _ in group}
    modules = {path: planned.model.get_submodule(path) for path, name in group if name == "weight"}
    cut = {
        path: "vocab_embedding" if isinstance(module, nn.Embedding) else "vocab_head"
        for path, module in modules.items()
        if type(module).forward in (nn.Embedding.forward, nn.Linear.forward)
    }
    ways = []
    if len(cut) == len(group) and "vocab_embedding" in cut.values():
        ways.append(" and ".join(f"{role!r} of {path}" for path, role in cut.items()))
    if len(whole) == 1:
        ways.append(f"{whole.pop()!r} of all of them")
    return [*ways, "a parameter of its own for each"]


# ------------------------------------------------------------------------------------------------- what is unsaid


def dropouts(planned: Planned) -> dict[str, str | None]:
    """path of an nn.Dropout -> what the plan says of it, or of the module that it is in; None: nothing."""
    found: dict[str, str | None] = {}
    for path, module in planned.model.named_modules():
        if type(module) is not nn.Dropout or not path:
            continue
        around = path
        while around and not (around in planned.sites and planned.sites[around].roles.keys() & set(PLACES)):
            around = around.rpartition(".")[0]
        roles = planned.sites[around].roles if around else {}
        found[path] = next((place for place in PLACES if place in roles), None)
    return found


def probability(value: Any) -> float:
    """Of an attribute: a number, or a dropout module."""
    return float(getattr(value, "p", value))


def warn_of_silence(planned: Planned, stays: Iterable[Stay]) -> None:
    """Of what has parameters, or draws, and is not mentioned: which role is right for it."""
    right: dict[str, list[str]] = {}
    for stay in stays:
        if stay.role is None and not stay.by_function and stay.path not in planned.sites:
            right.setdefault(stay.expected_role, []).append(stay.path or type(planned.model).__name__)
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
