"""A report of overlap per layer: efficiency, exposed time, the chosen schedule and the reason."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pynccl.bindings.values import attribute, instance

from ..names import plain_name
from .keys import as_config
from .lanes import observing
from .schedules import Decision
from .trace import Operation, Trace

_FORWARD = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@dataclass(frozen=True)
class Row:
    """One pass of one layer. Times are medians over its calls in seconds; nan if the pass did not overlap.

    layer       name in the model, or type, sizes and a number
    what        "forward" or "backward"
    pattern     as in `Decision`
    decision    the latest `Decision`: method, chunks, reason, times of the race
    calls       number of calls, with or without overlap
    comm, mm    time of communication, and of matmuls
    wall        time from begin to end
    exposed     wall - mm: time that the communication adds
    efficiency  hidden time / time that can be hidden: 1.0 is ideal, 0.0 is no overlap; nan: nothing to hide
    """

    layer: str
    what: str
    pattern: str
    decision: Decision
    calls: int
    comm: float
    mm: float
    wall: float
    exposed: float
    efficiency: float


class Report(Trace):
    """The result of `report()`; print it after the block, or read `rows()`."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        named = {plain_name(model, path): module for path, module in model.named_modules()} if model else {}
        self._named = {id(module): name or "model" for name, module in named.items()}
        self._overlapping = [name or "model" for name, module in named.items() if _may_overlap(module)]
        self._owners: list[Any] = []  # strong references, so that numbers stay unique
        self._decided: dict[tuple[str, str], list[Decision]] = {}

    def name(self, owner: Any) -> str:
        """Return the name of a layer: its name in the model, or its type, sizes and a number."""
        if owner is None:
            return "(function)"
        if id(owner) in self._named:
            return self._named[id(owner)]
        if not any(owner is known for known in self._owners):
            self._owners.append(owner)
        number = next(at for at, known in enumerate(self._owners, 1) if known is owner)
        sizes = [str(size) for name in ("in_features", "out_features") if (size := attribute(owner, name)) is not None]
        return f"{type(owner).__name__}({', '.join(sizes)}) #{number}"

    def decided(self, owner: Any, decision: Decision) -> None:
        """See Observer."""
        self._decided.setdefault((self.name(owner), decision.pattern), []).append(decision)

    def rows(self) -> list[Row]:
        """Return the passes of all layers in the order of their first calls, a forward pass before its backward pass.

        After the decision of a race, a row covers only the calls since then."""
        ran: dict[tuple[str, str], list[Operation]] = {}
        for operation in self.operations():
            ran.setdefault((operation.owner, operation.pattern), []).append(operation)
        rows = []
        for key in dict.fromkeys((*ran, *self._decided)):
            decisions, operations = self._decided.get(key, []), ran.get(key, [])
            if decisions and decisions[-1].settled:
                schedule = decisions[-1].schedule
                decisions = [one for one in decisions if one.settled and one.schedule == schedule]
                operations = [one for one in operations if one.decision.settled and one.decision.schedule == schedule]
            rows.append(_measured(*key, operations) if operations else _off(*key, decisions))
        order = {name: at for at, name in enumerate(dict.fromkeys(row.layer for row in rows))}
        return sorted(rows, key=lambda row: (order[row.layer], row.what == "backward"))

    def __str__(self) -> str:
        rows = self.rows()
        unseen = [f"  {name}: {_UNSEEN}" for name in self._overlapping if name not in {row.layer for row in rows}]
        if not rows:
            return "\n".join(["overlap: no layer with overlap ran", *unseen])
        table = [_HEADINGS, *(_cells(row) for row in rows)]
        widths = [max(len(line[at]) for line in table) for at in range(len(_HEADINGS))]
        lines = [_line(line, widths) for line in table]
        reasons = dict.fromkeys(f"  {row.layer}, {row.what}: {row.decision.reason}{_drift(row)}" for row in rows)
        return "\n".join([*lines, *reasons, *unseen])


_UNSEEN = "no overlap observed: not called, no backward pass, or compiled (torch.compile disables overlap)"


_HEADINGS = ("layer", "pass", "chosen", "calls", "comm us", "mm us", "wall us", "exposed us", "efficiency")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
    return "  ".join([*left, *right]).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    times = ["-" if math.isnan(s) else f"{s * 1e6:,.0f}" for s in (row.comm, row.mm, row.wall, row.exposed)]
    return (
        row.layer,
        row.what,
        row.decision.schedule,
        str(row.calls),
        *times,
        "-" if math.isnan(row.efficiency) else f"{row.efficiency:.2f}",
    )


def _drift(row: Row) -> str:
    """Return a hint if the chosen schedule has become slower than "off" was in the race."""
    off = row.decision.tried.get("off", math.inf)
    if not row.decision.settled or not row.wall > off:
        return ""
    return f"; now {row.wall * 1e3:.3g} ms, slower than off was in the race: call ad.overlap.retry(layer)"


def _what(pattern: str) -> str:
    return "forward" if pattern in _FORWARD else "backward"


def _measured(owner: str, pattern: str, operations: Sequence[Operation]) -> Row:
    def median(name: str) -> float:
        known = [value for one in operations if not math.isnan(value := getattr(one, name))]
        return statistics.median(known) if known else math.nan

    seconds = (median(name) for name in ("comm", "compute", "wall", "exposed", "efficiency"))
    return Row(owner, _what(pattern), pattern, operations[-1].decision, len(operations), *seconds)


def _off(owner: str, pattern: str, decisions: Sequence[Decision]) -> Row:
    nan = math.nan
    return Row(owner, _what(pattern), pattern, decisions[-1], len(decisions), nan, nan, nan, nan, nan)


def _may_overlap(module: torch.nn.Module) -> bool:
    """Return whether the module is a layer that overlaps when it is called directly."""
    kind, comm = (attribute(module, name) for name in ("kind", "comm"))
    if kind not in ("column", "row") or attribute(comm, "size") == 1 or attribute(module, "gather_input") is False:
        return False
    config = as_config("overlap.report", module.overlap, kind)
    return not config.method == config.backward.method == "off"


@contextlib.contextmanager
def report(model: torch.nn.Module | None = None) -> Iterator[Report]:
    """Report the overlap of all layers of this process in the block.

        with ad.overlap.report(model) as report:
            for _ in range(10):
                train_step(model)
        print(report)

    model  names the layers; the report then also lists layers without observed overlap, for example because
           torch.compile has disabled it

    Each measurement takes some microseconds. The report shows medians over the calls."""
    if model is not None:
        instance(model, torch.nn.Module, "overlap.report: model", "a torch.nn.Module, or None")
    result = Report(model)
    with observing(result):
        yield result
