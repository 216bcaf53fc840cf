"""Where slices of a trace lie on a GPU: what torch.profiler exports there, given by hand, for machines without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pynccl_autograd.tracing.profiled import Timeline, parse, without
from pynccl_autograd.tracing.recording import Recording, Span
from pynccl_autograd.tracing.spans import COMM, COMPUTE, STEP, Lane

MAIN, BACKWARD = 11, 12  # threads
WORLD = Lane(COMM, "uid", 0, 0, True)
NODE = "autograd::engine::evaluate_function: "


def operator(name: str, thread: int, begin: int, end: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": begin,
        "dur": end - begin,
        "args": {},
    }


def launched(number: int, thread: int, at: int, name: str, stream: int, begin: int, end: int) -> list[dict[str, Any]]:
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": thread, "ts": at, "dur": 1}
    kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": end - begin}
    return [call | {"args": {"correlation": number}}, kernel | {"args": {"correlation": number, "stream": stream}}]


def linked(number: int, forward: int, backward: int) -> list[dict[str, Any]]:
    same = {"id": number, "pid": 1, "cat": "fwdbwd", "name": "fwdbwd"}
    return [same | {"ph": "s", "tid": MAIN, "ts": forward}, same | {"ph": "f", "tid": BACKWARD, "ts": backward}]


EVENTS = [
    operator("aten::linear", MAIN, 10, 20),
    *launched(1, MAIN, 15, "gemm", 7, 100, 200),
    *launched(2, MAIN, 25, "ncclAllReduce", 20, 150, 300),
    operator(NODE + "LinearBackward", BACKWARD, 40, 60),
    operator("LinearBackward", BACKWARD, 41, 59),
    *launched(3, BACKWARD, 45, "gemm_backward", 7, 320, 400),
    *launched(4, BACKWARD, 55, "ncclReduceScatter", 20, 400, 450),
    *linked(1, 12, 41),
    operator("before the block", MAIN, -9, -5),
    *launched(5, MAIN, -7, "before the block", 7, 50, 60),
]


@pytest.fixture
def pieces() -> dict[str, list[tuple[str, Lane, int, int]]]:
    """By category: name, lane, begin and end in microseconds."""
    recording = Recording(torch.device("cuda"), None, 100)
    layer = {"layer": "up", "module": "Linear", "phase": "forward"}
    calls = [("all_reduce", MAIN, 22, 28, "forward"), ("reduce_scatter", BACKWARD, 50, 58, "backward")]
    recording.spans = [
        Span(STEP, "step", 5e-6, 65e-6, MAIN),
        Span(COMPUTE, "up", 8e-6, 21e-6, MAIN, layer),
        *(
            Span(
                COMM, name, begin / 1e6, end / 1e6, thread, {"phase": phase, "comm": "world"}, WORLD, issued=begin / 1e6
            )
            for name, thread, begin, end, phase in calls
        ),
        Span(COMM, "barrier", 62e-6, 63e-6, MAIN, {"comm": "world"}, WORLD, issued=62e-6),
    ]
    found: dict[str, list[tuple[str, Lane, int, int]]] = {}
    for one in Timeline(recording, parse(EVENTS, 0.0, 0.0, 1.0), 1.0).pieces:
        row = (one.name, one.lane, round(one.begin * 1e6), round(one.end * 1e6))
        found.setdefault(one.category, []).append(row)
    return found


def test_layers_and_calls_lie_where_their_kernels_ran(pieces: dict[str, list[tuple[str, Lane, int, int]]]) -> None:
    stream = Lane(COMPUTE)
    assert pieces["kernel"] == [("gemm", stream, 100, 200), ("gemm_backward", stream, 320, 400)]
    assert pieces["compute"] == [
        ("up", stream, 100, 200),
        ("backward", stream, 320, 400),
        ("up backward", stream, 320, 400),
    ]
    assert pieces["comm"] == [
        ("all_reduce", WORLD, 150, 300),
        ("reduce_scatter up backward", WORLD, 400, 450),
        ("barrier", Lane(COMM, "uid", 0, -1), 62, 63),  # which launched nothing
    ]
    assert pieces["step"] == [("step", Lane(STEP), 100, 400)]


def test_what_the_cpu_did_is_on_lanes_of_its_own(pieces: dict[str, list[tuple[str, Lane, int, int]]]) -> None:
    assert pieces["cpu"] == [
        ("up", Lane("cpu"), 8, 21),
        ("backward", Lane("cpu", number=1), 40, 60),
        ("up backward", Lane("cpu", number=1), 40, 60),
    ]
    assert [name for name, *_ in pieces["cpu_op"]] == ["aten::linear", NODE + "LinearBackward", "LinearBackward"]


def test_communication_is_exposed_where_nothing_is_computed(
    pieces: dict[str, list[tuple[str, Lane, int, int]]],
) -> None:
    assert [(begin, end) for _, _, begin, end in pieces["exposed"]] == [(200, 300), (400, 450)]
    assert without([(0.0, 10.0)], [(2.0, 3.0), (2.5, 4.0), (9.0, 12.0)]) == [(0.0, 2.0), (4.0, 9.0)]
