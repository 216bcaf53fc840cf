"""How a pass of a layer overlaps: as its configuration says, or as the first calls of the pass have shown.

A trial runs the ways that a pass may go by turns, in the steps of the program, each of which computes the result. Which
way a call takes follows from its arguments and a counter, so it is the same on all ranks; what it took is read when all
have had their turns, and then every rank makes the same choice from the times of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pynccl import Communicator, NcclInvalidUsage
from pynccl.bindings.values import shown
from pynccl.comm.observing import observers

from ..agreement import gathered
from ..recompute import as_in_first_pass
from ..streams import is_capturing
from .config import METHODS, OverlapConfig

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
MOST_SHAPES = 16  # of a pass of a layer that are tried
MOST_KEPT = 1024  # shapes that are remembered at once
TIE = 0.97  # what takes more of the time of "off" has gained nothing
FEWEST_FLOP = 2e7  # on a CPU; less is done before a second thread has woken up: 0.4 ms at 50 GFLOP/s
FEWEST_ROWS = {"cpu": 32, "cuda": 512}  # of all ranks together, of a layer and of a slice
FILE_VERSION = 1
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
    """What a decision depends on. same_bits: only ways that round alike"""

    pattern: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    config: OverlapConfig
    same_bits: bool

    def decision(self, comm: Communicator, way: Way, reason: str, **more: Any) -> Decision:
        streams = self.config.compute_streams or (1 if comm.library.is_host or way.chunks == 1 else 2)
        name = str(self.dtype).removeprefix("torch.")
        return Decision(self.pattern, self.m, self.n, self.k, name, *way, streams, reason, **more)

    def name(self, comm: Communicator) -> str:
        """In a file of decisions."""
        device = "cpu" if comm.library.is_host else torch.cuda.get_device_name(comm.device)
        config = replace(self.config, dgrad=None)
        return f"{self.pattern} {self.m}x{self.n}x{self.k} {self.dtype} {comm.size} ranks {device} {config}"


class Trial:
    """A pass that is being tried: the ways take turns, and each round begins with another one."""

    def __init__(self, asked: Asked, ways: tuple[Way, ...]) -> None:
        self.asked, self.ways = asked, ways
        self.rounds = min(MOST_ROUNDS, MOST_CALLS // len(ways))
        self.calls, self.last = 0, self.rounds * len(ways)
        self.took: list[Any] = [None] * self.last  # of each call, the moments of its begin and end
        self.shown: Decision  # how the last call went

    def _at(self, call: int) -> int:
        """Of the ways."""
        return (call + call // len(self.ways)) % len(self.ways)

    def next(self, comm: Communicator) -> Turn:
        """The way of this call."""
        call, self.calls = self.calls, self.calls + 1
        reason = f"on trial, call {self.calls} of {self.last}"
        self.shown = self.asked.decision(comm, self.ways[self._at(call)], reason, settled=False)
        return Turn(self.shown, self, call)

    def settle(self, comm: Communicator) -> Decision:
        """The choice of all ranks. A collective, and the only wait of a trial for a GPU.

        Of each call the slowest rank counts. A way is taken instead of "off" where it was faster by more than a tie in
        most rounds, and at its best: a machine that others use is slow at times, and never too fast."""
        rows = gathered(comm, [NEVER if took is None else _between(*took) for took in self.took])
        slowest = [max(times) for times in zip(*rows, strict=True)]
        times: dict[Way, list[int]] = {way: [] for way in self.ways}
        for call, nanoseconds in enumerate(slowest):
            times[self.ways[self._at(call)]].append(nanoseconds)
        medians = {str(way): statistics.median(one) for way, one in times.items()}
        tried = {way: median / 1e9 for way, median in medians.items() if median < NEVER}
        return self.asked.decision(comm, _best(times), f"tried: {_in_words(tried)}", tried=tried)


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
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


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


def _in_words(tried: Mapping[str, float]) -> str:
    return ", ".join(f"{way} {1e3 * seconds:.3g} ms" for way, seconds in tried.items())


# ---------------------------------------------------------------------------------------------- what layers remember


class _Passes:
    """What is known of the passes of a layer, or of a communicator's functions that no layer called."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = weakref.ref(comm)  # another one's ranks know nothing of this
        self.known: dict[Asked, Decision | Trial] = {}

    def add(self, asked: Asked, found: Decision | Trial) -> Decision | Trial:
        if len(self.known) >= MOST_KEPT:
            self.known.clear()
        self.known[asked] = found
        return found

    def shapes_tried(self, pattern: str) -> int:
        tried = (one for one in self.known.values() if isinstance(one, Trial) or one.tried)
        return sum(pattern == (one.asked.pattern if isinstance(one, Trial) else one.pattern) for one in tried)


