"""decide: how a layer's pass is to overlap on this communicator, the same on all ranks."""

from __future__ import annotations

import hashlib
import math
import weakref
from typing import Any, NamedTuple

import torch

from pynccl import Communicator, NcclInvalidUsage

from ..agreement import gathered
from .calibration import known_machine, machine_of
from .config import METHODS, OverlapConfig
from .machine import CPU_ROWS, DTYPES, GPU_ROWS, Machine, dtype_name
from .planner import Decision, check_pass, clamped, kept_method, plan, streams_of, way_in_words
from .schedule import PATTERNS, most_slices

# On a CPU less is done before a second thread has woken up: a fraction of a millisecond at 50 GFLOP/s.
FEWEST_FLOP = 2e7


class Pass(NamedTuple):
    """What is to be decided: the arguments of `decide`."""

    pattern: str
    m: int
    n: int
    k: int
    dtype: str
    config: OverlapConfig


MOST_KEPT = 4096  # decisions of a communicator that are looked up at once
_quick: weakref.WeakKeyDictionary[Communicator, dict[Any, tuple[OverlapConfig, Decision]]] = weakref.WeakKeyDictionary()
_decisions: weakref.WeakKeyDictionary[Communicator, dict[Pass, Decision]] = weakref.WeakKeyDictionary()


def decide(comm: Communicator, pattern: str, m: int, n: int, k: int, dtype: Any, config: OverlapConfig) -> Decision:
    """How to overlap this pass: `planner.plan` by the constants of this machine, once for every set of arguments.

    A collective where it decides something for the first time and the answer may be to overlap: it then measures this
    machine (`machine_of`), unless method and chunks are given, and compares the ranks' decisions. NcclInvalidUsage on
    every rank where they would cut differently. With PYNCCL_CHECK=1 they are compared at every call.

    Without any communication: method "off", one rank, and with "auto" what is too small on any machine. In the capture
    of a CUDA graph nothing is measured or compared, and what would have to be measured is declined.
    """
    quick = _quick.get(comm)
    if quick is None:
        quick = _quick[comm] = {}
    key = pattern, m, n, k, dtype, id(config)
    kept = quick.get(key)
    if kept is not None and not comm.checking:
        return kept[1]
    found, final = _decide(comm, pattern, m, n, k, dtype, config)
    if final:
        if len(quick) >= MOST_KEPT:
            quick.clear()
        quick[key] = config, found  # the configuration too, so that no other one gets its id
    return found


def _decide(
    comm: Communicator, pattern: str, m: int, n: int, k: int, dtype: Any, config: OverlapConfig
) -> tuple[Decision, bool]:
    """The decision, and whether it is the same at every call."""
    if config.method == "off":
        return unpredicted(pattern, "off", 'method="off" was asked for'), True
    if comm.size == 1:
        return unpredicted(pattern, "off", "one rank has nothing to communicate"), True
    check_pass("decide", m, n, k, comm.size, pattern, config)
    asked = Pass(pattern, m, n, k, dtype_name(dtype), config)
    if (small := _too_small(comm, asked)) and kept_method(config, pattern) == "auto":
        return unpredicted(pattern, "off", small), True
    known = _decisions.setdefault(comm, {})
    found = known.get(asked)
    if _captures(comm):
        return found or _captured(comm, asked), False
    if found is None:
        found = _as_asked(comm, asked, small)
        if found is None:
            _compare(comm, asked, None)  # before any rank measures alone
            found = _planned(comm, asked, machine_of(comm, asked.dtype))
        _compare(comm, asked, found)
        known[asked] = found
    elif comm.checking:
        _compare(comm, asked, found)
    return found, True


def unpredicted(pattern: str, method: str, reason: str, chunks: int = 1, compute_streams: int = 1) -> Decision:
    """A decision that no model was asked about."""
    nan = math.nan
    return Decision(pattern, method, chunks, compute_streams, nan, nan, nan, nan, nan, reason)


def is_tiny(comm: Communicator, m: int, n: int, k: int) -> bool:
    """Whether nothing is to be gained on any machine: m rows of the whole, n output and k input features of a rank."""
    return 2.0 * m * n * k < FEWEST_FLOP if comm.library.is_host else m < GPU_ROWS["fewest_rows"]


