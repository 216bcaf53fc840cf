"""The rows of torch_backend.py: calls of torch.distributed over a backend, and of pynccl.Communicator, by section."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench.ranks import Call, measure, middle, one_at_a_time
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pynccl.torch_backend

OURS = "pynccl"
MANY = 8  # messages in flight
SAFE_BYTES = 1 << 16  # on a GPU, larger messages that cross can wait for each other for ever, unless sent in one batch
DDP_BYTES = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
GROUPS = (1, 8, 64)


class Side(NamedTuple):
    """A backend, its process group of all ranks, and where its tensors are."""

    backend: str
    group: Any
    device: torch.device

    def zeros(self, nbytes: int, blocks: int = 1) -> torch.Tensor:
        """Return blocks of `nbytes`. Repeated sums of zeros stay finite; fill_ writes them, torch.zeros does not."""
        return torch.empty(blocks * max(nbytes // 4, 1), device=self.device).fill_(0)


def synchronous(side: Side, nbytes: int) -> dict[str, Callable[..., Any]]:
    """Return torch's collectives, which take async_op."""
    ranks = side.group.size()
    shard, full, other = (side.zeros(nbytes, blocks) for blocks in (1, ranks, ranks))
    blocks, others = ([*x.chunk(ranks)] for x in (full, other))
    of_root = blocks if side.group.rank() == 0 else None
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (shard,),
        "all_gather_into_tensor": (full, shard),
        "all_gather": (blocks, shard),
        "reduce_scatter_tensor": (shard, full),
        "broadcast": (shard, 0),
        "reduce": (shard, 0),
        "gather": (shard, of_root, 0),
        "scatter": (shard, of_root, 0),
        "all_to_all_single": (other, full),
        "all_to_all": (others, blocks),
    }
    return {name: partial(getattr(dist, name), *given, group=side.group) for name, given in arguments.items()}


def collectives(side: Side, nbytes: int) -> dict[str, Call]:
    def waited(call: Callable[..., Any]) -> None:
        call(async_op=True).wait()

    def future(call: Callable[..., Any]) -> None:
        call(async_op=True).get_future().wait()

    found: dict[str, Call] = {}
    for name, call in synchronous(side, nbytes).items():
        found |= {name: call, f"{name}, async": partial(waited, call), f"{name}, future": partial(future, call)}
    return found


def ping_pong(side: Side, send: Callable[[int], Any], recv: Callable[[int], Any]) -> Call:
    """Return a call in which even ranks send to the next rank and get an answer."""
    rank = side.group.rank()
    peer = rank ^ 1
    steps = (send, recv) if rank < peer else (recv, send)
    return lambda: [step(peer) for step in steps if peer < side.group.size()]


def messages(side: Side, nbytes: int) -> dict[str, Call]:
    rank, ranks, group = side.group.rank(), side.group.size(), side.group
    if ranks == 1:
        return {}
    x, *received = (side.zeros(nbytes) for _ in range(1 + MANY))
    isend = partial(dist.isend, x, (rank + 1) % ranks, group)
    irecvs = [partial(dist.irecv, part, (rank - 1) % ranks, group) for part in received]

    def waited(*calls: Callable[[], Any]) -> Call:
        return lambda: [work.wait() for work in [call() for call in calls]]

    def batch() -> None:
        ops = [dist.P2POp(call.func, *call.args) for call in (isend, irecvs[0])]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    send, recv = partial(dist.send, x, group=group), partial(dist.recv, received[0], group=group)
    found: dict[str, Call] = {"send, recv": ping_pong(side, send, recv), "batch_isend_irecv": batch}
    if side.device.type == "cpu" or nbytes <= SAFE_BYTES:
        found["isend, irecv"] = waited(isend, irecvs[0])
        found["irecv, isend"] = waited(irecvs[0], isend)
        found[f"{MANY} isend, {MANY} irecv"] = waited(*[isend] * MANY, *irecvs)
    return found


def small(side: Side, _: int) -> dict[str, Call]:
    payload, found = bytes(1024), [None] * side.group.size()
    shard, full = side.zeros(4096), side.zeros(4096, side.group.size())
    return {
        "barrier": partial(dist.barrier, side.group),
        "all_gather_object, 1 KB": partial(dist.all_gather_object, found, payload, side.group),
        "broadcast_object_list, 1 KB": partial(dist.broadcast_object_list, [payload], 0, side.group),
        "all_gather_into_tensor, 4 KB": partial(dist.all_gather_into_tensor, full, shard, side.group),
    }