_passes: weakref.WeakKeyDictionary[Any, _Passes] = weakref.WeakKeyDictionary()
_alike: weakref.WeakKeyDictionary[Communicator, dict[Asked, dict[str, Any]]] = weakref.WeakKeyDictionary()
_found: dict[str, dict[str, Any]] = {}  # what this process has decided, by `Asked.name`
_loaded: dict[str, dict[str, Any]] = {}  # what files say


class Route(NamedTuple):
    """How a forward call goes. composed: by the operations of unfused.py, since nothing of it overlaps

    graded  whether it was asked for a backward pass, too"""

    turn: Turn
    composed: bool
    graded: bool


def asked_for(pattern: str, rows: int, w: Tensor, config: OverlapConfig) -> Asked:
    """rows: of all ranks; w [out, in] of this one."""
    same_bits = config.deterministic or torch.are_deterministic_algorithms_enabled()
    return Asked(pattern, rows, w.shape[0], w.shape[1], w.dtype, config, same_bits)


def route_of(comm: Communicator, owner: Any, forward: Asked | None, backward: Asked | None) -> Route:
    """Of a forward call; what a checkpoint computes anew goes as it went at first.

    forward    None: it communicates nothing
    backward   None: there will be none, or none that communicates"""
    home = _home(comm, owner)

    def backward_is_off() -> bool:
        if backward is None:
            return True
        found = _known(comm, home, backward)
        if not isinstance(found, Decision) or found.method != "off":
            return False
        _tell(owner, found)  # nobody will ask for its turn
        return True

    def first() -> Route:
        turn = Turn(None) if forward is None else turn_of(comm, owner, forward)
        overlaps = turn.decision is not None and turn.decision.method != "off"
        return Route(turn, not overlaps and backward_is_off(), backward is not None)

    route, anew = as_in_first_pass(home, forward or backward, first)
    if not anew:
        return route
    return Route(Turn(route.turn.decision), route.composed and (route.graded or backward_is_off()), route.graded)


def turn_of(comm: Communicator, owner: Any, asked: Asked) -> Turn:
    """The way of this call, which is counted; the same on all ranks."""
    home = _home(comm, owner)
    found = _known(comm, home, asked)
    if isinstance(found, Trial) and found.calls == found.last:
        found = home.known[asked] = found.settle(comm)
        _found[asked.name(comm)] = {"way": found.way, "tried": dict(found.tried)}
    turn = Turn(found) if isinstance(found, Decision) else found.next(comm)
    _tell(owner, turn.decision)
    return turn


def _tell(owner: Any, decision: Decision | None) -> None:
    for observer in tuple(observers):
        observer.decided(owner, decision)


def _home(comm: Communicator, owner: Any) -> _Passes:
    key = comm if owner is None else owner
    home = _passes.get(key)
    if home is None or home.comm() is not comm:
        home = _passes[key] = _Passes(comm)
    return home


