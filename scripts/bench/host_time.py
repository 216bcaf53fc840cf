"""Measure the host time of a call to NCCL itself, on one GPU: ctypes, this package, nccl4py, torch.distributed.

One rank reduces, copies or broadcasts 16 bytes. "in place" NCCL launches nothing; from t to u it launches a copy. All
variants run by turns in one process with the garbage collector off. Times are medians over the rounds; ratios are the
medians of the ratios within a round. The GPU is waited for before each measurement, and not during it.

  ctypes            the C function, called with numbers
  ctypes, stream    the same, with torch's current stream asked for in each call, as comm.all_reduce and plan do
  vLLM's            its classes in pynccl.compat.vllm, and with --vllm FOLDER, an unpacked wheel as for overhead.py, its
                    own: in place on the default stream, for which they do not ask
  nccl4py           if it can be imported: on the default stream, and its Communicator
  nccl, pynccl      torch.distributed over these backends: a call, with async_op and wait(), with get_future().wait()
  stream, mul_      what to compare with: torch.cuda.current_stream(), pynccl.current_stream(), a kernel of torch

overhead.py measures the binding alone, on a stub. --device cpu rehearses this script on the host library, with gloo in
place of nccl; the library's work is then part of the times.

examples:
  python scripts/bench/host_time.py --device cpu --rounds 3 --calls 20
  python scripts/bench/host_time.py --markdown  # long; needs a GPU
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench.ranks import columns, prepare, surroundings
from bench.rows import OURS, Side, collectives
from bench.ways import WRAPPER, HandleZero, Variant, measure, nccl4py_variants, vllm_variants

import pynccl
from pynccl import RedOp
from pynccl.interop.buffers import data_type
from pynccl.tools import command

NBYTES = 16
BARE = "ctypes: in place"
QUEUE = 500  # calls: half of what a GPU's queue holds, after which a launch waits for the GPU
OF_TORCH = ("all_reduce", "all_reduce, async", "all_reduce, future", "broadcast", "all_gather_into_tensor")


def own_variants(comm: pynccl.Communicator, t: torch.Tensor, u: torch.Tensor) -> list[Variant]:
    """Return the variants of ctypes and of this package: in place, and from t to u."""
    stream = HandleZero if comm.library.is_host else torch.cuda.current_stream
    names = {"f": comm.library.ncclAllReduce, "p": ctypes.c_void_p, "h": ctypes.c_void_p(comm.handle), "stream": stream}
    names |= {"comm": comm, "t": t, "u": u, "a": t.data_ptr(), "b": u.data_ptr(), "n": t.numel()}
    names |= {"d": int(data_type(t.dtype)), "s": int(RedOp.SUM), "now": stream().cuda_stream}
    found = []
    for out, place, to in (("t", "in place", "a"), ("u", "to another tensor", "b")):
        asks = f"f(p(t.data_ptr()), p({out}.data_ptr()), t.numel(), d, s, h, p(stream().cuda_stream))"
        plan = {"plan": comm.plan.all_reduce(t, names[out])}
        found += [
            Variant(f"ctypes: {place}", f"f(a, {to}, n, d, s, h, now)", names),
            Variant(f"ctypes, stream: {place}", asks, names),
            Variant(f"comm.all_reduce: {place}", f"comm.all_reduce(t, {out})", names),
            Variant(f"plan: {place}", "plan()", plan),
        ]
    return found


def torch_variants(device: torch.device) -> list[Variant]:
    """Return torch.distributed's calls over its own backend and over this package's, and calls to compare with."""
    theirs = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(theirs, store=dist.HashStore(), rank=0, world_size=1)
    found = []
    for backend in (theirs, OURS):
        calls = collectives(Side(backend, dist.new_group(backend=backend), device), NBYTES)
        found += [Variant(f"{backend}: {name}", "call()", {"call": calls[name]}) for name in OF_TORCH]
    others: dict[str, Any] = {"x.mul_(1)": torch.ones(4, device=device)}
    if device.type == "cuda":
        others |= {"torch.cuda.current_stream()": torch, "pynccl.current_stream()": pynccl}
    return [*found, *(Variant(call, call, {call.partition(".")[0]: names}) for call, names in others.items())]


def table_lines(times: dict[str, list[float]]) -> list[list[str]]:
    lines = [["call", "microseconds", "x ctypes in place"]]
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times[BARE], strict=True))
        lines.append([name, f"{1e6 * statistics.median(found):.2f}", f"{ratio:.2f}"])
    return lines


def main() -> None:
    parser = command.Parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearse (%(default)s)")
    parser.add_argument("--rounds", type=command.integer(1), default=25, help="rounds over all variants (%(default)s)")
    calls = f"calls per round, at most {QUEUE} (200)"
    parser.add_argument("--calls", type=command.integer(1, QUEUE), default=200, help=calls)
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="an unpacked vLLM wheel")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table for docs/")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    if not on_cpu and not (torch.cuda.device_count() and dist.is_nccl_available()):
        parser.error(f"torch {torch.__version__} finds no GPU or has no NCCL; --device cpu rehearses without")
    if options.vllm and (on_cpu or not (options.vllm / WRAPPER).is_file()):
        parser.error(f"--vllm {options.vllm}: needs --device cuda, and {WRAPPER} in this folder")
    device = prepare(0, 1, options.device)
    wait: Any = "pass" if on_cpu else torch.cuda.synchronize
    with pynccl.Communicator.init(1, pynccl.get_unique_id(), 0, device=None if on_cpu else device.index) as comm:
        t, u = torch.ones(NBYTES // 4, device=device), torch.zeros(NBYTES // 4, device=device)
        variants = [*own_variants(comm, t, u), *vllm_variants(comm, Path(comm.library.path), t, options.vllm)]
        variants += [*nccl4py_variants(comm, t), *torch_variants(device)]
        variants = [variant._replace(before=wait) for variant in variants]
        for variant in variants:
            u.zero_()
            variant.seconds(variant.calls)
            if variant.name.endswith("another tensor") and not bool(u.eq(1).all()):
                raise RuntimeError(f"{variant.name}: wrote {u.tolist()}, expected ones")
        times = measure(variants, options.rounds, options.calls)
        dist.destroy_process_group()
    print(f"{surroundings(options.device)}; {comm.library}\n\n{columns(table_lines(times), options.markdown)}")


if __name__ == "__main__":
    command.run(main)
