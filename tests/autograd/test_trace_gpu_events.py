"""Where slices of a trace lie on a GPU: what torch.profiler exports there, given by hand, for machines without one."""

from __future__ import annotations

from typing import Any

from pynccl_autograd.tracing.merge import placed, without
from pynccl_autograd.tracing.recording import COMM, EXPOSED, HOST, Lane, Slice

MAIN, BACKWARD = 11, 12  # threads
NODE = "autograd::engine::evaluate_function: "


def operator(name: str, thread: int, begin: int, end: int, category: str = "cpu_op") -> dict[str, Any]:
    same = {"ph": "X", "cat": category, "pid": 1, "args": {}}
    return same | {"name": name, "tid": thread, "ts": begin, "dur": end - begin}


def launched(number: int, thread: int, at: int, name: str, stream: int, begin: int, end: int) -> list[dict[str, Any]]:
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": thread, "ts": at, "dur": 1}
    kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": end - begin}
    return [call | {"args": {"correlation": number}}, kernel | {"args": {"correlation": number, "stream": stream}}]


def linked(number: int, forward: int, backward: int) -> list[dict[str, Any]]:
    same = {"id": number, "pid": 1, "cat": "fwdbwd", "name": "fwdbwd"}
    return [same | {"ph": "s", "tid": MAIN, "ts": forward}, same | {"ph": "f", "tid": BACKWARD, "ts": backward}]


EVENTS = [
    operator("aten::linear", MAIN, 10, 20),
    operator("up", MAIN, 8, 21, "user_annotation"),
    *launched(1, MAIN, 15, "gemm", 7, 100, 200),
    *launched(2, MAIN, 25, "ncclAllReduce", 20, 150, 300),
    operator(NODE + "LinearBackward", BACKWARD, 40, 60),
    *launched(3, BACKWARD, 45, "gemm_backward", 7, 320, 400),
    *launched(4, BACKWARD, 55, "ncclReduceScatter", 20, 400, 450),
    *linked(1, 12, 41),
]


def call(name: str, thread: int, begin: int, end: int, phase: str) -> Slice:
    args = {"operation": name, "phase": phase, "function": "F"}
    lane = Lane("comm", 20, "uid", 0, True)
    return Slice(lane, name, COMM, begin / 1e6, end / 1e6, args, thread=thread, launched=begin / 1e6)


def test_calls_lie_where_their_kernels_ran_and_waits_where_nothing_is_computed() -> None:
    first, second = call("all_reduce", MAIN, 22, 28, ""), call("reduce_scatter", BACKWARD, 50, 58, "backward")
    third = call("barrier", MAIN, 62, 63, "")
    slices = placed([first, second, third], EVENTS)
    found = [(one.name, round(one.begin * 1e6), round(one.end * 1e6)) for one in slices]
    assert found == [
        ("all_reduce", 150, 300),
        ("reduce_scatter up backward", 400, 450),
        ("barrier", 62, 63),
        ("waits for communication", 200, 300),
        ("waits for communication", 400, 450),
    ]
    assert first.lane == second.lane == Lane("comm", 20, "uid", 0, True)
    assert third.lane == Lane("comm", HOST, "uid", 0, False)  # it launched nothing
    assert [one.lane for one in slices if one.category == EXPOSED] == [Lane("gpu", 7)] * 2


def test_times_without_others() -> None:
    assert list(without([(0.0, 10.0)], [(2.0, 3.0), (2.5, 4.0), (9.0, 12.0)])) == [(0.0, 2.0), (4.0, 9.0)]
    assert list(without([(0.0, 1.0), (5.0, 6.0)], [(0.0, 9.0)])) == []