def _known(comm: Communicator, home: _Passes, asked: Asked) -> Decision | Trial:
    found = home.known.get(asked)
    if found is not None and not comm.checking and (isinstance(found, Decision) or not _captures(comm)):
        return found
    ways, reason = _ways(comm, asked)
    if _captures(comm):
        if isinstance(found, Decision) or len(ways) == 1:
            return found or asked.decision(comm, ways[0], reason)  # not kept: it was compared with nobody's
        return asked.decision(comm, OFF, "captured into a CUDA graph before it was tried; run 25 steps before that")
    if found is None or comm.checking:
        loaded = {} if reason in _ALONE else _agreed(comm, asked)
        found = found or home.add(asked, _begun(comm, home, asked, ways, reason, loaded))
    return found


def _begun(
    comm: Communicator, home: _Passes, asked: Asked, ways: tuple[Way, ...], reason: str, loaded: dict[str, Any]
) -> Decision | Trial:
    if len(ways) == 1:
        return asked.decision(comm, ways[0], reason)
    for way in ways:
        if str(way) == loaded.get("way"):
            tried = loaded["tried"]
            return asked.decision(comm, way, f"loaded; tried: {_in_words(tried)}", tried=tried)
    if home.shapes_tried(asked.pattern) >= MOST_SHAPES:
        reason = f"{MOST_SHAPES} shapes of this pass were tried before; ad.overlap.retry(layer) forgets them"
        return asked.decision(comm, OFF, reason)
    return Trial(asked, ways)


# ---------------------------------------------------------------------------------------------- what is to be tried

_NOT_WANTED, _ALONE_HERE = 'method="off" was asked for', "one rank has nothing to communicate"
_TOO_FEW = "too few rows, or features, to overlap"
_ALONE = (_NOT_WANTED, _ALONE_HERE, _TOO_FEW)  # what every rank knows by itself
_WOULD_ROUND = "what is to be deterministic tries no way that rounds otherwise"


def is_tiny(comm: Communicator, m: int, n: int, k: int) -> bool:
    """Whether nothing is to be gained on any machine: m rows of the whole, n output and k input features of a rank."""
    return 2.0 * m * n * k < FEWEST_FLOP if comm.library.is_host else m < FEWEST_ROWS["cuda"]


def _ways(comm: Communicator, asked: Asked) -> tuple[tuple[Way, ...], str]:
    """Those that are to be tried, and the reason where it is one."""
    config, method, pattern = asked.config, asked.config.method, asked.pattern
    if method == "off":
        return (OFF,), _NOT_WANTED
    if comm.size == 1:
        return (OFF,), _ALONE_HERE
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
    return (way,), f"{way}, as asked for" if config.chunks else _WOULD_ROUND if asked.same_bits else f"{way}: few rows"


def _of_auto(comm: Communicator, asked: Asked) -> tuple[tuple[Way, ...], str]:
    pattern, m, config = asked.pattern, asked.m, asked.config
    if config.deterministic:  # sums in the order of the ranks
        return (OFF if pattern in GATHER else Way("exchange"),), _WOULD_ROUND
    if is_tiny(comm, m, asked.n, asked.k):
        return (OFF,), _TOO_FEW
    bulk = (Way("bulk"),) if pattern in HAVE_WGRAD else ()
    if asked.same_bits:  # products of the same rows, sums of the same tensors
        return (OFF, *bulk), _WOULD_ROUND
    if pattern in GATHER:
        bulk = (Way("bulk"),)
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


def _captures(comm: Communicator) -> bool:
    return not comm.library.is_host and is_capturing(torch.device(comm.device))


# ---------------------------------------------------------------------------------------------- what ranks compare