def _too_small(comm: Communicator, asked: Pass) -> str:
    """Why nothing is to be gained on any machine; "" where something may be."""
    if not is_tiny(comm, asked.m, asked.n, asked.k):
        return ""
    if comm.library.is_host:
        flop = 2.0 * asked.m * asked.n * asked.k
        return f"{flop:.1e} FLOP are fewer than {FEWEST_FLOP:.0e}: too few to overlap"
    return f"{asked.m} rows are fewer than {GPU_ROWS['fewest_rows']}: too few to overlap"


def _as_asked(comm: Communicator, asked: Pass, small: str) -> Decision | None:
    """What follows from the arguments alone; None where the times have to be known."""
    config, pattern = asked.config, asked.pattern
    method = kept_method(config, pattern)
    if method in ("ring", "bulk"):
        chunks = comm.size if method == "ring" else 1
    elif method != "auto" and config.chunks is not None:
        chunks = clamped(config.chunks, most_slices(pattern, asked.m, comm.size))
    elif method != config.method == "auto" and small:
        chunks = 1
    else:
        return None
    rows = CPU_ROWS if comm.library.is_host else GPU_ROWS
    streams = streams_of(config, chunks, rows["compute_streams"])
    return unpredicted(pattern, method, f"{way_in_words(method, chunks)}, as asked for", chunks, streams)


def _planned(comm: Communicator, asked: Pass, machine: Machine) -> Decision:
    pattern, m, n, k, dtype, config = asked
    return plan(m, n, k, dtype, comm.size, machine.link, machine.device, pattern=pattern, config=config)


def _captures(comm: Communicator) -> bool:
    if comm.library.is_host:
        return False
    with torch.cuda.device(comm.device):
        return torch.cuda.is_current_stream_capturing()


def _captured(comm: Communicator, asked: Pass) -> Decision:
    """By what is known. Not kept: it was compared with nobody's."""
    if machine := known_machine(comm, asked.dtype):
        return _planned(comm, asked, machine)
    reason = "not calibrated before the capture: run one step first"
    method = kept_method(asked.config, asked.pattern)
    if method == "auto":
        return unpredicted(asked.pattern, "off", reason)
    return _as_asked(comm, asked, small=reason) or unpredicted(asked.pattern, method, reason)


# ---------------------------------------------------------------------------------------------- what ranks compare


def _compare(comm: Communicator, asked: Pass, found: Decision | None) -> None:
    """NcclInvalidUsage on every rank unless all have the same: arguments, and decision if there is one."""
    rows = gathered(comm, _row(asked, found))
    if all(row == rows[0] for row in rows):
        return
    lines = "\n".join(f"  rank {rank}: {_in_words(row)}" for rank, row in enumerate(rows))
    raise NcclInvalidUsage(
        f"the ranks would not overlap alike, and would wait for each other:\n{lines}\n"
        "  every rank must pass the same sizes and the same OverlapConfig"
    )


def _row(asked: Pass, found: Decision | None) -> list[int]:
    """In numbers; the last stands for all of the configuration."""
    pattern, m, n, k, dtype, config = asked
    decided = (METHODS.index(found.method), found.chunks, found.compute_streams) if found else (-1, 0, 0)
    digest = int.from_bytes(hashlib.blake2b(repr(config).encode(), digest_size=7).digest(), "big")
    wanted = METHODS.index(config.method), config.chunks or 0
    return [PATTERNS.index(pattern), m, n, k, DTYPES.index(dtype), *decided, *wanted, digest]


def _in_words(row: list[int]) -> str:
    pattern, m, n, k, dtype, method, chunks, streams, wanted, of, digest = row
    config = f"method={METHODS[wanted]!r}" + (f", chunks={of}" if of else "")
    decided = f"{way_in_words(METHODS[method], chunks)}, compute streams {streams}" if method >= 0 else "not decided"
    return (
        f"{PATTERNS[pattern]} of m={m}, n={n}, k={k}, {DTYPES[dtype]}: {decided}, by OverlapConfig({config}, ..) "
        f"[{digest:x}]"
    )
