"""What each rank of scripts/bench_overlap.py measures: passes of layers, an MLP beside DTensor's, small shapes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from bench_overlap_cases import (
    BY_NAME,
    Case,
    Model,
    Shape,
    Step,
    Tensors,
    check_equal,
    decision_of,
    step_of,
    tensors_of,
)
from bench_overlap_lanes import Apart, CommunicationAlone, MatmulsAlone, OneStream, passes_on
from bench_overlap_ranks import LATENCY, here, link_text, linked, measure, rounds_of, slowest
from bench_overlap_torch import Mlp, ModelledLink, torch_step

from pynccl import Communicator
from pynccl.tools import progress
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.lanes import Lanes

MLP, SMALL = "mlp", "small"
CONTROLS = ("one stream", "apart")
# Shapes of which nothing can be hidden on a CPU: (tokens, width, hidden).
SMALL_SHAPES = ((16, 64, 128), (32, 64, 256), (64, 128, 256), (64, 128, 512))
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Of the command line. tokens: None to find a number by `milliseconds`."""

    ranks: int
    device: str
    sections: tuple[str, ...]
    chunks: tuple[int, ...]
    methods: tuple[str, ...]
    rounds: int
    tokens: int | None
    width: int
    hidden: int
    milliseconds: float
    balance: float
    link: str | None = None

    @property
    def ways(self) -> list[tuple[str, int | None]]:
        """(method, chunks) of what was asked for by name."""
        cut = [
            (method, chunks) for method in self.methods if method in ("slices", "exchange") for chunks in self.chunks
        ]
        return [*cut, *((method, None) for method in self.methods if method in ("ring", "bulk"))]


def run(rank: int, options: Options) -> Row:
    """All that was asked for, on one rank."""
    shape = shape_of(options)
    found: Row = {"shape": shape._asdict() | {"dtype": str(shape.dtype).removeprefix("torch.")}}
    named = [name for name in options.sections if name in BY_NAME]
    passes = progress.over(named, "measuring", "pass", own=rank == 0)
    found["patterns"] = [_Pass(BY_NAME[name], shape, rank, options).row() for name in passes]
    found["mlp"] = _mlp(shape, rank, options) if MLP in options.sections else None
    found["small"] = [_small(small, rank, options) for small in SMALL_SHAPES] if SMALL in options.sections else []
    return found


