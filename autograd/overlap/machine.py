"""What a plan of overlap is made from: how long a link takes for a collective, and a device for a matmul."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pynccl.bindings.values import instance, shown

OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send_recv")
DTYPES = ("float64", "float32", "bfloat16", "float16")  # of a matmul


@dataclass(frozen=True)
class Link:
    """How the ranks of a communicator are connected.

    latency    seconds that a collective takes however little it moves
    hop        seconds that each of its steps adds
    bandwidth  bytes/s on the wire, per rank
    """

    name: str
    latency: float
    hop: float
    bandwidth: float

    def seconds(self, operation: str, nbytes: float, ranks: int) -> float:
        """What one collective takes on `ranks` ranks; nbytes is that of the full tensor, for send_recv of the message.

        Steps and bytes on the wire of each rank, for p ranks and V bytes:

            all_gather, reduce_scatter, all_to_all    (p-1) steps    (p-1)/p V
            all_reduce                               2(p-1) steps   2(p-1)/p V
            send_recv, one step of a ring                 1 step             V
        """
        if operation == "send_recv":
            return self.latency + self.hop + nbytes / self.bandwidth
        if operation not in OPERATIONS:
            raise ValueError(f"Link.seconds: operation is {shown(operation)}, expected one of {', '.join(OPERATIONS)}")
        steps = (2 if operation == "all_reduce" else 1) * (ranks - 1)
        if not steps:
            return 0.0
        return self.latency + steps * self.hop + steps * nbytes / ranks / self.bandwidth


@dataclass(frozen=True)
class Device:
    """What multiplies matrices on each rank.

    flops             FLOP/s of a large matmul, by the name of the data type
    overhead          seconds that each slice of a cut matmul costs beside its share: a launch, a wait for an event
    memory_bandwidth  bytes/s, read and written together
    min_rows          rows of a slice with fewer of which cutting does not pay
    fewest_rows       rows in all with fewer of which nothing is overlapped
    compute_streams   on which the slices take turns
    beside            part of the time of a collective in which matmuls run beside it as fast as alone, 0..1: what
                      moves the bytes may take cores, multiprocessors or memory from them
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    overhead: float
    memory_bandwidth: float
    min_rows: int
    fewest_rows: int
    compute_streams: int
    beside: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", dict(self.flops))  # of its own: the caller may go on changing his

    def matmul(self, m: int, n: int, k: int, dtype: Any) -> float:
        """Seconds of [m, k] @ [k, n], which is 2mnk FLOP."""
        name = dtype_name(dtype)
        if name not in self.flops:
            known = ", ".join(self.flops) or "none"
            raise ValueError(f"device {self.name}: the rate of {name} is not known, only of {known}; calibrate with it")
        return 2.0 * m * n * k / self.flops[name]


@dataclass(frozen=True)
class Machine:
    """A link and the device at each of its ends."""

    link: Link
    device: Device


# OVERLAP.md's starting constants. Bandwidths are what NCCL reaches with large messages on H100 and H200 with NVSwitch,
# and on one 400 Gb/s InfiniBand port per GPU. The latencies are those of NCCL's own cost model for its ring with the
# Simple protocol (src/graph/tuning.cc): 8.4 us in all, and 3.4 us a step over NVLink, 14 us over the network.
NVLINK = Link("nvlink", latency=8.4e-6, hop=3.4e-6, bandwidth=370e9)
INFINIBAND = Link("infiniband", latency=8.4e-6, hop=14e-6, bandwidth=45e9)
# An assumption, of which nothing was measured: 100 Gb/s per GPU with a tenth lost to headers and the protocol, and
# twice InfiniBand's time a step, since RoCE's switches and TCP's stack are slower by about so much.
ETHERNET = Link("ethernet", latency=8.4e-6, hop=28e-6, bandwidth=11e9)
LINKS = {one.name: one for one in (NVLINK, INFINIBAND, ETHERNET)}

# Rows are those of measurements on 8 x H100: slices of fewer than about 1,024 have lost on every one of them, and below
# 512 in all even the uncut form loses to one kernel. More than two compute streams lose as well.
GPU_ROWS = {"min_rows": 1024, "fewest_rows": 512, "compute_streams": 2}
# On a CPU a slice is a call that takes microseconds, and threads of one pool cannot take turns.
CPU_ROWS = {"min_rows": 32, "fewest_rows": 32, "compute_streams": 1}

# 700 TFLOP/s is what large bf16 matmuls reach of the data sheet's 989. Assumed: float16 is as fast, float32 (as TF32)
# half as fast, which is the data sheet's ratio; matmuls beside collectives as fast as alone; 5 us for the launch of a
# kernel and the wait for an event. float64 is missing, since nothing is known of it. The memory bandwidth is the data
# sheet's.
_HOPPER = {"bfloat16": 700e12, "float16": 700e12, "float32": 350e12}
H100 = Device("h100", _HOPPER, overhead=5e-6, memory_bandwidth=3.35e12, **GPU_ROWS)
H200 = replace(H100, name="h200", memory_bandwidth=4.8e12)
DEVICES = {one.name: one for one in (H100, H200)}


def link(of: str | Link) -> Link:
    """The link of this name: "nvlink", "infiniband" or "ethernet". One that is given is given back."""
    return of if isinstance(of, Link) else _found("link", LINKS, of, "a Link")


def device(of: str | Device) -> Device:
    """The device of this name: "h100" or "h200". One that is given is given back."""
    return of if isinstance(of, Device) else _found("device", DEVICES, of, "a Device")


def _found(kind: str, table: Mapping[str, Any], name: Any, other: str) -> Any:
    instance(name, str, kind, f"one of {', '.join(table)}, or {other}")
    if name not in table:
        raise ValueError(f"{kind} is {shown(name)}, expected one of {', '.join(table)}, or {other}")
    return table[name]


def dtype_name(dtype: Any) -> str:
    """ "bfloat16" for torch.bfloat16 and for "bfloat16"; ValueError or TypeError for what no layer computes in."""
    instance(dtype, (str, torch.dtype), "dtype", f"a torch.dtype or one of {', '.join(DTYPES)}")
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {shown(name)}, expected one of {', '.join(DTYPES)}")
    return name


def item_size(dtype: Any) -> int:
    """Bytes of an element."""
    found: torch.dtype = getattr(torch, dtype_name(dtype))
    return found.itemsize
