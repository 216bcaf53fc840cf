"""Exchange of arguments and errors between ranks before a call."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from pynccl import Communicator, NcclInvalidUsage
from pynccl.bindings.resource import Shared
from pynccl.bindings.values import shown
from pynccl.comm.consistency import compare_texts
from pynccl.comm.groups import recorder
from pynccl.watch.frames import walk_outwards

from .torch_internals import is_tracing, unwrapped

T = TypeVar("T")


def check_not_in_group(name: str = "") -> None:
    """Raise NcclInvalidUsage within a `pynccl.group`, where results are available only at the end of the block.

    name  what the program called; by default the function of this package"""
    if recorder() is not None:
        raise NcclInvalidUsage(
            f"{name or _called()} within a pynccl.group(): the group launches its calls at the end of the block, but "
            "autograd needs the results before: call it outside.\nFor several tensors pass a list, e.g. "
            "ad.all_reduce([a, b], comm, ...), which is one group; for several ranks in\none process use one thread "
            "per rank"
        )


def _called() -> str:
    """Return the name of the function or class of this package that the program called."""
    frames = walk_outwards(sys._getframe(1))
    ours = [one for one in frames if one.f_globals.get("__name__", "").startswith(f"{__package__}.")]
    *_, outermost = (one for one in ours if one.f_code.co_name not in ("run_now", "wrapper"))  # those of decorators
    name, owner = outermost.f_code.co_name, outermost.f_locals.get("self")
    if owner is None:
        return name
    return type(owner).__name__ + ("" if name in ("__init__", "__call__", "__enter__", "forward") else f".{name}")


def gathered(comm: Communicator, row: Sequence[float], dtype: torch.dtype = torch.int64) -> list[list[Any]]:
    """All-gather a row of numbers and return the rows of all ranks. All rows must have the same length and dtype. The
    CPU waits for the result."""
    rows: list[list[Any]] = gathered_tensor(comm, row, dtype).tolist()
    return rows


def gathered_tensor(comm: Communicator, row: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """The same as a tensor [N, len(row)] on the communicator's device, for which no CPU waits on a GPU."""
    check_not_in_group()
    with unwrapped():
        send = torch.tensor(row, dtype=dtype, device="cpu")
        if comm.device != "cpu":  # from pageable memory, the copy would wait for the stream
            send = send.pin_memory().to(comm.device, non_blocking=True)
        rows: Tensor = comm.all_gather(send, send.new_empty(comm.size, len(row)))
    return rows


class DeferredCheck(Shared):
    """A check of numbers of all ranks in every step, for which no CPU waits in that step on a GPU.

    With the host library the numbers are checked at once. On a GPU they are copied to the CPU, and checked in the next
    call, on every rank in the same one, so those of the last call are not checked. Not for a call that a CUDA graph
    captures."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Any, Callable[[list[Any]], object]] | None = None

    def __call__(self, numbers: Tensor, check: Callable[[list[Any]], object]) -> None:
        """Call `check(numbers.tolist())`, which raises if they are wrong, now or in the next call. `numbers` must be
        equal on all ranks, as all_gather and all_reduce return them."""
        if not numbers.is_cuda:
            check(numbers.tolist())
            return
        last, on_cpu = self._last, numbers.to("cpu", non_blocking=True)  # in pinned memory
        self._last = on_cpu, torch.cuda.current_stream(numbers.device).record_event(), check
        if last is not None:
            on_cpu, copied, check = last
            copied.synchronize()  # waits if the GPU is a whole step behind
            check(on_cpu.tolist())


class Difference(NamedTuple):
    """A value that is not equal on all ranks."""

    rank: int  # the first rank whose value differs from that of rank 0
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank} and rank 0 differ in {self.what}"


def difference(comm: Communicator, values: Mapping[str, Any]) -> Difference | None:
    """Return the first value that is not equal on all ranks, or None if all are equal. The result is the same on all
    ranks. Every rank must call it, with the same names.

    values  name -> an integer, or any object; objects are compared by the checksum of their repr()
    """
    row = [value if isinstance(value, int) else zlib.crc32(repr(value).encode()) for value in values.values()]
    rows = gathered(comm, row)
    for at, what in enumerate(values):
        for rank, other in enumerate(rows):
            if other[at] != rows[0][at]:
                return Difference(rank, what)
    return None


def broadcast_object(comm: Communicator | None, value: Any, root: int = 0) -> Any:
    """Return the value that `root` passes, on every rank. comm None: return `value`.

    The value is serialized so that torch.load(weights_only=True) can read it, which executes no code: numbers, strings,
    None, lists, tuples, dicts, dtypes and tensors. Tensors arrive on the CPU. TypeError on every rank for anything
    else.
    """
    if comm is None or comm.size == 1:
        return value
    data, failed = b"", False
    if comm.rank == root:
        try:
            data = _packed(value)
            _unpacked(data)
        except Exception:  # whatever pickle, or the restricted unpickler, raises
            failed = True
            data = _packed(
                f"cannot broadcast {shown(value)} from rank {root} to the other ranks; expected numbers, strings, "
                "lists, tuples, dicts or tensors"
            )
    size, wrong = gathered(comm, [len(data), failed])[root]
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
    buffer = buffer.to(comm.device)
    comm.broadcast(buffer, buffer, root)
    if comm.rank == root and not wrong:
        return value
    received = _unpacked(bytes(buffer.tolist()))
    if wrong:
        raise TypeError(received)
    return received


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def raise_on_all_ranks(comm: Communicator | None, problem: Exception | None) -> None:
    """Raise this rank's problem. On a rank without one, raise a RuntimeError that quotes the first failed rank's
    problem.

    Returns if no rank has a problem. Every rank must call it."""
    if comm is not None and comm.size > 1:
        failed = [rank for rank, (wrong,) in enumerate(gathered(comm, [problem is not None])) if wrong]
        if failed:
            text = broadcast_object(comm, f"{type(problem).__name__}: {problem}", failed[0])
            if problem is None:
                raise RuntimeError(f"on rank {failed[0]}: {text}")
    if problem is not None:
        raise problem


def try_call(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call the function and return (its result, None), or (None, the exception)."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def run_on_all_ranks(comm: Communicator | None, function: Callable[[], T]) -> T:
    """Return `function()`. If it raises on one rank, all ranks raise. Every rank must call this."""
    result, problem = try_call(function)
    raise_on_all_ranks(comm, problem)
    return cast(T, result)


def check_on_all_ranks(comm: Communicator, options: Callable[[], str], check: Callable[[], T]) -> T:
    """Return `check()`, which raises ValueError or TypeError for wrong arguments of this rank.

    With PYNCCL_CHECK=1 every rank raises if one does, and NcclInvalidUsage is raised if the ranks' `options` differ.
    For operations made of sends and receives, which pynccl itself does not compare. Every rank must call it."""
    if comm.size == 1 or not comm.checking or is_tracing():
        return check()
    result = run_on_all_ranks(comm, check)
    text = options()
    if len(text) > 350:  # to fit into a record of the check; the checksum keeps different texts different
        text = f"{text[:320]}... ({zlib.crc32(text.encode()):08x})"
    compare_texts({comm: text})
    return result
