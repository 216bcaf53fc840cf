"""Names of modules and parameters without those of the modules that wrap others: torch.compile's, those of activation
checkpointing, DistributedDataParallel and FSDP1. As in torch.distributed.checkpoint's get_model_state_dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import nn

from .torch_internals import WRAPPED_MODULES, wrapped_in


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name of a module, parameter or buffer, as if no module in the model wrapped another."""
    module: Any = model
    parts = []
    for part in name.split("."):
        while (held := wrapped_in(module)) not in (None, part):  # a state-dict hook has removed it from the name
            module = getattr(module, str(held))
        if held is None:
            parts.append(part)
        module = getattr(module, part, None)
    return ".".join(parts)


def plain_names(model: nn.Module, names: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Return the plain name of each name in a checkpoint, which may have been saved from a wrapped model, this one or
    another. known: the plain names in the model. Of the ways to read the names, the one that finds most of them counts.
    Two names that would become one stay as they are."""
    private = [".".join(part for part in name.split(".") if part not in WRAPPED_MODULES - {"module"}) for name in names]
    of_ddp = [name.removeprefix("module.") for name in private]
    forms = [[*names], [plain_name(model, name) for name in names], private, of_ddp]
    best = max(forms, key=lambda form: len({*form} & {*known}))
    counts = Counter(best)
    return {name: plain if counts[plain] == 1 else name for name, plain in zip(names, best, strict=True)}
