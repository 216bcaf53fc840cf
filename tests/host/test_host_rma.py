"""Memory and windows of the host library; puts, signals and waits: on streams, in groups, and on failure."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from host_calls import CallFailed, Ranks, allocate, call, check_fails, in_threads, register, unique_id

import pynccl
from pynccl import host
from pynccl.bindings import abi
from pynccl.bindings.abi import WINDOW_ALIGNMENT, DataType, Result

INT32 = DataType.INT32
NBYTES = 4096
INVALID = Result.INVALID_ARGUMENT


def test_memory_is_aligned_writable_and_freed_once() -> None:
    for nbytes in (1, 4096, 10_000_001):
        pointer = allocate(nbytes)
        assert pointer and pointer % WINDOW_ALIGNMENT == 0
        ctypes.memset(pointer, 7, nbytes)
        assert ctypes.string_at(pointer + nbytes - 1, 1) == b"\7"
        call("ncclMemFree", pointer)
        check_fails(INVALID, f"ptr is {pointer:#x}; expected one that ncclMemAlloc returned", "ncclMemFree", pointer)
    assert allocate(0) == 0
    call("ncclMemFree", None)
    for nbytes in (1 << 60, (1 << 64) - 1):
        check_fails(Result.SYSTEM_ERROR, "out of memory", "ncclMemAlloc", ctypes.byref(ctypes.c_void_p()), nbytes)


def test_windows_have_equal_handles_on_all_ranks(pair: Ranks) -> None:
    pointers = [allocate(4096) for _ in range(2)]
    numbers = [pair.run(lambda rank, comm: register(comm, pointers[rank], 4096)) for _ in range(3)]
    out = [ctypes.c_void_p() for _ in range(2)]
    call("ncclGroupStart")  # one thread for both ranks
    for comm, pointer, handle in zip(pair.comms, pointers, out, strict=True):
        call("ncclCommWindowRegister", comm, pointer, 4096, ctypes.byref(handle), 0)
    call("ncclGroupEnd")
    numbers.append([handle.value for handle in out])
    assert all(a == b for a, b in numbers)
    assert len({a for a, _ in numbers}) == 4
    found = ctypes.c_void_p()
    for rank, comm in enumerate(pair.comms):
        call("ncclWinGetUserPtr", comm, numbers[1][rank], ctypes.byref(found))
        assert found.value == pointers[rank]
        call("ncclCommWindowDeregister", comm, numbers[1][rank])
        for name, *more in (("ncclCommWindowDeregister",), ("ncclWinGetUserPtr", ctypes.byref(found))):
            check_fails(INVALID, "expected a window that is registered", name, comm, numbers[1][rank], *more)
    for pointer in pointers:
        call("ncclMemFree", pointer)


def test_a_mistake_of_one_rank_raises_on_all_ranks(pair: Ranks) -> None:
    first, second = (allocate(4096) for _ in range(2))
    cases = [
        ([(first, 4096, 0), (second + 64, 4, 0)], "rank 1 passes a buffer that is empty or does not start"),
        ([(None, 4096, 0), (second, 4096, 0)], "rank 0 passes a buffer that is empty"),
        ([(first, 4096, 8), (second, 4096, 0)], "rank 0 passes winFlags 0x8; expected 0 to 3"),
        ([(first, 4096, 1), (second, 4096, 0)], r"the ranks disagree.*winFlags \[1, 0\]"),
    ]

    def body(rank: int, comm: int) -> int:
        for arguments, text in cases:
            with pytest.raises(CallFailed, match=text):
                register(comm, *arguments[rank])
        return register(comm, (first, second)[rank], 4096)

    assert len(set(pair.run(body))) == 1  # the ranks are still in step
    for pointer in (first, second):
        call("ncclMemFree", pointer)


# One-sided operations


class Windowed(Ranks):
    """Ranks with 4096 bytes of memory each, and one window over it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.pointers = [allocate(NBYTES) for _ in range(size)]
        self.windows = self.run(lambda rank, comm: register(comm, self.pointers[rank], NBYTES, 1))
        self.memory = [values(pointer, NBYTES // 4) for pointer in self.pointers]

    def put(self, rank: int, data: torch.Tensor, peer: int, offset: int = 0, *, stream: int = 0) -> None:
        window = self.windows[rank]
        args = (data.data_ptr(), data.numel(), INT32, peer, window, offset, 0, 0, 0, self.comms[rank], stream)
        call("ncclPutSignal", *args)

    def wait(self, rank: int, counts: dict[int, int], *, stream: int = 0) -> None:
        rows = (abi.WaitSignalDesc * len(counts))(*(abi.WaitSignalDesc(n, peer, 0, 0) for peer, n in counts.items()))
        call("ncclWaitSignal", len(counts), rows, self.comms[rank], stream)


def values(pointer: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_int32 * count).from_address(pointer), dtype=torch.int32)


@pytest.fixture
def group() -> Iterator[Windowed]:
    ranks = Windowed(3)
    yield ranks
    for comm in ranks.comms:
        host.function("ncclCommAbort")(comm)
    for pointer in ranks.pointers:
        call("ncclMemFree", pointer)


def test_puts_do_not_wait_for_their_target(group: Windowed) -> None:
    """Each rank puts to all ranks, including itself, many times."""
    n, rounds = group.size, 20

    def body(rank: int, comm: int) -> list[list[int]]:
        for step in range(rounds):
            for peer in range(n):
                data = torch.tensor([rank, peer, step], dtype=torch.int32)
                group.put(rank, data, peer, 64 * rank)
                data.zero_()  # the buffer may be reused once the put has completed
        group.wait(rank, dict.fromkeys(range(n), rounds))
        return [group.memory[rank][16 * peer : 16 * peer + 3].tolist() for peer in range(n)]

    assert group.run(body) == [[[peer, rank, rounds - 1] for peer in range(n)] for rank in range(n)]


def test_a_wait_blocks_only_its_own_stream(group: Windowed) -> None:
    """Rank 0 waits on one stream for a signal that it triggers by a put on another stream."""
    waiting, putting, answering = host.HostStream(), host.HostStream(), host.HostStream()
    group.wait(0, {1: 1}, stream=waiting.handle)
    copied = torch.zeros(1, dtype=torch.int32)
    waiting.submit(lambda: copied.copy_(group.memory[0][:1]))
    assert not waiting.query()
    seven, nine = (torch.tensor([value], dtype=torch.int32) for value in (7, 9))
    group.put(0, seven, 1, stream=putting.handle)
    call("ncclGroupStart")  # wait before put: all operations of a group progress
    group.wait(1, {0: 1}, stream=answering.handle)
    group.put(1, nine, 0, stream=answering.handle)
    call("ncclGroupEnd")
    for stream in (waiting, putting, answering):
        stream.synchronize()
    assert (copied.item(), group.memory[1][0].item()) == (9, 7)


def test_signals_are_counted_by_peer_index_and_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_HOST_TIMEOUT", "2")
    identity = unique_id()
    config = pynccl.CommConfig(num_rma_sig=2, num_rma_ctx=3).to_struct(pynccl.load("host"))

    def joined(rank: int) -> int:
        out = ctypes.c_void_p()
        call("ncclCommInitRankConfig", ctypes.byref(out), 2, identity, rank, ctypes.byref(config))
        return out.value or 0

    comms = in_threads(2, joined)
    for index, context, times in ((1, 2, 3), (0, 2, 1), (1, 0, 1)):
        for _ in range(times):
            call("ncclSignal", 1, index, context, 0, comms[0], None)
    for arguments, text in (((2, 0), "sigIdx is 2; expected 0 to 1"), ((0, 3), "ctx is 3; expected 0 to 2")):
        check_fails(INVALID, text, "ncclSignal", 1, *arguments, 0, comms[0], None)
    rows = (abi.WaitSignalDesc * 3)(*(abi.WaitSignalDesc(*row) for row in ((3, 0, 1, 2), (1, 0, 0, 2), (1, 0, 1, 0))))
    call("ncclWaitSignal", 3, rows, comms[1], None)
    text = r"missing signals: .*1 from rank 0 \(sigIdx=0, ctx=2\).*after 2 s"
    check_fails(Result.REMOTE_ERROR, text, "ncclWaitSignal", 3, rows, comms[1], None)
    for comm in comms:
        call("ncclCommAbort", comm)


def test_wrong_arguments_of_a_put_raise(group: Windowed) -> None:
    data = torch.ones(1, dtype=torch.int32)
    for change, text in (
        ({"offset": NBYTES}, "4 bytes at offset 4096 do not fit into the window of rank 1, which has 4096"),
        ({"window": 77}, "window is 0x4d; expected a window that is registered"),
        ({"peer": 9}, "peer is 9; expected a rank"),
        ({"signal": 1}, "sigIdx is 1; expected 0 to 0"),
        ({"flags": 1}, "flags is 0x1; expected 0"),
        ({"buffer": None}, "sendbuff is NULL"),
    ):
        right = {"buffer": data.data_ptr(), "peer": 1, "window": group.windows[0], "offset": 0, "signal": 0, "flags": 0}
        buffer, peer, window, offset, number, flags = {**right, **change}.values()
        arguments = (buffer, 1, INT32, peer, window, offset, number, 0, flags, group.comms[0], None)
        check_fails(INVALID, text, "ncclPutSignal", *arguments)
    group.windows = group.run(lambda rank, comm: register(comm, group.pointers[rank], 4 if rank else NBYTES, 1))
    with pytest.raises(CallFailed, match="window of rank 1, which has 4"):  # the size of the target's memory is checked
        group.put(0, torch.ones(2, dtype=torch.int32), 1)
