"""CommOverlapHelper, CommOverlap, CommOverlapP2P: TransformerEngine's objects for communication overlap.

    helper = ad.CommOverlapHelper(comm)
    overlap = ad.CommOverlap(helper, (8192, 4096), torch.bfloat16, num_splits=4)
    y = overlap.all_gather_matmul(x, w)                       # x [8192/N, 4096]
    layer = ad.RowParallelLinear(.., overlap=overlap)         # or as a layer's overlap=

Each owns persistent buffers for tensors of one shape. If the library supports it, NCCL accesses this memory without
copies. Layers of the same shape can share an object if they do not run concurrently.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from pynccl import CommConfig, Communicator, NcclError, mem_alloc
from pynccl.bindings.resource import Resource, Shared
from pynccl.bindings.values import attribute, instance, integer, shown

from ..agreement import gathered
from ..arguments import as_int, as_list, check_comm, check_type
from ..streams import side_stream
from .buffers import Buffers
from .config import OverlapConfig
from .functions import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .lanes import Lanes
from .limits import limited, split_off

CTA_POLICY_ZERO = 0x02  # NCCL_CTA_POLICY_ZERO
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class CommOverlapHelper:
    """The placement of a communicator's ranks on nodes. Collective: every rank constructs one.

    comm        a communicator, or a torch.distributed process group, from which one is created
    rank, size              in the communicator
    node_id, num_nodes      of this rank's node; nodes are numbered in the order of their first ranks
    local_rank, local_size  among the ranks of this node
    """

    def __init__(self, comm: Any) -> None:
        if attribute(comm, "get_group_store") is not None:
            comm = Communicator.from_process_group(comm)
        check_comm("CommOverlapHelper", comm)
        self.comm: Communicator = comm
        self.rank, self.size = comm.rank, comm.size
        name = os.environ.get("NCCL_HOSTID") or os.uname().nodename  # as in NCCL
        hosts = [row[0] for row in gathered(comm, [zlib.crc32(name.encode())])]
        here, nodes = hosts[self.rank], list(dict.fromkeys(hosts))
        self.node_id, self.num_nodes = nodes.index(here), len(nodes)
        self.local_rank, self.local_size = hosts[: self.rank].count(here), hosts.count(here)

    def all_gather(self, send: Tensor, recv: Tensor | None = None) -> Tensor:
        """Gather the tensors of all ranks.   [..] -> [N, ..], or into `recv` with as many elements"""
        instance(send, Tensor, "CommOverlapHelper.all_gather: send", "a torch.Tensor")
        into = send.new_empty(self.size, *send.shape) if recv is None else recv
        self.comm.all_gather(send, into)
        return into

    def barrier(self) -> None:
        """Block until every rank has called it."""
        self.comm.barrier()

    def __repr__(self) -> str:
        local = f"rank {self.local_rank} of {self.local_size} on node {self.node_id} of {self.num_nodes}"
        return f"CommOverlapHelper(rank {self.rank} of {self.size}, {local})"


class CommOverlap(Resource, Shared):
    """Overlap by slices, with persistent buffers for tensors of one shape. Collective: every rank constructs one.

    helper          the CommOverlapHelper of the communicator
    tensor_shape    of the full tensor that is gathered or summed; rows are all dimensions but the last
    dtype           data type of the communication; if sums use a reduce_dtype, the wider of the two
    num_splits      number of slices
    num_comm_ctas   maximum number of thread blocks of a collective (NCCL's maxCTAs)
    priority        of the communication stream; see `OverlapConfig`
    deterministic   sum by exchange, in rank order
    save_gathered   see `OverlapConfig`; by default the backward pass gathers again, as in TransformerEngine
    copy_engines    let NCCL >= 2.28 run gathers and exchanges (not sums) on the GPU's copy engines, which takes no
                    multiprocessors from the matmuls (CTA policy ZERO). This splits off a communicator. NCCL uses copy
                    engines only with symmetric windows, otherwise kernels

    config      the equivalent OverlapConfig
    memory      "window": symmetric window (NCCL >= 2.27), "registered" (>= 2.19), or "plain": torch's memory
    nbytes      of the buffers on this rank

    Copies of a layer share the object. close() it on every rank after the last use of the layers.
    """

    def __init__(
        self, helper: CommOverlapHelper, tensor_shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, *,
        num_splits: int = 4, num_comm_ctas: int | None = None, priority: int = -1, deterministic: bool = False,
        save_gathered: bool = False, copy_engines: bool = False,
    ) -> None:  # fmt: skip
        method = "exchange" if deterministic is True else "slices"
        chunks = integer(num_splits, "CommOverlap: num_splits", 1)
        self.config = OverlapConfig(
            method, chunks=chunks, num_comm_ctas=num_comm_ctas, priority=priority, deterministic=deterministic,
            save_gathered=save_gathered,
        )  # fmt: skip
        self._construct(helper, tensor_shape, dtype, copy_engines)

    def _construct(self, helper: CommOverlapHelper, shape: Any, dtype: torch.dtype, copy_engines: bool) -> None:
        """Check the arguments, and allocate the buffers of the configuration."""
        name, config = type(self).__name__, self.config
        instance(helper, CommOverlapHelper, f"{name}: helper", "a CommOverlapHelper(comm)")
        sizes = tuple(map(as_int, as_list(shape) or ()))
        if len(sizes) < 2 or None in sizes or min(sizes) < 1 or math.prod(sizes[:-1]) % helper.size:
            expected = f"[rows, .., features] with sizes >= 1 and a number of rows divisible by {helper.size} ranks"
            raise ValueError(f"{name}: tensor_shape is {shown(shape)}, expected {expected}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"{name}: dtype is {shown(dtype)}, expected a floating-point torch.dtype")
        check_type(f"{name}: copy_engines", "bool", copy_engines)
        self.helper, self.comm, self.tensor_shape, self.dtype = helper, helper.comm, sizes, dtype
        self._closing = ExitStack()
        carrier = self.comm
        if copy_engines:
            carrier = split_off(carrier, CommConfig(cta_policy=CTA_POLICY_ZERO, max_ctas=config.num_comm_ctas))
            self._closing.callback(carrier.destroy)
        self._carrier, _ = limited(carrier, config, config.method)  # windows belong to this one
        self.buffers = Buffers(name, self._carrier)
        for role, rows in _buffer_rows(config, math.prod(sizes[:-1]), self.comm.size).items():
            nbytes = rows * sizes[-1] * dtype.itemsize
            self.buffers.reserve(role, nbytes, torch.device(self.comm.device), self._allocate)
        self.buffers.window = self.memory == "window"

    @property
    def nbytes(self) -> int:
        return self.buffers.nbytes

    def _allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Allocate NCCL memory as a symmetric window, else registered memory, else torch memory.

        The library decides what is supported, the same on every rank."""
        self.memory = "plain"
        if self.comm.library.version < (2, 19):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        memory = mem_alloc(-(-nbytes // 4096) * 4096, device=device.index, library=self.comm.library)
        self._closing.enter_context(memory)
        for kind, register in (("window", self._carrier.window), ("registered", self._carrier.register)):
            with suppress(NcclError, ValueError):  # an older library, no peer access, no symmetric kernels
                self._closing.enter_context(register(memory))
                self.memory = kind
                break
        return torch.from_dlpack(memory)

    def all_gather_matmul(self, x: Tensor, w: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
        """See `pynccl_autograd.all_gather_matmul`."""
        return all_gather_matmul(x, w, self.comm, bias, overlap=self, **options)

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        """See `pynccl_autograd.matmul_reduce_scatter`."""
        return matmul_reduce_scatter(x, w, self.comm, bias, overlap=self, **options)

    def matmul_all_reduce(self, x: Tensor, w: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
        """See `pynccl_autograd.matmul_all_reduce`."""
        return matmul_all_reduce(x, w, self.comm, bias, overlap=self, **options)

    @contextmanager
    def bulk(self, collective: str, send: Tensor, recv: Tensor, *args: Any) -> Iterator[Tensor]:
        """Run one collective concurrently with a with block, which must not use the collective's tensors.

            with overlap.bulk("all_gather", x, gathered):
                dx = dy @ w                                  # does not need `gathered`
            dw = dy.T @ gathered

        collective  "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"
        send, recv  contiguous tensors, as for the communicator's method
        args        further arguments of that method, such as op

        Not differentiable.
        """
        if not isinstance(collective, str) or collective not in COLLECTIVES:
            raise ValueError(f"bulk: collective is {shown(collective)}, expected one of {', '.join(COLLECTIVES)}")
        instance(send, Tensor, "bulk: send", "a torch.Tensor")
        instance(recv, Tensor, "bulk: recv", "a torch.Tensor")
        comm, limit = limited(self._carrier, self.config, "bulk")
        with Lanes(comm, self.config, limit=limit) as lanes:
            lanes.comm.wait(lanes.start)
            lanes.collective(collective, send.detach(), recv.detach(), *args)
            yield recv

    def close(self) -> None:
        """Free the buffers. Call it on every rank when nothing uses them any more. A second call does nothing."""
        if not self.nbytes:
            return
        # Work may be left after an error in a pass, or if slices were not read.
        with suppress(Exception):  # the launch has reported it
            side_stream(self._carrier, self.config.priority).record().synchronize()
        if self.comm.device != "cpu":
            torch.cuda.synchronize(self.comm.device)
        self.buffers.drop()
        self._closing.close()

    def __repr__(self) -> str:
        name, method = type(self).__name__, self.config.method
        return f"{name}({method}, {self.tensor_shape} of {self.dtype}, {self.nbytes} bytes, {self.memory})"


class CommOverlapP2P(CommOverlap):
    """Overlap by a ring of send and recv, with persistent buffers. Collective: every rank constructs one.

    aggregate    gather the blocks of two ranks for each matmul

    The other arguments are those of CommOverlap.
    """

    def __init__(
        self, helper: CommOverlapHelper, tensor_shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, *,
        aggregate: bool = False, num_comm_ctas: int | None = None, priority: int = -1, save_gathered: bool = False,
    ) -> None:  # fmt: skip
        self.config = OverlapConfig(
            "ring", aggregate=aggregate, num_comm_ctas=num_comm_ctas, priority=priority, save_gathered=save_gathered
        )
        self._construct(helper, tensor_shape, dtype, copy_engines=False)


def _buffer_rows(config: OverlapConfig, rows: int, ranks: int) -> dict[str, int]:
    """Return the number of rows of each buffer, for tensors with `rows` on all ranks together."""
    if config.chunks is None:  # a ring
        return {"gathered": rows, "partial": 2 * rows // ranks, "received": rows // ranks}
    if config.method == "slices":  # sums need no receive buffer
        return {"gathered": rows, "partial": rows}
    padded = rows + ranks * config.chunks  # an exchange pads all slices to one multiple of the ranks
    return {"gathered": padded, "partial": padded, "received": padded, "total": -(-padded // ranks)}