def _agreed(comm: Communicator, asked: Asked) -> dict[str, Any]:
    """What files say, where the way is the same on all ranks; else nothing. A collective, at the first call of all with
    these arguments, and with PYNCCL_CHECK=1 at every one: NcclInvalidUsage on every rank unless all pass the same."""
    known = _alike.setdefault(comm, {})
    if asked in known and not comm.checking:
        return known[asked]
    pattern, m, n, k, dtype, config, same_bits = asked
    loaded = _loaded.get(asked.name(comm), {})
    method = [METHODS.index(config.method), config.chunks or 0]
    rest = zlib.crc32(repr((str(dtype), config, same_bits)).encode())
    rows = gathered(comm, [PATTERNS.index(pattern), m, n, k, *method, rest, zlib.crc32(loaded.get("way", "").encode())])
    if any(row[:-1] != rows[0][:-1] for row in rows):
        lines = "\n".join(f"  rank {rank}: {_row_in_words(*row[:-1])}" for rank, row in enumerate(rows))
        raise NcclInvalidUsage(
            f"the ranks would not overlap alike, and would wait for each other:\n{lines}\n"
            "  every rank must pass the same sizes, type and OverlapConfig"
        )
    if len(known) >= MOST_KEPT:
        known.clear()
    known[asked] = loaded if all(row[-1] == rows[0][-1] for row in rows) else {}
    return known[asked]


def _row_in_words(pattern: int, m: int, n: int, k: int, method: int, chunks: int, rest: int) -> str:
    config = f"method={METHODS[method]!r}" + (f", chunks={chunks}" if chunks else "")
    return (
        f"{PATTERNS[pattern]} of m={m}, n={n}, k={k}, by OverlapConfig({config}, ..) [type and all options: {rest:x}]"
    )


# ---------------------------------------------------------------------------------------------- for the user


def decisions(owner: nn.Module | Communicator) -> tuple[Decision, ...]:
    """What was decided for the passes of a layer; of a communicator, for those of functions that no layer has called.
    What is still on trial has `settled` False and the way of its last call."""
    home = _passes.get(owner)
    if home is None:
        return ()
    return tuple(one if isinstance(one, Decision) else one.shown for one in home.known.values())


def retry(model: nn.Module | Communicator) -> None:
    """Try the ways anew, in the next calls of a model's layers; of a communicator, of the functions. On every rank.

    For another machine load, clock or library: what was tried, also what was loaded, is forgotten."""
    for owner in model.modules() if isinstance(model, nn.Module) else (model,):
        home = _passes.get(owner)
        comm = None if home is None else home.comm()
        if home is None or comm is None:
            continue
        for asked in home.known:
            for names in (_found, _loaded):
                names.pop(asked.name(comm), None)
            _alike.get(comm, {}).pop(asked, None)
        home.known.clear()


def save(path: str | Path) -> None:
    """Write what the trials of this process have decided, as JSON, for `load`. Every rank may write the same file: the
    ranks of a communicator decide the same."""
    path = Path(path)
    text = json.dumps({"version": FILE_VERSION, "decisions": {**_loaded, **_found}}, indent=1)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(number, "w") as file:
            file.write(text + "\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load(path: str | Path) -> None:
    """Take decisions from a file of `save`, for passes of the same sizes, types, options, number of ranks and device
    that have not begun. On every rank, before the first step; where not all have loaded the same, a pass is tried.

    OSError where it cannot be read, ValueError where it is no such file."""
    try:
        said = json.loads(Path(path).read_text())
        found = {name: _record(one) for name, one in said["decisions"].items()}
        version = said["version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"load: {path} is no file that ad.overlap.save() has written: {shown(error)}") from None
    if version != FILE_VERSION:
        raise ValueError(
            f"load: {path} is of version {shown(version)}, expected {FILE_VERSION}; try anew, and save that"
        )
    _loaded.update(found)


def _record(one: Any) -> dict[str, Any]:
    """A decision of a file."""
    way, tried = one["way"], one["tried"]
    if not isinstance(way, str):
        raise TypeError(f"a way is {shown(way)}")
    return {"way": way, "tried": {str(name): float(seconds) for name, seconds in tried.items()}}
