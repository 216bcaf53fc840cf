"""A group has the calls of its block in the same thread or task, except those of nested blocks that raised."""

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
    assert not records  # all groups are closed


def call(comm: Communicator, peer: int) -> None:
    comm.send(torch.zeros(4), peer)


def peers(stub: Stub) -> list[Any]:
    """Return the peers of the launched sends; those of a group are a nested list."""
    found: list[Any] = []
    into = found
    for recorded in stub.calls():
        if recorded.name == START:
            into = []
        elif recorded.name == END:
            found.append(into)
            into = found
        else:
            into.append(recorded.args["peer"])
    return found


def test_group_drops_calls_of_block_that_raised(stub: Stub) -> None:
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


def test_groups_are_per_task_and_thread(stub: Stub) -> None:
    comm = stub.comm(cpu=True)

    async def task(first: int, there: asyncio.Event, turn: asyncio.Event) -> None:
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
        tasks = [asyncio.create_task(task(2 * i, events[2 * i], events[2 * i + 1])) for i in range(2)]
        await events[0].wait()
        await events[2].wait()
        call(comm, 3)  # both are open
        await asyncio.to_thread(call, comm, 2)
        for event in (events[1], events[3]):
            event.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert peers(stub) == [3, 2, [0, 1], [2, 3]]
