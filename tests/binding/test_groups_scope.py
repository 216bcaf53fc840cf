"""A group takes the calls of its block: of its thread or task, and not those of a block that raised."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from libraries import Stub

import pynccl
from pynccl import Communicator
from pynccl.comm.groups import records

START, END = "ncclGroupStart", "ncclGroupEnd"


@pytest.fixture
def stub() -> Iterator[Stub]:
    yield Stub()
    assert not records  # every group was closed


def call(comm: Communicator, peer: int) -> None:
    comm.send(torch.zeros(4), peer)


def peers(stub: Stub) -> list[Any]:
    """What was launched: the peers of sends, in a list of their own where they were a group."""
    found: list[Any] = []
    into = found
    for one in stub.calls():
        if one.name == START:
            into = []
        elif one.name == END:
            found.append(into)
            into = found
        else:
            into.append(one.args["peer"])
    return found


def test_blocks_that_raise_take_their_calls_with_them(stub: Stub) -> None:
    comm = stub.comm(cpu=True)
    with pynccl.group():
        call(comm, 0)
        with contextlib.suppress(KeyError), pynccl.group():
            call(comm, 1)
            with pynccl.group():
                call(comm, 1)
            raise KeyError
        with pytest.raises(ValueError), pynccl.group():
            comm.all_to_all_v(torch.zeros(3), send_counts=[1] * 4, recv_counts=[0] * 4)
        call(comm, 2)
    assert peers(stub) == [[0, 2]]


def test_tasks_and_threads_have_groups_of_their_own(stub: Stub) -> None:
    comm = stub.comm(cpu=True)

    async def one(first: int, there: asyncio.Event, turn: asyncio.Event) -> None:
        with pynccl.group():
            call(comm, first)
            there.set()
            await turn.wait()
            await later(first + 1)

    async def later(peer: int) -> None:
        await asyncio.sleep(0)
        call(comm, peer)

    async def main() -> None:
        events = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(one(2 * i, events[2 * i], events[2 * i + 1])) for i in range(2)]
        await events[0].wait()
        await events[2].wait()
        call(comm, 3)  # both are open
        await asyncio.to_thread(call, comm, 2)
        for event in (events[1], events[3]):
            event.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert peers(stub) == [3, 2, [0, 1], [2, 3]]
