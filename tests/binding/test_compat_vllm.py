"""Programs written for vLLM's wrapper of NCCL, and SGLang's, on the host library; torch's gloo is the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import gloo, numbers
from ranks import RankPool, each_size
from torch.distributed import P2POp, ReduceOp

import pynccl
from pynccl import Communicator
from pynccl.compat import sglang
from pynccl.compat.vllm import PyNcclCommunicator, buffer_type, cudaStream_t, ncclDataTypeEnum

CPU = torch.device("cpu")


def collectives(comm: Communicator, path: str) -> None:
    with gloo(comm, path):
        c, r, n = PyNcclCommunicator(dist.group.WORLD, CPU), comm.rank, comm.size
        assert (c.available, c.disabled, c.rank, c.world_size, c.device) == (True, False, r, n, CPU)
        assert c.comm.value and c.nccl_version == c.nccl.ncclGetRawVersion() and any(c.unique_id.internal)

        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
            for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
                x = numbers(r, 5, 3, dtype=dtype)
                expected = x.clone()
                dist.all_reduce(expected, op)
                before = x.clone()
                assert torch.equal(c.all_reduce(x, op=op), expected) and torch.equal(x, before)
                out = torch.empty_like(x)
                assert c.all_reduce(x, out, op) is out and torch.equal(out, expected)
                assert c.all_reduce(x, x, op=op) is x and torch.equal(x, expected)
        x = numbers(r, 4)
        torch.testing.assert_close(c.all_reduce(x, op=ReduceOp.AVG), sum(numbers(q, 4) for q in range(n)) / n)

        x = numbers(r, 2, 3)
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        gathered = torch.empty(2 * n, 3)
        c.all_gather(gathered, x)
        assert torch.equal(gathered, torch.cat(parts))

        x = numbers(r, 2 * n, 3)
        total = x.clone()
        dist.all_reduce(total)
        part = torch.empty(2, 3)
        c.reduce_scatter(part, x)
        assert torch.equal(part, total[2 * r : 2 * r + 2])

        for root in range(n):
            x, expected = numbers(r, 7), numbers(r, 7)
            dist.broadcast(expected, root)
            c.broadcast(x, src=root)
            assert torch.equal(x, expected)
            x, expected, y = numbers(r, 7), numbers(r, 7), torch.full((7,), 9.0)
            dist.reduce(expected, root, ReduceOp.MAX)
            c.reduce(y, x, root, ReduceOp.MAX)
            assert torch.equal(y, expected if r == root else torch.full((7,), 9.0))
        c.destroy()


@each_size
def test_collectives_give_what_gloo_gives(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, collectives, str(tmp_path / "store"))


def uneven(comm: Communicator, path: str) -> None:
    """A number of rows per rank, zero among them."""
    with gloo(comm, path):
        c, r, n = PyNcclCommunicator(None, "cpu"), comm.rank, comm.size
        sizes = [(3 * rank + 2) % 5 for rank in range(n)]
        starts = [sum(sizes[:rank]) for rank in range(n + 1)]
        mine = numbers(r, sizes[r], 3)
        gathered = torch.empty(sum(sizes), 3)
        c.all_gatherv(gathered, mine, sizes=sizes)
        assert torch.equal(gathered, torch.cat([numbers(q, sizes[q], 3) for q in range(n)]))

        x = numbers(r, sum(sizes), 3)
        total = x.clone()
        dist.all_reduce(total)
        part = torch.empty(sizes[r], 3)
        c.reduce_scatterv(part, x, sizes=sizes)
        assert torch.equal(part, total[starts[r] : starts[r + 1]])

        root = n - 1
        whole = numbers(root, sum(sizes), 3)
        part = torch.empty(sizes[r], 3)
        c.scatter(part, whole if r == root else None, sizes, root=root)
        assert torch.equal(part, whole[starts[r] : starts[r + 1]])

        # Buffers may be larger than what is moved, as with the raw pointers of theirs.
        wide = torch.full((2 * n + 3, 3), -1.0)
        c.all_gather(wide, numbers(r, 2, 3))
        assert (
            torch.equal(wide[: 2 * n], torch.cat([numbers(q, 2, 3) for q in range(n)])) and (wide[2 * n :] == -1).all()
        )
        padded = torch.cat([mine, torch.full((4, 3), 1e9)])
        c.all_gatherv(gathered.zero_(), padded, sizes)
        assert torch.equal(gathered, torch.cat([numbers(q, sizes[q], 3) for q in range(n)]))
        c.destroy()


@each_size
def test_rows_per_rank(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, uneven, str(tmp_path / "store"))


def point_to_point(comm: Communicator, path: str) -> None:
    with gloo(comm, path):
        c, r, n = PyNcclCommunicator(dist.group.WORLD, CPU), comm.rank, comm.size
        # A pipeline: each rank receives, works, and sends on.
        x = torch.ones(4) if r == 0 else torch.empty(4)
        if r > 0:
            c.recv(x, src=r - 1)
        x *= 2
        if r < n - 1:
            c.send(x, dst=r + 1)
        assert torch.equal(x, torch.full((4,), 2.0 ** (r + 1)))

        # Everybody with everybody, in a group; as one launch of torch's P2POps; and raw calls in the same group.
        send, recv = numbers(r, n, 5), torch.empty(n, 5)
        expected = torch.stack([numbers(q, n, 5)[r] for q in range(n)])
        c.group_start()
        for peer in range(n):
            c.send(send[peer], peer)
            c.recv(recv[peer], peer)
        c.group_end()
        assert torch.equal(recv, expected)
        recv.zero_()
        right, left = (r + 1) % n, (r - 1) % n
        c.batch_isend_irecv([P2POp(dist.isend, send[right], right), P2POp(dist.irecv, recv[left], left)])
        assert torch.equal(recv[left], expected[left])
        recv.zero_()
        float32 = ncclDataTypeEnum.from_torch(torch.float32)
        c.group_start()
        c.nccl.ncclSend(buffer_type(send[right].data_ptr()), 5, float32, right, c.comm, cudaStream_t(0))
        c.nccl.ncclRecv(buffer_type(recv[left].data_ptr()), 5, float32, left, c.comm, cudaStream_t(0))
        c.group_end()
        assert torch.equal(recv[left], expected[left])
        recv.zero_()
        c.nccl.ncclGroupStart()
        c.send(send[right], right)
        c.recv(recv[left], left)
        c.nccl.ncclGroupEnd()
        assert torch.equal(recv[left], expected[left])

        # fp8 travels as bytes, whatever kind of fp8 it is.
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz):
            x, y = torch.arange(8.0).to(dtype), torch.empty(8).to(dtype)
            c.group_start()
            c.send(x, right)
            c.recv(y, left)
            c.group_end()
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        c.destroy()


@each_size
def test_point_to_point_and_groups(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, point_to_point, str(tmp_path / "store"))


def several_groups(comm: Communicator, path: str) -> None:
    """Two process groups of two ranks each, and the world around them: three communicators at once."""
    with gloo(comm, path):
        pairs = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
        pair = pairs[comm.rank // 2]
        inner, world = PyNcclCommunicator(pair, CPU), PyNcclCommunicator(dist.group.WORLD, CPU)
        assert (inner.rank, inner.world_size) == (comm.rank % 2, 2)
        x = torch.full((3,), float(comm.rank))
        for _ in range(2):
            expected = x.clone()
            dist.all_reduce(expected, group=pair)
            x = inner.all_reduce(x)
            assert torch.equal(x, expected)
            dist.all_reduce(expected)
            x = world.all_reduce(x)
            assert torch.equal(x, expected)
        # P2POp names ranks of the world; what travels is told by their places in the group.
        other = comm.rank ^ 1
        y = torch.empty(3)
        inner.batch_isend_irecv([P2POp(dist.isend, x + comm.rank, other, pair), P2POp(dist.irecv, y, other, pair)])
        assert torch.equal(y, x + other)
        with pytest.raises(ValueError, match="not in the group"):
            PyNcclCommunicator(pairs[1 - comm.rank // 2], CPU)
        inner.destroy()
        world.destroy()


def test_several_groups_at_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, several_groups, str(tmp_path / "store"))


def layouts(comm: Communicator, path: str) -> None:
    with gloo(comm, path):
        c, r, n = PyNcclCommunicator(dist.group.WORLD, CPU), comm.rank, comm.size
        # Dense in another order of dimensions: theirs moves the memory as it lies, and so the result is right.
        x = numbers(r, 2, 3, 4, 5).to(memory_format=torch.channels_last)
        expected = x.clone()
        dist.all_reduce(expected)
        out = c.all_reduce(x)
        assert out.stride() == x.stride() and torch.equal(out, expected)
        with pytest.raises(ValueError, match="strides"):
            c.all_reduce(x, torch.empty(2, 3, 4, 5))
        # With gaps theirs would sum other memory than the tensor's.
        with pytest.raises(ValueError, match="is not contiguous, and NCCL would move other memory"):
            c.all_reduce(torch.zeros(4, 4)[:, :2])
        # A parameter under grad mode, as a trainer hands its weights over.
        weight = torch.nn.Parameter(numbers(r, 3))
        c.broadcast(weight, src=1)
        assert torch.equal(weight.detach(), numbers(1, 3))
        saved = weight.square()
        c.broadcast(weight, src=0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()
        # A stream of the host library.
        stream = pynccl.create_stream()
        y = c.all_reduce(torch.full((2,), 1.0), stream=stream)
        stream.synchronize()
        assert y.tolist() == [n, n]
        c.destroy()


def test_layouts_parameters_and_streams(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, layouts, str(tmp_path / "store"))


def bad_input(comm: Communicator, path: str) -> list[str]:
    with gloo(comm, path):
        c, n = PyNcclCommunicator(dist.group.WORLD, CPU), comm.size
        x = torch.zeros(4)
        calls: list[Callable[[], Any]] = [
            lambda: c.all_reduce(x, ReduceOp.SUM),  # as in old vLLM
            lambda: c.all_reduce(x, op=ReduceOp.BAND),
            lambda: c.all_reduce(x, torch.zeros(3)),
            lambda: c.all_reduce(x, torch.zeros(4, dtype=torch.float64)),
            lambda: c.all_reduce(x.to(torch.complex64)),
            lambda: c.all_reduce(torch.zeros(4, device="meta")),
            lambda: c.all_reduce([1.0]),
            lambda: c.all_gather(torch.zeros(3), x),
            lambda: c.all_gatherv(torch.zeros(4, 1), x, [1]),
            lambda: c.all_gatherv(torch.zeros(4, 1), x, [5] * n),
            lambda: c.reduce_scatterv(torch.zeros(1), x, [3] * n),
            lambda: c.scatter(x, x, [-1] * n),
            lambda: c.broadcast(x, n),
            lambda: c.send(x, -1),
            c.group_end,
            lambda: c.all_reduce(x, stream="fast"),
        ]
        said = []
        for call in calls:
            try:
                call()
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        assert c.all_reduce(torch.ones(1)).item() == n  # none of them reached NCCL
        c.destroy()
        return said


def test_bad_input_is_said_before_the_launch_and_alike_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, bad_input, str(tmp_path / "store"))
    assert first == second
    words = [
        "TypeError: all_reduce: out_tensor is", "ValueError: Unsupported op", "recv has 3 elements, expected 4",
        "send is FLOAT32, recv is FLOAT64", "complex64", "meta", "expected a torch tensor",
        "recv has 3 elements, expected 8", "sizes has 1 entries", "all_gather_v: send has 4 elements, the counts say 5",
        "reduce_scatter_v: send has 4 elements, the counts say 6",
        "sizes", "broadcast: root", "send: peer", "no group_start()", "is no stream",
    ]  # fmt: skip
    assert len(words) == len(first)
    for word, text in zip(words, first, strict=True):
        assert word in text and "\n" not in text, (word, text)


def ends(comm: Communicator, path: str) -> None:
    with gloo(comm, path):
        c = PyNcclCommunicator(dist.group.WORLD, CPU)
        x = torch.ones(2)
        c.disabled = True
        assert c.all_reduce(x) is None
        c.all_gather(x, torch.ones(1))  # of wrong sizes, and to nobody: nothing is done
        c.send(x, 99)
        c.disabled = False
        c.suspend()
        c.suspend()
        c.resume()
        c.resume()
        assert c.all_reduce(x).tolist() == [comm.size] * 2
        handle = c.comm
        c.destroy()
        c.destroy()
        assert (c.available, c.disabled, c.communicator) == (False, True, None) and not c.comm
        assert handle.value
        for call in (lambda: c.all_reduce(x), lambda: c.recv(x, 0), lambda: c.register_comm_window(x)):
            with pytest.raises(RuntimeError, match=r"was destroyed|there is no communicator"):
                call()
        # By the raw function, which the communicator has to know of: it would end it once more.
        c = PyNcclCommunicator(dist.group.WORLD, CPU)
        made = c.communicator
        c.nccl.ncclCommDestroy(c.comm)
        assert made is not None and not made.alive
        with pytest.raises(RuntimeError, match="destroyed"):
            c.all_reduce(x)


def test_disabled_suspended_destroyed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, ends, str(tmp_path / "store"))


def windows(comm: Communicator, path: str) -> None:
    with gloo(comm, path):
        c = PyNcclCommunicator(dist.group.WORLD, CPU)
        with pynccl.mem_alloc(4096, "float32", device=comm.device) as memory:
            x = torch.from_dlpack(memory)
            window = c.register_comm_window(x)
            assert window.value
            x.fill_(1.0)
            assert c.all_reduce(x, x)[0].item() == comm.size
            c.deregister_comm_window(window)
            raw = c.register_comm_window_raw(x.data_ptr(), x.numel() * 4)
            c.deregister_comm_window(raw)
            del x
        c.destroy()


def test_windows(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, windows, str(tmp_path / "store"))


def of_sglang(comm: Communicator, path: str) -> None:
    with gloo(comm, path):
        c, r, n = sglang.PyNcclCommunicator(dist.group.WORLD, CPU), comm.rank, comm.size
        x = numbers(r, 2 * n, 3)
        assert c.available and c.disabled
        c.all_reduce(x)
        assert torch.equal(x, numbers(r, 2 * n, 3))
        total = x.clone()
        dist.all_reduce(total)
        with c.change_state(enable=True):
            assert torch.equal(c.outplace_all_reduce(x), total)
            part = torch.empty(2, 3)
            c.reduce_scatter(part, x)
            assert torch.equal(part, total[2 * r : 2 * r + 2])
            sizes = [1] * (n - 1) + [n + 1]
            part = torch.empty(sizes[r], 3)
            c.reduce_scatter(part, x, sizes=sizes)
            assert torch.equal(part, total[r : r + sizes[r]])
            whole = torch.empty(2 * n, 3)
            c.all_gather(whole, part, sizes)
            assert torch.equal(whole, total)
            c.all_gather(whole, total[:2].contiguous())
            assert torch.equal(whole, total[:2].repeat(n, 1))
            swapped = torch.empty_like(x)
            c.all_to_all_single(swapped, x)
            assert torch.equal(swapped, torch.cat([numbers(q, 2 * n, 3)[2 * r : 2 * r + 2] for q in range(n)]))
            c.all_reduce(x)
            assert torch.equal(x, total)
        assert c.disabled
        c.destroy()
        nccl = sglang.NCCLLibrary()
        alone = nccl.ncclCommInitRankConfig(1, nccl.ncclGetUniqueId(), 0, pynccl.CommConfig(cta_policy=2))
        nccl.ncclMemFree(nccl.ncclMemAlloc(256))
        nccl.ncclCommDestroy(alone)


@each_size
def test_a_program_of_sglang(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, of_sglang, str(tmp_path / "store"))
