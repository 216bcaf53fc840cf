"""A call goes one way: the same functions the first time and later, and on every library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from libraries import Stub

import pynccl
from pynccl import Communicator

PACKAGE = Path(pynccl.__file__).parent
MOST = {"in place": 12, "two buffers": 13, "plan": 12}


def entered(call: Callable[[], Any]) -> list[str]:
    """The functions of the binding that the call enters, by file and name, without those of the host library."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents and "host" not in path.parts:
            found.append(f"{path.relative_to(PACKAGE)}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


WAYS: dict[str, Callable[[Communicator, torch.Tensor, torch.Tensor], Callable[[], Any]]] = {
    "in place": lambda comm, x, y: lambda: comm.all_reduce(x, x),
    "two buffers": lambda comm, x, y: lambda: comm.all_reduce(x, y),
    "plan": lambda comm, x, y: comm.plan.all_reduce(x, y),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_thousandth_call_goes_the_way_of_the_second_on_every_library(way: str) -> None:
    stub, (host,) = Stub().comm(1, 0, cpu=True), Communicator.init_all(1, library=pynccl.load("host"))
    ways = []
    for comm in (stub, host):
        call = WAYS[way](comm, torch.zeros(4), torch.zeros(4))

        def often(call: Callable[[], Any] = call) -> None:
            call()

        often()  # which meets types, strings and symbols
        second = entered(often)
        for _ in range(1000):
            often()
        ways += [second, entered(often)]
    assert all(one == ways[0] for one in ways), ways
    assert len(ways[0]) <= MOST[way], ways[0]
    host.destroy()
