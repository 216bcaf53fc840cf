"""What overlap did in some steps, layer by layer: efficiency, exposed time, which way was taken and why."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pynccl.bindings.values import attribute
from pynccl.comm.observers import observing

from .config import as_config
from .trace import Operation, Trace
from .trials import Decision

_FORWARD = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@dataclass(frozen=True)
class Row:
    """One pass of one layer. Times in seconds, medians over its calls; nan where nothing was overlapped.

    layer       name in the model, or type, sizes and a number
    what        "forward" or "backward"
    pattern     as `Decision` calls it
    decision    the last one: method, chunks, reason, what was tried
    calls       how often it ran, or went without overlap
    comm, mm    in which something travelled, and was multiplied
    wall        from begin to end
    exposed     wall - mm: what the communication added
    efficiency  the part of what can be hidden that was: 1.0 is the ideal, 0.0 one after the other
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
    """`report()` gives one; print it after the block, or read `rows()`."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        named = dict(model.named_modules()) if model else {}
        self._named = {id(module): name or "model" for name, module in named.items()}
        self._overlapping = [name or "model" for name, module in named.items() if _may_overlap(module)]
        self._owners: list[Any] = []  # kept, so that no number is given twice
        self._decided: dict[tuple[str, str], list[Decision]] = {}

    def name(self, owner: Any) -> str:
        """What a layer is called: its name in the model; else its type, its sizes and a number."""
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
        """Layers in the order in which they were first seen; the forward pass of each before its backward pass. Once a
        pass is decided, of its calls since then."""
        ran: dict[tuple[str, str], list[Operation]] = {}
        for operation in self.operations():
            ran.setdefault((operation.owner, operation.pattern), []).append(operation)
        rows = []
        for key in dict.fromkeys((*ran, *self._decided)):
            said, ones = self._decided.get(key, []), ran.get(key, [])
            if said and said[-1].settled:
                said = [one for one in said if one.settled and one.way == said[-1].way]
                ones = [one for one in ones if one.decision.settled and one.decision.way == said[-1].way]
            rows.append(_measured(*key, ones) if ones else _off(*key, said))
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
        whys = dict.fromkeys(f"  {row.layer}, {row.what}: {row.decision.reason}{_drift(row)}" for row in rows)
        return "\n".join([*lines, *whys, *unseen])


_UNSEEN = "nothing that could overlap was seen: not called, no backward pass, or compiled (torch.compile drops overlap)"


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
        row.decision.way,
        str(row.calls),
        *times,
        "-" if math.isnan(row.wall) else f"{row.efficiency:.2f}",
    )


def _drift(row: Row) -> str:
    """What is to be said where a way has become slower than off was."""
    off = row.decision.tried.get("off", math.inf)
    if not row.decision.settled or not row.wall > off:
        return ""
    return f"; now {row.wall * 1e3:.3g} ms, slower than off was: ad.overlap.retry(layer) tries anew"


def _what(pattern: str) -> str:
    return "forward" if pattern in _FORWARD else "backward"


def _measured(owner: str, pattern: str, ones: Sequence[Operation]) -> Row:
    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in ones)

    seconds = (median(name) for name in ("comm", "compute", "wall", "exposed", "efficiency"))
    return Row(owner, _what(pattern), pattern, ones[-1].decision, len(ones), *seconds)


def _off(owner: str, pattern: str, decisions: Sequence[Decision]) -> Row:
    nan = math.nan
    return Row(owner, _what(pattern), pattern, decisions[-1], len(decisions), nan, nan, nan, nan, nan)


def _may_overlap(module: torch.nn.Module) -> bool:
    """Whether it is a layer that overlaps when it is called by itself."""
    kind, comm = (attribute(module, name) for name in ("kind", "comm"))
    if kind not in ("column", "row") or attribute(comm, "size") == 1 or attribute(module, "gather_input") is False:
        return False
    config = as_config("report", module.overlap, kind)
    return not config.method == config.backward.method == "off"


@contextlib.contextmanager
def report(model: torch.nn.Module | None = None) -> Iterator[Report]:
    """What overlap does in the block, of all layers of this process.

        with ad.overlap.report(model) as report:
            for _ in range(10):
                train_step(model)
        print(report)

    model  gives the layers their names, and tells those that were not seen: torch.compile takes the way without
           overlap, of which nothing is in the report. The marks cost some microseconds a piece; medians over the
           calls are shown."""
    found = Report(model)
    with observing(found):
        yield found
