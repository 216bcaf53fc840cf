"""Every collective matches a single-process reference, for all dtypes and operators, in place and out of place."""

from __future__ import annotations

import numpy as np
import torch
from ranks import RankPool, each_size
from reference import DTYPES, OPS, bits, expect, inputs, reduced
from test_buffers import OnlyDlpack

import pynccl
from pynccl import Communicator

COUNT = 37  # elements per rank and block: odd, so that blocks are not aligned


def check_reductions(comm: Communicator, dtype: torch.dtype, op: str) -> None:
    n, rank, root = comm.size, comm.rank, (len(op) + dtype.itemsize) % comm.size
    xs = inputs(dtype, op, COUNT * n, n)
    wanted = reduced(xs, op)
    mine, block = xs[rank], slice(rank * COUNT, (rank + 1) * COUNT)
    before = mine.clone()
    what = f"{op} of {dtype} on {n} ranks"

    expect(comm.all_reduce(mine, op=op), wanted, f"all_reduce {what}")
    expect(comm.reduce_scatter(mine, op=op), wanted[block], f"reduce_scatter {what}")
    result = comm.reduce(mine, op=op, root=root)
    if rank == root:
        expect(result, wanted, f"reduce {what}")
    else:
        assert result is None
    expect(mine, before, f"input of {what}")

    in_place = mine.clone()
    assert comm.all_reduce(in_place, in_place, pynccl.RedOp[op.upper()]) is in_place
    expect(in_place, wanted, f"all_reduce in place {what}")
    in_place = mine.clone()
    comm.reduce_scatter(in_place, in_place[block], op)
    expect(in_place[block], wanted[block], f"reduce_scatter in place {what}")
    in_place = mine.clone()
    comm.reduce(in_place, in_place if rank == root else None, op, root)
    expect(in_place, wanted if rank == root else mine, f"reduce in place {what}")


def check_copies(comm: Communicator, dtype: torch.dtype, root: int) -> None:
    n, rank = comm.size, comm.rank
    full = inputs(dtype, "sum", COUNT * n, n)
    block = slice(rank * COUNT, (rank + 1) * COUNT)
    shard = full[rank][block].clone()
    gathered = torch.cat([bits(x[i * COUNT : (i + 1) * COUNT]) for i, x in enumerate(full)]).view(dtype)
    exchanged = torch.cat([bits(x[block]) for x in full]).view(dtype)
    what = f"of {dtype} on {n} ranks, root {root}"

    expect(comm.broadcast(full[rank], root=root), full[root], f"broadcast {what}")
    expect(comm.all_gather(shard), gathered, f"all_gather {what}")
    expect(comm.all_to_all(full[rank]), exchanged, f"all_to_all {what}")
    expect(comm.scatter(full[rank], root=root), full[root][block], f"scatter {what}")
    received = torch.empty_like(shard)
    assert comm.scatter(full[root] if rank == root else None, received, root) is received
    expect(received, full[root][block], f"scatter without send {what}")
    result = comm.gather(shard, root=root)
    if rank == root:
        expect(result, gathered, f"gather {what}")
    else:
        assert result is None
    expect(full[rank], inputs(dtype, "sum", COUNT * n, n)[rank], f"input {what}")

    what = f"in place {what}"
    mine = full[rank].clone()
    assert comm.broadcast(mine, mine, root) is mine
    expect(mine, full[root], f"broadcast {what}")
    mine = full[rank].clone()
    assert comm.all_gather(mine[block], mine) is mine
    expect(mine, gathered, f"all_gather {what}")
    mine = full[rank].clone()
    comm.gather(mine[block], mine if rank == root else None, root)
    expect(mine, gathered if rank == root else full[rank], f"gather {what}")
    mine = full[rank].clone()
    comm.scatter(mine if rank == root else None, mine[block], root)
    expect(mine[block], full[root][block], f"scatter {what}")


def check_all_dtypes(comm: Communicator) -> None:
    for i, dtype in enumerate(DTYPES.values()):
        check_copies(comm, dtype, i % comm.size)
        for op in OPS:
            check_reductions(comm, dtype, op)


