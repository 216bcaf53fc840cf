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

from ..agreement import first_other, gathered
from ..streams import is_capturing
from ..torch_internals import has_no_values, is_tracing, tensors_in
from .plan import NAME, Site

SAMPLE = 16  # elements of each parameter


def check_alike(model: nn.Module, sites: Mapping[str, Site], options: Iterable[Any], comm: Communicator) -> None:
    """ValueError, on all ranks, if they would make other models; UserWarning if they have other weights, which a
    checkpoint that is loaded afterwards may put right."""
    if comm.size == 1:
        return
    said = [f"{path}: {_plain(site.roles)} {site.function is not None}" for path, site in sites.items()]
    shapes = [f"{name} {list(one.shape)} {one.dtype} {one.is_meta}" for name, one in model.named_parameters()]
    own = [_sum(said), _sum([_plain(list(options))]), _sum(shapes), _sample(model)]
    rows = gathered(comm, own)
    what = ("what the plan says of the modules", "the options", "names, shapes, types or devices of the parameters")
    other = first_other([row[:-1] for row in rows])
    if other is not None:
        rank, place = other
        raise ValueError(f"{NAME}: rank {rank} and rank 0 differ in {what[place]}; expected the same on all ranks")
    other = first_other(rows)
    if other is not None:
        warnings.warn(
            f"{NAME}: rank {other[0]} and rank 0 have other weights, and each will keep its part of its own: call "
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
        rows = gathered(self.comm, [_sum(f"{list(one.shape)} {one.dtype}" for one in given), _values(given)])
        other = first_other(rows)
        if other is not None:
            rank, place = other
            what = ("of other shapes or types", "with other values")[place]
            raise ValueError(
                f"{type(module).__name__}: rank {rank} was given a batch {what} than rank 0; expected the same on all "
                f"{self.comm.size} ranks that share the model: give the sampler the rank of the data-parallel "
                "communicator, not of all"
            )


def _plain(value: Any) -> str:
    """As text that is equal where the value is: of objects their type."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return repr(value) if isinstance(value, (str, int, float, bool, type(None), torch.dtype)) else type(value).__name__


def _sum(lines: Iterable[str]) -> int:
    return zlib.crc32("\n".join(lines).encode())


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
