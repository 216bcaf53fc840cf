"""Comparison of the inputs of a parallelized model over its ranks, which must all get the same."""

from __future__ import annotations

import ctypes
import functools
import random
import zlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator

from ..agreement import DeferredCheck, check_not_in_group, gathered
from ..streams import is_capturing
from ..torch_internals import has_no_values, is_tracing, tensors_in, transforms_active

_SAMPLE = 1000  # elements of an input that are compared after the first forward pass
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # itemsize -> dtype


class CheckSameInput:
    """Compare the inputs of each forward pass over the ranks: a forward pre-hook of the full model. ValueError, on all
    ranks, if they differ.

    The first inputs are compared whole, later ones by their shapes and about 1,000 elements of each tensor; these are
    compared in the next forward pass on a GPU, which would have to wait otherwise."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.is_first, self.compare_later = comm, True, DeferredCheck()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        comm, name = self.comm, type(module).__name__
        if is_tracing() or transforms_active() or comm.size == 1:
            return
        if not comm.library.is_host and is_capturing(torch.device(comm.device)):
            return
        inputs = tensors_in([args, dict(sorted(kwargs.items()))])
        if any(map(has_no_values, inputs)):
            return
        check_not_in_group(name)
        shapes = [f"{list(x.shape)} {x.dtype}" if _is_dense(x) else str(x.layout) for x in inputs]
        described, dense = zlib.crc32(repr(shapes).encode()), filter(_is_dense, inputs)
        if self.is_first:
            self.is_first = False
            self._compare(f"{name}: the batch", gathered(comm, [described, checksum(dense)]))
            return
        row = torch.full((2,), described, dtype=torch.int64, device=comm.device)
        for x in dense:
            add_sample(row[1], x)
        rows = comm.all_gather(row, row.new_empty(comm.size, 2))
        previous = "" if comm.library.is_host else " of the previous forward pass"
        self.compare_later(rows, partial(self._compare, f"{name}: the batch{previous}"))

    def _compare(self, batch: str, rows: list[list[int]]) -> None:
        for rank, (shapes, _) in enumerate(rows):
            if rows[rank] != rows[0]:
                what = "other values" if shapes == rows[0][0] else "other shapes or dtypes"
                raise ValueError(
                    f"{batch} on rank {rank} has {what} than on rank 0; all {self.comm.size} tensor-parallel ranks "
                    "need the same inputs: give the sampler of the data the rank of the data-parallel communicator, "
                    "not the global rank; before generate(do_sample=True), call ad.rng.seed(seed, comm), or "
                    "torch.manual_seed with the same seed on all ranks"
                )


def _is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return the CRC-32 of the bytes of dense tensors."""
    total = 0
    for x in tensors:
        data = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if data.numel():
            total = zlib.crc32((ctypes.c_char * data.nbytes).from_address(data.data_ptr()), total)
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    numbers = random.Random(0)  # odd: then no change of one element is lost
    return torch.tensor([numbers.getrandbits(63) | 1 for _ in range(_SAMPLE)], device=device)


def add_sample(total: Tensor, x: Tensor) -> None:
    """Add to a checksum, on the GPU if x is there, the bits of evenly spaced elements of x, with the last one, each
    with a weight of its place."""
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.dtype == torch.complex128 else x
    bits = x.view(_BITS[x.element_size()])
    count = bits.numel()
    if count <= _SAMPLE:
        sample = bits.reshape(-1)
    else:  # not a slice of a reshape, which may copy all of x
        step = -(-count // _SAMPLE)
        sample = torch.take(bits, torch.arange((count - 1) % step, count, step, device=x.device))
    added = (sample * _weights(x.device)[: sample.numel()]).sum()
    total.mul_(31).add_(added if added.is_cpu else added.to(total.device))  # one on the CPU becomes an argument
