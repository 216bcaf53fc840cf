"""The schedules of a pass: which it can use, and the one that was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator

from .config import OverlapConfig

GATHER = ("all_gather_matmul", "row_backward")  # gather rows; the others sum them
ALL_REDUCE = ("matmul_all_reduce", "copy_backward")
SLICES = (2, 4, 8)
MIN_FLOP = 2e7  # on a CPU; smaller matmuls finish before a second thread wakes up: 0.4 ms at 50 GFLOP/s
MIN_ROWS = {"cpu": 32, "cuda": 512}  # of all ranks together, for a layer and for a slice


class Schedule(NamedTuple):
    """method: "off", "bulk", "slices", "exchange" or "ring". chunks: number of slices of "slices" and "exchange", of
    ranks for "ring"."""

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
    """The inputs of a decision, in which the ranks must agree.

    m, n, k       rows of all ranks, output and input features of this rank
    same_bits     allow only schedules that cannot change the rounding
    reduce_dtype  data type in which sums are communicated
    ranks         their number;  on_cpu: whether they use the host library"""

    pattern: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    config: OverlapConfig
    same_bits: bool
    reduce_dtype: torch.dtype | None
    ranks: int
    on_cpu: bool

    def decision(self, schedule: Schedule, reason: str, **more: Any) -> Decision:
        streams = self.config.compute_streams or (1 if self.on_cpu or schedule.chunks == 1 else 2)
        name = str(self.dtype).removeprefix("torch.")
        return Decision(self.pattern, self.m, self.n, self.k, name, *schedule, streams, reason, **more)

    def name(self, comm: Communicator) -> str:
        """Return the key of this pass in a file of decisions."""
        device = "cpu" if self.on_cpu else torch.cuda.get_device_name(comm.device)
        return f"{self._replace(config=replace(self.config, dgrad=None))} of {device}"

    def __str__(self) -> str:
        sums = f", sums in {self.reduce_dtype}" if self.reduce_dtype else ""
        bits = ", same bits" if self.same_bits else ""
        sizes = f"m={self.m}, n={self.n}, k={self.k}"
        return f"{self.pattern} of {sizes}, {self.config}, {self.dtype}{sums}{bits}, {self.ranks} ranks"


def pass_key(
    comm: Communicator, pattern: str, rows: int, w: Tensor, config: OverlapConfig, reduce_dtype: torch.dtype | None
) -> PassKey:
    """rows: of all ranks; w [out, in]: the shard of this rank"""
    same_bits = config.deterministic or torch.are_deterministic_algorithms_enabled()
    n, k = w.shape
    return PassKey(pattern, rows, n, k, w.dtype, config, same_bits, reduce_dtype, comm.size, comm.library.is_host)


def format_times(tried: Mapping[str, float]) -> str:
    return ", ".join(f"{schedule} {1e3 * seconds:.3g} ms" for schedule, seconds in tried.items())


# ---------------------------------------------------------------------------------------------- candidates

TOO_FEW = "too few rows or features to overlap"
WOULD_ROUND = "no race of deterministic passes: each schedule rounds in a different order"


def is_tiny(on_cpu: bool, m: int, n: int, k: int) -> bool:
    """Return whether a pass is too small to gain from overlap on any hardware.

    m: rows of all ranks; n, k: output and input features of this rank"""
    return 2.0 * m * n * k < MIN_FLOP if on_cpu else m < MIN_ROWS["cuda"]


def why_off(key: PassKey) -> str:
    """Return why a pass cannot overlap, as every rank knows without communication; "" if it can."""
    if key.config.method == "off":
        return 'method="off" was requested'
    if key.ranks == 1:
        return "one rank has nothing to communicate"
    tiny = key.config.method == "auto" and not key.config.deterministic and is_tiny(key.on_cpu, key.m, key.n, key.k)
    return TOO_FEW if tiny else ""


def candidates_for(key: PassKey) -> tuple[tuple[Schedule, ...], str]:
    """Return the schedules to try for a pass that can overlap, and the reason if there is one only."""
    config, gathers = key.config, key.pattern in GATHER
    method = "slices" if config.method == "exchange" and gathers else config.method  # a gather exchanges no sums
    if method == "auto" and key.same_bits:  # an exchange sums in rank order
        return (Schedule("exchange") if config.deterministic and not gathers else OFF,), WOULD_ROUND
    if method in ("bulk", "ring"):
        return (Schedule(method, key.ranks if method == "ring" else 1),), f"{method}, as requested"
    min_rows = MIN_ROWS["cpu" if key.on_cpu else "cuda"]
    most = max(1, key.m if key.pattern in ALL_REDUCE else key.m // key.ranks)  # a slice has rows of every owner
    to_try = [chunks for chunks in SLICES if chunks <= min(most, key.m // min_rows)]
    counts = to_try if config.chunks is None else [min(config.chunks, most)]
    if method == "auto":
        # In these, the whole collective depends on the only matmul:
        bulk = () if key.pattern in ("matmul_reduce_scatter", "matmul_all_reduce") else (Schedule("bulk"),)
        slices = tuple(Schedule("slices", chunks) for chunks in counts if chunks > 1)
        ring = (Schedule("ring", key.ranks),) if config.chunks is None and key.m >= key.ranks * min_rows else ()
        return (OFF, *bulk, *slices, *ring), "too few rows to split into slices"
    if len(counts) > 1 and not key.same_bits:
        return tuple(Schedule(method, chunks) for chunks in counts), ""
    schedule = Schedule(method, [1, *counts[:2]][-1])  # without a race: 4 slices if there are enough rows
    why_no_race = WOULD_ROUND if key.same_bits else f"{schedule}: too few rows for a race"
    return (schedule,), why_no_race if config.chunks is None else f"{schedule}, as requested"
