"""`python -m pynccl_autograd plan`: how the linear layers of a model would overlap, and how long that would take.

Predicted from the sizes of the layers and the constants of a link and a device: presets, or by --calibrated what this
machine is measured to have. A table for each link: times in microseconds of each pass, alone and overlapped.

examples:
  python -m pynccl_autograd plan --model llama-8b --tp 8 --tokens 8192 --link nvlink
  python -m pynccl_autograd plan --hidden 512 --ffn 2048 --heads 8 --layers 4 --tp 2 --tokens 1024 --json
  torchrun --nproc-per-node=2 -m pynccl_autograd plan --calibrated --model llama-8b --tokens 1024
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

import pynccl
from pynccl import Communicator, NcclError
from pynccl.tools import command

from .overlap.calibration import calibrate
from .overlap.machine import DEVICES, DTYPES, LINKS, Machine, device, link
from .overlap.models import MODELS, Layer, Model, layers_of
from .overlap.planner import Decision, plan
from .overlap.schedule import TABLE

PATTERN_OF = {
    (True, "forward"): "all_gather_matmul",
    (True, "backward"): "column_backward",
    (False, "forward"): "matmul_reduce_scatter",
    (False, "backward"): "row_backward",
}
_OWN = ("hidden", "ffn", "heads", "kv_heads", "layers")
WIDTH = 120
HEADINGS = (
    "layer pass", "m x n x k", "T_comm", "NCCL", "T_mm", "T_seq", "method", "k", "T(k)", "floor", "exposed", "eff.",
)  # fmt: skip


class Row(NamedTuple):
    """A pass of a layer. `nccl`: NCCL's own estimate of its collectives in seconds, nan where it has none."""

    layer: Layer
    direction: str
    m: int
    decision: Decision
    nccl: float


# ---------------------------------------------------------------------------------------------- options


count = command.whole(1)


def parser() -> argparse.ArgumentParser:
    main = command.Parser("The tools of this package.", prog="python -m pynccl_autograd")
    commands = main.add_subparsers(dest="command", required=True, metavar="command")
    options = commands.add_parser(
        "plan", doc=__doc__, failed="a rank failed", help="how the linear layers of a model would overlap"
    )
    options.add_argument("--model", choices=MODELS, help="sizes; any of them may be given instead, or besides")
    for name in _OWN:
        options.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N")
    options.add_argument("--tp", type=count, metavar="N", help="ranks of tensor parallelism (with --calibrated: all)")
    options.add_argument("--tokens", type=count, required=True, metavar="N", help="of a step, on all tp ranks together")
    options.add_argument("--link", nargs="+", choices=LINKS, help="default: each of them")
    options.add_argument("--device", choices=DEVICES, help="default: h100")
    options.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, on a CPU float32")
    options.add_argument("--json", action="store_true", help="seconds, for programs")
    options.add_argument(
        "--calibrated", action="store_true", help="under torchrun: by the constants of this machine, measured"
    )
    return main


def model_of(options: argparse.Namespace) -> Model:
    """The named model with the sizes that are given; ValueError where one is missing."""
    given = {name: getattr(options, name) for name in _OWN if getattr(options, name) is not None}
    if options.model:
        return replace(MODELS[options.model], **given)
    given.setdefault("kv_heads", given.get("heads"))
    missing = [f"--{name}" for name in _OWN if given.get(name) is None and name != "kv_heads"]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; pass --model, or the sizes of your own")
    return Model(**given)


# ---------------------------------------------------------------------------------------------- plans


def rows_of(model: Model, tp: int, tokens: int, dtype: str, machine: Machine, comm: Communicator | None) -> list[Row]:
    if tokens % tp:
        raise ValueError(f"--tokens is {tokens}, not divisible by tp = {tp}")
    rows = []
    for direction in ("forward", "backward"):
        for layer in layers_of(model, tp):
            pattern = PATTERN_OF[layer.column, direction]
            decision = plan(tokens, layer.n, layer.k, dtype, tp, machine.link, machine.device, pattern=pattern)
            rows.append(Row(layer, direction, tokens, decision, estimated(comm, pattern, tokens, layer, dtype)))
    return rows


