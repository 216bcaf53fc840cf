"""The collectives that take a configuration per call: checked, then run as the plain call.

What the fields steer (thread blocks, algorithms) does not exist on the CPU, so only the event has an effect: it is
recorded when the operation is about to begin, after what its stream had queued before.
"""

from __future__ import annotations

from typing import Any

from . import algorithms
from .entry import issue
from .operation import Kind
from .registry import entry
from .stream import HostEvent, find_event
from .structs import check_coll_config

# Everything but the name and the kind is as in `entry.issue`.
Pointer = int | None


def _issue(
    name: str, kind: Kind, send: Pointer, recv: Pointer, count: int, dtype: int,
    comm: Pointer, stream: Pointer, config: Any, op: int = 0, root: int = 0,
) -> None:  # fmt: skip
    handle = check_coll_config(f"{name}Config", config)
    started: HostEvent | None = find_event(handle) if handle else None
    # Under the plain call's name, so that ranks that pass a config and ranks that pass none fit together.
    issue(name, kind, send, recv, count, dtype, comm, stream, op=op, peer=root, started=started)


@entry
def ncclReduceConfig(send, recv, count, dtype, op, root, comm, stream, config) -> None:  # type: ignore[no-untyped-def]
    _issue("ncclReduce", algorithms.REDUCE, send, recv, count, dtype, comm, stream, config, op=op, root=root)


@entry
def ncclBroadcastConfig(send, recv, count, dtype, root, comm, stream, config) -> None:  # type: ignore[no-untyped-def]
    _issue("ncclBroadcast", algorithms.BROADCAST, send, recv, count, dtype, comm, stream, config, root=root)


@entry
def ncclAllReduceConfig(send, recv, count, dtype, op, comm, stream, config) -> None:  # type: ignore[no-untyped-def]
    _issue("ncclAllReduce", algorithms.ALL_REDUCE, send, recv, count, dtype, comm, stream, config, op=op)


@entry
def ncclReduceScatterConfig(send, recv, count, dtype, op, comm, stream, config) -> None:  # type: ignore[no-untyped-def]
    _issue("ncclReduceScatter", algorithms.REDUCE_SCATTER, send, recv, count, dtype, comm, stream, config, op=op)


@entry
def ncclAllGatherConfig(send, recv, count, dtype, comm, stream, config) -> None:  # type: ignore[no-untyped-def]
    _issue("ncclAllGather", algorithms.ALL_GATHER, send, recv, count, dtype, comm, stream, config)


@entry
def ncclAlltoAllConfig(send, recv, count, dtype, comm, stream, config) -> None:  # type: ignore[no-untyped-def]
    _issue("ncclAlltoAll", algorithms.ALL_TO_ALL, send, recv, count, dtype, comm, stream, config)


@entry
def ncclGatherConfig(send, recv, count, dtype, root, comm, stream, config) -> None:  # type: ignore[no-untyped-def]
    _issue("ncclGather", algorithms.GATHER, send, recv, count, dtype, comm, stream, config, root=root)


@entry
def ncclScatterConfig(send, recv, count, dtype, root, comm, stream, config) -> None:  # type: ignore[no-untyped-def]
    _issue("ncclScatter", algorithms.SCATTER, send, recv, count, dtype, comm, stream, config, root=root)
