"""Memory does not grow with the number of calls, although each one has fresh buffers of another size."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process_groups import process_group
from ranks import HOST, Place, RankPool
from torch import Tensor

import pynccl
import pynccl_autograd as ad

WARM_UP, STEPS = 50, 300
BYTES = 1 << 19  # about: large enough for the C library to map, small enough for the heap once one has been freed
MAX_GROWTH = 16 * BYTES  # of STEPS - WARM_UP buffers
SIZES = [random.Random(step).randrange(BYTES // 8, BYTES // 4) // 256 * 256 for step in range(STEPS)]  # of float32

Call = Callable[[int], object]


def communicator_calls(comm: pynccl.Communicator) -> dict[str, Call]:
    other, stream = 1 - comm.rank, pynccl.create_stream()

    def in_place(n: int) -> None:
        x = torch.ones(n)
        comm.all_reduce(x, x)

    def on_a_stream(n: int) -> None:
        comm.all_reduce(torch.ones(n), stream=stream)
        stream.synchronize()

    def message(n: int) -> None:
        (comm.recv if comm.rank else comm.send)(torch.ones(n), other)

    def group(n: int) -> None:
        with pynccl.group():
            comm.send(torch.ones(n), other)
            comm.recv(torch.empty(n), other)

    def operator(n: int) -> None:
        with comm.pre_mul_sum(0.5, "float32") as op:
            comm.all_reduce(torch.ones(n), op=op)

    def registered(n: int) -> None:
        x = torch.ones(n)
        with comm.register(x):
            comm.all_reduce(x, x)

    def window(n: int) -> None:
        with pynccl.mem_alloc(4 * n) as memory, comm.window(memory):
            comm.barrier()

    return {
        "gloo": lambda n: dist.all_reduce(torch.ones(n), group=GLOO[0]),
        "all_reduce": lambda n: comm.all_reduce(torch.ones(n)),
        "all_reduce in place": in_place,
        "all_reduce on a stream": on_a_stream,
        "average of bfloat16": lambda n: comm.all_reduce(torch.ones(2 * n, dtype=torch.bfloat16), op="avg"),
        "broadcast": lambda n: comm.broadcast(torch.ones(n), root=0),
        "reduce": lambda n: comm.reduce(torch.ones(n), root=0),
        "all_gather": lambda n: comm.all_gather(torch.ones(n)),
        "reduce_scatter": lambda n: comm.reduce_scatter(torch.ones(n)),
        "all_to_all": lambda n: comm.all_to_all(torch.ones(n)),
        "all_gather_v": lambda n: comm.all_gather_v(torch.ones(n), counts=[n, n]),
        "send and recv": message,
        "group": group,
        "plan": lambda n: comm.plan.all_reduce(torch.ones(n), torch.empty(n))(),
        "operator": operator,
        "registered buffer": registered,
        "window": window,
    }


GLOO: list[dist.ProcessGroup] = []


def backend_calls() -> dict[str, Call]:
    first = dist.get_rank() == 0
    return {
        "dist.all_reduce": lambda n: dist.all_reduce(torch.ones(n)),
        "dist.all_reduce, async": lambda n: dist.all_reduce(torch.ones(n), async_op=True).wait(),
        "dist.broadcast": lambda n: dist.broadcast(torch.ones(n), 0),
        "dist.all_gather": lambda n: dist.all_gather([torch.empty(n), torch.empty(n)], torch.ones(n)),
        "dist.reduce_scatter": lambda n: dist.reduce_scatter(torch.empty(n), [torch.ones(n), torch.ones(n)]),
        "dist.all_to_all_single": lambda n: dist.all_to_all_single(torch.empty(n), torch.ones(n)),
        "dist.send": lambda n: dist.send(torch.ones(n), 1) if first else dist.recv(torch.empty(n), 0),
        "dist.all_gather_object": lambda n: dist.all_gather_object([None, None], bytes(n)),
    }


def autograd_calls(comm: pynccl.Communicator) -> dict[str, Call]:
    def leaf(n: int, *shape: int) -> Tensor:
        return torch.ones(n).view(*(shape or (-1,))).requires_grad_()

    def mlp(sequence_parallel: bool) -> Call:
        kwargs = {"sequence_parallel": sequence_parallel}
        up, down = ad.ColumnParallelLinear(256, 64, comm, **kwargs), ad.RowParallelLinear(64, 256, comm, **kwargs)
        return lambda n: down(up(leaf(n, -1, 256))).sum().backward()

    return {
        "ad.all_reduce": lambda n: ad.all_reduce(leaf(n), comm, grad="sum").sum().backward(),
        "ad.reduce_scatter": lambda n: ad.reduce_scatter(leaf(n), comm).sum().backward(),
        "ad.all_gather": lambda n: ad.all_gather(leaf(n), comm, grad="sum").sum().backward(),
        "ad.all_to_all": lambda n: ad.all_to_all(leaf(n, 2, -1), comm).sum().backward(),
        "ad.start": lambda n: ad.start(ad.all_reduce, leaf(n), comm, grad="sum").wait().sum().backward(),
        "tensor parallel": mlp(False),
        "sequence parallel": mlp(True),
    }


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(place: Place, path: str) -> dict[str, int]:
    """Return, for each call, the bytes by which it grows this process after the warm-up."""
    with process_group("pynccl", place, path):
        GLOO.append(dist.new_group(backend="gloo"))
        comm = pynccl.Communicator.from_process_group(dist.group.WORLD)
        grown: dict[str, int] = {}
        for name, call in {**communicator_calls(comm), **backend_calls(), **autograd_calls(comm)}.items():
            before = 0
            for step, n in enumerate(SIZES):
                if step == WARM_UP:
                    before = resident()
                call(n)
            grown[name] = resident() - before
        comm.destroy()
        return grown


@pytest.mark.slow
def test_calls_with_fresh_buffers_use_no_more_memory_than_gloo(tmp_path: Path) -> None:
    with contextlib.closing(RankPool({**HOST, "OMP_NUM_THREADS": "1"}, communicators=False)) as pool:
        for grown in pool.run(2, growth, str(tmp_path / "store"), timeout=120):
            limit = grown.pop("gloo") + MAX_GROWTH
            assert not {name: f"{size >> 20} MB" for name, size in grown.items() if size > limit}
