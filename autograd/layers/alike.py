"""What has to be equal on all ranks for a model to be made parallel: the plan, the weights, and then the batch."""

from __future__ import annotations

import ctypes
import warnings
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator

from ..agreement import difference
from ..streams import is_capturing
from ..torch_internals import has_no_values, is_tracing, tensors_in
from .plan import NAME, Site

SAMPLE = 16  # elements of each parameter
_WEIGHTS = "the weights"


def check_alike(model: nn.Module, sites: Mapping[str, Site], options: Iterable[Any], comm: Communicator) -> None:
    """ValueError, on all ranks, if they would make other models; UserWarning if they have other weights, which a
    checkpoint that is loaded afterwards may put right."""
    if comm.size == 1:
        return
    said = [f"{path}: {_plain(site.roles)} {site.function is not None}" for path, site in sites.items()]
    shapes = [f"{name} {list(one.shape)} {one.dtype} {one.is_meta}" for name, one in model.named_parameters()]
    values = {
        "what the plan says of the modules": said,
        "the options": _plain(list(options)),
        "names, shapes, types or devices of the parameters": shapes,
        _WEIGHTS: _sample(model),
    }
    other = difference(comm, values)
    if other is not None and other.what != _WEIGHTS:
        raise ValueError(f"{NAME}: {other}; expected the same on all ranks")
    if other is not None:
        warnings.warn(
            f"{NAME}: rank {other.rank} and rank 0 have other weights, and each will keep its part of its own: call "
            "torch.manual_seed(seed) before the model is made, or load a checkpoint afterwards by load_full_state_dict",
            UserWarning,
            stacklevel=3,
        )


class SameInput:
    """A hook of the whole model: the first batch is compared. ValueError, on all ranks, if they have other ones."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.seen = comm, False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (
            self.seen
            or is_tracing()
            or (not self.comm.library.is_host and is_capturing(torch.device(self.comm.device)))
        ):
            return
        given = tensors_in([args, dict(sorted(kwargs.items()))])
        if any(has_no_values(one) or one.layout != torch.strided for one in given):
            return
        self.seen = True
        shapes = [f"{list(one.shape)} {one.dtype}" for one in given]
        other = difference(self.comm, {"of other shapes or types": shapes, "with other values": _values(given)})
        if other is not None:
            raise ValueError(
                f"{type(module).__name__}: rank {other.rank} was given a batch {other.what} than rank 0; expected the "
                f"same on all {self.comm.size} ranks that share the model: give the sampler the rank of the "
                "data-parallel communicator, not of all"
            )


def _plain(value: Any) -> str:
    """As text that is equal where the value is: of objects their type."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return repr(value) if isinstance(value, (str, int, float, bool, type(None), torch.dtype)) else type(value).__name__


def _sample(model: nn.Module) -> int:
    """Of some elements of each parameter."""
    parts: list[Tensor] = []
    for one in model.parameters():
        if one.numel() and not has_no_values(one) and one.layout == torch.strided:
            step = max(1, one.numel() // SAMPLE)
            parts.append(one.detach().reshape(-1)[::step][:SAMPLE].to(torch.float64))
    return _values([torch.cat(parts)]) if parts else 0


def _values(tensors: Iterable[Tensor]) -> int:
    total = 0
    for one in tensors:
        whole = one.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if whole.numel():
            total = zlib.crc32((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()), total)
    return total
