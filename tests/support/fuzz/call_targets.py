"""The calls of pynccl that are fuzzed, each with good arguments, of which some are exchanged. See calling.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import pynccl

from .call_values import logical
from .calling import Arguments, Target


def sums(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)).sum(0)


REDUCTIONS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "sum": sums,
    "prod": lambda rows: torch.stack(list(rows)).prod(0),
    "max": lambda rows: torch.stack(list(rows)).amax(0),
    "min": lambda rows: torch.stack(list(rows)).amin(0),
    "avg": lambda rows: sums(rows) / len(rows),
}


def _flat(rows: list[Arguments], name: str = "send") -> list[Tensor] | None:
    found = [logical(row[name]) for row in rows]
    return None if any(x is None for x in found) else [x.reshape(-1) for x in found if x is not None]


def reduced(rows: list[Arguments], name: str = "send") -> Tensor | None:
    xs = _flat(rows, name)
    op = rows[0].get("op", "sum")
    if xs is None or not isinstance(op, str) or op not in REDUCTIONS:
        return None
    return REDUCTIONS[op](xs)


def right_all_reduce(rows: list[Arguments], rank: int, n: int) -> Any:
    return reduced(rows)


def right_broadcast(rows: list[Arguments], rank: int, n: int) -> Any:
    xs = _flat(rows)
    return None if xs is None else xs[int(rows[0]["root"])]


def right_all_gather(rows: list[Arguments], rank: int, n: int) -> Any:
    xs = _flat(rows)
    return None if xs is None else torch.cat(xs)


def right_reduce_scatter(rows: list[Arguments], rank: int, n: int) -> Any:
    y = reduced(rows)
    return None if y is None else y.chunk(n)[rank] if y.numel() else y


def _all_to_all(rows: list[Arguments], rank: int, n: int) -> Any:
    xs = _flat(rows)
    return None if xs is None else torch.cat([x.reshape(n, -1)[rank] if x.numel() else x for x in xs])


def _all_to_all_v(rows: list[Arguments], rank: int, n: int) -> Any:
    xs = _flat(rows)
    if xs is None:
        return None
    parts = [x.split([int(c) for c in row["send_counts"]]) for x, row in zip(xs, rows, strict=True)]
    return torch.cat([part[rank] for part in parts])


def _reduce_scatter_v(rows: list[Arguments], rank: int, n: int) -> Any:
    y = reduced(rows)
    return None if y is None else y.split([int(c) for c in rows[0]["counts"]])[rank]


def method(name: str, **fixed: Any) -> Callable[[Any, Arguments], Any]:
    """A method of the communicator under test."""
    return lambda env, given: getattr(given["comm"], name)(**{k: v for k, v in given.items() if k != "comm"}, **fixed)


COMM = ("self", "comm")
STREAM, CONFIG, OP = ("stream", None), ("config", None), ("op", "sum")
SEND, RECV = ("buffer", "tensor"), ("recv", "tensor")


def _self_method(name: str) -> Callable[[Any, Arguments], Any]:
    """On a communicator of one rank, which is the root: there the root's buffers are looked at on every rank."""
    return lambda env, given: getattr(env.alone, name)(**given)


def _exchange(env: Any, given: Arguments) -> Any:
    """send and recv around the ring of ranks, as one group."""
    comm = env.comm
    with pynccl.group():
        comm.send(given["send"], given["peer"], stream=given["stream"])
        return comm.recv(given["recv"], given["peer"], stream=given["stream"])


def _plan(env: Any, given: Arguments) -> Any:
    plan = env.comm.plan.all_reduce(given["send"], given["recv"], given["op"])
    plan(given["stream"])
    return plan.recv


def _split(env: Any, given: Arguments) -> Any:
    made = env.comm.split(given["color"], given["key"], given["config"])
    if made is not None:
        made.destroy()


def _init(env: Any, given: Arguments) -> Any:
    made = pynccl.Communicator.init(**given)
    y = made.all_reduce(torch.ones(2))
    made.destroy()
    return y


def _init_all(env: Any, given: Arguments) -> None:
    for made in pynccl.Communicator.init_all(**given):
        made.destroy()


def _close(made: Any) -> Any:
    made.close()


def _pre_mul_sum(env: Any, given: Arguments) -> Any:
    operator = env.comm.pre_mul_sum(**given)
    operator.destroy()


def _mem_alloc(env: Any, given: Arguments) -> Any:
    memory = pynccl.mem_alloc(**given)
    memory.free()