def check_sizes_and_shapes(comm: Communicator) -> None:
    """Check sizes on both sides of possible algorithm thresholds, and the shapes of allocated results."""
    n, last = comm.size, comm.rank == comm.size - 1
    for count in (1, 2, 255, 4097, 65_537, 1_000_003):
        xs = inputs(torch.float32, "sum", count, n, seed=count)
        wanted = reduced(xs, "sum")
        expect(comm.all_reduce(xs[comm.rank]), wanted, f"all_reduce of {count}")
        expect(comm.all_gather(xs[comm.rank]), torch.cat(xs), f"all_gather of {count}")
        expect(comm.reduce_scatter(torch.cat([xs[comm.rank]] * n)), wanted, f"reduce_scatter of {count}")
    scalar, empty = torch.tensor(1.0), torch.ones(0, 4)
    for result, shape in (
        (comm.all_reduce(torch.ones(3, 4, 5)), (3, 4, 5)),
        (comm.all_gather(torch.ones(3, 4)), (3 * n, 4)),
        (comm.reduce_scatter(torch.ones(2 * n, 4)), (2, 4)),
        (comm.all_to_all(torch.ones(2 * n, 4)), (2 * n, 4)),
        (comm.gather(torch.ones(3, 4), root=n - 1), (3 * n, 4) if last else None),
        (comm.all_reduce(scalar), ()),
        (comm.all_reduce(empty), (0, 4)),
        (comm.all_to_all(torch.ones(0)), (0,)),
    ):
        assert (None if result is None else tuple(result.shape)) == shape


def check_same_bits(comm: Communicator) -> None:
    """Check that sums are bitwise equal on all ranks although their last bits depend on the order of addition."""
    generator = torch.Generator().manual_seed(comm.rank)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for count in (5, 70_001):
            ours = bits(comm.all_reduce(torch.randn(count, generator=generator).to(dtype)))
            assert torch.equal(comm.all_gather(ours), ours.repeat(comm.size)), f"{count} of {dtype}"


def check_other_buffers(comm: Communicator) -> None:
    total = comm.size * (comm.size + 1) / 2
    array = np.full((2, 3), comm.rank + 1, "f8")
    result = comm.all_reduce(array)
    assert isinstance(result, np.ndarray) and result.tolist() == [[total] * 3] * 2
    tensor = torch.full((4,), comm.rank + 1.0)
    wrapped = OnlyDlpack(tensor)
    assert comm.all_reduce(wrapped, wrapped) is wrapped and tensor.tolist() == [total] * 4
    raw = torch.full((5,), comm.rank + 1, dtype=torch.bfloat16)
    comm.all_reduce((raw.data_ptr(), 2, "bfloat16"), (raw.data_ptr(), 2, "bfloat16"), stream=0)
    assert raw.tolist() == [total] * 2 + [comm.rank + 1] * 3


def check_send_recv(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    first, second, to_itself = torch.zeros(2), torch.zeros(7), torch.zeros(4)
    with pynccl.group():
        comm.send(torch.full((2,), rank + 0.5), right)
        comm.send(torch.full((7,), rank + 0.25), right)
        comm.send(torch.full((4,), 3.0), rank)
        assert comm.recv(first, left) is first
        comm.recv(second, left)
        comm.recv(to_itself, rank)
    assert first.tolist() == [left + 0.5] * 2 and second.tolist() == [left + 0.25] * 7
    assert to_itself.tolist() == [3.0] * 4

    x = torch.arange(5.0)  # from rank 0 to 1 to 2 ..., outside any group
    if rank > 0:
        comm.recv(x, rank - 1)
    x += 1
    if rank < n - 1:
        comm.send(x, rank + 1)
    assert x.tolist() == [i + rank + 1.0 for i in range(5)]


def check_all(comm: Communicator) -> None:
    for body in (check_all_dtypes, check_sizes_and_shapes, check_same_bits, check_other_buffers, check_send_recv):
        body(comm)


@each_size
def test_collectives_match_single_process(ranks: RankPool, n: int) -> None:
    ranks.run(n, check_all, timeout=120)
