"""Every collective gives what a single process would: all data types and operators, in place and out of place."""

from __future__ import annotations

import numpy as np
import torch
from ranks import RankPool, each_size
from reference import DTYPES, OPS, bits, expect, inputs, reduced
from test_buffers import OnlyDlpack

import pynccl
from pynccl import Communicator

COUNT = 37  # elements per rank and block: odd, so that no alignment comes for free


def reductions(comm: Communicator, dtype: torch.dtype, op: str) -> None:
    n, rank, root = comm.size, comm.rank, (len(op) + dtype.itemsize) % comm.size
    given = inputs(dtype, op, COUNT * n, n)
    wanted = reduced(given, op)
    mine, block = given[rank], slice(rank * COUNT, (rank + 1) * COUNT)
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


def copies(comm: Communicator, dtype: torch.dtype, root: int) -> None:
    n, rank = comm.size, comm.rank
    whole = inputs(dtype, "sum", COUNT * n, n)
    block = slice(rank * COUNT, (rank + 1) * COUNT)
    part = whole[rank][block].clone()
    gathered = torch.cat([bits(x[i * COUNT : (i + 1) * COUNT]) for i, x in enumerate(whole)]).view(dtype)
    exchanged = torch.cat([bits(x[block]) for x in whole]).view(dtype)
    what = f"of {dtype} on {n} ranks, root {root}"

    expect(comm.broadcast(whole[rank], root=root), whole[root], f"broadcast {what}")
    expect(comm.all_gather(part), gathered, f"all_gather {what}")
    expect(comm.all_to_all(whole[rank]), exchanged, f"all_to_all {what}")
    expect(comm.scatter(whole[rank], root=root), whole[root][block], f"scatter {what}")
    received = torch.empty_like(part)
    assert comm.scatter(whole[root] if rank == root else None, received, root) is received
    expect(received, whole[root][block], f"scatter without send {what}")
    result = comm.gather(part, root=root)
    if rank == root:
        expect(result, gathered, f"gather {what}")
    else:
        assert result is None
    expect(whole[rank], inputs(dtype, "sum", COUNT * n, n)[rank], f"input {what}")

    what = f"in place {what}"
    mine = whole[rank].clone()
    assert comm.broadcast(mine, mine, root) is mine
    expect(mine, whole[root], f"broadcast {what}")
    mine = whole[rank].clone()
    assert comm.all_gather(mine[block], mine) is mine
    expect(mine, gathered, f"all_gather {what}")
    mine = whole[rank].clone()
    comm.gather(mine[block], mine if rank == root else None, root)
    expect(mine, gathered if rank == root else whole[rank], f"gather {what}")
    mine = whole[rank].clone()
    comm.scatter(mine if rank == root else None, mine[block], root)
    expect(mine[block], whole[root][block], f"scatter {what}")


def of_all_types(comm: Communicator) -> None:
    for i, dtype in enumerate(DTYPES.values()):
        copies(comm, dtype, i % comm.size)
        for op in OPS:
            reductions(comm, dtype, op)


def sizes_and_shapes(comm: Communicator) -> None:
    """Sizes on both sides of whatever an algorithm may switch at; shapes of results that are allocated."""
    n, last = comm.size, comm.rank == comm.size - 1
    for count in (1, 2, 255, 4097, 65_537, 1_000_003):
        given = inputs(torch.float32, "sum", count, n, seed=count)
        wanted = reduced(given, "sum")
        expect(comm.all_reduce(given[comm.rank]), wanted, f"all_reduce of {count}")
        expect(comm.all_gather(given[comm.rank]), torch.cat(given), f"all_gather of {count}")
        expect(comm.reduce_scatter(torch.cat([given[comm.rank]] * n)), wanted, f"reduce_scatter of {count}")
    one, nothing = torch.tensor(1.0), torch.ones(0, 4)
    for result, shape in (
        (comm.all_reduce(torch.ones(3, 4, 5)), (3, 4, 5)),
        (comm.all_gather(torch.ones(3, 4)), (3 * n, 4)),
        (comm.reduce_scatter(torch.ones(2 * n, 4)), (2, 4)),
        (comm.all_to_all(torch.ones(2 * n, 4)), (2 * n, 4)),
        (comm.gather(torch.ones(3, 4), root=n - 1), (3 * n, 4) if last else None),
        (comm.all_reduce(one), ()),
        (comm.all_reduce(nothing), (0, 4)),
        (comm.all_to_all(torch.ones(0)), (0,)),
    ):
        assert (None if result is None else tuple(result.shape)) == shape


def same_bits(comm: Communicator) -> None:
    """Sums whose last bits depend on the order of addition are the same on all ranks."""
    generator = torch.Generator().manual_seed(comm.rank)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for count in (5, 70_001):
            ours = bits(comm.all_reduce(torch.randn(count, generator=generator).to(dtype)))
            assert torch.equal(comm.all_gather(ours), ours.repeat(comm.size)), f"{count} of {dtype}"


def other_buffers(comm: Communicator) -> None:
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


def exchanges(comm: Communicator) -> None:
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


def all_of_them(comm: Communicator) -> None:
    for body in (of_all_types, sizes_and_shapes, same_bits, other_buffers, exchanges):
        body(comm)


@each_size
def test_every_rank_gets_what_one_process_computes(ranks: RankPool, n: int) -> None:
    ranks.run(n, all_of_them, timeout=120)