def _from_store(env: Any, given: Arguments) -> Any:
    store = torch.distributed.HashStore()
    made = pynccl.from_store(store, **given)
    made.destroy()


BINDING = [
    Target("all_reduce", method("all_reduce"),
           {"comm": COMM, "send": SEND, "recv": RECV, "op": OP, "stream": STREAM, "config": CONFIG}, right_all_reduce),
    Target("all_reduce", lambda env, given: env.comm.all_reduce(given["send"], given["send"], given["op"]),
           {"send": SEND, "op": OP}),
    Target("all_reduce", method("all_reduce"),
           {"comm": COMM, "send": SEND, "op": OP, "stream": STREAM}, right_all_reduce),
    Target("broadcast", method("broadcast"),
           {"comm": COMM, "send": SEND, "recv": RECV, "root": ("rank", 0), "stream": STREAM, "config": CONFIG},
           right_broadcast),
    Target("reduce", method("reduce"),
           {"comm": COMM, "send": SEND, "op": OP, "root": ("rank", 1), "stream": STREAM, "config": CONFIG}),
    Target("reduce", _self_method("reduce"), {"send": SEND, "recv": RECV, "op": OP, "root": ("only 0", 0)}),
    Target("all_gather", method("all_gather"),
           {"comm": COMM, "send": SEND, "recv": ("recv", "8 elements"), "stream": STREAM, "config": CONFIG},
           right_all_gather),
    Target("all_gather", method("all_gather"), {"comm": COMM, "send": SEND}, right_all_gather),
    Target("reduce_scatter", method("reduce_scatter"),
           {"comm": COMM, "send": SEND, "recv": ("recv", "2 elements"), "op": OP, "stream": STREAM, "config": CONFIG},
           right_reduce_scatter),
    Target("reduce_scatter", method("reduce_scatter"), {"comm": COMM, "send": SEND, "op": OP}, right_reduce_scatter),
    Target("all_to_all", method("all_to_all"),
           {"comm": COMM, "send": SEND, "recv": RECV, "stream": STREAM, "config": CONFIG}, _all_to_all),
    Target("gather", method("gather"),
           {"comm": COMM, "send": SEND, "root": ("rank", 1), "stream": STREAM, "config": CONFIG}),
    Target("gather", _self_method("gather"), {"send": SEND, "recv": RECV, "root": ("only 0", 0)}),
    Target("scatter", method("scatter"),
           {"comm": COMM, "send": SEND, "root": ("rank", 1), "stream": STREAM, "config": CONFIG}),
    Target("scatter", _self_method("scatter"), {"send": SEND, "recv": RECV, "root": ("only 0", 0)}),
    Target("all_to_all_v", method("all_to_all_v"),
           {"comm": COMM, "send": SEND, "recv": RECV, "send_counts": ("counts", [2, 2]),
            "recv_counts": ("counts", [2, 2]), "stream": STREAM}, _all_to_all_v),
    Target("all_gather_v", method("all_gather_v"),
           {"comm": COMM, "send": SEND, "recv": ("recv", "8 elements"), "counts": ("counts", [4, 4]),
            "stream": STREAM}, right_all_gather),
    Target("reduce_scatter_v", method("reduce_scatter_v"),
           {"comm": COMM, "send": SEND, "recv": ("recv", "2 elements"), "op": OP, "counts": ("counts", [2, 2]),
            "stream": STREAM}, _reduce_scatter_v),
    Target("send", lambda env, given: env.comm.send(**given),
           {"buf": ("no buffer", "sparse"), "peer": ("rank", 0)}),
    Target("recv", lambda env, given: env.comm.recv(**given),
           {"buf": ("no buffer", "sparse"), "peer": ("rank", 0)}),
    Target("exchange", _exchange,  # both of one size, since a peer's other size is found out only under way
           {"send": ("no buffer", "buffer tensor"), "recv": ("no buffer", "buffer tensor"),
            "peer": ("partner", "partner"), "stream": STREAM}, words=("send", "recv")),
    Target("plan", _plan, {"send": SEND, "recv": RECV, "op": OP, "stream": STREAM}, right_all_reduce, ("all_reduce",)),
    Target("plan.group", lambda env, given: env.comm.plan.group(given["plans"]), {"plans": ("nothing else", [None])},
           words=("plan", "group")),
    Target("barrier", lambda env, given: given["comm"].barrier(), {"comm": COMM}),
    Target("split", _split, {"color": ("color", 0), "key": ("key", 0), "config": ("comm config", None)},
           words=("ncclCommSplit",)),
    Target("shrink", lambda env, given: env.comm.shrink(**given),
           {"exclude": ("no ranks", [7]), "abort": ("flag", False), "config": ("comm config", None)}),
    Target("grow", lambda env, given: env.comm.grow(**given),
           {"nranks": ("nothing else", 1), "unique_id": ("other", None), "config": ("comm config", None)}),
    Target("register", lambda env, given: _close(given["comm"].register(given["buf"])),
           {"comm": COMM, "buf": SEND}, words=("ncclCommRegister",)),
    Target("window", lambda env, given: _close(given["comm"].window(**{k: given[k] for k in ("buf", "flags")})),
           {"comm": COMM, "buf": ("buffer", "memory"), "flags": ("flags", None)}, words=("ncclCommWindowRegister",)),
    Target("put_signal", lambda env, given: env.comm.put_signal(**given),
           {"buf": SEND, "peer": ("no rank", 5), "window": ("nothing else", "window"),
            "offset": ("size", 0), "signal": ("size", 0), "context": ("size", 0)}),
    Target("signal", lambda env, given: env.comm.signal(**given),
           {"peer": ("no rank", 5), "signal": ("size", 0), "context": ("size", 0), "stream": ("stream", "stream")}),
    Target("wait_signal", lambda env, given: env.comm.wait_signal(**given),
           {"counts": ("no ranks", 5), "signal": ("size", 0), "context": ("size", 0),
            "stream": ("stream", "stream")}),
    Target("pre_mul_sum", _pre_mul_sum, {"scalar": ("number", 1.5), "dtype": ("dtype", "float32")}),
    Target("pre_mul_sum", lambda env, given: given["comm"].pre_mul_sum(1.0, "float32").destroy(), {"comm": COMM}),
    Target("Communicator.init", _init,
           {"nranks": ("only 1", 1), "unique_id": ("other", "unique id"), "rank": ("only 0", 0),
            "device": ("device", None), "config": ("comm config", None), "timeout": ("timeout", 1.0),
            "library": ("library", None)}, words=("ncclCommInitRank",)),
    Target("Communicator.init_all", _init_all,
           {"devices": ("devices", 1), "library": ("library", None)}, words=("ncclCommInitAll",)),
    Target("join_grown", lambda env, given: pynccl.Communicator.join_grown(**given),
           {"nranks": ("nothing else", 0), "unique_id": ("other", "bytes(128)"), "rank": ("nothing else", 1),
            "config": ("comm config", None), "timeout": ("timeout", 0.2)}),
    Target("from_store", _from_store,
           {"rank": ("only 0", 0), "nranks": ("only 1", 1), "device": ("device", None),
            "config": ("comm config", None), "timeout": ("timeout", 1.0), "library": ("library", None),
            "local_rank": ("flags", 0)}),
    Target("from_store", lambda env, given: pynccl.from_store(rank=0, nranks=1, timeout=1.0, **given),
           {"store": ("nothing else", None)}),
    Target("from_process_group", lambda env, given: pynccl.Communicator.from_process_group(**given),
           {"group": ("nothing else", "x")}, words=("process group",)),
    Target("get_unique_id", lambda env, given: pynccl.get_unique_id(**given), {"library": ("library", None)}),
    Target("load", lambda env, given: pynccl.load(**given), {"spec": ("other", "host")}, words=("PYNCCL_LIBRARY",)),
    Target("mem_alloc", _mem_alloc,
           {"shape": ("size", 4), "dtype": ("dtype", "float32"), "device": ("other", None),
            "library": ("library", None)}, words=("ncclMemAlloc",)),
    Target("mem_pool", lambda env, given: pynccl.mem_pool(**given), {"library": ("library", None)}),
    Target("create_stream", lambda env, given: _close(pynccl.create_stream(**given)),
           {"device": ("other", None), "priority": ("priority", None), "library": ("library", None)}),
    Target("create_event", lambda env, given: pynccl.create_event(**given),
           {"device": ("other", None), "timing": ("flag", False), "library": ("library", None)}),
    Target("stream.wait", lambda env, given: env.stream.wait(given["event"]), {"event": ("other", "event")},
           words=("wait", "event")),
    Target("stream.record", lambda env, given: env.stream.record(given["event"]), {"event": ("other", None)},
           words=("record", "event")),
    Target("param", lambda env, given: pynccl.param(**given), {"key": ("other", "NCCL_DEBUG"),
           "library": ("library", None)},
           words=("ncclParamGetParameter",)),
    Target("abort", lambda env, given: pynccl.abort(given["comms"]), {"comms": ("other", [])}, words=("communicator",)),
]  # fmt: skip
