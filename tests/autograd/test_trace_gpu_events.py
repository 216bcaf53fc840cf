"""Placement of trace slices on a GPU, with hand-written torch.profiler events, so that no GPU is needed."""

from __future__ import annotations

from typing import Any

from pynccl_autograd.tracing.merge import placed, without
from pynccl_autograd.tracing.recording import COMM, EXPOSED, HOST, Lane, Slice

MAIN, BACKWARD = 11, 12  # threads
NODE = "autograd::engine::evaluate_function: "


def operator(name: str, thread: int, begin: int, end: int, category: str = "cpu_op") -> dict[str, Any]:
    common = {"ph": "X", "cat": category, "pid": 1, "args": {}}
    return common | {"name": name, "tid": thread, "ts": begin, "dur": end - begin}


def launch(number: int, thread: int, at: int, name: str, stream: int, begin: int, end: int) -> list[dict[str, Any]]:
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": thread, "ts": at, "dur": 1}
    kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": end - begin}
    return [call | {"args": {"correlation": number}}, kernel | {"args": {"correlation": number, "stream": stream}}]


def fwdbwd_link(number: int, forward: int, backward: int) -> list[dict[str, Any]]:
    common = {"id": number, "pid": 1, "cat": "fwdbwd", "name": "fwdbwd"}
    return [common | {"ph": "s", "tid": MAIN, "ts": forward}, common | {"ph": "f", "tid": BACKWARD, "ts": backward}]


EVENTS = [
    operator("aten::linear", MAIN, 10, 20),
    operator("up", MAIN, 8, 21, "user_annotation"),
    *launch(1, MAIN, 15, "gemm", 7, 100, 200),
    *launch(2, MAIN, 25, "ncclAllReduce", 20, 150, 300),
    operator(NODE + "LinearBackward", BACKWARD, 40, 60),
    *launch(3, BACKWARD, 45, "gemm_backward", 7, 320, 400),
    *launch(4, BACKWARD, 55, "ncclReduceScatter", 20, 400, 450),
    *fwdbwd_link(1, 12, 41),
]


def call(name: str, thread: int, begin: int, end: int, phase: str) -> Slice:
    args = {"operation": name, "phase": phase, "function": "F"}
    lane = Lane("comm", 20, "uid", 0, True)
    return Slice(lane, name, COMM, begin / 1e6, end / 1e6, args, thread=thread, launched=begin / 1e6)


def test_calls_are_placed_at_their_kernels_and_waits_where_no_kernel_computes() -> None:
    first, second = call("all_reduce", MAIN, 22, 28, ""), call("reduce_scatter", BACKWARD, 50, 58, "backward")
    third = call("barrier", MAIN, 62, 63, "")
    slices = placed([first, second, third], EVENTS)
    found = [(each.name, round(each.begin * 1e6), round(each.end * 1e6)) for each in slices]
    assert found == [
        ("all_reduce", 150, 300),
        ("reduce_scatter up backward", 400, 450),
        ("barrier", 62, 63),
        ("waits for communication", 200, 300),
        ("waits for communication", 400, 450),
    ]
    assert first.lane == second.lane == Lane("comm", 20, "uid", 0, True)
    assert third.lane == Lane("comm", HOST, "uid", 0, False)  # it has no kernel
    assert [each.lane for each in slices if each.category == EXPOSED] == [Lane("gpu", 7)] * 2


def test_subtracting_intervals() -> None:
    assert list(without([(0.0, 10.0)], [(2.0, 3.0), (2.5, 4.0), (9.0, 12.0)])) == [(0.0, 2.0), (4.0, 9.0)]
    assert list(without([(0.0, 1.0), (5.0, 6.0)], [(0.0, 9.0)])) == []