def steps(side: Side, _: int) -> dict[str, Call]:
    """Return training steps: forward, backward and SGD."""
    torch.manual_seed(0)

    def ddp(width: int, layers: int, **options: Any) -> Call:
        pairs = ((nn.Linear(width, width, bias=not options), nn.ReLU()) for _ in range(layers))
        model = nn.Sequential(*(layer for pair in pairs for layer in pair)).to(side.device)
        parallel = DistributedDataParallel(model, process_group=side.group, **options)
        return step_of(parallel, torch.randn(32, width, device=side.device))

    found = {f"DDP, 8 buckets of {n // 1024} KB": ddp(int((n // 4) ** 0.5), 8, bucket_cap_mb=1e-4) for n in DDP_BYTES}
    found["DDP, MLP"] = ddp(256, 4)
    if importlib.util.find_spec("transformers"):
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, **heads}
        llama: Any = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=2, **sizes))
        llama.to(side.device)
        mesh = DeviceMesh.from_group(side.group, side.device.type)
        for layer in llama.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(llama, mesh=mesh)
        words = torch.randint(512, (2, 64), device=side.device)
        found["FSDP2, Llama"] = step_of(llama, words, lambda out: out.logits)
    return found


def step_of(model: nn.Module, x: torch.Tensor, result: Callable[[Any], torch.Tensor] = lambda out: out) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        result(model(x)).square().mean().backward()
        optimizer.step()

    return step


def groups(side: Side, _: int) -> dict[str, Call]:
    """Return generators for `middle`: the second of their steps, on a list of groups, is timed."""
    x, ranks = side.zeros(16), side.group.size()

    def cycle(*steps: Callable[..., Any]) -> Iterator[None]:
        made: list[Any] = []
        for step in steps:
            step(made)
            yield

    def new(made: list[Any], count: int = 1) -> None:
        made += [dist.new_group(backend=side.backend) for _ in range(count)]

    def mesh(made: list[Any]) -> None:
        override: dict[int | str, Any] = {0: side.backend, 1: side.backend}
        found = init_device_mesh(side.device.type, (ranks // 2, 2), backend_override=override)
        made += [found.get_group(dimension) for dimension in range(2)]

    def all_reduce(made: list[Any]) -> None:
        dist.all_reduce(x, group=made[0])

    def message(made: list[Any]) -> None:
        messages(side._replace(group=made[0]), 16)["send, recv"]()

    def used(made: list[Any]) -> None:
        new(made)
        all_reduce(made)

    def destroy(made: list[Any]) -> None:
        for group in made:
            dist.destroy_process_group(group)

    found: dict[str, Call] = {
        f"new_group, {n} groups": partial(cycle, len, partial(new, count=n), destroy) for n in GROUPS
    }
    found["first all_reduce of a group"] = partial(cycle, new, all_reduce, destroy)
    if ranks > 1:
        found["first send, recv of a group"] = partial(cycle, new, message, destroy)
    found["destroy_process_group"] = partial(cycle, used, destroy)
    if ranks % 2 == 0:
        found["init_device_mesh, 2 dimensions"] = partial(cycle, len, mesh, destroy)
    return found


def binding(side: Side, nbytes: int) -> dict[str, Call]:
    """Return pynccl.Communicator's methods, and for another backend the same calls of torch.distributed."""
    comm = pynccl.Communicator.from_process_group(side.group) if side.backend == OURS else None
    shard, full, other = (side.zeros(nbytes, blocks) for blocks in (1, side.group.size(), side.group.size()))
    theirs = synchronous(side, nbytes)
    table = {
        "all_reduce": ("all_reduce", shard, shard),
        "all_gather": ("all_gather_into_tensor", shard, full),
        "reduce_scatter": ("reduce_scatter_tensor", full, shard),
        "broadcast": ("broadcast", shard, shard),
        "reduce": ("reduce", shard, shard),
        "gather": ("gather", shard, full),
        "scatter": ("scatter", full, shard),
        "all_to_all": ("all_to_all_single", full, other),
    }
    found: dict[str, Call] = {
        f"comm.{method}": partial(getattr(comm, method), *given) if comm else theirs[name]
        for method, (name, *given) in table.items()
    }
    if side.group.size() > 1:
        group = {} if comm else {"group": side.group}
        send, recv = (partial(getattr(comm or dist, name), shard, **group) for name in ("send", "recv"))
        found["comm.send, recv"] = ping_pong(side, send, recv)
    return found


class Section(NamedTuple):
    """build(side, nbytes) returns calls by name; timers adds a word to the name for each manner of timing.

    A section is measured at each size if its batch is 0, which is then as many calls as take a few ms.
    """

    build: Callable[[Side, int], dict[str, Call]]
    batch: int
    timers: tuple[tuple[str, Any], ...] = (("", measure),)


SECTIONS = {
    "collectives": Section(collectives, 0),
    "messages": Section(messages, 0, ((", back to back", measure), (", one at a time", one_at_a_time))),
    "small": Section(small, 50),
    "steps": Section(steps, 3),
    "groups": Section(groups, 1, (("", middle),)),
    "binding": Section(binding, 0),
}
