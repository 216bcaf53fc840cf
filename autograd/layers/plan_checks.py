"""Checks that a plan fits the model and gives correct gradients; warnings about modules that it does not mention."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from pynccl.bindings.values import shown

from ..arguments import as_int
from ..torch_internals import BACKWARD_HOOKS, STATE_HOOKS, TENSOR_HOOKS, has_any
from .dropout import ELEMENTWISE, FUNCTIONS
from .plan import (
    LAYER_ROLES,
    NAME,
    PlannedModel,
    Site,
    ancestors,
    is_within,
    names_read,
    probability,
    reads,
    reject,
    title_of,
    widths_of,
)
from .shards import Sharded

# ------------------------------------------------------------------------------------------------- sharded layers


def check_sharded_layers(planned: PlannedModel) -> None:
    """Check that the layers that the plan shards fit the modules around them."""
    ranks, sites = planned.comm.size, planned.sites
    for site in sites.values():
        _check_attributes(site, ranks)
    begins, ends = planned.of_role("sequence_begin"), planned.of_role("sequence_end")
    if planned.sequence_parallel and begins and not ends and not any(one.function for one in sites.values()):
        reject(
            begins[0].title,
            " is 'sequence_begin', but no module after it is 'sequence_end', so the output would be a shard of the "
            "sequence; add 'sequence_end' to the module whose output must be gathered, besides 'sequence'",
        )
    if ranks > 1:
        for parent in sorted({site.parent for site in sites.values()}):
            _check_counts(planned, parent)
            _check_pieces(planned.children(parent))


def _check_attributes(site: Site, ranks: int) -> None:
    """Check that the module has the attributes that the plan names, and that those of "divide" are divisible."""
    drawn: list[Any] = [site.roles["attention_dropout"].get("p")] if "attention_dropout" in site.roles else []
    for name in [*drawn, *site.divided]:
        try:
            value = operator.attrgetter(name)(site.module)
        except (AttributeError, TypeError):
            kind = type(site.module).__name__
            reject(site.title, f": the plan names the attribute {shown(name)}, which {kind} does not have; correct it")
        if name in site.divided and (as_int(value) is None or value % ranks):
            reject(
                site.title,
                f": the plan divides the attribute {name!r}, which is {shown(value)}; expected an integer that is "
                f"divisible by {ranks} ranks",
            )


_COUNTS = re.compile(r"heads$|^n_?head$")


def _check_counts(planned: PlannedModel, parent: str) -> None:
    """Check that a module whose heads are sharded does not read the number of all heads in its forward."""
    heads = {planned.num_heads(site) for site in planned.children(parent)} - {None}
    module, around = planned.model.get_submodule(parent), planned.sites.get(parent)
    if not heads or (around is not None and around.function is not None):
        return
    read, divided = names_read(module), around.divided if around is not None else []
    config = getattr(module, "config", None) if "config" in read else None
    missing = []
    for name in sorted(filter(_COUNTS.search, read)):
        owner, full_name = (module, name) if hasattr(module, name) else (config, f"config.{name}")
        if getattr(owner, name, None) in heads and full_name not in divided:
            missing.append(full_name)
    if missing:
        reject(
            title_of(parent, module),
            f": the forward of {type(module).__name__} reads {' and '.join(missing)}, which counts the heads of all "
            f"ranks, but the plan shards them over {planned.comm.size} ranks; add the role ('divide', "
            f"{{'attributes': {[*divided, *missing]}}})",
        )


def _check_pieces(sites: list[Site]) -> None:
    """Check that the plan says how the outputs of a layer are laid out, if they are several projections in one."""
    rows = [site for site in sites if site.layer == "row"]
    for site in sites:
        if not site.is_column or not rows or site.options.keys() & {"heads", "blocks"}:
            continue
        outputs, read = widths_of(site.module)[1], max(widths_of(row.module)[0] for row in rows)
        if outputs > read:
            reject(
                site.path,
                f" has {outputs} outputs, but {rows[0].path} has {read} inputs, so it seems to fuse several "
                "projections (queries, keys, values); give their layout: ('column', {'blocks': 3}) if they are "
                "consecutive, {'heads': 'num_heads'} if they alternate by head, {'blocks': 1} if there is one",
            )


# ------------------------------------------------------------------------------------------------- replaced modules


def check_replaceable(site: Site, role: str) -> None:
    """Check that the module has the type that the role needs, and that replacing it loses nothing."""
    module, kind = site.module, type(site.module)
    if isinstance(module, Sharded):
        raise TypeError(f"{NAME}: {site.path} is {kind.__name__} already; call {NAME} once per model")
    base: Any = nn.Embedding if role == "vocab_embedding" else nn.Linear
    is_conv = kind.__name__ == "Conv1D" and "Conv1D" in LAYER_ROLES[role]
    if not isinstance(module, base) and not is_conv:
        raise TypeError(f"{NAME}: {site.path} is {kind.__name__}, but the role {role!r} needs {LAYER_ROLES[role]}")
    lost = "" if kind is base or is_conv else f"subclasses torch.nn.{base.__name__}"
    check_nothing_lost(site.path, module, repr(role), lost)


def check_nothing_lost(path: str, module: nn.Module, new: str, lost: str) -> None:
    """Check that the new module can have all that changes what this one does. Hooks of inputs and outputs move; others
    would see shards. lost: what is known to be lost"""
    tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    others = [*(tensors.keys() - {"weight", "bias"}), *(name for name, _ in module.named_children())]
    found = {
        lost: bool(lost),
        f"has {min(others, default=None)} of its own": others,  # of weight_norm, spectral_norm and pruning, in a hook
        "has a forward of its own": "forward" in vars(module),
        "has a backward hook": has_any(module, BACKWARD_HOOKS),
        "has a state-dict hook": has_any(module, STATE_HOOKS),
        "has a parameter with a gradient hook": any(has_any(one, TENSOR_HOOKS) for one in tensors.values()),
    }
    lost = next((what for what, there in found.items() if there), "")
    if lost:
        raise TypeError(
            f"{NAME}: {path} ({type(module).__name__}) {lost}, which {new} would lose; add it to the parallel model, "
            "or use 'replicated' for it and for modules tied to it, or a function that makes the layer"
        )


# ------------------------------------------------------------------------------------------------- kept modules


class KeptModule(NamedTuple):
    """A module that has parameters and is not replaced."""

    path: str
    module: nn.Module
    placement: str | None  # in the plan
    expected: str | None  # the placement that fits the modules around; None: unknown, a function makes these
    reason: str  # why it is expected

    @property
    def title(self) -> str:
        return title_of(self.path, self.module)


def kept_modules(planned: PlannedModel) -> list[KeptModule]:
    """Return the modules that have parameters and are not replaced."""
    sites, found = planned.sites, []
    for path, module in planned.model.named_modules():
        if next(module.parameters(recurse=False), None) is None or (path in sites and sites[path].layer):
            continue
        by_function = any(sites[one].function is not None for one in ancestors(path) if one in sites)
        expected = (None, "") if by_function else _expected_placement(planned, path, module)
        found.append(KeptModule(path, module, planned.placement(path), *expected))
    return found


_SHARES_INPUT = "is 'shared_input' and has parameters of its own"
_NEXT_TO_COLUMN, _MAYBE_SEQUENCE = "is next to 'column' layers", "may see a shard of the sequence on each rank"
_AFTER_ROW = "comes after the 'row' layers of a 'shared_input' module"
_AMBIGUOUS = {  # reasons for which the placement cannot be inferred: then any one that the plan gives is accepted
    _SHARES_INPUT: "'partial' if it uses them before or on the sharded outputs of its layers, 'replicated' if not",
    _AFTER_ROW: "'sequence' if it sees their output, 'partial' if this rank's heads or columns",
    _NEXT_TO_COLUMN: "'partial' if it sees this rank's heads or columns, 'sequence' if all of them",
    _MAYBE_SEQUENCE: "'sequence' if it does, 'replicated' if not",
}


def _expected_placement(planned: PlannedModel, path: str, module: nn.Module) -> tuple[str, str]:
    """Return the placement that fits the modules around a module that is kept, and the reason."""
    at = {one: index for index, (one, _) in enumerate(planned.model.named_modules())}
    for around in planned.of_role("shared_input"):
        rows = [at[site.path] for site in planned.of_role("row") if is_within(site.path, around.path)]
        if path == around.path:  # its own parameters, before or after its layers
            return "partial", _SHARES_INPUT
        if is_within(path, around.path) and at[path] > max(rows, default=len(at)):
            return "partial", _AFTER_ROW
        if is_within(path, around.path):
            return "partial", f"is within {around.title}, which is 'shared_input'"
    widths = [widths_of(site.module)[0] for site in _siblings(planned, path) if site.is_column]
    if widths and not any(one.dim() and one.shape[-1] in widths for one in module.parameters(recurse=False)):
        return "partial", _NEXT_TO_COLUMN
    begins, ends = ([site.path for site in planned.of_role(f"sequence_{one}")] for one in ("begin", "end"))
    sharded = [one for one in planned.stacks() if one not in planned.sites or one in ends]
    sharded += [end for end in ends if not any(is_within(begin, end) for begin in begins)]
    if any(is_within(path, one) for one in sharded):
        return "sequence", "sees a shard of the sequence on each rank"
    for begin in begins:
        if at[begin] < at[path] < min((at[end] for end in ends if at[end] > at[begin]), default=0 if ends else len(at)):
            return "sequence", _MAYBE_SEQUENCE
    return "replicated", "is neither between 'sequence_begin' and 'sequence_end' nor between sharded layers"


def _siblings(planned: PlannedModel, path: str) -> list[Site]:
    """Return the matched children of the module itself, or of the nearest one around it, that has "column" layers."""
    for around in ancestors(path):
        children = planned.children(around)
        if any(site.is_column for site in children):
            return children
    return []


def check_kept_modules(planned: PlannedModel, kept: Iterable[KeptModule]) -> None:
    """Check that the placement of each module that is kept, or the lack of one, gives correct gradients."""
    for entry in kept:
        if entry.expected is None:
            continue
        expected = _AMBIGUOUS.get(entry.reason, repr(entry.expected))
        fits = planned.has_partial_gradients(entry.placement) == planned.has_partial_gradients(entry.expected)
        fits &= (entry.placement == "partial") == (entry.expected == "partial")
        fits |= entry.reason in _AMBIGUOUS and entry.placement is not None
        if entry.placement == "sequence" and entry.expected == "replicated" and not planned.of_role("sequence_begin"):
            continue  # the caller splits the sequence
        if not fits:
            found = f"is {entry.placement!r} in the plan" if entry.placement else "is not in the plan"
            layer = ", or 'column' or 'row' to shard it" if isinstance(entry.module, nn.Linear) else ""
            reject(entry.title, f" {entry.reason}, but {found}; use {expected}{layer}")
        if entry.placement == "partial" and planned.comm.size > 1:
            _check_sizes(planned, entry)


def _check_sizes(planned: PlannedModel, entry: KeptModule) -> None:
    """Check that a module between sharded layers does not have the size of all ranks: as many features as an unsharded
    layer, or one entry for each of all heads."""
    siblings = _siblings(planned, entry.path)
    columns = [site for site in siblings if site.is_column]
    sharded = {widths_of(site.module)[1]: site.path for site in columns if planned.num_heads(site) != 1}
    sharded |= {widths_of(site.module)[0]: site.path for site in siblings if site.layer == "row"}
    heads = {planned.num_heads(site): site.path for site in columns}
    shapes = [one.shape for one in entry.module.parameters(recurse=False)]
    sizes = {shape[0] for shape in shapes if len(shape) == 1}
    counts = {shape[0] for shape in shapes if len(shape) > 1}
    if isinstance(entry.module, nn.Linear) or type(entry.module).__name__ == "Conv1D":
        inputs, outputs = widths_of(entry.module)
        sizes, counts = {outputs} | ({inputs} - {widths_of(site.module)[0] for site in columns}), set()
        _check_heads(planned, entry.path, columns, inputs, outputs)
    if entry.path in {site.parent for site in columns}:  # its own parameters
        counts |= sizes
    parent = planned.model.get_submodule(entry.path.rpartition(".")[0])
    if isinstance(parent, (nn.ModuleList, nn.ParameterList)):
        counts.add(len(parent))
    too_large = {size: path for size, path in sharded.items() if size in sizes}
    too_large |= {count: path for count, path in heads.items() if count in counts and count not in (None, 1)}
    for size, path in too_large.items():
        reject(
            entry.title,
            f" is sized for all {size} of {path}, which the plan shards over {planned.comm.size} ranks; shard it too, "
            "or put a function in the plan that makes this rank's layer",
        )


def _check_heads(planned: PlannedModel, path: str, columns: Iterable[Site], inputs: int, outputs: int) -> None:
    """Check that a linear layer does not compute all heads on every rank next to a layer that is sharded by heads: the
    queries of this rank would be paired with keys of other heads."""
    for site in columns:
        site_inputs, site_outputs = widths_of(site.module)
        width = site_outputs // (planned.num_heads(site) or 1)
        if site_inputs == inputs and width != site_outputs and outputs > width and outputs % width == 0:
            reject(
                path,
                f" computes all {outputs // width} heads of width {width} on every rank, but {site.path} is sharded by "
                f"heads over {planned.comm.size} ranks, so the heads would not match; use ('key_value', {{'heads': "
                "...}) or ('column', {'heads': ...})",
            )


def check_dropouts(planned: PlannedModel) -> None:
    """Check that a rank can draw the masks of its shards: those of the elements, without regard to the others."""
    for path, placement in planned.dropouts().items():
        kind: Any = type(planned.model.get_submodule(path))
        if planned.comm.size == 1 or not planned.has_partial_gradients(placement) or kind in ELEMENTWISE:
            continue
        if probability(planned.model.get_submodule(path)) > 0:
            does = "zeroes whole channels" if kind in FUNCTIONS else "subclasses one of torch's dropout modules"
            reject(
                path,
                f" ({kind.__name__}) {does}, but is {placement!r}: whether the ranks need equal masks depends on its "
                "input; use torch.nn.Dropout or AlphaDropout, p=0, or a function in the plan that makes a layer, which "
                "draws within ad.rng.sharded(comm) if the masks must differ",
            )


# ------------------------------------------------------------------------------------------------- tied parameters


def tied_parameters(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return, for each parameter that several modules have, the path of each of these modules and its name there."""
    users: dict[int, list[tuple[str, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append((path, name))
    return [one for one in users.values() if len(one) > 1]


def check_tied(planned: PlannedModel, kept: Iterable[KeptModule], layers: Mapping[str, Sharded | None]) -> None:
    """Check that each tied parameter is sharded, or its gradient summed, in the same way by all its modules.

    A module that holds a parameter without reading it (BERT's head and the bias of its decoder) follows the others.
    tie() checks the layers that functions of the plan make."""
    kept_by_path = {entry.path: entry for entry in kept}
    for group in tied_parameters(planned.model):
        becomes: dict[str, str] = {}
        for path, name in group:
            entry, site = kept_by_path.get(path), planned.sites.get(path)
            roles = " and ".join(map(repr, site.roles)) if site is not None else "not in the plan"
            user = f"{f'{path}.{name}'.lstrip('.')} ({roles})"
            if entry is not None:
                if entry.expected is not None and reads(entry.module, name):
                    becomes[user] = "summed" if planned.has_partial_gradients(entry.placement) else "full"
            elif site is not None and site.function is None:
                layer = layers[path]
                shard = None if layer is None else layer.shards().get(name)
                becomes[user] = repr(site.roles) if shard is None else f"{shard} {shard.splits}"
        if len(set(becomes.values())) > 1:
            raise ValueError(
                f"{NAME}: {' and '.join(becomes)} are one tied parameter, but the plan shards them differently; use "
                "'vocab_embedding' and 'vocab_head', give both the same role, or untie them"
            )


# ------------------------------------------------------------------------------------------------- unmentioned modules


def warn_unmentioned(planned: PlannedModel, kept: Iterable[KeptModule]) -> None:
    """Warn about modules with parameters, and dropout, that the plan does not mention."""
    names = [
        entry.title
        for entry in kept
        if entry.placement is None and entry.expected is not None and entry.path not in planned.sites
    ]
    for path, placement in planned.dropouts().items():
        if placement is None and path not in planned.sites and probability(planned.model.get_submodule(path)) > 0:
            names.append(path)
    if names:
        warnings.warn(
            f"{NAME}: the plan does not mention {', '.join(names[:10])}{', ...' if names[10:] else ''}: they are "
            "replicated on every rank; use 'replicated' to confirm, or 'sequence' if they see a shard of the sequence",
            UserWarning,
            stacklevel=3,
        )
