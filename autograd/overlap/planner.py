"""How a linear layer is to hide its communication, or that it should not: predicted by playing its schedule through.

plan(8192, 1280, 8192, "bfloat16", 8, "nvlink", "h100", pattern="all_gather_matmul")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pynccl.bindings.values import integer, shown

from .config import AUTO, OverlapConfig
from .machine import Device, Link, item_size
from .machine import device as device_of
from .machine import link as link_of
from .schedule import PATTERNS, TABLE, Work, simulated

CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LEAST_GAIN = 0.03  # of T_seq: less is within what the model gets wrong
TIE = 0.01  # among times as close as this, fewer slices: each costs launches that the model may be short of


@dataclass(frozen=True)
class Decision:
    """How to overlap, and what that is predicted to take. All times in seconds; nan where nothing was predicted.

    method           "slices", "ring", "exchange", "bulk"; "off" for one after the other
    chunks           slices of "slices" and "exchange"; of "ring" the ranks; else 1
    compute_streams  on which the matmuls take turns
    t_comm, t_mm     the communication and the matmuls, each alone and uncut
    t_seq            one after the other
    t_overlap        so overlapped; with "off" t_seq
    floor            no schedule is faster: the longer of t_comm and t_mm
    reason           why so, in a sentence
    """

    pattern: str
    method: str
    chunks: int
    compute_streams: int
    t_comm: float
    t_mm: float
    t_seq: float
    t_overlap: float
    floor: float
    reason: str

    @property
    def exposed(self) -> float:
        """Seconds that the communication adds to the matmuls."""
        return self.t_overlap - self.t_mm

    @property
    def efficiency(self) -> float:
        """The part of what can be hidden that is: 1.0 is the ideal, 0.0 one after the other."""
        can = min(self.t_comm, self.t_mm)
        return 0.0 if self.method == "off" or can == 0 else (self.t_seq - self.t_overlap) / can


def plan(
    m: int,
    n: int,
    k: int,
    dtype: Any,
    ranks: int,
    link: str | Link,
    device: str | Device,
    *,
    pattern: str,
    config: OverlapConfig = AUTO,
) -> Decision:
    """How to overlap the pass `pattern` of a linear layer: the fastest way by the model of schedule.py, or "off".

    m, n, k  of the forward matmul on one rank, whatever the pass: m rows (tokens) of the gathered tensor, n output and
             k input features of this rank
    dtype    torch.dtype or its name
    link     "nvlink", "infiniband", "ethernet", or a Link
    device   "h100", "h200", or a Device
    pattern  one of PATTERNS:

        all_gather_matmul        gather [m, k], multiply
        matmul_reduce_scatter    multiply, reduce-scatter [m, n];   matmul_all_reduce likewise
        column_backward          dgrad, reduce-scatter [m, k], wgrad; with config.save_gathered=False a gather of [m, k]
        row_backward             gather [m, n], dgrad and wgrad
        copy_backward            dgrad, all-reduce [m, k], wgrad

    config   its method and chunks are kept to. "auto" declines where less than 3% of T_seq is to be gained, and where
             there are too few rows; a method that is named is never declined.

    What collectives take from matmuls beside them is one number of the device, `beside`. ValueError, TypeError.
    """
    work = work_of(m, n, k, dtype, ranks, link, device, pattern=pattern, config=config)
    if config.method == "off":
        return _declined(work, 'method="off" was asked for')
    if ranks == 1:
        return _declined(work, "one rank has nothing to communicate")
    method = kept_method(config, pattern)
    if method == "auto" and (problem := _too_few(work)):
        return _declined(work, problem)
    timed = [
        (_seconds(work, way, chunks, config.aggregate), chunks, way)
        for way, chunks in _candidates(work, method, config.chunks)
    ]
    fastest = min(timed)[0]
    seconds, chunks, way = min((one for one in timed if one[0] <= fastest * (1 + TIE)), key=lambda one: one[1])
    t_seq = work.t_comm + work.t_mm
    if method == "auto" and t_seq - seconds < LEAST_GAIN * t_seq:
        return _declined(work, _lost(work, way, chunks, seconds))
    streams = streams_of(config, chunks, work.device.compute_streams)
    return _decision(work, way, chunks, streams, seconds, _won(work, way, chunks, seconds, config))


def _seconds(work: Work, way: str, chunks: int, aggregate: bool) -> float:
    """What the schedule takes. Of what it hides, only that part is gained in which communication costs no matmul."""
    seconds, t_seq = simulated(work.schedule(way, chunks, aggregate)), work.t_comm + work.t_mm
    return seconds + max(0.0, t_seq - seconds) * (1 - work.device.beside)


def work_of(
    m: int, n: int, k: int, dtype: Any, ranks: int, link: Any, device: Any, *, pattern: str, config: OverlapConfig
) -> Work:
    """The same arguments, checked."""
    check_pass("plan", m, n, k, ranks, pattern, config)
    regather = pattern == "column_backward" and not config.save_gathered
    name = str(dtype).removeprefix("torch.")
    item_size(dtype)
    return Work(pattern, m, n, k, name, ranks, link_of(link), device_of(device), regather)


def check_pass(owner: str, m: int, n: int, k: int, ranks: int, pattern: str, config: OverlapConfig) -> None:
    """ValueError, TypeError for what is no pass of a layer."""
    if pattern not in PATTERNS:
        raise ValueError(f"{owner}: pattern is {shown(pattern)}, expected one of {', '.join(PATTERNS)}")
    if not isinstance(config, OverlapConfig):
        raise TypeError(f"{owner}: config is {shown(config)}, expected an OverlapConfig")
    for name, value in (("m", m), ("n", n), ("k", k), ("ranks", ranks)):
        integer(value, f"{owner}: {name}", low=1, high=1 << 62, expected="an integer >= 1")


def kept_method(config: OverlapConfig, pattern: str) -> str:
    """The method that the configuration binds the pass to; "auto" for any. Only sums are exchanged, and those that have
    to be deterministic are never anything else."""
    if TABLE[pattern].gathers:
        return "slices" if config.method == "exchange" else config.method
    return "exchange" if config.deterministic and config.method == "auto" else config.method


def clamped(chunks: int, rows: int) -> int:
    """No more slices than rows that can be cut."""
    return max(1, min(chunks, rows))


def streams_of(config: OverlapConfig, chunks: int, of_device: int) -> int:
    return config.compute_streams or (of_device if chunks > 1 else 1)


def _too_few(work: Work) -> str:
    if work.m < work.device.fewest_rows:
        return f"{work.m} rows are fewer than {work.device.fewest_rows}: too few to overlap"
    return "" if work.rows else f"{work.m} rows are fewer than the {work.ranks} ranks"


def _candidates(work: Work, method: str, chunks: int | None) -> list[tuple[str, int]]:
    """(method, chunks) of all that may be chosen."""
    if method in ("ring", "bulk"):
        return [(method, work.ranks if method == "ring" else 1)]
    rows, least = max(1, work.rows), work.device.min_rows
    if chunks is not None:
        cuts = [clamped(chunks, rows)]
    else:
        cuts = [one for one in CHUNKS if one == 1 or (one <= rows and work.m >= one * least)]
    if method != "auto":
        return [(method, one) for one in cuts]
    ring = [("ring", work.ranks)] if chunks is None and work.m >= work.ranks * least else []
    return [("slices" if one > 1 else "bulk", one) for one in cuts] + ring


def _declined(work: Work, reason: str) -> Decision:
    return _decision(work, "off", 1, 1, work.t_comm + work.t_mm, reason)


def _decision(work: Work, method: str, chunks: int, streams: int, seconds: float, reason: str) -> Decision:
    comm, mm = work.t_comm, work.t_mm
    return Decision(work.pattern, method, chunks, streams, comm, mm, comm + mm, seconds, max(comm, mm), reason)


def way_in_words(method: str, chunks: int) -> str:
    return {"bulk": "bulk", "ring": f"a ring of {chunks} ranks", "off": "one after the other"}.get(
        method, f"{method} in {chunks}"
    )


def _won(work: Work, method: str, chunks: int, seconds: float, config: OverlapConfig) -> str:
    chosen = "the fastest" if config.method == "auto" and config.chunks is None else "as asked for"
    return (
        f"{way_in_words(method, chunks)}, {chosen}: {microseconds(seconds)} against "
        f"{microseconds(work.t_comm + work.t_mm)} one after the other"
    )


def _lost(work: Work, method: str, chunks: int, seconds: float) -> str:
    comm, t_seq = microseconds(work.t_comm), work.t_comm + work.t_mm
    if work.t_comm < LEAST_GAIN * t_seq:
        return f"communication is {comm} of {microseconds(t_seq)}: too little to hide"
    way = way_in_words(method, chunks)
    return (
        f"{way} would take {microseconds(seconds)} against {microseconds(t_seq)} one after the other: "
        f"less than {LEAST_GAIN:.0%} to gain"
    )


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-4 else f"{seconds * 1e6:,.0f} us"
