"""What the ranks tell each other about the arguments of a call before it, where that is needed or asked for."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from pynccl import Communicator, NcclInvalidUsage
from pynccl.bindings.values import shown
from pynccl.comm.consistency import exchange
from pynccl.watch.frames import call_site

from .torch_internals import is_tracing, unwrapped

T = TypeVar("T")


def gathered(comm: Communicator, row: Sequence[int]) -> list[list[int]]:
    """The row of every rank, equally long on all; the CPU waits for them."""
    with unwrapped():
        own = torch.tensor(row, device=comm.device, dtype=torch.int64)
        rows: list[list[int]] = comm.all_gather(own, own.new_empty(comm.size, len(row))).tolist()
    return rows


def first_other(rows: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """The first rank whose row is not that of rank 0, and the first place in it that is other; None: all are equal."""
    places = range(len(rows[0]))
    return next(((rank, at) for rank, row in enumerate(rows) for at in places if row[at] != rows[0][at]), None)


def broadcast_object(comm: Communicator | None, value: Any, root: int = 0) -> Any:
    """What `root` passes, on every rank; None: this rank is alone.

    It travels as JSON, so that nobody has to trust it: numbers, strings, None, lists, tuples, dicts, data types and
    tensors, which arrive on the CPU. TypeError, on every rank, for anything else."""
    if comm is None or comm.size == 1:
        return value
    data, failed = b"", False
    if comm.rank == root:
        try:
            data = json.dumps(_packed(value)).encode()
        except (TypeError, RecursionError) as error:
            data, failed = json.dumps(str(error)).encode(), True
    size, wrong = gathered(comm, [len(data), failed])[root]
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
    wire = sent.to(comm.device)
    comm.broadcast(wire, wire, root)
    if comm.rank == root and not wrong:
        return value
    found = json.loads(bytes(wire.tolist()))
    if wrong:
        raise TypeError(f"{found} (on rank {root})")
    return _unpacked(found)


def _packed(value: Any) -> Any:
    """As what JSON has. A list says first what it was."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return ["list", *map(_packed, value)]
        case tuple():
            return ["tuple", *map(_packed, value)]
        case dict():
            return ["dict", *([_packed(key), _packed(one)] for key, one in value.items())]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")]
        case torch.Tensor():
            return ["tensor", _packed(value.dtype), list(value.shape), value.detach().reshape(-1).tolist()]
    raise TypeError(
        f"{shown(value)} cannot be told to other ranks; expected numbers, strings, lists, tuples, dicts or tensors"
    )


def _unpacked(found: Any) -> Any:
    """What `_packed` was given."""
    match found:
        case ["list", *items]:
            return [_unpacked(one) for one in items]
        case ["tuple", *items]:
            return tuple(_unpacked(one) for one in items)
        case ["dict", *items]:
            return {_unpacked(key): _unpacked(one) for key, one in items}
        case ["dtype", str(name)]:
            return getattr(torch, name)
        case ["tensor", dtype, shape, values]:
            return torch.tensor(values, dtype=_unpacked(dtype)).reshape(shape)
    return found


def raise_alike(comm: Communicator | None, problem: Exception | None) -> None:
    """Raise this rank's problem; where only others have one, a RuntimeError that says theirs. Every rank must come."""
    if comm is not None and comm.size > 1:
        failed = [rank for rank, (wrong,) in enumerate(gathered(comm, [problem is not None])) if wrong]
        if failed:
            text = broadcast_object(comm, f"{type(problem).__name__}: {problem}", failed[0])
            if problem is None:
                raise RuntimeError(f"on rank {failed[0]}: {text}")
    if problem is not None:
        raise problem


def checked_alike(comm: Communicator, options: Callable[[], str], check: Callable[[], T]) -> T:
    """The result of `check`, which raises ValueError or TypeError for wrong arguments of this rank.

    With PYNCCL_CHECK=1 every rank raises if one does, and NcclInvalidUsage if `options`, in which all ranks have to be
    equal, differ. For calls of sends and receives, which pynccl itself does not compare; every rank must come here."""
    if comm.size == 1 or not comm.checking or is_tracing():
        return check()
    problem: Exception | None = None
    try:
        found = check()
    except (ValueError, TypeError) as error:
        problem = error
    own = _short(options())
    rows = [row.split("\0") for row in exchange({comm: f"{own}\0{_short(str(problem or ''))}\0{call_site()}"})[comm]]
    if problem is not None:
        raise problem
    for rank, (_, wrong, *_) in enumerate(rows):
        if wrong:
            raise ValueError(f"{wrong} (on rank {rank})")
    for rank, (other, _, *line) in enumerate(rows):
        if other != own:
            raise NcclInvalidUsage(
                "the ranks of this communicator disagree (PYNCCL_CHECK=1):\n"
                f"  rank {comm.rank}: {own} at {call_site()}\n"
                f"  rank {rank}: {other} at {''.join(line)}\n"
                "  every rank must pass the same"
            )
    return found


def _short(text: str) -> str:
    """So that all of a row fits into a record of the check; what differs still does."""
    return text if len(text) <= 350 else f"{text[:320]}... ({zlib.crc32(text.encode()):08x})"