def shape_of(options: Options) -> Shape:
    """With so many tokens that a forward matmul takes the milliseconds that were asked for."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    unit = 16 * options.ranks
    tokens, device = options.tokens or 16 * unit, here(options.device)
    if options.tokens is None:
        inner = options.hidden // options.ranks
        x, w = torch.randn(tokens, options.width), torch.randn(inner, options.width)
        x, w = x.to(device, dtype), w.to(device, dtype)
        seconds = min(measure(options.device, lambda: x @ w.t()) for _ in range(5))
        tokens = max(1, round(options.milliseconds / 1e3 / seconds * tokens / unit)) * unit
    return Shape(tokens, options.width, options.hidden, dtype)


def on_lanes(lanes: type[Lanes], step: Step) -> Step:
    def call() -> Any:
        with passes_on(lanes):
            return step()

    return call


def seconds_of(options: Options, step: Step) -> float:
    """Of one call, the median of a few."""
    return statistics.median(rounds_of(options.device, {"": step}, 5)[""])


def link_for(options: Options, case_steps: int, nbytes: float, t_mm: float) -> str:
    """The link on which so many bytes take `balance` times as long as the matmuls; "" on a GPU."""
    if options.device == "cuda":
        return ""
    if options.link is not None:
        return options.link
    seconds = options.balance * t_mm - case_steps * LATENCY
    return link_text(nbytes / max(seconds, 1e-4))


class _Pass:
    """The measurement of one pass of a layer."""

    def __init__(self, case: Case, shape: Shape, rank: int, options: Options) -> None:
        self.case, self.shape, self.options = case, shape, options
        self.tensors: Tensors = tensors_of(case, shape, rank, options.ranks, here(options.device))

    def row(self) -> Row:
        case, options = self.case, self.options
        with linked(options.device, "") as comm:
            whole = on_lanes(MatmulsAlone, step_of(case, self.tensors, comm, case.config("bulk")))
            t_mm = seconds_of(options, whole)
        link = link_for(options, *case.wire(self.shape, options.ranks), t_mm)
        with linked(options.device, link) as comm:
            return self._measured(comm, link)

    def _measured(self, comm: Communicator, link: str) -> Row:
        case, options = self.case, self.options
        decision = decision_of(case, self.shape, comm, case.config("auto"))
        ways = {"auto": case.config("auto")} | {
            f"{method} {chunks}" if chunks else method: case.config(method, chunks) for method, chunks in options.ways
        }
        calls, model = self._calls(comm, ways, self._control(decision)), Model(case, self.shape, comm)
        calls["torch"] = torch_step(case, self.tensors)
        if link:
            calls["torch, link"] = _through(ModelledLink(link), calls["torch"])
        self._check(calls)
        times = rounds_of(options.device, calls, options.rounds)
        return self._row(link, decision, times, ways, model)

    def _control(self, decision: Row) -> OverlapConfig:
        """The schedule under which nothing may overlap: the planner's, if it is one of slices."""
        if decision["method"] in ("slices", "exchange"):
            return self.case.config(decision["method"], decision["chunks"])
        return self.case.config("slices", self.options.chunks[0])

    def _calls(self, comm: Communicator, ways: Mapping[str, OverlapConfig], control: OverlapConfig) -> dict[str, Step]:
        uncut = self._step(comm, self.case.config("bulk"))
        steps = {name: self._step(comm, config) for name, config in ways.items()}
        controlled = self._step(comm, control)
        calls: dict[str, Step] = {
            "off": self._step(comm, self.case.config("off")),
            "seq": on_lanes(OneStream, uncut),
            "comm": on_lanes(CommunicationAlone, uncut),
            "mm": on_lanes(MatmulsAlone, uncut),
            "one stream": on_lanes(OneStream, controlled),
            "apart": on_lanes(Apart, controlled),
        }
        for name, step in steps.items():
            calls[name] = step
            calls[f"mm {name}"] = on_lanes(MatmulsAlone, step)
        return calls

    def _step(self, comm: Communicator, config: OverlapConfig) -> Step:
        return step_of(self.case, self.tensors, comm, config)

    def _check(self, calls: Mapping[str, Step]) -> None:
        """The same results, whatever way: of all that compute and communicate."""
        whole = [name for name in calls if name.split()[0] not in ("comm", "mm")]
        check_equal(self.case, {name: calls[name]() for name in whole})

    def _row(
        self,
        link: str,
        decision: Row,
        times: Mapping[str, Sequence[float]],
        ways: Mapping[str, OverlapConfig],
        model: Model,
    ) -> Row:
        case, median = self.case, {name: statistics.median(values) for name, values in times.items()}
        row: Row = {"name": case.name, "pattern": case.pattern, "link": link, "rounds": len(times["seq"])}
        row |= {"t_comm": median["comm"], "t_mm": median["mm"], "t_seq": median["seq"], "t_off": median["off"]}
        row |= {"t_torch": median["torch"], "t_torch_link": median.get("torch, link"), "planned": decision, "ways": []}
        for name, config in ways.items():
            auto = name == "auto"
            method, chunks = (decision["method"], decision["chunks"]) if auto else (config.method, config.chunks or 1)
            row["ways"].append(
                {
                    "way": name,
                    "method": method,
                    "chunks": chunks,
                    "seconds": median[name],
                    "efficiency": efficiency(times, name),
                    "exposed": _median_of(a - b for a, b in zip(times[name], times["mm"], strict=True)),
                    "tax": _median_of(a - b for a, b in zip(times[f"mm {name}"], times["mm"], strict=True)),
                    "model": model.efficiency(method, chunks, median["comm"], median["mm"]),
                }
            )
        row["controls"] = [
            {"way": name, "seconds": median[name], "efficiency": efficiency(times, name)} for name in CONTROLS
        ]
        row["times"] = {name: list(values) for name, values in times.items()}
        return row


