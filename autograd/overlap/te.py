"""CommOverlapHelper, CommOverlap, CommOverlapP2P: TransformerEngine's objects for communication overlap.

    helper = ad.CommOverlapHelper(comm)
    overlap = ad.CommOverlap(helper, (8192, 4096), torch.bfloat16, num_splits=4)
    y = overlap.all_gather_matmul(x, w)                       # x [8192/N, 4096]
    layer = ad.RowParallelLinear(.., overlap=overlap)         # or as a layer's overlap=

Each owns persistent buffers for tensors of one shape. If the library supports it, NCCL accesses this memory without
copies. Layers of the same shape can share an object if they do not run concurrently.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

import pynccl
from pynccl import CommConfig, Communicator, NcclError
from pynccl.bindings.resource import Shared
from pynccl.bindings.values import attribute, instance, integer, shown

from ..agreement import gathered
from ..arguments import as_int, as_list, check_comm, check_type
from ..streams import share_side_streams, side_stream
from .buffers import Buffers
from .config import OverlapConfig
from .functions import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .lanes import Lanes
from .limits import limited

CTA_POLICY_ZERO = 0x02  # NCCL_CTA_POLICY_ZERO
HOST_ID = "NCCL_HOSTID"  # overrides the host name, as in NCCL
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class CommOverlapHelper:
    """The placement of a communicator's ranks on nodes. Collective: every rank constructs one.

    comm        a communicator, or a torch.distributed process group, from which one is created
    rank, size              in the communicator
    node_id, num_nodes      of this rank's node; nodes are numbered in the order of their first ranks
    local_rank, local_size  among the ranks of this node
    """

    def __init__(self, comm: Any) -> None:
        if type(comm).__name__ == "ProcessGroup" or attribute(comm, "get_group_store") is not None:
            comm = Communicator.from_process_group(comm)
        check_comm("CommOverlapHelper", comm)
        self.comm: Communicator = comm
        self.rank, self.size = comm.rank, comm.size
        name = os.environ.get(HOST_ID) or socket.gethostname()
        hosts = [row[0] for row in gathered(comm, [zlib.crc32(name.encode()) << 16 | len(name) & 0xFFFF])]
        nodes = list(dict.fromkeys(hosts))
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.node_id, self.num_nodes = nodes.index(hosts[self.rank]), len(nodes)
        self.local_rank, self.local_size = here.index(self.rank), len(here)

    def all_gather(self, send: Tensor, recv: Tensor | None = None) -> Tensor:
        """Gather the tensors of all ranks.   [..] -> [N, ..], or into `recv` with as many elements"""
        instance(send, Tensor, "CommOverlapHelper.all_gather: send", "a torch.Tensor")
        if recv is None:
            recv = send.new_empty(self.size, *send.shape)
        result: Tensor = self.comm.all_gather(send, recv)
        return result

    def barrier(self) -> None:
        """Block until every rank has called it."""
        self.comm.barrier()

    def __repr__(self) -> str:
        return (
            f"CommOverlapHelper(rank {self.rank} of {self.size}, rank {self.local_rank} of {self.local_size} on node "
            f"{self.node_id} of {self.num_nodes})"
        )


class CommOverlap(Shared):
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
        self,
        helper: CommOverlapHelper,
        tensor_shape: Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        *,
        num_splits: int = 4,
        num_comm_ctas: int | None = None,
        priority: int = -1,
        deterministic: bool = False,
        save_gathered: bool = False,
        copy_engines: bool = False,
    ) -> None:
        integer(num_splits, "CommOverlap: num_splits", 1)
        method = "exchange" if deterministic is True else "slices"
        config = OverlapConfig(
            method,
            chunks=num_splits,
            num_comm_ctas=num_comm_ctas,
            priority=priority,
            deterministic=deterministic,
            save_gathered=save_gathered,
        )

        def rows_of(rows: int, ranks: int) -> dict[str, int]:
            """Slices need no receive buffer for sums. An exchange pads each slice to a multiple of the ranks."""
            if not deterministic:
                return {"gathered": rows, "partial": rows}
            padded = rows + (ranks - 1) * num_splits
            return {"gathered": padded, "partial": padded, "received": padded, "total": -(-padded // ranks)}

        self._begin(helper, tensor_shape, dtype, config, rows_of, copy_engines)

    def _begin(
        self,
        helper: CommOverlapHelper,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        config: OverlapConfig,
        rows_of: Callable[[int, int], dict[str, int]],
        copy_engines: bool = False,
    ) -> None:
        name = type(self).__name__
        if not isinstance(helper, CommOverlapHelper):
            raise TypeError(f"{name}: helper is {shown(helper)}, expected a CommOverlapHelper(comm)")
        shape = tuple(map(as_int, as_list(tensor_shape) or ()))
        if len(shape) < 2 or None in shape or min(shape) < 1 or math.prod(shape[:-1]) % helper.size:
            raise ValueError(
                f"{name}: tensor_shape is {shown(tensor_shape)}, expected [rows, .., features] with sizes >= 1 and a "
                f"number of rows divisible by {helper.size} ranks"
            )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"{name}: dtype is {shown(dtype)}, expected a floating-point torch.dtype")
        self.helper, self.comm, self.tensor_shape, self.dtype = helper, helper.comm, shape, dtype
        self.config = config
        self._closing: list[Callable[[], object]] = []
        self.memory = "plain"
        self._carrier = self.comm
        check_type(f"{name}: copy_engines", "bool", copy_engines)
        if copy_engines:
            self._carrier = self._split_off()
        self._carrier, _ = limited(self._carrier, config, config.method)  # windows belong to this one
        self.buffers = Buffers(self._allocate, fixed=name, carrier=self._carrier)
        for role, rows in rows_of(math.prod(shape[:-1]), self.comm.size).items():
            nbytes = rows * shape[-1] * dtype.itemsize
            self.buffers.reserve(role, nbytes, torch.device(self.comm.device))
        self.buffers.window = self.memory == "window"

    @property
    def nbytes(self) -> int:
        return self.buffers.nbytes

    def _split_off(self) -> Communicator:
        """Split off a communicator that uses copy engines. Raises NcclVersionError if NCCL is too old."""
        child = self.comm.split(
            0, self.comm.rank, CommConfig(cta_policy=CTA_POLICY_ZERO, max_ctas=self.config.num_comm_ctas)
        )
        assert child is not None
        share_side_streams(self.comm, child)
        self._closing.append(child.destroy)
        return child

    def _allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Allocate NCCL memory as a symmetric window, else registered memory, else torch memory.

        The library decides what is supported, the same on every rank."""
        library = self.comm.library
        if library.version < (2, 19):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        memory = pynccl.mem_alloc(
            -(-nbytes // 4096) * 4096, device=None if library.is_host else device.index, library=library
        )
        self._closing.append(memory.close)
        self.memory = "plain"
        if library.version >= (2, 27):
            with contextlib.suppress(NcclError, ValueError):  # unsupported: no peer access, no symmetric kernels
                self._closing.append(self._carrier.window(memory).close)
                self.memory = "window"
        if self.memory == "plain":
            with contextlib.suppress(NcclError):
                self._closing.append(self._carrier.register(memory).close)
                self.memory = "registered"
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

    @contextlib.contextmanager
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
        for name, one in (("send", send), ("recv", recv)):
            instance(one, Tensor, f"bulk: {name}", "a torch.Tensor")
        comm, limit = limited(self._carrier, self.config, "bulk")
        with Lanes(comm, self.config, limit=limit) as lanes:
            lanes.comm.wait(lanes.start)
            lanes.collective(collective, send.detach(), recv.detach(), *args)
            yield recv

    def close(self) -> None:
        """Free the buffers. Call it on every rank when nothing uses them any more. A second call does nothing."""
        if self._closing:
            self._wait()
        self.buffers.drop()
        closing, self._closing = self._closing, []
        for close in reversed(closing):
            close()

    def _wait(self) -> None:
        """Wait for issued work, which may be left after an error in a pass, or if slices were not read."""
        with contextlib.suppress(Exception):  # the launch has reported it
            side_stream(self._carrier, self.config.priority).record().synchronize()
        if self.comm.device != "cpu":
            torch.cuda.synchronize(self.comm.device)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, since it owns communication buffers; save module.state_dict() "
            "instead of the module, and construct both again after loading"
        )

    def __enter__(self) -> CommOverlap:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.config.method}, {self.tensor_shape} of {self.dtype}, {self.nbytes} bytes, "
            f"{self.memory})"
        )


class CommOverlapP2P(CommOverlap):
    """Overlap by a ring of send and recv, with persistent buffers. Collective: every rank constructs one.

    aggregate    gather the blocks of two ranks for each matmul

    The other arguments are those of CommOverlap.
    """

    def __init__(
        self,
        helper: CommOverlapHelper,
        tensor_shape: Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        *,
        aggregate: bool = False,
        num_comm_ctas: int | None = None,
        priority: int = -1,
        save_gathered: bool = False,
    ) -> None:
        config = OverlapConfig(
            "ring",
            aggregate=aggregate,
            num_comm_ctas=num_comm_ctas,
            priority=priority,
            save_gathered=save_gathered,
        )

        def rows_of(rows: int, ranks: int) -> dict[str, int]:
            block = -(-rows // ranks)
            return {"gathered": rows, "partial": 2 * block, "received": block}

        self._begin(helper, tensor_shape, dtype, config, rows_of)
