"""Programs written for vLLM's wrapper of NCCL, and SGLang's, on the host library; torch's gloo is the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import gloo_group, numbers
from ranks import RankPool, each_size
from torch.distributed import P2POp, ReduceOp

import pynccl
from pynccl import Communicator
from pynccl.compat import sglang
from pynccl.compat.vllm import PyNcclCommunicator

CPU = torch.device("cpu")


def summed(x: torch.Tensor, op: Any = ReduceOp.SUM) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total, op)
    return total


def collectives(c: PyNcclCommunicator, r: int, n: int) -> None:
    assert (c.available, c.disabled, c.rank, c.world_size, c.device) == (True, False, r, n, CPU)
    assert c.comm.value and c.nccl_version == c.nccl.ncclGetRawVersion() and any(c.unique_id.internal)
    types = (torch.float32, torch.float64, torch.int32, torch.uint8)
    for dtype, op in zip(types, (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT), strict=True):
        x = numbers(r, 5, 3, dtype=dtype)
        expected, before, out = summed(x, op), x.clone(), torch.empty_like(x)
        assert torch.equal(c.all_reduce(x, op=op), expected) and torch.equal(x, before)
        assert c.all_reduce(x, out, op) is out and torch.equal(out, expected)
        assert c.all_reduce(x, x, op=op) is x and torch.equal(x, expected)
    x = numbers(r, 4)
    torch.testing.assert_close(c.all_reduce(x, op=ReduceOp.AVG), sum(numbers(q, 4) for q in range(n)) / n)
    gathered = torch.full((2 * n + 3, 3), -1.0)  # as in vLLM, buffers may be larger than the data
    c.all_gather(gathered, numbers(r, 2, 3))
    assert torch.equal(gathered[: 2 * n], torch.cat([numbers(q, 2, 3) for q in range(n)]))
    assert (gathered[2 * n :] == -1).all()
    x, shard = numbers(r, 2 * n, 3), torch.empty(2, 3)
    c.reduce_scatter(shard, x)
    assert torch.equal(shard, summed(x)[2 * r : 2 * r + 2])
    for root in range(n):
        x = numbers(r, 7)
        c.broadcast(x, src=root)
        assert torch.equal(x, numbers(root, 7))
        y = torch.full((7,), 9.0)
        c.reduce(y, numbers(r, 7), root, ReduceOp.MAX)
        expected = torch.stack([numbers(q, 7) for q in range(n)]).amax(0)
        assert torch.equal(y, expected if r == root else torch.full((7,), 9.0))


def uneven(c: PyNcclCommunicator, r: int, n: int) -> None:
    """Different numbers of rows per rank, including zero."""
    sizes = [(3 * rank + 2) % 5 for rank in range(n)]
    start, root = sum(sizes[:r]), n - 1
    gathered = torch.empty(sum(sizes), 3)
    c.all_gatherv(gathered, numbers(r, sizes[r], 3), sizes=sizes)
    assert torch.equal(gathered, torch.cat([numbers(q, sizes[q], 3) for q in range(n)]))
    x, shard = numbers(r, sum(sizes), 3), torch.empty(sizes[r], 3)
    c.reduce_scatterv(shard, x, sizes=sizes)
    assert torch.equal(shard, summed(x)[start : start + sizes[r]])
    full = numbers(root, sum(sizes), 3)
    c.scatter(shard, full if r == root else None, sizes, root=root)
    assert torch.equal(shard, full[start : start + sizes[r]])


def point_to_point(c: PyNcclCommunicator, r: int, n: int) -> None:
    """All pairs of ranks in a group, and one launch of torch's P2POps."""
    right, left = (r + 1) % n, (r - 1) % n
    send, recv = numbers(r, n, 5), torch.empty(n, 5)
    expected = torch.stack([numbers(q, n, 5)[r] for q in range(n)])
    c.group_start()
    for peer in range(n):
        c.send(send[peer], peer)
        c.recv(recv[peer], peer)
    c.group_end()
    assert torch.equal(recv, expected)

    recv.zero_()
    c.batch_isend_irecv([P2POp(dist.isend, send[right], right), P2POp(dist.irecv, recv[left], left)])
    assert torch.equal(recv[left], expected[left])


