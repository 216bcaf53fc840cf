"""Communicator.sync_state: the state of models and optimizers from a rank that has the newest step to those behind.

The state dicts travel with their tensors replaced by empty ones (on the meta device), then one tensor at a time, so
that no rank holds more than one copy of the state.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..bindings.errors import NcclInvalidUsage
from ..bindings.values import methods, shown, type_of
from ..bindings.workers import Clock
from ..comm.communicator import Communicator, bootstrap
from .generation import Generation
from .survivors import TORN, elastic, in_time, synchronize


@bootstrap
def sync_state(comm: Communicator, objects: Sequence[Any], timeout: float | None = 600.0) -> None:
    generation, clock = elastic(comm, "sync_state"), Clock(timeout, "sync_state: timeout")
    for one in objects:
        _check(one)
    if generation.agreed is None:
        raise NcclInvalidUsage("sync_state: call comm.agree(step) first: it finds who has the newest state")
    source, behind = generation.agreed
    if behind:
        in_time(generation, partial(_sync, generation, comm, objects, source, behind), "sync_state", clock)
    generation.launch.behind = None


def _check(one: Any) -> None:
    """Check an object, on every rank alike."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    if not isinstance(one, Tensor):
        kinds = "a torch tensor, or an object with state_dict() and load_state_dict()"
        methods(one, ("state_dict", "load_state_dict"), f"sync_state: {type_of(one)}", kinds)
    for value in [one] if isinstance(one, Tensor) else tree_leaves(one.state_dict()):
        if isinstance(value, Tensor):
            _check_dense(value)


def _sync(
    generation: Generation, comm: Communicator, objects: Sequence[Any], source: int, behind: Sequence[int]
) -> None:
    """Copy the objects. Until this rank has them all, `agree` takes it for one without a state, if it is behind."""
    launch = generation.launch
    takes_part = comm.rank == source or comm.rank in behind
    with launch.copying:
        group = comm.split(0 if takes_part else None, int(comm.rank != source))  # the source becomes rank 0
        if launch.behind is not None:
            launch.behind = launch.behind[0], TORN
        if group is not None:
            with group:
                for one in objects:
                    _copy(group, one)
        comm.barrier()  # else a rank that goes on takes those that copy for late
        synchronize(comm)
        generation.check()  # a stream goes on after an abort
        if launch.behind is not None:
            launch.behind = launch.behind[0], launch.behind[0]


def _copy(group: Communicator, one: Any) -> None:
    """Copy the state of one object from rank 0."""
    from torch import Tensor, empty_like, no_grad
    from torch.utils._pytree import tree_flatten, tree_unflatten

    if isinstance(one, Tensor):
        value = one.detach().contiguous()
        _broadcast(group, value)
        with no_grad():
            one.copy_(value)
        return
    data = b""
    if group.rank == 0:
        values, spec = tree_flatten(one.state_dict())
        values = [value.contiguous() if isinstance(value, Tensor) else value for value in values]
        kinds = [value.device.type if isinstance(value, Tensor) else "" for value in values]
        empty = [value.to("meta") if isinstance(value, Tensor) else value for value in values]
        data = _packed((tree_unflatten(empty, spec), kinds))
    state, kinds = _unpacked(_broadcast_bytes(group, data))
    if group.rank:
        values, spec = tree_flatten(state)
        devices = ["cpu" if kind == "cpu" else group.device for kind in kinds]
        pairs = zip(values, devices, strict=True)
        values = [empty_like(each, device=device) if isinstance(each, Tensor) else each for each, device in pairs]
    for value in values:
        if isinstance(value, Tensor):
            _broadcast(group, value)
    if group.rank:
        one.load_state_dict(tree_unflatten(values, spec))


def _check_dense(value: Any) -> None:
    """TypeError for a tensor that cannot be sent as it is."""
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        raise TypeError(
            f"sync_state: the state has {shown(type(value).__name__)}, {value.layout} of {value.dtype}; expected dense "
            "torch tensors. A sharded state is lost with its rank: load a checkpoint"
        )


def _broadcast(group: Communicator, value: Any) -> None:
    """Broadcast a contiguous tensor from rank 0, in place."""
    import torch

    wire = value.reshape(-1).view(torch.uint8).to(group.device)
    if wire.numel():
        group.broadcast(wire, wire, 0)
    if wire.data_ptr() != value.data_ptr():
        value.reshape(-1).view(torch.uint8).copy_(wire)


def _broadcast_bytes(group: Communicator, data: bytes) -> bytes:
    import torch

    size = torch.tensor([len(data)], device=group.device)
    group.broadcast(size, size, 0)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
    _broadcast(group, sent)
    return sent.numpy().tobytes()


def _packed(value: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    """Return the value. It can hold only what torch.load(weights_only=True) reads, which executes no code."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)
