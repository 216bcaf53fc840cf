"""The arguments that one-sided operations pass to the library, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from libraries import Stub

from pynccl import Communicator, Window

X = (1 << 20, 12, "float32")


def opened(stub: Stub) -> tuple[Communicator, Window]:
    comm = stub.comm()
    window = comm.window((1 << 30, 4096, "uint8"))
    stub.clear()
    return comm, window


def test_put_signal_and_wait_arguments() -> None:
    stub = Stub()
    comm, window = opened(stub)
    comm.put_signal(X, 3, window, 128, signal=5, context=2, stream=9)
    comm.put_signal(X, 3, window, 4096 - 48, stream=0)  # up to the last byte
    comm.signal(2, signal=1, context=3, stream=7)
    comm.wait_signal({3: 2, 0: 1}, signal=4, context=1, stream=7)
    comm.wait_signal(2, stream=0)
    what = {"buffer": 1 << 20, "count": 12, "dtype": 7, "peer": 3, "window": 0x6000, "flags": 0, "comm": 1}
    assert [(call.name, call.args) for call in stub.calls()] == [
        ("ncclPutSignal", {**what, "offset": 128, "signal": 5, "context": 2, "stream": 9}),
        ("ncclPutSignal", {**what, "offset": 4048, "signal": 0, "context": 0, "stream": 0}),
        ("ncclSignal", {"flags": 0, "comm": 1, "peer": 2, "signal": 1, "context": 3, "stream": 7}),
        ("row", {"count": 2, "peer": 3, "signal": 4, "context": 1}),
        ("row", {"count": 1, "peer": 0, "signal": 4, "context": 1}),
        ("ncclWaitSignal", {"rows": 2, "comm": 1, "stream": 7}),
        ("row", {"count": 1, "peer": 2, "signal": 0, "context": 0}),
        ("ncclWaitSignal", {"rows": 1, "comm": 1, "stream": 0}),
    ]


INVALID: list[tuple[Callable[[Communicator, Window], Any], str]] = [
    (lambda comm, window: comm.put_signal(X, 3, window, -4, stream=0), "48 bytes at offset -4 do not fit"),
    (
        lambda comm, window: comm.put_signal(X, 3, window, 4049, stream=0),
        "put_signal: 48 bytes at offset 4049 do not fit into the window of 4096",
    ),
    (lambda comm, window: comm.put_signal(X, 4, window, stream=0), r"put_signal: peer is 4, expected a rank in 0\.\.3"),
    (lambda comm, _: comm.signal(-1, stream=0), r"signal: peer is -1, expected a rank in 0\.\.3"),
    (lambda comm, _: comm.wait_signal({0: 1, 9: 1}, stream=0), "wait_signal: counts: peer is 9, expected a rank in"),
    (lambda comm, _: comm.wait_signal({2: 0}, stream=0), "wait_signal: counts has 0 signals from rank 2, expected 1"),
    (lambda comm, _: comm.wait_signal({}, stream=0), "wait_signal: counts is empty, expected"),
]


def test_invalid_offsets_peers_and_counts_raise() -> None:
    stub = Stub()
    comm, window = opened(stub)
    for call, message in INVALID:
        with pytest.raises(ValueError, match=message):
            call(comm, window)
    assert stub.names() == []
    window.close()
    with pytest.raises(ValueError, match="this window of 4096 bytes was closed"):
        comm.put_signal(X, 3, window, stream=0)
