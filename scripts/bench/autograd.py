"""What a differentiable all_reduce costs, forward and backward, before NCCL starts to work; beside torch's.

pynccl runs on the stub library of overhead.py, whose functions return 0; torch.distributed runs on its fake
backend, which launches nothing either. What is left is Python and autograd. Rounds A B A B with the garbage collector
off, medians, and ratios as the median of the ratios within a round. The tensor is small and in CPU memory. Needs a
C compiler.

examples:
  python scripts/bench/autograd.py --rounds 3 --calls 50 --json
  python scripts/bench/autograd.py  # long
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.overhead import ROOT, communicator, compile_stub
from bench.ways import Way, measure

from pynccl.tools import command

ELEMENTS = 16
OURS, FUNCTION, THEIRS = "ad.all_reduce", "ad.AllReduce.apply", "torch.distributed.nn.functional.all_reduce"
REPLICATED, FUNCTIONAL = 'ad.all_reduce, grad="replicated"', "functional collectives' all_reduce (autograd)"
BOUND = 1.0  # of OURS beside THEIRS
FORWARD_AND_BACKWARD = "grad({forward}, x, g)"


def ways(path: Path) -> list[Way]:
    """Forward and backward of one all_reduce each."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    import torch.distributed.nn.functional as nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import pynccl_autograd as ad

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    comm = communicator(path)
    x, g = torch.zeros(ELEMENTS, requires_grad=True), torch.zeros(ELEMENTS)
    names: dict[str, Any] = {"x": x, "g": g, "comm": comm, "grad": torch.autograd.grad}
    forwards = {
        OURS: ("f(x, comm, grad='sum')", ad.all_reduce),
        REPLICATED: ("f(x, comm, grad='replicated')", ad.all_reduce),
        FUNCTION: ("f(x, comm, 'sum', 'sum', None)", ad.AllReduce.apply),
        THEIRS: ("f(x)", nn.all_reduce),
        FUNCTIONAL: ("f(x, 'sum', world)", functional.all_reduce_autograd)
        if hasattr(functional, "all_reduce_autograd")
        else ("", None),
    }
    return [
        Way(name, FORWARD_AND_BACKWARD.format(forward=call), {**names, "f": f, "world": dist.group.WORLD})
        for name, (call, f) in forwards.items()
        if f is not None
    ]


def check_reach(found: list[Way], stub: ctypes.CDLL) -> None:
    """That the stub is called by ours as often as the adjoint says, and by theirs never."""
    expected = {OURS: 2, FUNCTION: 2, REPLICATED: 1}
    for way in found:
        before = stub.stub_calls()
        way.seconds(1)
        calls = stub.stub_calls() - before
        if calls != expected.get(way.name, 0):
            raise RuntimeError(f"{way.name}: {calls} calls reached the stub, expected {expected.get(way.name, 0)}")


def results(times: dict[str, list[float]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {
            "way": name,
            "us": 1e6 * statistics.median(found),
            "ratio": statistics.median(a / b for a, b in zip(found, times[THEIRS], strict=True)),
        }
        for name, found in times.items()
    ]
    ratio = next(row["ratio"] for row in rows if row["way"] == OURS)
    return {"calls": rows, "ratio": ratio, "at_most": BOUND, "pass": ratio <= BOUND}


def table(found: dict[str, Any]) -> str:
    lines = [f"{'forward + backward':<48}{'us':>8}{'x torch':>10}"]
    lines += [f"{row['way']:<48}{row['us']:>8.1f}{row['ratio']:>10.2f}" for row in found["calls"]]
    verdict = "PASS" if found["pass"] else "FAIL"
    return "\n".join([*lines, "", f"{verdict}  {OURS} / {THEIRS}: {found['ratio']:.2f}, at most {BOUND:g}"])


def main() -> int:
    parser = command.Parser(__doc__, failed="pynccl_autograd is slower than torch.distributed.nn.functional")
    parser.add_argument("--rounds", type=command.whole(1), default=31, help="rounds over all ways (default 31)")
    parser.add_argument(
        "--calls", type=command.whole(1), default=300, help="calls of each way in a round (default 300)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-autograd-") as folder:
        path = compile_stub(Path(folder))
        stub = ctypes.CDLL(str(path))  # before torch, which may bring a libnccl.so.2 of its own
        found = ways(path)
        check_reach(found, stub)
        summary = results(measure(found, options.rounds, options.calls))
    print(json.dumps(summary, indent=1) if options.json else table(summary))
    return 0 if summary["pass"] else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    command.run(main)
