"""What the ranks tell each other about the arguments of a call before it, where that is needed or asked for."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from pynccl import Communicator
from pynccl.bindings.values import shown
from pynccl.comm.consistency import compare_texts

from .torch_internals import is_tracing, unwrapped

T = TypeVar("T")


def gathered(comm: Communicator, row: Sequence[float], dtype: torch.dtype = torch.int64) -> list[list[Any]]:
    """The row of every rank, equally long on all and of the same type; the CPU waits for them."""
    with unwrapped():
        own = torch.tensor(row, device=comm.device, dtype=dtype)
        rows: list[list[Any]] = comm.all_gather(own, own.new_empty(comm.size, len(row))).tolist()
    return rows


class Difference(NamedTuple):
    """What is not equal on all ranks."""

    rank: int  # the first whose value is not that of rank 0
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank} and rank 0 differ in {self.what}"


def difference(comm: Communicator, values: Mapping[str, Any]) -> Difference | None:
    """The first of the values that is not equal on all ranks, the same on all ranks; None: they are. Every rank must
    call it, with the same names.

    values  name -> an integer, or something whose repr() is equal where it is; texts are compared by their checksum
    """
    row = [one if isinstance(one, int) else zlib.crc32(repr(one).encode()) for one in values.values()]
    rows = gathered(comm, row)
    for at, what in enumerate(values):
        for rank, other in enumerate(rows):
            if other[at] != rows[0][at]:
                return Difference(rank, what)
    return None


def broadcast_object(comm: Communicator | None, value: Any, root: int = 0) -> Any:
    """What `root` passes, on every rank; None: this rank is alone.

    It travels as torch.load(weights_only=True) reads it, so that nobody has to trust it: numbers, strings, None, lists,
    tuples, dicts, data types and tensors, which arrive on the CPU. TypeError, on every rank, for anything else."""
    if comm is None or comm.size == 1:
        return value
    data, failed = b"", False
    if comm.rank == root:
        try:
            data = _packed(value)
            _unpacked(data)
        except Exception:  # of what pickle knows, and its readers do not
            failed = True
            data = _packed(
                f"{shown(value)} cannot be told to other ranks; expected numbers, strings, lists, tuples, dicts or "
                f"tensors (on rank {root})"
            )
    size, wrong = gathered(comm, [len(data), failed])[root]
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
    wire = sent.to(comm.device)
    comm.broadcast(wire, wire, root)
    if comm.rank == root and not wrong:
        return value
    found = _unpacked(bytes(wire.tolist()))
    if wrong:
        raise TypeError(found)
    return found


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def raise_on_all_ranks(comm: Communicator | None, problem: Exception | None) -> None:
    """Raise this rank's problem; where only others have one, a RuntimeError that says theirs. Every rank must come."""
    if comm is not None and comm.size > 1:
        failed = [rank for rank, (wrong,) in enumerate(gathered(comm, [problem is not None])) if wrong]
        if failed:
            text = broadcast_object(comm, f"{type(problem).__name__}: {problem}", failed[0])
            if problem is None:
                raise RuntimeError(f"on rank {failed[0]}: {text}")
    if problem is not None:
        raise problem


def caught(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """(what it returns, None), or (None, what it raises)."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def run_on_all_ranks(comm: Communicator | None, function: Callable[[], T]) -> T:
    """Return `function()`. If it raises on one rank, all ranks raise. Every rank must call this."""
    found, problem = caught(function)
    raise_on_all_ranks(comm, problem)
    return cast(T, found)


def checked_on_all_ranks(comm: Communicator, options: Callable[[], str], check: Callable[[], T]) -> T:
    """The result of `check`, which raises ValueError or TypeError for wrong arguments of this rank.

    With PYNCCL_CHECK=1 every rank raises if one does, and NcclInvalidUsage if `options`, in which all ranks have to be
    equal, differ. For calls of sends and receives, which pynccl itself does not compare; every rank must come here."""
    if comm.size == 1 or not comm.checking or is_tracing():
        return check()
    found = run_on_all_ranks(comm, check)
    text = options()
    if len(text) > 350:  # so that it fits into a record of the check; what differs still does
        text = f"{text[:320]}... ({zlib.crc32(text.encode()):08x})"
    compare_texts({comm: text})
    return found