BAD: list[tuple[Callable[[PyNcclCommunicator, torch.Tensor, int], Any], str]] = [  # x has four elements
    (lambda c, x, n: c.all_reduce(x, ReduceOp.SUM), "TypeError: all_reduce: out_tensor is"),  # as in old vLLM
    (lambda c, x, n: c.all_reduce(x, op=ReduceOp.BAND), "ValueError: Unsupported op"),
    (lambda c, x, n: c.all_reduce(x.to(torch.complex64)), "complex64"),
    (lambda c, x, n: c.all_reduce([1.0]), "expected a torch tensor"),
    (lambda c, x, n: c.all_reduce(torch.zeros(4, 4)[:, :2]), "is not contiguous, so NCCL would access memory"),
    (lambda c, x, n: c.all_reduce(torch.zeros(2, 2).t(), torch.zeros(2, 2)), "strides"),
    (lambda c, x, n: c.all_gatherv(torch.zeros(4, 1), x, [1]), "sizes has 1 entries"),
    (lambda c, x, n: c.group_end(), "without group_start()"),
]


def invalid_arguments(c: PyNcclCommunicator, r: int, n: int) -> None:
    for number, (call, message) in enumerate(BAD):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            call(c, torch.zeros(4), n)
        text = f"{caught.typename}: {caught.value}"
        assert message in text and "\n" not in text, number
    assert c.all_reduce(torch.ones(1)).item() == n  # none of them reached NCCL


def sglang_methods(world: PyNcclCommunicator, r: int, n: int) -> None:
    c = sglang.PyNcclCommunicator(dist.group.WORLD, CPU)
    x = numbers(r, 2 * n, 3)
    total = summed(x)
    assert c.available and c.disabled
    c.all_reduce(x)
    assert torch.equal(x, numbers(r, 2 * n, 3))
    with c.change_state(enable=True):
        assert torch.equal(c.outplace_all_reduce(x), total)
        sizes = [1] * (n - 1) + [n + 1]
        shard, full, swapped = torch.empty(sizes[r], 3), torch.empty(2 * n, 3), torch.empty_like(x)
        c.reduce_scatter(shard, x, sizes=sizes)
        assert torch.equal(shard, total[r : r + sizes[r]])
        c.all_gather(full, shard, sizes)
        assert torch.equal(full, total)
        c.all_to_all_single(swapped, x)
        assert torch.equal(swapped, torch.cat([numbers(q, 2 * n, 3)[2 * r : 2 * r + 2] for q in range(n)]))
        c.all_reduce(x)
        assert torch.equal(x, total)
    assert c.disabled
    c.destroy()


def disable_and_destroy(c: PyNcclCommunicator, r: int, n: int) -> None:
    x = torch.ones(2)
    c.disabled = True
    assert c.all_reduce(x) is None
    c.send(x, 99)  # ignored although the rank does not exist
    c.disabled = False
    for call in (c.suspend, c.suspend, c.resume, c.resume):
        call()
    with pynccl.mem_alloc(4096, "float32", device="cpu") as memory:
        y = torch.from_dlpack(memory)
        window = c.register_comm_window(y)
        y.fill_(1.0)
        assert window.value and c.all_reduce(y, y)[0].item() == n
        c.deregister_comm_window(window)
        del y
    c.destroy()
    c.destroy()
    assert (c.available, c.disabled, c.communicator) == (False, True, None) and not c.comm
    with pytest.raises(RuntimeError, match=r"was destroyed|there is no communicator"):
        c.all_reduce(x)
    # After the raw ncclCommDestroy, the communicator must know that it has ended, and not end it again.
    c = PyNcclCommunicator(dist.group.WORLD, CPU)
    made = c.communicator
    c.nccl.ncclCommDestroy(c.comm)
    assert made is not None and not made.alive


def program(comm: Communicator, path: str) -> None:
    with gloo_group(comm, path):
        c = PyNcclCommunicator(dist.group.WORLD, CPU)
        for body in (collectives, uneven, point_to_point, invalid_arguments, sglang_methods, disable_and_destroy):
            body(c, comm.rank, comm.size)


@each_size
def test_vllm_and_sglang_programs_match_gloo(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, program, str(tmp_path / "store"))