def estimated(comm: Communicator | None, pattern: str, tokens: int, layer: Layer, dtype: str) -> float:
    """Seconds that NCCL says its collective takes; nan where it says nothing. A collective."""
    if comm is None:
        return math.nan
    operation, travels, _ = TABLE[pattern]
    features = layer.k if travels == "k" else layer.n
    full = torch.empty(tokens * features, dtype=getattr(torch, dtype), device=comm.device)
    part = torch.empty(tokens * features // comm.size, dtype=full.dtype, device=comm.device)
    try:
        with pynccl.simulate() as estimate:
            if operation == "all_gather":
                comm.all_gather(part, full)
            else:
                comm.reduce_scatter(full, part)
    except NcclError:  # an old library has no estimate, and a nonblocking communicator gets none
        return math.nan
    return estimate.estimated_time * 1e-6 or math.nan  # 0 is what the host library says without a modelled link


def totals(rows: Sequence[Row], layers: int) -> dict[str, float]:
    """Seconds of the linear layers of a block and of all blocks."""
    names = ("t_comm", "t_mm", "t_seq", "t_overlap")
    block = {name: sum(getattr(row.decision, name) for row in rows) for name in names}
    return {**block, **{f"step_{name}": seconds * layers for name, seconds in block.items()}}


# ---------------------------------------------------------------------------------------------- output


def table(rows: Sequence[Row], machine: Machine, model: Model, estimates: bool) -> str:
    """For people: at most 120 columns; microseconds. `estimates`: with NCCL's own."""
    one, where = machine.link, machine.device
    lines = [
        f"{one.name}: {one.latency * 1e6:.1f} us + {one.hop * 1e6:.1f} us a step, {one.bandwidth / 1e9:.3g} GB/s; "
        f"{where.name}: {rate(rows[0]):.3g} TFLOP/s; predicted times in microseconds",
        in_columns(HEADINGS, estimates),
        *(in_columns(cells(row), estimates) for row in rows),
    ]
    sums = totals(rows, model.layers)
    for name, prefix in (("block", ""), ("step", "step_")):
        comm, mm, seq, over = (sums[f"{prefix}{each}"] for each in ("t_comm", "t_mm", "t_seq", "t_overlap"))
        shape = f"{model.layers} blocks" if prefix else ""
        saved = f"-{(seq - over) / seq:.1%}"
        summed = [name, shape, us(comm), "", us(mm), us(seq), saved, "", us(over), "", us(over - mm), ""]
        lines.append(in_columns(summed, estimates))
    for row in rows:
        if row.decision.method == "off":
            reason = f"  {row.layer.name} {row.direction} is off: {row.decision.reason}"
            lines += textwrap.wrap(reason, WIDTH, subsequent_indent="    ")
    return "\n".join(lines)


def in_columns(texts: Sequence[str], estimates: bool) -> str:
    name, shape, comm, nccl, mm, seq, method, chunks, *rest, efficiency = texts
    times = [comm, *([nccl] if estimates else []), mm, seq]
    return (
        f"{name:<14} {shape:>17} {' '.join(f'{one:>8}' for one in times)} {method:<8} {chunks:>2} "
        f"{' '.join(f'{one:>8}' for one in rest)} {efficiency:>5}".rstrip()
    )


def cells(row: Row) -> list[str]:
    layer, plan = row.layer, row.decision
    chunks, efficiency = ("-", "-") if plan.method == "off" else (str(plan.chunks), f"{plan.efficiency:.2f}")
    shape = f"{row.m}x{layer.n}x{layer.k}"
    alone = [us(one) for one in (plan.t_comm, row.nccl, plan.t_mm, plan.t_seq)]
    together = [us(one) for one in (plan.t_overlap, plan.floor, plan.exposed)]
    return [f"{layer.name:<5} {row.direction}", shape, *alone, plan.method, chunks, *together, efficiency]


def rate(row: Row) -> float:
    """TFLOP/s of its matmuls."""
    passes = 2 if TABLE[row.decision.pattern].wgrad else 1
    return passes * 2.0 * row.m * row.layer.n * row.layer.k / row.decision.t_mm / 1e12


def us(seconds: float) -> str:
    text = "-" if math.isnan(seconds) else f"{seconds * 1e6:.1f}"
    return text if len(text) <= 8 else f"{seconds * 1e6:.0f}"


def as_json(rows: Sequence[Row], machine: Machine, model: Model) -> dict[str, Any]:
    """For programs: seconds, null where there is no number."""
    passes = [
        {
            "layer": row.layer.name,
            "pass": row.direction,
            "m": row.m,
            "n": row.layer.n,
            "k": row.layer.k,
            **asdict(row.decision),
            "exposed": row.decision.exposed,
            "efficiency": row.decision.efficiency,
            "nccl": None if math.isnan(row.nccl) else row.nccl,
        }
        for row in rows
    ]
    found = asdict(machine)
    if math.isinf(found["link"]["bandwidth"]):  # one rank has no link, and JSON no infinity
        found["link"]["bandwidth"] = None
    return {**found, "model": asdict(model), "passes": passes, "totals": totals(rows, model.layers)}


# ---------------------------------------------------------------------------------------------- the command


def run(options: argparse.Namespace) -> str:
    """What the command prints: nothing on ranks other than 0."""
    model = model_of(options)
    plans = of_this_machine(options, model) if options.calibrated else of_presets(options, model)
    if options.json:
        found = [as_json(rows, machine, model) for rows, machine in plans]
        return json.dumps(found, indent=1) if found else ""
    return "\n\n".join(table(rows, machine, model, options.calibrated) for rows, machine in plans)


def of_presets(options: argparse.Namespace, model: Model) -> list[tuple[list[Row], Machine]]:
    if options.tp is None:
        raise ValueError("--tp missing: on how many ranks is each layer cut?")
    machines = [Machine(link(name), device(options.device or "h100")) for name in options.link or LINKS]
    dtype = options.dtype or "bfloat16"
    return [(rows_of(model, options.tp, options.tokens, dtype, one, None), one) for one in machines]


def of_this_machine(options: argparse.Namespace, model: Model) -> list[tuple[list[Row], Machine]]:
    """Under torchrun; nothing on ranks other than 0."""
    if options.link or options.device:
        raise ValueError("--calibrated measures the link and the device; leave out --link and --device")
    if "RANK" not in os.environ:
        raise ValueError("--calibrated is for torchrun: torchrun --nproc-per-node=N -m pynccl_autograd plan ..")
    with Communicator.from_env() as comm:
        if options.tp not in (None, comm.size):
            raise ValueError(f"--tp is {options.tp}, but --calibrated plans for the {comm.size} ranks of this launch")
        dtype = options.dtype or ("float32" if comm.library.is_host else "bfloat16")
        machine = calibrate(comm, dtypes=[dtype])
        rows = rows_of(model, comm.size, options.tokens, dtype, machine, comm)
        return [] if comm.rank else [(rows, machine)]


def main(argv: list[str]) -> int:
    """The exit code; 2 is wrong usage, said in one line."""
    options = parser().parse_args(argv)
    return command.ended(lambda: show(options), "python -m pynccl_autograd plan")


def show(options: argparse.Namespace) -> None:
    if text := run(options):
        print(text)


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]), "python -m pynccl_autograd")
