"""The ways that a pass of a layer may go, and the trial of them.

A trial runs the ways by turns, in the steps of the program, each of which computes the result. Which way a call takes
follows from its arguments and a counter, so it is the same on all ranks; what it took is read when all have had their
turns, and then every rank makes the same choice from the times of all ranks.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator

from ..agreement import gathered
from .config import OverlapConfig

PATTERNS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "column_backward",
    "row_backward",
    "copy_backward",
)
GATHER = ("all_gather_matmul", "row_backward")  # rows; the others sum them
ALL_REDUCE = ("matmul_all_reduce", "copy_backward")
HAVE_WGRAD = ("column_backward", "copy_backward")  # a matmul that needs nothing of what travels meanwhile
SLICES = (2, 4, 8)
MOST_CALLS, MOST_ROUNDS = 24, 8  # of a trial: the call after it goes as was decided
TIE = 0.97  # what takes more of the time of "off" has gained nothing
FEWEST_FLOP = 2e7  # on a CPU; less is done before a second thread has woken up: 0.4 ms at 50 GFLOP/s
FEWEST_ROWS = {"cpu": 32, "cuda": 512}  # of all ranks together, of a layer and of a slice
NEVER = 1 << 62  # nanoseconds of a way that was not timed


class Way(NamedTuple):
    """method "off", "bulk", "slices", "exchange" or "ring"; chunks of slices and exchange"""

    method: str
    chunks: int = 1

    def __str__(self) -> str:
        return f"{self.method} {self.chunks}" if self.method in ("slices", "exchange") else self.method


OFF = Way("off")


@dataclass(frozen=True)
class Decision:
    """How a pass goes, of a layer whose forward matmul on this rank is [m, k] x [k, n].

    pattern          all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce; of the backward passes
                     column_backward, row_backward, copy_backward
    m, n, k          rows of all ranks, output and input features of this one
    dtype            of what is multiplied
    method, chunks   "off", "bulk", "ring", or "slices" and "exchange" in so many
    compute_streams  on which the matmuls take turns
    reason           why so, in a sentence
    settled          False while other ways are still to be tried
    tried            seconds that each way took: the median of its turns, on the slowest rank
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
    def way(self) -> str:
        """Method and chunks: "slices 4"."""
        return str(Way(self.method, self.chunks))


class Asked(NamedTuple):
    """What a decision depends on. same_bits: no way that could round otherwise; reduce_dtype: in which sums travel"""

    pattern: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    config: OverlapConfig
    same_bits: bool
    reduce_dtype: torch.dtype | None

    def decision(self, comm: Communicator, way: Way, reason: str, **more: Any) -> Decision:
        streams = self.config.compute_streams or (1 if comm.library.is_host or way.chunks == 1 else 2)
        name = str(self.dtype).removeprefix("torch.")
        return Decision(self.pattern, self.m, self.n, self.k, name, *way, streams, reason, **more)

    def name(self, comm: Communicator) -> str:
        """In a file of decisions."""
        device = "cpu" if comm.library.is_host else torch.cuda.get_device_name(comm.device)
        sizes = f"{self.m}x{self.n}x{self.k} {self.dtype}, sums {self.reduce_dtype}, {comm.size} ranks"
        config = replace(self.config, dgrad=None)
        return f"{self.pattern} {sizes}, {device}, {config}{', same bits' if self.same_bits else ''}"


