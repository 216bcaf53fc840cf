"""Times on this machine: of collectives large and small, matmuls, copies, and what a slice costs beside its share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.tools import progress

from ..agreement import gathered
from ..streams import side_stream
from ..torch_internals import unwrapped

# A collective whose time is that of its bytes: of a full tensor that grows fourfold until it takes so long, or is so
# large. On a GPU that is less long, since NVLink moves 256 MB in under a millisecond.
FIRST_BYTES = 1 << 16
MOST_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
LONG_SECONDS = {"cpu": 5e-3, "cuda": 5e-4}
# Matmuls of squares from the first size to the last, and the bytes of a copy that no cache holds.
SQUARES = {"cpu": (256, 1024), "cuda": (2048, 8192)}
BESIDE_SECONDS = 0.3  # for what runs at once, and each alone
COPY_BYTES = {"cpu": 1 << 25, "cuda": 1 << 27}


def measured(comm: Communicator, dtypes: Iterable[str]) -> dict[str, float]:
    """Seconds, the shortest of several times each. A collective: every rank of the communicator comes here.

    all_gather, all_reduce   of one element a rank
    wire                     a byte on the wire
    overhead                 a slice more
    copy                     a byte read or written
    gather, matmul, both     a long all_gather, matmuls of about that time, and both at once
    flop:float32, ..         a FLOP of a large matmul, for each of dtypes
    """
    parts: list[Callable[[], dict[str, float]]] = [
        lambda: _collectives(comm),
        lambda: {"overhead": _overhead(comm)},
        lambda: {"copy": _copy(comm)},
        lambda: _beside(comm),
        *(partial(_flops, comm, dtype) for dtype in dtypes),
    ]
    times: dict[str, float] = {}
    for part in progress.over(parts, "measuring this machine", "part", own=comm.rank == 0):
        times |= part()
    return times


def _flops(comm: Communicator, dtype: str) -> dict[str, float]:
    return {f"flop:{dtype}": _flop(comm, getattr(torch, dtype))}


@contextlib.contextmanager
def apart(comm: Communicator) -> Iterator[None]:
    """Nothing of the caller's torch reaches what is measured: gradients, autocast, torch.func, another current GPU."""
    kind = torch.device(comm.device).type
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(kind, enabled=False),
        torch.cuda.device(comm.device) if kind == "cuda" else contextlib.nullcontext(),
        unwrapped(),
    ):
        yield


def _shortest(comm: Communicator, run: Callable[[], Any], calls: int = 1, repetitions: int = 3) -> float:
    """Seconds of a call. Other work only ever makes it longer, and so does waiting for another rank: hence the
    shortest."""
    timed = _on_the_cpu if comm.library.is_host else _on_the_gpu
    return min(timed(run, calls) for _ in range(repetitions)) / calls


