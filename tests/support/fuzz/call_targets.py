"""The fuzzed calls of pynccl with valid arguments, some of which are replaced. See call_kinds.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import pynccl

from .call_kinds import Arguments, Target
from .call_values import logical


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
    """Return a function that calls the method of the communicator under test."""
    return lambda env, args: getattr(args["comm"], name)(**{k: v for k, v in args.items() if k != "comm"}, **fixed)


COMM = ("self", "comm")
STREAM, CONFIG, OP = ("stream", None), ("config", None), ("op", "sum")
SEND, ROOT_SEND, RECV = ("buffer", "tensor"), ("root buffer", "tensor"), ("recv", "tensor")


def _self_method(name: str) -> Callable[[Any, Arguments], Any]:
    """Return a function that calls the method on a communicator of one rank, so that every rank checks as root."""
    return lambda env, args: getattr(env.alone, name)(**args)


def _exchange(env: Any, args: Arguments) -> Any:
    """send and recv around the ring of ranks, as one group."""
    comm = env.comm
    with pynccl.group():
        comm.send(args["send"], args["peer"], stream=args["stream"])
        return comm.recv(args["recv"], args["peer"], stream=args["stream"])


def _plan(env: Any, args: Arguments) -> Any:
    plan = env.comm.plan.all_reduce(args["send"], args["recv"], args["op"])
    plan(args["stream"])
    return plan.recv


def _split(env: Any, args: Arguments) -> Any:
    made = env.comm.split(args["color"], args["key"], args["config"])
    if made is not None:
        made.destroy()


def _init(env: Any, args: Arguments) -> Any:
    made = pynccl.Communicator.init(**args)
    y = made.all_reduce(torch.ones(2))
    made.destroy()
    return y


def _init_all(env: Any, args: Arguments) -> None:
    for made in pynccl.Communicator.init_all(**args):
        made.destroy()


def _close(made: Any) -> Any:
    made.close()


def _pre_mul_sum(env: Any, args: Arguments) -> Any:
    operator = env.comm.pre_mul_sum(**args)
    operator.destroy()


def _mem_alloc(env: Any, args: Arguments) -> Any:
    memory = pynccl.mem_alloc(**args)
    memory.free()


def _from_store(env: Any, args: Arguments) -> Any:
    store = torch.distributed.HashStore()
    made = pynccl.from_store(store, **args)
    made.destroy()


BINDING = [
    Target("all_reduce", method("all_reduce"),
           {"comm": COMM, "send": SEND, "recv": RECV, "op": OP, "stream": STREAM, "config": CONFIG}, right_all_reduce),
    Target("all_reduce", lambda env, args: env.comm.all_reduce(args["send"], args["send"], args["op"]),
           {"send": SEND, "op": OP}),
    Target("all_reduce", method("all_reduce"),
           {"comm": COMM, "send": SEND, "op": OP, "stream": STREAM}, right_all_reduce),
    Target("broadcast", method("broadcast"),
           {"comm": COMM, "send": SEND, "recv": RECV, "root": ("rank", 0), "stream": STREAM, "config": CONFIG},
           right_broadcast),
    Target("reduce", method("reduce"),
           {"comm": COMM, "send": ROOT_SEND, "op": OP, "root": ("rank", 1), "stream": STREAM, "config": CONFIG}),
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
           {"comm": COMM, "send": ROOT_SEND, "root": ("rank", 1), "stream": STREAM, "config": CONFIG}),
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
    Target("send", lambda env, args: env.comm.send(**args),
           {"buf": ("no buffer", "sparse"), "peer": ("rank", 0)}),
    Target("recv", lambda env, args: env.comm.recv(**args),
           {"buf": ("no buffer", "sparse"), "peer": ("rank", 0)}),
    Target("exchange", _exchange,  # equal sizes, since a mismatch with the peer is detected only during the transfer
           {"send": ("no buffer", "buffer tensor"), "recv": ("no buffer", "buffer tensor"),
            "peer": ("partner", "partner"), "stream": STREAM}, words=("send", "recv")),
    Target("plan", _plan, {"send": SEND, "recv": RECV, "op": OP, "stream": STREAM}, right_all_reduce, ("all_reduce",)),
    Target("plan.group", lambda env, args: env.comm.plan.group(args["plans"]), {"plans": ("nothing else", [None])},
           words=("plan", "group")),
    Target("barrier", lambda env, args: args["comm"].barrier(), {"comm": COMM}),
    Target("split", _split, {"color": ("color", 0), "key": ("key", 0), "config": ("comm config", None)},
           words=("ncclCommSplit",)),
    Target("shrink", lambda env, args: env.comm.shrink(**args),
           {"exclude": ("no ranks", [7]), "abort": ("flag", False), "config": ("comm config", None)}),
    Target("grow", lambda env, args: env.comm.grow(**args),
           {"nranks": ("nothing else", 1), "unique_id": ("other", None), "config": ("comm config", None)}),
    Target("register", lambda env, args: _close(args["comm"].register(args["buf"])),
           {"comm": COMM, "buf": SEND}, words=("ncclCommRegister",)),
    Target("window", lambda env, args: _close(args["comm"].window(**{k: args[k] for k in ("buf", "flags")})),
           {"comm": COMM, "buf": ("buffer", "memory"), "flags": ("flags", None)}, words=("ncclCommWindowRegister",)),
    Target("put_signal", lambda env, args: env.comm.put_signal(**args),
           {"buf": SEND, "peer": ("no rank", 5), "window": ("nothing else", "window"),
            "offset": ("size", 0), "signal": ("size", 0), "context": ("size", 0)}),
    Target("signal", lambda env, args: env.comm.signal(**args),
           {"peer": ("no rank", 5), "signal": ("size", 0), "context": ("size", 0), "stream": ("stream", "stream")}),
    Target("wait_signal", lambda env, args: env.comm.wait_signal(**args),
           {"counts": ("no ranks", 5), "signal": ("size", 0), "context": ("size", 0),
            "stream": ("stream", "stream")}),
    Target("pre_mul_sum", _pre_mul_sum, {"scalar": ("number", 1.5), "dtype": ("dtype", "float32")}),
    Target("pre_mul_sum", lambda env, args: args["comm"].pre_mul_sum(1.0, "float32").destroy(), {"comm": COMM}),
    Target("Communicator.init", _init,
           {"nranks": ("only 1", 1), "unique_id": ("other", "unique id"), "rank": ("only 0", 0),
            "device": ("device", None), "config": ("comm config", None), "timeout": ("timeout", 1.0),
            "library": ("library", None)}, words=("ncclCommInitRank",)),
    Target("Communicator.init_all", _init_all,
           {"devices": ("devices", 1), "library": ("library", None)}, words=("ncclCommInitAll",)),
    Target("join_grown", lambda env, args: pynccl.Communicator.join_grown(**args),
           {"nranks": ("nothing else", 0), "unique_id": ("other", "bytes(128)"), "rank": ("nothing else", 1),
            "config": ("comm config", None), "timeout": ("timeout", 0.2)}),
    Target("from_store", _from_store,
           {"rank": ("only 0", 0), "nranks": ("only 1", 1), "device": ("device", None),
            "config": ("comm config", None), "timeout": ("timeout", 1.0), "library": ("library", None),
            "local_rank": ("flags", 0)}),
    Target("from_store", lambda env, args: pynccl.from_store(rank=0, nranks=1, timeout=1.0, **args),
           {"store": ("nothing else", None)}),
    Target("from_process_group", lambda env, args: pynccl.Communicator.from_process_group(**args),
           {"group": ("nothing else", "x")}, words=("process group",)),
    Target("get_unique_id", lambda env, args: pynccl.get_unique_id(**args), {"library": ("library", None)}),
    Target("load", lambda env, args: pynccl.load(**args), {"spec": ("other", "host")}, words=("PYNCCL_LIBRARY",)),
    Target("mem_alloc", _mem_alloc,
           {"shape": ("size", 4), "dtype": ("dtype", "float32"), "device": ("other", None),
            "library": ("library", None)}, words=("ncclMemAlloc",)),
    Target("mem_pool", lambda env, args: pynccl.mem_pool(**args), {"library": ("library", None)}),
    Target("create_stream", lambda env, args: _close(pynccl.create_stream(**args)),
           {"device": ("other", None), "priority": ("priority", None), "library": ("library", None)}),
    Target("create_event", lambda env, args: pynccl.create_event(**args),
           {"device": ("other", None), "timing": ("flag", False), "library": ("library", None)}),
    Target("stream.wait", lambda env, args: env.stream.wait(args["event"]), {"event": ("other", "event")},
           words=("wait", "event")),
    Target("stream.record", lambda env, args: env.stream.record(args["event"]), {"event": ("other", None)},
           words=("record", "event")),
    Target("param", lambda env, args: pynccl.param(**args), {"key": ("other", "NCCL_DEBUG"),
           "library": ("library", None)},
           words=("ncclParamGetParameter",)),
    Target("abort", lambda env, args: pynccl.abort(args["comms"]), {"comms": ("other", [])}, words=("communicator",)),
]  # fmt: skip
