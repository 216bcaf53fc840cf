"""Format the results: the printed table, in the columns of nccl-tests, and JSON with the conditions of the run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from dataclasses import dataclass, field
from typing import Any

from ... import __version__
from ...bindings.library import host_module
from ...comm.communicator import Communicator
from .measure import PLACEMENTS, Row, Side

NONE = "N/A"
_ROW_BYTES = 512


@dataclass
class Results:
    """All results of a run."""

    head: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return sum(row.wrong for row in self.rows)

    @property
    def average(self) -> float:
        """Mean bus bandwidth over all rows, out of place and in place, in GB/s."""
        sides = [(row, side) for row in self.rows for side in row.sides if side]
        return statistics.fmean(row.bandwidths(side.mean)[1] for row, side in sides)


def head(comm: Communicator, options: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Return library, ranks, devices, transport and the settings of the run, equal on all ranks."""
    import torch

    library = comm.library
    ranks = _ranks(comm)
    return {
        "collective": options.collective,
        "library": "host library" if library.is_host else "NCCL",
        "version": ".".join(map(str, library.version)),
        "path": library.path,
        "origin": library.origin,
        "pynccl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nodes": len({rank["host"] for rank in ranks}),
        "ranks": ranks,
        "transport": _transport(comm),
        "iterations": options.iters,
        "warm_up": options.warmup_iters,
        "clock": "perf_counter" if library.is_host else "CUDA events",
        "rule": "time of the slowest rank",
        "data": f"-c {options.check}: compared with a local reference" if options.check else "not checked (-c 0)",
        "checked": bool(options.check),
        "backend": backend,
    }


def _ranks(comm: Communicator) -> list[dict[str, Any]]:
    """Gather host, pid and device of every rank."""
    import torch

    device = str(comm.device) if comm.library.is_host else f"{comm.device} {torch.cuda.get_device_name(comm.device)}"
    text = json.dumps({"host": platform.node()[:64], "pid": os.getpid(), "device": device[:128]})
    mine = torch.tensor(list(text.encode()[:_ROW_BYTES].ljust(_ROW_BYTES)), dtype=torch.uint8, device=comm.device)
    rows = comm.all_gather(mine).view(comm.size, _ROW_BYTES).cpu()
    return [json.loads(bytes(row.tolist())) for row in rows]


def _transport(comm: Communicator) -> str:
    """Return the transport of the host library; "" for NCCL, which logs it with NCCL_DEBUG=INFO."""
    if not comm.library.is_host:
        return ""
    found = "shared memory" if host_module().comm.find(comm.handle).shared else "sockets"
    link = os.environ.get("PYNCCL_HOST_LINK")
    return f"{found}, simulated link {link}" if link else found


def head_lines(head: dict[str, Any]) -> list[str]:
    ranks, nodes = len(head["ranks"]), head["nodes"]
    lines = [f"pynccl perf {head['collective']}: {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"]
    rows = {
        "library": f"{head['library']} {head['version']} ({head['path']}; {head['origin']})",
        "pynccl": f"{head['pynccl']}, Python {head['python']}, torch {head['torch']}",
        "transport": head["transport"],
        "timing": f"{head['iterations']} iterations after {head['warm_up']}, {head['clock']}",
        "reported": head["rule"],
        "data": head["data"],
        "compare": head["backend"] and f"torch.distributed with {head['backend']}, alternating",
    }
    lines += [f"{name:<12}{text}" for name, text in rows.items() if text]
    for number, rank in enumerate(head["ranks"]):
        lines.append(f"rank {number:<6} {rank['host']} pid {rank['pid']} {rank['device']}")
    return [*(f"# {line}" for line in lines), "#"]


def column_lines(comparing: bool) -> list[str]:
    names, units = ["time", "algbw", "busbw", "#wrong"], ["(us)", "(GB/s)", "(GB/s)", ""]
    if comparing:
        names, units = [*names, "torch", "torch/"], [*units, "(us)", "ours"]
    side, under = _columns(names), _columns(units)
    front = f"{'size':>11} {'count':>12} {'type':>9} {'redop':>6} {'root':>5}"
    placements = " ".join(f"{placement:^{len(side)}}" for placement in PLACEMENTS)
    below = f"{'(B)':>11} {'(elements)':>12} {'':>9} {'':>6} {'':>5} {under} {under}"
    return [f"#{line}".rstrip() for line in (f"{'':{len(front)}} {placements}", f"{front} {side} {side}", below)]


def _columns(cells: list[str]) -> str:
    """Align the columns of one placement: time, bandwidths, wrong elements; torch's time and the ratio."""
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, (9, 7, 7, 7, 9, 7), strict=False))


def row_line(row: Row, comparing: bool) -> str:
    case = row.case
    root = case.root if case.rooted else -1
    cells = [f"{case.nbytes:>12} {case.count:>12} {case.type:>9} {case.reduction or 'none':>6} {root:>5}"]
    for side in row.sides:
        found = [NONE] * (6 if comparing else 4)
        if side is not None:
            wrong = NONE if side.wrong is None else str(side.wrong)
            found[:4] = [_format_us(side.mean), *(f"{bandwidth:.2f}" for bandwidth in row.bandwidths(side.mean)), wrong]
            if side.torch is not None:
                found[4:] = [_format_us(side.torch), f"{side.torch / side.mean:.2f}"]
        cells.append(_columns(found))
    return " ".join(cells) + ("  WRONG" if row.wrong else "")


def _format_us(seconds: float) -> str:
    """Format a time in microseconds with three to five digits."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 9999.5 else f"{value:.1f}" if value >= 999.5 else f"{value:.2f}"


def foot_lines(results: Results, options: argparse.Namespace) -> list[str]:
    wrong = f"{results.wrong} {'FAILED' if results.wrong else 'OK'}" if options.check else f"{NONE} (-c 0: not checked)"
    lines = [f"# Out of bounds values : {wrong}", f"# Avg bus bandwidth    : {results.average:.6g}"]
    if options.min_busbw is not None:
        below = results.average < options.min_busbw
        lines.append(f"# --min-busbw          : {options.min_busbw:g} {'FAILED' if below else 'OK'}")
    return [*lines, "#"]


def as_json(results: Results, code: int) -> str:
    rows = []
    for row in results.rows:
        case = row.case
        found = {"size": case.nbytes, "count": case.count, "type": case.type, "redop": case.reduction or None}
        sides = [side and _side_json(row, side) for side in row.sides]
        root = case.root if case.rooted else None
        rows.append({**found, "root": root, "out_of_place": sides[0], "in_place": sides[1]})
    wrong = results.wrong if results.head["checked"] else None
    summary = {"wrong": wrong, "avg_busbw_GBps": results.average, "exit": code}
    return json.dumps({**results.head, "rows": rows, "summary": summary}, indent=1) + "\n"


def _side_json(row: Row, side: Side) -> dict[str, Any]:
    algorithm, bus = row.bandwidths(side.mean)
    return {
        "time_s": side.mean,
        "algbw_GBps": algorithm,
        "busbw_GBps": bus,
        "wrong": side.wrong,
        "torch_time_s": side.torch,
        "torch_over_ours": None if side.torch is None else side.torch / side.mean,
        "iterations_s": side.times,
    }
