"""vLLM's wrapper of NCCL by its own names: NCCLLibrary, PyNcclCommunicator, StatelessProcessGroup.

    from pynccl.compat.vllm import PyNcclCommunicator     # instead of vllm.distributed.device_communicators.pynccl

The methods, their parameters and what a valid program sees are those of vLLM 0.33.0. Every operation goes through a
`pynccl.Communicator`, kept in `.communicator`: so buffers are checked before NCCL gets them, ranks that died are named,
and on a machine without a GPU the same program runs on the host library, on CPU tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from ..bindings.abi import RedOp
from ..bindings.errors import NcclError, NcclInvalidUsage
from ..bindings.structs import CommConfig
from ..bindings.values import integers
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator
from ..comm.groups import group as pynccl_group
from ..comm.init import check_rank_of
from .stateless import StatelessProcessGroup as StatelessProcessGroup
from .wrapper import (
    NCCL_UNIQUE_ID_BYTES as NCCL_UNIQUE_ID_BYTES,
    NCCLLibrary as NCCLLibrary,
    buffer_type as buffer_type,
    cudaStream_t as cudaStream_t,
    ncclComm_t as ncclComm_t,
    ncclDataType_t as ncclDataType_t,
    ncclDataTypeEnum as ncclDataTypeEnum,
    ncclRedOp_t as ncclRedOp_t,
    ncclRedOpTypeEnum as ncclRedOpTypeEnum,
    ncclResult_t as ncclResult_t,
    ncclUniqueId as ncclUniqueId,
    ncclWindow_t as ncclWindow_t,
    operator_of,
    owners,
)

INIT_SECONDS = 1800.0  # for the other ranks to come, as torch's process groups wait; vLLM waits for ever
_ABORT_SECONDS = 5.0
_NO_ID = bytes(NCCL_UNIQUE_ID_BYTES)


class PyNcclCommunicator:
    """This rank's handle on the ranks of `group`, made by all of them together.

    group         a torch.distributed process group of another backend than NCCL (None: the default one), or what has
                  rank, world_size and broadcast_obj(obj, src), such as StatelessProcessGroup
    device        torch.device, "cuda:1" or 1: this rank's GPU; None: the current one. The host library takes "cpu", an
                  index or None, and is the CPU
    library_path  as NCCLLibrary's so_file

    rank, world_size, group, device; nccl, an NCCLLibrary; unique_id; nccl_version, 22703 for 2.27.3
    comm          ncclComm_t, for the functions of `nccl`       communicator  the same as a pynccl.Communicator
    available     False with one rank, without a libnccl, with VLLM_DISABLE_PYNCCL=1, and after destroy()
    disabled      True: every operation does nothing and returns None. A program may set it.

    `stream=None` is torch's current stream; an operation returns once it is enqueued. The first thing after the init
    is an all_reduce of one float, as with vLLM: another program at the other end must take part in it.
    """

    library_class: type[NCCLLibrary] = NCCLLibrary
    config: CommConfig | None = None
    group: Any
    nccl: NCCLLibrary
    unique_id: ncclUniqueId

    def __init__(self, group: Any = None, device: Any = None, library_path: str | None = None) -> None:
        stateless = hasattr(group, "broadcast_obj")
        if stateless:
            rank, world_size = group.rank, group.world_size
        else:
            rank, world_size = _place_in(group)
        self._prepare(group, rank, world_size)
        if self.world_size == 1 or _is_switched_off():
            return
        problem = self._load(library_path)
        mine = _NO_ID
        if self.rank == 0 and problem is None:
            mine = bytes(self.nccl.ncclGetUniqueId())
        if stateless:
            identity = bytes(group.broadcast_obj(ncclUniqueId.from_buffer_copy(mine), src=0))
        else:
            identity = _broadcast_bytes(group, mine)
        if identity == _NO_ID:  # rank 0 has no libnccl, and nobody can go on without
            why = problem or "rank 0 could not load it"
            warnings.warn(f"PyNcclCommunicator is disabled on rank {self.rank}: no NCCL: {why}", stacklevel=2)
            return
        if problem is not None:  # the others are in the init by now: going on alone would leave them there
            raise problem
        self.unique_id = ncclUniqueId.from_buffer_copy(identity)
        self._init_comm(device)

    @classmethod
    def from_unique_id_bytes(
        cls, unique_id_bytes: bytes, rank: int, world_size: int, device: Any, library_path: str | None = None
    ) -> PyNcclCommunicator:
        """The communicator of ranks that share the 128 bytes of an id, however they came by it.

        The bytes are bytes(NCCLLibrary().ncclGetUniqueId()) of one rank, or bytes(pynccl.get_unique_id())."""
        if len(unique_id_bytes) != NCCL_UNIQUE_ID_BYTES:
            raise ValueError(
                f"unique_id_bytes: expected {NCCL_UNIQUE_ID_BYTES} bytes, got {len(unique_id_bytes)} bytes"
            )
        rank, world_size = check_rank_of(rank, world_size)
        self = cls.__new__(cls)
        self._prepare(None, rank, world_size)
        if world_size == 1 or _is_switched_off():
            return self
        problem = self._load(library_path)
        if problem is not None:
            raise problem
        self.unique_id = self.nccl.unique_id_from_bytes(unique_id_bytes)
        self._init_comm(device)
        return self

    def _prepare(self, group: Any, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self.available, self.disabled = False, True
        self.communicator: Communicator | None = None
        self.comm = ncclComm_t()
        self.device: Any = None
        self._suspended = self._destroyed = False
        self._groups: list[contextlib.AbstractContextManager[None]] = []

    def _load(self, library_path: str | None) -> NcclError | None:
        try:
            self.nccl = self.library_class(library_path)
            self.nccl_version = self.nccl.ncclGetRawVersion()
        except NcclError as error:
            return error
        return None

    def _init_comm(self, device: Any) -> None:
        """Join the others, and run one small operation, which makes NCCL connect."""
        import torch

        made = Communicator.init(
            self.world_size, bytes(self.unique_id), self.rank, device, self.config, INIT_SECONDS, self.nccl.lib
        )
        made.timeout = DEFAULT_TIMEOUT
        self.communicator, self.device = made, torch.device(made.device)
        self.comm = ncclComm_t(made.handle)
        owners[made.handle] = made
        self.available, self.disabled = True, False
        warm = torch.zeros(1, device=self.device)
        made.all_reduce(warm, warm)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _live(self, operation: str) -> Communicator | None:
        """Where the operation goes; None if it is to do nothing."""
        if self.communicator is not None and not self.disabled:
            return self.communicator
        if self._destroyed:  # not in silence: the caller counts on a result
            raise NcclInvalidUsage(
                f"{operation}: this PyNcclCommunicator (rank {self.rank} of {self.world_size}) was destroyed; "
                "make another one, on all ranks"
            )
        if not self.disabled:
            raise NcclInvalidUsage(
                f"{operation}: disabled was set to False, but there is no communicator: `available` says whether "
                "there is (not with one rank, VLLM_DISABLE_PYNCCL=1, or without a libnccl)"
            )
        return None

    # Collectives. output and input may hold more elements than are moved, as with raw pointers.

    def all_reduce(self, in_tensor: Any, out_tensor: Any = None, op: Any = RedOp.SUM, stream: Any = None) -> Any:
        """out_tensor on every rank: the reduction of all ranks' in_tensor. In place if they are the same tensor."""
        comm = self._live("all_reduce")
        if comm is None:
            return None
        if out_tensor is not None and not hasattr(out_tensor, "data_ptr"):
            raise TypeError(
                f"all_reduce: out_tensor is {out_tensor!r}, expected a tensor; pass op by name: op=ReduceOp.SUM "
                "(in old vLLM op came second and the result was in place: pynccl.compat.sglang has that)"
            )
        send = memory("in_tensor", in_tensor, any_order=True)
        if out_tensor is None:
            import torch

            out_tensor = torch.empty_like(in_tensor, requires_grad=False)
        recv = send if out_tensor is in_tensor else memory("out_tensor", out_tensor, any_order=True)
        if in_tensor.stride() != out_tensor.stride() and not (in_tensor.is_contiguous() and out_tensor.is_contiguous()):
            raise ValueError(
                f"all_reduce: in_tensor has strides {in_tensor.stride()}, out_tensor {out_tensor.stride()}; "
                "they must be equal"
            )
        comm.all_reduce(send, _first(recv, send.numel()), operator_of(op), stream=stream)
        return out_tensor

    def all_gather(self, output_tensor: Any, input_tensor: Any, stream: Any = None) -> None:
        """output_tensor on every rank: all ranks' input_tensor, one after the other."""
        if comm := self._live("all_gather"):
            send, recv = memory("input_tensor", input_tensor), memory("output_tensor", output_tensor)
            comm.all_gather(send, _first(recv, send.numel() * self.world_size), stream=stream)

    def all_gatherv(self, output_tensor: Any, input_tensor: Any, sizes: Sequence[int], stream: Any = None) -> None:
        """output_tensor on every rank: sizes[r] rows (of dimension 0) of each rank's input_tensor."""
        if comm := self._live("all_gatherv"):
            send, recv = memory("input_tensor", input_tensor), memory("output_tensor", output_tensor)
            counts = self._counts(sizes, recv)
            comm.all_gather_v(_first(send, counts[self.rank]), recv, counts=counts, stream=stream)

    def reduce_scatter(self, output_tensor: Any, input_tensor: Any, op: Any = RedOp.SUM, stream: Any = None) -> None:
        """output_tensor on rank r: block r of the reduction of all ranks' input_tensor."""
        if comm := self._live("reduce_scatter"):
            send, recv = memory("input_tensor", input_tensor), memory("output_tensor", output_tensor)
            comm.reduce_scatter(_first(send, recv.numel() * self.world_size), recv, operator_of(op), stream=stream)

    def reduce_scatterv(
        self, output_tensor: Any, input_tensor: Any, sizes: Sequence[int], op: Any = RedOp.SUM, stream: Any = None
    ) -> None:
        """output_tensor on rank r: its sizes[r] rows (of dimension 0) of the reduction of all ranks' input_tensor."""
        if comm := self._live("reduce_scatterv"):
            send, recv = memory("input_tensor", input_tensor), memory("output_tensor", output_tensor)
            counts = self._counts(sizes, send)
            own, whole = _first(recv, counts[self.rank]), _first(send, sum(counts))
            comm.reduce_scatter_v(whole, own, operator_of(op), counts=counts, stream=stream)

    def reduce(self, output_tensor: Any, input_tensor: Any, root: int, op: Any = RedOp.SUM, stream: Any = None) -> None:
        """output_tensor on root: the reduction of all ranks' input_tensor. Other ranks' is not written."""
        if comm := self._live("reduce"):
            send, recv = memory("input_tensor", input_tensor, any_order=True), None
            if root == self.rank:
                recv = _first(memory("output_tensor", output_tensor, any_order=True), send.numel())
            comm.reduce(send, recv, operator_of(op), root, stream=stream)

    def scatter(
        self, output_tensor: Any, input_tensor: Any, sizes: Sequence[int], root: int = 0, stream: Any = None
    ) -> None:
        """output_tensor on rank r: its sizes[r] rows of root's input_tensor. Other ranks' input_tensor is not read."""
        if comm := self._live("scatter"):
            recv, send = memory("output_tensor", output_tensor), None
            counts = self._counts(sizes, recv)
            if root == self.rank:
                send = _first(memory("input_tensor", input_tensor), sum(counts))
            comm.scatter_v(send, _first(recv, counts[self.rank]), root, counts=counts, stream=stream)

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """tensor on every rank: src's."""
        if comm := self._live("broadcast"):
            whole = memory("tensor", tensor, any_order=True)
            comm.broadcast(whole, whole, src, stream=stream)

    def _counts(self, sizes: Sequence[int], tensor: Any) -> list[int]:
        """Elements per rank for sizes in rows of such a tensor."""
        rows = integers(sizes, "sizes", "a number of rows per rank")
        if len(rows) != self.world_size:
            raise ValueError(f"sizes has {len(rows)} entries, expected one per rank, {self.world_size}")
        return [count * math.prod(tensor.shape[1:]) for count in rows]

    # Point to point

    def send(self, tensor: Any, dst: int, stream: Any = None) -> None:
        """Send tensor to rank dst, which must recv as many elements of the same type."""
        if comm := self._live("send"):
            comm.send(_as_bytes(memory("tensor", tensor, any_order=True)), dst, stream=stream)

    def recv(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Receive into tensor what rank src sends."""
        if comm := self._live("recv"):
            comm.recv(_as_bytes(memory("tensor", tensor, any_order=True)), src, stream=stream)

    def batch_isend_irecv(self, p2p_ops: Sequence[Any], stream: Any = None) -> None:
        """The sends and receives of a list of torch.distributed.P2POp, as one launch."""
        if self._live("batch_isend_irecv") is None:
            return
        import torch.distributed as dist

        kinds = {dist.isend: self.send, dist.irecv: self.recv}
        for one in p2p_ops:
            if one.op not in kinds:
                raise ValueError(f"batch_isend_irecv: op is {one.op!r}, expected torch.distributed.isend or irecv")
        self.group_start()
        try:
            for one in p2p_ops:
                kinds[one.op](one.tensor, one.group_peer, stream)
        finally:
            self.group_end()

    # Groups, memory, and its end

    def group_start(self) -> None:
        """What is called until group_end() is launched together: where sends and receives must progress together.

        Calls of this class are one launch, those of NCCLLibrary another one before it."""
        if self.communicator is not None:
            self.nccl.ncclGroupStart()
        self._groups.append(pynccl_group())
        self._groups[-1].__enter__()

    def group_end(self) -> None:
        """Launch what was called since the first group_start()."""
        if not self._groups:
            raise NcclInvalidUsage("group_end: there was no group_start()")
        try:
            if self.communicator is not None:
                self.nccl.ncclGroupEnd()
        finally:
            self._groups.pop().__exit__(None, None, None)

    def register_comm_window(self, tensor: Any) -> Any:
        """A window on the memory of a tensor, on all ranks together; the tensor must be of NCCL's own memory."""
        return self.register_comm_window_raw(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def register_comm_window_raw(self, ptr: int, size: int) -> Any:
        """A window (ncclWindow_t) on `size` bytes at `ptr`, for symmetric-memory collectives (NCCL >= 2.27)."""
        return self.nccl.ncclCommWindowRegister(self._handle("register_comm_window"), buffer_type(ptr), size, 1)

    def deregister_comm_window(self, window: Any) -> None:
        self.nccl.ncclCommWindowDeregister(self._handle("deregister_comm_window"), window)

    def _handle(self, operation: str) -> ncclComm_t:
        if self.communicator is None:
            raise NcclInvalidUsage(f"{operation}: there is no communicator here: `available` is False")
        return self.comm

    def suspend(self) -> None:
        """Give NCCL's dynamic memory back until resume(), on all ranks (NCCL >= 2.29). Twice is harmless."""
        comm = self._live("suspend")
        if comm is None or self._suspended:
            return
        if not self.nccl.has_symbol("ncclCommSuspend"):
            warnings.warn("suspend: NCCL < 2.29 has no ncclCommSuspend; nothing was given back", stacklevel=2)
            return
        comm.suspend()
        self._suspended = True

    def resume(self) -> None:
        """End a suspend()."""
        comm = self._live("resume")
        if comm is not None and self._suspended:
            comm.resume()
            self._suspended = False

    def destroy(self) -> None:
        """End it here, whatever the other ranks do. Twice is harmless.

        As vLLM's it waits five seconds at most: CUDA graphs that captured operations hold the communicator."""
        ended, self.communicator = self.communicator, None
        if ended is None:
            return
        self.available, self.disabled, self._destroyed, self.comm = False, True, True, ncclComm_t()
        thread = threading.Thread(target=ended.abort, daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)

    def __repr__(self) -> str:
        state = "destroyed" if self._destroyed else "disabled" if self.disabled else str(self.device)
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}, {state}>"


def _is_switched_off() -> bool:
    return os.environ.get("VLLM_DISABLE_PYNCCL", "").lower() in ("1", "true")


# Tensors as vLLM's programs pass them: they may be parameters, or have more elements than are moved.


def memory(what: str, tensor: Any, any_order: bool = False) -> Any:
    """The tensor, detached: a trainer hands its parameters over. ValueError if it is not contiguous.

    any_order  its dimensions may lie in another order in memory, such as channels_last, which is the same on all ranks:
               they are put in that order"""
    if not hasattr(tensor, "is_contiguous"):
        raise TypeError(f"{what} is {tensor!r}, expected a torch tensor")
    found = tensor.detach()
    if any_order and not found.is_contiguous():
        found = found.permute(sorted(range(found.dim()), key=lambda dim: -found.stride(dim)))
    if not found.is_contiguous():
        raise ValueError(
            f"{what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, and NCCL would "
            "move other memory than its own; pass x.contiguous()"
        )
    return found


def _first(tensor: Any, count: int) -> Any:
    """The first `count` elements of a tensor that may have more."""
    return tensor.view(-1)[:count] if tensor.numel() > count else tensor


def _as_bytes(tensor: Any) -> Any:
    """fp8 as bytes: what is sent is moved, whatever it means, and not every kind of fp8 has a type in NCCL."""
    if not str(tensor.dtype).startswith("torch.float8"):
        return tensor
    import torch

    return tensor.view(torch.uint8)


# What a process group of torch.distributed has to give.


def _place_in(group: Any) -> tuple[int, int]:
    """(rank, number of ranks) in a process group of torch."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise NcclInvalidUsage(
            "PyNcclCommunicator: torch.distributed is not initialized: call init_process_group first, or pass a "
            "StatelessProcessGroup"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("PyNcclCommunicator: this process is not in the group: only its ranks may make it")
    if dist.get_backend(group) == dist.Backend.NCCL:
        raise ValueError(
            "PyNcclCommunicator: the group is NCCL's own; pass one of a CPU backend, over which the id travels"
        )
    return rank, dist.get_world_size(group)


def _broadcast_bytes(group: Any, data: bytes) -> bytes:
    """The bytes of the group's first rank."""
    import torch
    import torch.distributed as dist

    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[0], group=group)
    return bytes(tensor.tolist())
