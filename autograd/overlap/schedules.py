"""The schedules of a pass: which it can use, and the one that was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from pynccl import Communicator

from .config import OverlapConfig

PATTERNS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "column_backward",
    "row_backward",
    "copy_backward",
)
GATHER = ("all_gather_matmul", "row_backward")  # gather rows; the others sum them
ALL_REDUCE = ("matmul_all_reduce", "copy_backward")
HAVE_WGRAD = ("column_backward", "copy_backward")  # the wgrad matmul does not depend on the collective
SLICES = (2, 4, 8)
MIN_FLOP = 2e7  # on a CPU; smaller matmuls finish before a second thread wakes up: 0.4 ms at 50 GFLOP/s
MIN_ROWS = {"cpu": 32, "cuda": 512}  # of all ranks together, for a layer and for a slice


class Schedule(NamedTuple):
    """method: "off", "bulk", "slices", "exchange" or "ring". chunks: number of slices of "slices" and "exchange"."""

    method: str
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.method} {self.chunks}" if self.method in ("slices", "exchange") else self.method


OFF = Schedule("off")


@dataclass(frozen=True)
class Decision:
    """The schedule of one pass of a layer whose forward matmul on this rank is [m, k] x [k, n].

    pattern          all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce; column_backward, row_backward or
                     copy_backward for backward passes
    m, n, k          rows of all ranks, output and input features of this rank
    dtype            of the matmul's inputs
    method, chunks   "off", "bulk", "ring", or "slices" and "exchange" with their number of chunks
    compute_streams  number of streams that the matmuls alternate between
    reason           why this schedule was chosen, in a sentence
    settled          False while the race is running
    tried            schedule -> seconds: the median of its calls on the slowest rank
    """

    pattern: str
    m: int
    n: int
    k: int
    dtype: str
    method: str
    chunks: int
    compute_streams: int
    reason: str
    settled: bool = True
    tried: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def schedule(self) -> str:
        """Method and chunks: "slices 4"."""
        return str(Schedule(self.method, self.chunks))


class PassKey(NamedTuple):
    """The inputs of a decision.

    same_bits     allow only schedules that cannot change the rounding
    reduce_dtype  data type in which sums are communicated"""

    pattern: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    config: OverlapConfig
    same_bits: bool
    reduce_dtype: torch.dtype | None

    def decision(self, on_cpu: bool, schedule: Schedule, reason: str, **more: Any) -> Decision:
        streams = self.config.compute_streams or (1 if on_cpu or schedule.chunks == 1 else 2)
        name = str(self.dtype).removeprefix("torch.")
        return Decision(self.pattern, self.m, self.n, self.k, name, *schedule, streams, reason, **more)

    def name(self, comm: Communicator) -> str:
        """Return the key of this pass in a file of decisions."""
        device = "cpu" if comm.library.is_host else torch.cuda.get_device_name(comm.device)
        sizes = f"{self.m}x{self.n}x{self.k} {self.dtype}, sums {self.reduce_dtype}, {comm.size} ranks"
        config = replace(self.config, dgrad=None)
        return f"{self.pattern} {sizes}, {device}, {config}{', same bits' if self.same_bits else ''}"


def format_times(tried: Mapping[str, float]) -> str:
    return ", ".join(f"{schedule} {1e3 * seconds:.3g} ms" for schedule, seconds in tried.items())


# ---------------------------------------------------------------------------------------------- candidates

NOT_REQUESTED, ONE_RANK = 'method="off" was requested', "one rank has nothing to communicate"
TOO_FEW = "too few rows or features to overlap"
LOCAL_REASONS = (NOT_REQUESTED, ONE_RANK, TOO_FEW)  # every rank derives these without communication
WOULD_ROUND = "no race of deterministic passes: each schedule rounds in a different order"


def is_tiny(comm: Communicator, m: int, n: int, k: int) -> bool:
    """Return whether a pass is too small to gain from overlap on any hardware.

    m: rows of all ranks; n, k: output and input features of this rank"""
    return 2.0 * m * n * k < MIN_FLOP if comm.library.is_host else m < MIN_ROWS["cuda"]


def candidates_for(comm: Communicator, key: PassKey) -> tuple[tuple[Schedule, ...], str]:
    """Return the schedules to try, and the reason if there is one only."""
    config, method, pattern = key.config, key.config.method, key.pattern
    if method == "off":
        return (OFF,), NOT_REQUESTED
    if comm.size == 1:
        return (OFF,), ONE_RANK
    if method == "auto":
        return _auto_candidates(comm, key)
    if method in ("bulk", "ring"):
        return (Schedule(method, comm.size if method == "ring" else 1),), f"{method}, as requested"
    if method == "exchange" and pattern in GATHER:
        method = "slices"
    counts = _chunk_counts(comm, key)
    if config.chunks is None and not key.same_bits and len(counts) > 1:
        return tuple(Schedule(method, chunks) for chunks in counts), ""
    schedule = Schedule(method, counts[min(1, len(counts) - 1)] if counts else 1)
    if config.chunks:
        return (schedule,), f"{schedule}, as requested"
    return (schedule,), WOULD_ROUND if key.same_bits else f"{schedule}: too few rows for a race"


def _auto_candidates(comm: Communicator, key: PassKey) -> tuple[tuple[Schedule, ...], str]:
    pattern, m, config = key.pattern, key.m, key.config
    if config.deterministic:  # sums in rank order
        return (OFF if pattern in GATHER else Schedule("exchange"),), WOULD_ROUND
    if is_tiny(comm, m, key.n, key.k):
        return (OFF,), TOO_FEW
    if key.same_bits:
        return (OFF,), WOULD_ROUND
    bulk = (Schedule("bulk"),) if pattern in GATHER or pattern in HAVE_WGRAD else ()
    slices = tuple(Schedule("slices", chunks) for chunks in _chunk_counts(comm, key) if chunks > 1)
    ring = (Schedule("ring", comm.size),) if config.chunks is None and m >= comm.size * _min_rows(comm) else ()
    return (OFF, *bulk, *slices, *ring), "too few rows to split into slices"


def _chunk_counts(comm: Communicator, key: PassKey) -> list[int]:
    """Return the numbers of slices to try. Each slice contains rows of every owner."""
    max_chunks = max(1, key.m if key.pattern in ALL_REDUCE else key.m // comm.size)
    if key.config.chunks is not None:
        return [min(key.config.chunks, max_chunks)]
    return [chunks for chunks in SLICES if chunks <= max_chunks and key.m >= chunks * _min_rows(comm)]


def _min_rows(comm: Communicator) -> int:
    """Return the minimum number of rows of a slice."""
    return MIN_ROWS["cpu" if comm.library.is_host else "cuda"]