def _median_of(values: Iterator[float]) -> float:
    return statistics.median(values)


def efficiency(times: Mapping[str, Sequence[float]], way: str) -> float:
    """(T_seq - T) / min(T_comm, T_mm) of each round; the median of the rounds."""
    rows = zip(*(times[name] for name in ("seq", way, "comm", "mm")), strict=True)
    return statistics.median((seq - overlapped) / min(comm, mm) for seq, overlapped, comm, mm in rows)


def _through(link: ModelledLink, step: Step) -> Step:
    def call() -> Any:
        with link.applied():
            return step()

    return call


def _mlp(shape: Shape, rank: int, options: Options) -> Row:
    """An MLP's step, forward and backward: six matmuls, four collectives."""
    mlp = Mlp(shape, rank, options.ranks, here(options.device))
    inner = shape.hidden // options.ranks
    x, w = (torch.randn(rows, shape.width).to(here(options.device), shape.dtype) for rows in (shape.tokens, inner))
    steps, nbytes = BY_NAME["all_gather_matmul"].wire(shape, options.ranks)
    link = link_for(options, 4 * steps, 4 * nbytes, 6 * seconds_of(options, lambda: x @ w.t()))
    with linked(options.device, link) as comm:
        calls: dict[str, Step] = {"auto": mlp.ours(comm, "auto"), "off": mlp.ours(comm, "off")}
        calls |= {
            f"{method} {chunks}" if chunks else method: mlp.ours(comm, OverlapConfig(method, chunks=chunks))
            for method, chunks in options.ways
        }
        theirs = calls["DTensor"] = mlp.dtensor()
        counted: Mapping[str, int] = {}
        if link:
            torch_link = ModelledLink(link)
            calls["DTensor, link"] = _through(torch_link, theirs)
        results = {name: tuple(one.clone() for one in call()) for name, call in calls.items()}
        check_equal(BY_NAME["all_gather_matmul"], results)
        if link:
            counted = dict(torch_link.calls)
        times = rounds_of(options.device, calls, options.rounds)
    against = times["DTensor, link" if link else "DTensor"]
    ratios = {
        name: _median_of(theirs / ours for theirs, ours in zip(against, values, strict=True))
        for name, values in times.items()
    }
    median = {name: statistics.median(values) for name, values in times.items()}
    return {"link": link, "seconds": median, "ratio": ratios, "collectives": counted, "times": times}


def _small(sizes: tuple[int, int, int], rank: int, options: Options) -> Row:
    """The MLP's step where nothing is to be gained: "auto" beside "off", in pairs."""
    tokens, width, hidden = sizes
    unit = 2 * options.ranks
    shape = Shape(-(-tokens // unit) * unit, width, -(-hidden // unit) * unit, _shape_dtype(options))
    mlp = Mlp(shape, rank, options.ranks, here(options.device))
    with linked(options.device, "") as comm:
        calls = {"auto": mlp.ours(comm, "auto"), "off": mlp.ours(comm, "off")}
        said = {
            name: decision_of(BY_NAME[name], shape, comm, BY_NAME[name].config("auto"))
            for name in ("all_gather_matmul", "matmul_reduce_scatter", "column_backward", "row_backward")
        }
        one = slowest(min(measure(options.device, calls["off"]) for _ in range(5)))
        batch = max(1, min(200, round(0.02 / one)))
        times = rounds_of(options.device, calls, 3 * options.rounds, batch)
    dist.barrier()
    ratio = _median_of(off / auto for off, auto in zip(times["off"], times["auto"], strict=True))
    return {
        "shape": [shape.tokens, shape.width, shape.hidden],
        "declined": all(decision["method"] == "off" for decision in said.values()),
        "reason": said["all_gather_matmul"]["reason"],
        "auto": statistics.median(times["auto"]),
        "off": statistics.median(times["off"]),
        "ratio": ratio,
    }


def _shape_dtype(options: Options) -> torch.dtype:
    return torch.bfloat16 if options.device == "cuda" else torch.float32