def _on_the_cpu(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


def _on_the_gpu(run: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _agreed(comm: Communicator, seconds: float) -> float:
    """The longest of all ranks: by their own, they would not make equally many calls."""
    return max(row[0] for row in gathered(comm, [round(seconds * 1e9)])) / 1e9


def _calls(comm: Communicator, run: Callable[[], Any], within: float, most: int) -> int:
    """How many calls take so many seconds; the first, in which NCCL connects the ranks, is not counted."""
    run()
    return max(2, min(most, int(within / max(_agreed(comm, _shortest(comm, run)), 1e-9))))


def _collectives(comm: Communicator) -> dict[str, float]:
    if comm.size == 1:
        return dict.fromkeys(("all_gather", "all_reduce", "wire"), 0.0)
    send, recv = _buffers(comm, comm.size * 4)

    def gather() -> None:
        comm.all_gather(send, recv)

    def reduce() -> None:
        comm.all_reduce(recv, recv, "max")  # the values stay what they are

    calls = _calls(comm, reduce, within=5e-3, most=16)
    small = [_shortest(comm, run, calls, repetitions=5) for run in (gather, reduce)]
    kind = torch.device(comm.device).type
    nbytes, long = FIRST_BYTES, 0.0
    while True:  # the closures see the new buffers
        send, recv = _buffers(comm, nbytes)
        gather()
        long = _shortest(comm, gather)
        if nbytes >= MOST_BYTES[kind] or _agreed(comm, long) >= LONG_SECONDS[kind]:
            break
        nbytes *= 4
    reduce()
    longer = long + _shortest(comm, reduce) - sum(small)
    on_the_wire = 3 * (comm.size - 1) / comm.size * recv.nbytes  # once by the gather, twice by the sum
    return {"all_gather": small[0], "all_reduce": small[1], "wire": max(longer, 0.0) / on_the_wire}


def _buffers(comm: Communicator, nbytes: int) -> tuple[Tensor, Tensor]:
    """What a rank sends, and what it receives: a full tensor of about nbytes."""
    own = torch.ones(max(1, nbytes // 4 // comm.size), device=comm.device, dtype=torch.float32)
    return own, own.repeat(comm.size)


class _Keeper:
    """Keeps the buffers of what is under way on the side stream."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def hold(self, keep: Any) -> None:
        self.kept.append(keep)


def _overhead(comm: Communicator) -> float:
    """What a tiny slice takes by itself, and what it takes longer with its collective on the side stream and an event
    than with all of it on one stream."""
    tile = _numbers(comm, 32, torch.float32)
    out = torch.empty_like(tile)

    def multiply() -> None:
        torch.mm(tile, tile, out=out)

    multiply()
    alone = _shortest(comm, multiply, calls=32)
    if comm.size == 1:
        return alone
    send, recv = _buffers(comm, 4 * comm.size)
    side, keeper = side_stream(comm), _Keeper()

    def slice_on_one() -> None:
        comm.all_gather(send, recv)
        multiply()

    slices = _calls(comm, slice_on_one, within=5e-3, most=16)

    def slices_on_both() -> None:
        side.wait_for_caller()
        events = []
        for _ in range(slices):
            comm.all_gather(send, recv, stream=side.handle(keeper))
            events.append(side.record())
        for event in events:
            side.wait(event)
            multiply()

    slices_on_both()
    on_both = _shortest(comm, slices_on_both) / slices
    return alone + max(0.0, on_both - _shortest(comm, slice_on_one, calls=slices))


def _beside(comm: Communicator) -> dict[str, float]:
    """A collective, matmuls of about the same time, and both at once, on all ranks together."""
    if comm.size == 1:
        return {"gather": 0.0, "matmul": 0.0, "both": 0.0}
    kind = torch.device(comm.device).type
    nbytes = FIRST_BYTES
    while True:
        send, recv = _buffers(comm, nbytes)
        comm.all_gather(send, recv)
        gather = _agreed(comm, _shortest(comm, lambda send=send, recv=recv: comm.all_gather(send, recv)))  # type: ignore[misc]
        if nbytes >= MOST_BYTES[kind] or gather >= LONG_SECONDS[kind]:
            break
        nbytes *= 4
    square = _numbers(comm, SQUARES[kind][0], torch.float32)
    out = torch.empty_like(square)

    def multiply() -> None:
        torch.mm(square, square, out=out)

    multiply()
    calls = max(1, round(gather / max(_agreed(comm, _shortest(comm, multiply, calls=4)), 1e-9)))
    side, keeper = side_stream(comm), _Keeper()

    def both() -> None:
        side.wait_for_caller()
        comm.all_gather(send, recv, stream=side.handle(keeper))
        arrived = side.record()
        for _ in range(calls):
            multiply()
        side.wait(arrived)

    def matmuls() -> None:
        for _ in range(calls):
            multiply()

    both()
    runs = {"gather": lambda: comm.all_gather(send, recv), "matmul": matmuls, "both": both}
    # In turns: what disturbs a machine for a tenth of a second then disturbs all three, and not one alone.
    count = max(3, min(8, int(BESIDE_SECONDS / (3 * max(gather, 1e-9)))))
    rounds = [{name: _shortest(comm, run, repetitions=1) for name, run in runs.items()} for _ in range(count)]
    return {name: min(one[name] for one in rounds) for name in runs}


def _copy(comm: Communicator) -> float:
    source = torch.ones(COPY_BYTES[torch.device(comm.device).type] // 4, device=comm.device, dtype=torch.float32)
    target = torch.zeros_like(source)
    return _shortest(comm, lambda: target.copy_(source)) / (2 * source.nbytes)


def _flop(comm: Communicator, dtype: torch.dtype) -> float:
    """Of the largest square that does not take long."""
    kind = torch.device(comm.device).type
    size, most = SQUARES[kind]
    while True:
        square = _numbers(comm, size, dtype)
        out = torch.empty_like(square)

        def multiply(square: Tensor = square, out: Tensor = out) -> None:
            torch.mm(square, square, out=out)

        multiply()
        seconds = _shortest(comm, multiply)
        if size >= most or seconds >= LONG_SECONDS[kind]:
            return min(seconds, _shortest(comm, multiply)) / (2.0 * size**3)
        size *= 2


def _numbers(comm: Communicator, size: int, dtype: torch.dtype) -> Tensor:
    """A square of numbers that look drawn: a GPU is faster with equal ones, and the generators are the caller's."""
    count = torch.arange(size * size, device=comm.device, dtype=torch.float32)
    return count.mul_(0.7).sin_().view(size, size).to(dtype)