class Trial:
    """A pass that is being tried: the ways take turns, and each round begins with another one."""

    def __init__(self, comm: Communicator, asked: Asked, ways: tuple[Way, ...]) -> None:
        self.asked, self.ways = asked, ways
        self.rounds = min(MOST_ROUNDS, MOST_CALLS // len(ways))
        self.calls, self.last = 0, self.rounds * len(ways)
        self.took: list[Any] = [None] * self.last  # of each call, the moments of its begin and end
        self._show(comm, ways[0])

    def _at(self, call: int) -> int:
        """Of the ways."""
        return (call + call // len(self.ways)) % len(self.ways)

    def next(self, comm: Communicator) -> Turn:
        """The way of this call."""
        call, self.calls = self.calls, self.calls + 1
        self._show(comm, self.ways[self._at(call)])
        return Turn(self.shown, self, call)

    def _show(self, comm: Communicator, way: Way) -> None:
        """How the last call went."""
        reason = f"on trial, call {self.calls} of {self.last}"
        self.shown = self.asked.decision(comm, way, reason, settled=False)

    def settle(self, comm: Communicator) -> Decision:
        """The choice of all ranks. A collective, which on a GPU waits for what was issued.

        Of each call the slowest rank counts. A way is taken instead of "off" where it was faster by more than a tie in
        most rounds, and at its best: a machine that others use is slow at times, and never too fast."""
        rows = gathered(comm, [NEVER if took is None else _between(*took) for took in self.took])
        slowest = [max(times) for times in zip(*rows, strict=True)]
        times: dict[Way, list[int]] = {way: [] for way in self.ways}
        for call, nanoseconds in enumerate(slowest):
            times[self.ways[self._at(call)]].append(nanoseconds)
        timed = {str(way): [one for one in found if one < NEVER] for way, found in times.items()}
        tried = {way: statistics.median(found) / 1e9 for way, found in timed.items() if found}
        return self.asked.decision(comm, _best(times), f"tried: {in_words(tried)}", tried=tried)


class Turn(NamedTuple):
    """The way of one call, and the trial that wants to know how long it takes. decision None: nothing to communicate"""

    decision: Decision | None
    trial: Trial | None = None
    call: int = 0

    @contextlib.contextmanager
    def timed(self, like: Tensor) -> Iterator[None]:
        """The block is the pass."""
        if self.trial is None:
            yield
            return
        begin = _moment(like)
        yield
        self.trial.took[self.call] = begin, _moment(like)


def _best(times: Mapping[Way, list[int]]) -> Way:
    """times: nanoseconds on the slowest rank, round by round"""
    off = times.get(OFF)
    ways = list(times)
    if off is not None:
        gains = [way for way in ways if min(times[way]) <= TIE * min(off) and _ratio(times[way], off) <= TIE]
        ways = gains or [OFF]
    return min(ways, key=lambda way: statistics.median(times[way]))


def _ratio(ones: list[int], others: list[int]) -> float:
    return statistics.median(one / max(other, 1) for one, other in zip(ones, others, strict=True))


def _moment(like: Tensor) -> Any:
    if not like.is_cuda:
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(like.device))
    return event


def _between(begin: Any, end: Any) -> int:
    """Nanoseconds."""
    if isinstance(begin, int):
        return int(end) - begin
    end.synchronize()
    return round(begin.elapsed_time(end) * 1e6)


def in_words(tried: Mapping[str, float]) -> str:
    return ", ".join(f"{way} {1e3 * seconds:.3g} ms" for way, seconds in tried.items())


# ---------------------------------------------------------------------------------------------- what is to be tried

NOT_WANTED, ONE_RANK = 'method="off" was asked for', "one rank has nothing to communicate"
TOO_FEW = "too few rows, or features, to overlap"
ALONE = (NOT_WANTED, ONE_RANK, TOO_FEW)  # what every rank knows by itself
WOULD_ROUND = "what is to be deterministic tries nothing: each way rounds in its own order"


def is_tiny(comm: Communicator, m: int, n: int, k: int) -> bool:
    """Whether nothing is to be gained on any machine: m rows of the whole, n output and k input features of a rank."""
    return 2.0 * m * n * k < FEWEST_FLOP if comm.library.is_host else m < FEWEST_ROWS["cuda"]


def ways_of(comm: Communicator, asked: Asked) -> tuple[tuple[Way, ...], str]:
    """Those that are to be tried, and the reason where it is one."""
    config, method, pattern = asked.config, asked.config.method, asked.pattern
    if method == "off":
        return (OFF,), NOT_WANTED
    if comm.size == 1:
        return (OFF,), ONE_RANK
    if method == "auto":
        return _of_auto(comm, asked)
    if method in ("bulk", "ring"):
        return (Way(method, comm.size if method == "ring" else 1),), f"{method}, as asked for"
    if method == "exchange" and pattern in GATHER:
        method = "slices"
    cuts = _cuts(comm, asked)
    if config.chunks is None and not asked.same_bits and len(cuts) > 1:
        return tuple(Way(method, chunks) for chunks in cuts), ""
    way = Way(method, cuts[min(1, len(cuts) - 1)] if cuts else 1)
    return (way,), f"{way}, as asked for" if config.chunks else WOULD_ROUND if asked.same_bits else f"{way}: few rows"


def _of_auto(comm: Communicator, asked: Asked) -> tuple[tuple[Way, ...], str]:
    pattern, m, config = asked.pattern, asked.m, asked.config
    if config.deterministic:  # sums in the order of the ranks
        return (OFF if pattern in GATHER else Way("exchange"),), WOULD_ROUND
    if is_tiny(comm, m, asked.n, asked.k):
        return (OFF,), TOO_FEW
    if asked.same_bits:
        return (OFF,), WOULD_ROUND
    bulk = (Way("bulk"),) if pattern in GATHER or pattern in HAVE_WGRAD else ()
    slices = tuple(Way("slices", chunks) for chunks in _cuts(comm, asked) if chunks > 1)
    ring = (Way("ring", comm.size),) if config.chunks is None and m >= comm.size * _least(comm) else ()
    return (OFF, *bulk, *slices, *ring), "too few rows to cut"


def _cuts(comm: Communicator, asked: Asked) -> list[int]:
    """Numbers of slices, each of which has some of every owner's rows."""
    most = max(1, asked.m if asked.pattern in ALL_REDUCE else asked.m // comm.size)
    if asked.config.chunks is not None:
        return [min(asked.config.chunks, most)]
    return [chunks for chunks in SLICES if chunks <= most and asked.m >= chunks * _least(comm)]


def _least(comm: Communicator) -> int:
    """Rows of a slice."""
    return FEWEST_ROWS["cpu" if comm.library.is_host else "cuda"]
