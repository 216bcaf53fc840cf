"""Integers that C would truncate raise an error with their range; integers of NumPy and torch are accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from libraries import Stub
from test_buffers import describe

import pynccl
from pynccl import CollConfig, CommConfig, Communicator, Window

X = torch.zeros(4)
RAW = (4096, 4, "int8")
WINDOW = Window.__new__(Window)
WINDOW._handle, WINDOW.nbytes = 1, 1 << 40
WRAPS = 1 << 32  # 0 in a C int
BOOLS: list[Any] = [True, np.True_, np.array(True), torch.tensor(True)]


INVALID: list[tuple[Callable[[Communicator], Any], str]] = [
    (lambda c: c.split(WRAPS), r"split: color is 4294967296, expected an integer >= 0, up to 2147483647"),
    (lambda c: c.split(0, key=1.0), r"split: key is 1\.0, expected an integer"),  # type: ignore[arg-type]
    (
        lambda c: Communicator.init(WRAPS + 1, bytes(128), 0, library=c.library),
        r"nranks is 4294967297, expected a number of ranks >= 1, up to 2147483647",
    ),
    (lambda c: Communicator.init(2, bytes(128), WRAPS, library=c.library), "rank is 4294967296, expected 0"),
    (lambda c: c.broadcast(X, root=WRAPS), r"broadcast: root is 4294967296, expected a rank in 0\.\.3"),
    *((lambda c, root=root: c.broadcast(X, root=root), "broadcast: root is") for root in BOOLS),
    (lambda c: c.send(X, -WRAPS), "send: peer is -4294967296, expected a rank"),
    (lambda c: c.all_gather_v(X, counts=[4, 1 << 62, 0, 0]), r"all_gather_v: counts is \[4, 4611686018427387904"),
    (lambda c: c.signal(0, signal=WRAPS, stream=0), r"signal: signal is 4294967296, expected an integer in 0"),
    (
        lambda c: c.wait_signal({0: WRAPS + 1}, stream=0),
        "wait_signal: counts has 4294967297 signals from rank 0, expected 1 or more, up to 2147483647",
    ),
    (lambda c: c.put_signal(X, 0, WINDOW, signal=WRAPS), "put_signal: signal is 4294967296, expected"),
    (lambda c: c.window(X, flags=WRAPS | 1), r"window: flags is 4294967297, expected an integer in 0\.\."),
    (lambda c: c.all_reduce(X, stream=1 << 64), r"stream is 18446744073709551616, expected a handle, 0\.\."),
    (lambda c: c.plan.send(X, 0)(1 << 70), "stream is 1180591620717411303424, expected a handle"),
    (lambda c: c.all_reduce((1 << 64, 1, "int8"), RAW, stream=0), "pointer is 18446744073709551616, expected"),
    (lambda c: c.all_reduce((64, 1 << 63, "int32"), RAW, stream=0), "count is 9223372036854775808, expected"),
    (lambda c: pynccl.mem_alloc(1 << 63, library=c.library), r"mem_alloc: shape is 9223372036854775808, exp"),
    (
        lambda c: CommConfig(min_ctas=WRAPS + 2).to_struct(c.library),
        r"CommConfig\.min_ctas is 4294967298, expected an integer in -2147483647\.\.2147483647",
    ),
    (lambda c: CommConfig(comm_name=3).to_struct(c.library), r"comm_name is 3, expected a string"),  # type: ignore[arg-type]
    (
        lambda c: CollConfig(user_profiler_tag=1 << 64).to_struct(c.library),
        r"CollConfig\.user_profiler_tag is 18446744073709551616, expected an integer in 0\.\.18446744073709551615",
    ),
]


def test_out_of_range_integer_raises_with_range() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for call, message in INVALID:
        with pytest.raises(ValueError, match=message):
            call(comm)
        assert stub.names() == [], message


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "torch"])
def test_numpy_and_torch_integers_are_accepted(kind: Any) -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    index = kind(1)
    comm.broadcast(X, root=index)
    comm.send(X, index)
    comm.all_gather_v(torch.zeros(1), counts=[index] * 4)
    comm.signal(index, signal=index, stream=kind(7))
    comm.wait_signal({index: index}, stream=0)
    comm.wait_signal(index, stream=0)
    comm.split(index, key=index)
    comm.shrink([kind(0)])
    assert CommConfig(min_ctas=index).to_struct(comm.library).minCTAs == 1
    assert describe((kind(64), kind(2), "int8"))[:2] == (64, 2)
    args = {call.name: call.args for call in stub.calls()}
    assert args["ncclSend"]["peer"] == 1
    assert args["ncclSignal"]["stream"] == 7
    assert args["ncclCommSplit"]["color"] == args["ncclCommSplit"]["key"] == 1
