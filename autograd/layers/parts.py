"""What a model keeps that parallelize has made: marks in its copies, and a save_pretrained that saves no parts."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from ..torch_internals import own_parameters
from .shards import Shard, Sharded, shard_of


def keep_parts(model: nn.Module) -> None:
    """See to it that copies of the model have the marks of its parameters, also in modules that are not `Sharded`, and
    that save_pretrained of models of transformers, also within it, refuses to save what this rank has."""
    for module in model.modules():
        parameters = own_parameters(module)
        marks = {name: shard for name, one in parameters.items() if one is not None and (shard := shard_of(one))}
        if marks and not isinstance(module, Sharded):
            keeping = Marks(parameters, marks)
            module.register_load_state_dict_post_hook(keeping)
            module.register_forward_pre_hook(keeping)
        if hasattr(module, "save_pretrained") and any(shard_of(one) is not None for one in module.parameters()):
            module.save_pretrained = SavePretrained(module)  # type: ignore[assignment]


class Marks:
    """A hook of load_state_dict, whose assign=True makes new parameters, and of the forward pass, before which others
    may have, as to_empty() does. As a part of the module it is copied and pickled with it, and then marks the
    parameters there, which are new ones, too."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], marks: dict[str, Shard]) -> None:
        self.parameters, self.marks = parameters, marks

    def __call__(self, *_: Any) -> None:
        for name, shard in self.marks.items():
            parameter: Any = self.parameters.get(name)
            if parameter is not None and getattr(parameter, "shard", None) is not shard:
                parameter.shard = shard

    def __deepcopy__(self, memo: dict[int, Any]) -> Marks:
        twin = Marks(copy.deepcopy(self.parameters, memo), self.marks)
        twin()
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self()


class SavePretrained:
    """`save_pretrained` of a model of which each rank has a part."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **options: Any) -> Any:
        """transformers' own, of the whole state dict, which it needs. Ranks that have none of it write nothing."""
        state = args[1] if len(args) > 1 else options.get("state_dict")
        if state is None or options.get("distributed_checkpoint"):
            raise RuntimeError(
                "save_pretrained: each rank has a part of this model, which would be saved as if it were the whole. On "
                "every rank, call ad.save_full_state_dict(model, folder), and model.config.save_pretrained(folder) on "
                "rank 0; or model.save_pretrained(folder, state_dict=ad.full_state_dict(model))"
            )
        if not state:
            return None
        for name, one in self.model.state_dict(keep_vars=True).items():
            shard, given = shard_of(one) if isinstance(one, Tensor) else None, state.get(name)
            if shard is not None and isinstance(given, Tensor) and tuple(given.shape) != shard.shape:
                raise ValueError(
                    f"save_pretrained: {name} of state_dict has shape {list(given.shape)}, expected that of the "
                    f"whole, {list(shard.shape)}: pass state_dict=ad.full_state_dict(model)"
                )
        kind: Any = type(self.model)
        return kind.save_pretrained(self.model, save_directory, *args, **options)
