"""keep_shards: parameters keep what they are parts of where they are made anew, as FSDP2 does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from pynccl.bindings.values import instance

from .shards import shard_of


@contextlib.contextmanager
def keep_shards(model: nn.Module) -> Iterator[None]:
    """A block in which parameters of the model are replaced under their names. The new ones are parts of what the old
    ones were, for `finish_gradients`, `clip_grad_norm_` and checkpoints.

        with ad.keep_shards(model):
            for layer in model.layers:
                fully_shard(layer, mesh=device_mesh["dp"])
            fully_shard(model, mesh=device_mesh["dp"])

    For torch's fully_shard (FSDP2), over another axis than that which cuts the layers; for what else makes parameters
    anew, such as load_state_dict(assign=True) of a model with modules that a plan only marks. No communication.
    TypeError if the model has lost its marks before.
    """
    instance(model, nn.Module, "keep_shards: model", "a torch.nn.Module")
    before = {name: shard_of(one) for name, one in model.named_parameters(remove_duplicate=False)}
    try:
        yield
    finally:
        for name, one in model.named_parameters(remove_duplicate=False):
            if name in before:
                parameter: Any = one
                parameter.shard = before[name]  # None says of a DTensor that this is known
