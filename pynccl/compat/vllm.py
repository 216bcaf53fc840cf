"""vLLM's NCCL wrapper, with the same names: NCCLLibrary, PyNcclCommunicator, StatelessProcessGroup.

    from pynccl.compat.vllm import PyNcclCommunicator     # instead of vllm.distributed.device_communicators.pynccl

Methods, parameters and behavior follow vLLM 0.33.0. Every operation goes through a `pynccl.Communicator`, available as
`.communicator`: buffers are checked before the call, dead ranks are named, and without a GPU the same program runs on
the host library with CPU tensors.
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
from ..bindings.listing import public_dir
from ..bindings.structs import CommConfig
from ..bindings.values import integers
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator
from ..comm.groups import group as pynccl_group
from ..comm.init import check_rank_of
from .stateless import StatelessProcessGroup
from .wrapper import (
    NCCL_UNIQUE_ID_BYTES,
    NCCLLibrary,
    buffer_type,
    cudaStream_t,
    ncclComm_t,
    ncclDataType_t,
    ncclDataTypeEnum,
    ncclRedOp_t,
    ncclRedOpTypeEnum,
    ncclResult_t,
    ncclUniqueId,
    ncclWindow_t,
    operator_of,
    owners,
)

__all__ = [
    "NCCL_UNIQUE_ID_BYTES",
    "NCCLLibrary",
    "PyNcclCommunicator",
    "StatelessProcessGroup",
    "buffer_type",
    "cudaStream_t",
    "ncclComm_t",
    "ncclDataTypeEnum",
    "ncclDataType_t",
    "ncclRedOpTypeEnum",
    "ncclRedOp_t",
    "ncclResult_t",
    "ncclUniqueId",
    "ncclWindow_t",
]
__dir__ = public_dir(globals())

INIT_SECONDS = 1800.0  # wait for the other ranks, as long as torch's process groups; vLLM has no timeout
_ABORT_SECONDS = 5.0
_NO_ID = bytes(NCCL_UNIQUE_ID_BYTES)


class PyNcclCommunicator:
    """A communicator of the ranks of `group`. All of them must create it together.

    group         a torch.distributed process group with a backend other than NCCL (None: the default group), or an
                  object with rank, world_size and broadcast_obj(obj, src), such as StatelessProcessGroup
    device        torch.device, "cuda:1" or 1: this rank's GPU; None: the current GPU. The host library accepts "cpu",
                  an index or None, and always uses the CPU
    library_path  as NCCLLibrary's so_file

    Attributes: rank, world_size, group, device; nccl, an NCCLLibrary; unique_id; nccl_version, 22703 for 2.27.3
    comm          ncclComm_t, for the functions of `nccl`       communicator  the same as a pynccl.Communicator
    available     False with one rank, without a libnccl, with VLLM_DISABLE_PYNCCL=1, and after destroy()
    disabled      True: every operation does nothing and returns None. You may set it.

    `stream=None` is torch's current stream; operations return once they are enqueued. Init ends with an all_reduce of
    one float, as in vLLM: ranks that use another implementation must take part in it.
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
            rank, world_size = _rank_and_size(group)
        self._prepare(group, rank, world_size)
        if self.world_size == 1 or _disabled_by_env():
            return
        problem = self._load(library_path)
        mine = _NO_ID
        if self.rank == 0 and problem is None:
            mine = bytes(self.nccl.ncclGetUniqueId())
        if stateless:
            identity = bytes(group.broadcast_obj(ncclUniqueId.from_buffer_copy(mine), src=0))
        else:
            identity = _broadcast_bytes(group, mine)
        if identity == _NO_ID:  # rank 0 has no libnccl, so no rank can continue
            reason = problem or "rank 0 could not load it"
            warnings.warn(f"PyNcclCommunicator is disabled on rank {self.rank}: no NCCL: {reason}", stacklevel=2)
            return
        if problem is not None:  # the other ranks are in init, and would hang if this rank continued without them
            raise problem
        self.unique_id = ncclUniqueId.from_buffer_copy(identity)
        self._init_comm(device)

    @classmethod
    def from_unique_id_bytes(
        cls, unique_id_bytes: bytes, rank: int, world_size: int, device: Any, library_path: str | None = None
    ) -> PyNcclCommunicator:
        """Create the communicator from the 128 bytes of a unique id, which you distribute to the ranks.

        One rank makes them by bytes(NCCLLibrary().ncclGetUniqueId()) or bytes(pynccl.get_unique_id())."""
        if len(unique_id_bytes) != NCCL_UNIQUE_ID_BYTES:
            raise ValueError(
                f"unique_id_bytes: expected {NCCL_UNIQUE_ID_BYTES} bytes, got {len(unique_id_bytes)} bytes"
            )
        rank, world_size = check_rank_of(rank, world_size, "from_unique_id_bytes")
        self = cls.__new__(cls)
        self._prepare(None, rank, world_size)
        if world_size == 1 or _disabled_by_env():
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
        """Join the other ranks and run a small all_reduce, which makes NCCL connect."""
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

    def _active(self, operation: str) -> Communicator | None:
        """Return the communicator to use, or None if the operation should do nothing."""
        if self.communicator is not None and not self.disabled:
            return self.communicator
        if self._destroyed:  # do not ignore the call: the caller expects a result
            raise NcclInvalidUsage(
                f"{operation}: this PyNcclCommunicator (rank {self.rank} of {self.world_size}) was destroyed; "
                "create another one on all ranks"
            )
        if not self.disabled:
            raise NcclInvalidUsage(
                f"{operation}: disabled is False, but there is no communicator; check `available` (it is False with "
                "one rank, with VLLM_DISABLE_PYNCCL=1, or without a libnccl)"
            )
        return None

    # Collectives. Buffers may have more elements than are transferred, as with raw pointers.

    def all_reduce(self, in_tensor: Any, out_tensor: Any = None, op: Any = RedOp.SUM, stream: Any = None) -> Any:
        """Reduce in_tensor over all ranks into out_tensor (None: a new tensor), and return it.

        In place if both are the same tensor."""
        comm = self._active("all_reduce")
        if comm is None:
            return None
        if out_tensor is not None and not hasattr(out_tensor, "data_ptr"):
            raise TypeError(
                f"all_reduce: out_tensor is {out_tensor!r}, expected a tensor; pass op by keyword: op=ReduceOp.SUM "
                "(for the signature of old vLLM, in place with op second, use pynccl.compat.sglang)"
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
        """Gather input_tensor of all ranks into output_tensor, in rank order."""
        if comm := self._active("all_gather"):
            send, recv = memory("input_tensor", input_tensor), memory("output_tensor", output_tensor)
            comm.all_gather(send, _first(recv, send.numel() * self.world_size), stream=stream)

    def all_gatherv(self, output_tensor: Any, input_tensor: Any, sizes: Sequence[int], stream: Any = None) -> None:
        """Gather sizes[r] rows (dimension 0) of the input_tensor of each rank r into output_tensor."""
        if comm := self._active("all_gatherv"):
            send, recv = memory("input_tensor", input_tensor), memory("output_tensor", output_tensor)
            counts = self._counts(sizes, recv)
            comm.all_gather_v(_first(send, counts[self.rank]), recv, counts=counts, stream=stream)

    def reduce_scatter(self, output_tensor: Any, input_tensor: Any, op: Any = RedOp.SUM, stream: Any = None) -> None:
        """Reduce input_tensor over all ranks; rank r gets block r in output_tensor."""
        if comm := self._active("reduce_scatter"):
            send, recv = memory("input_tensor", input_tensor), memory("output_tensor", output_tensor)
            comm.reduce_scatter(_first(send, recv.numel() * self.world_size), recv, operator_of(op), stream=stream)

    def reduce_scatterv(
        self, output_tensor: Any, input_tensor: Any, sizes: Sequence[int], op: Any = RedOp.SUM, stream: Any = None
    ) -> None:
        """Reduce input_tensor over all ranks; rank r gets its sizes[r] rows (dimension 0) in output_tensor."""
        if comm := self._active("reduce_scatterv"):
            send, recv = memory("input_tensor", input_tensor), memory("output_tensor", output_tensor)
            counts = self._counts(sizes, send)
            send, recv = _first(send, sum(counts)), _first(recv, counts[self.rank])
            comm.reduce_scatter_v(send, recv, operator_of(op), counts=counts, stream=stream)

    def reduce(self, output_tensor: Any, input_tensor: Any, root: int, op: Any = RedOp.SUM, stream: Any = None) -> None:
        """Reduce input_tensor over all ranks into output_tensor of root. Other ranks' output_tensor is not modified."""
        if comm := self._active("reduce"):
            send, recv = memory("input_tensor", input_tensor, any_order=True), None
            if root == self.rank:
                recv = _first(memory("output_tensor", output_tensor, any_order=True), send.numel())
            comm.reduce(send, recv, operator_of(op), root, stream=stream)

    def scatter(
        self, output_tensor: Any, input_tensor: Any, sizes: Sequence[int], root: int = 0, stream: Any = None
    ) -> None:
        """Scatter rows of root's input_tensor: rank r gets sizes[r] rows in output_tensor.

        Other ranks' input_tensor is not read."""
        if comm := self._active("scatter"):
            recv, send = memory("output_tensor", output_tensor), None
            counts = self._counts(sizes, recv)
            if root == self.rank:
                send = _first(memory("input_tensor", input_tensor), sum(counts))
            comm.scatter_v(send, _first(recv, counts[self.rank]), root, counts=counts, stream=stream)

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Broadcast tensor from rank src, in place."""
        if comm := self._active("broadcast"):
            buf = memory("tensor", tensor, any_order=True)
            comm.broadcast(buf, buf, src, stream=stream)

    def _counts(self, sizes: Sequence[int], tensor: Any) -> list[int]:
        """Convert sizes, in rows of `tensor` per rank, to elements per rank."""
        rows = integers(sizes, "sizes", "a number of rows per rank")
        if len(rows) != self.world_size:
            raise ValueError(f"sizes has {len(rows)} entries, expected {self.world_size}, one per rank")
        return [count * math.prod(tensor.shape[1:]) for count in rows]

    # Point to point

    def send(self, tensor: Any, dst: int, stream: Any = None) -> None:
        """Send tensor to rank dst, which must recv the same number of elements of the same type."""
        if comm := self._active("send"):
            comm.send(_as_bytes(memory("tensor", tensor, any_order=True)), dst, stream=stream)

    def recv(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Receive tensor from rank src."""
        if comm := self._active("recv"):
            comm.recv(_as_bytes(memory("tensor", tensor, any_order=True)), src, stream=stream)

    def batch_isend_irecv(self, p2p_ops: Sequence[Any], stream: Any = None) -> None:
        """Run the sends and receives of a list of torch.distributed.P2POp in one launch."""
        if self._active("batch_isend_irecv") is None:
            return
        import torch.distributed as dist

        kinds = {dist.isend: self.send, dist.irecv: self.recv}
        for p2p in p2p_ops:
            if p2p.op not in kinds:
                raise ValueError(f"batch_isend_irecv: op is {p2p.op!r}, expected torch.distributed.isend or irecv")
        self.group_start()
        try:
            for p2p in p2p_ops:
                kinds[p2p.op](p2p.tensor, p2p.group_peer, stream)
        finally:
            self.group_end()

    # Groups, memory, teardown

    def group_start(self) -> None:
        """Begin a group: calls until group_end() are launched together, so that sends and receives progress together.

        Calls of this class form one launch. Calls of NCCLLibrary form another launch before it."""
        if self.communicator is not None:
            self.nccl.ncclGroupStart()
        self._groups.append(pynccl_group())
        self._groups[-1].__enter__()

    def group_end(self) -> None:
        """End the group; the outermost group_end() launches the calls."""
        if not self._groups:
            raise NcclInvalidUsage("group_end: called without group_start()")
        try:
            if self.communicator is not None:
                self.nccl.ncclGroupEnd()
        finally:
            self._groups.pop().__exit__(None, None, None)

    def register_comm_window(self, tensor: Any) -> Any:
        """Register a window on a tensor, collectively. The tensor must be in memory allocated by ncclMemAlloc."""
        return self.register_comm_window_raw(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def register_comm_window_raw(self, ptr: int, size: int) -> Any:
        """Register a window (ncclWindow_t) on `size` bytes at `ptr`, for symmetric memory (NCCL >= 2.27)."""
        return self.nccl.ncclCommWindowRegister(self._handle("register_comm_window"), buffer_type(ptr), size, 1)

    def deregister_comm_window(self, window: Any) -> None:
        self.nccl.ncclCommWindowDeregister(self._handle("deregister_comm_window"), window)

    def _handle(self, operation: str) -> ncclComm_t:
        if self.communicator is None:
            raise NcclInvalidUsage(f"{operation}: there is no communicator (`available` is False)")
        return self.comm

    def suspend(self) -> None:
        """Release NCCL's dynamic memory until resume(), on all ranks (NCCL >= 2.29). Calling it twice is harmless."""
        comm = self._active("suspend")
        if comm is None or self._suspended:
            return
        if not self.nccl.has_symbol("ncclCommSuspend"):
            warnings.warn("suspend: NCCL < 2.29 has no ncclCommSuspend; no memory was released", stacklevel=2)
            return
        comm.suspend()
        self._suspended = True

    def resume(self) -> None:
        """Restore the memory released by suspend()."""
        comm = self._active("resume")
        if comm is not None and self._suspended:
            comm.resume()
            self._suspended = False

    def destroy(self) -> None:
        """Abort the communicator on this rank, without waiting for other ranks. Calling it twice is harmless.

        As in vLLM, it waits at most five seconds: CUDA graphs with captured operations keep the communicator in use."""
        communicator, self.communicator = self.communicator, None
        if communicator is None:
            return
        self.available, self.disabled, self._destroyed, self.comm = False, True, True, ncclComm_t()
        thread = threading.Thread(target=communicator.abort, daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)

    def __repr__(self) -> str:
        state = "destroyed" if self._destroyed else "disabled" if self.disabled else str(self.device)
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}, {state}>"


def _disabled_by_env() -> bool:
    return os.environ.get("VLLM_DISABLE_PYNCCL", "").lower() in ("1", "true")


# Tensor arguments: vLLM's programs may pass parameters, or tensors with more elements than are transferred.


def memory(what: str, tensor: Any, any_order: bool = False) -> Any:
    """Return the tensor, detached, since it may be a parameter. Raises ValueError if it is not contiguous.

    any_order  accept permuted dimensions, such as channels_last, if they are the same on all ranks; the result has its
               dimensions in memory order"""
    if not hasattr(tensor, "is_contiguous"):
        raise TypeError(f"{what} is {tensor!r}, expected a torch tensor")
    found = tensor.detach()
    if any_order and not found.is_contiguous():
        found = found.permute(sorted(range(found.dim()), key=lambda dim: -found.stride(dim)))
    if not found.is_contiguous():
        raise ValueError(
            f"{what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, so NCCL would "
            "access memory outside it; pass x.contiguous()"
        )
    return found


def _first(tensor: Any, count: int) -> Any:
    """Return the first `count` elements of a tensor that may have more."""
    return tensor.view(-1)[:count] if tensor.numel() > count else tensor


def _as_bytes(tensor: Any) -> Any:
    """Return fp8 tensors as bytes, since NCCL lacks some fp8 types and send/recv only copy; others unchanged."""
    if not str(tensor.dtype).startswith("torch.float8"):
        return tensor
    import torch

    return tensor.view(torch.uint8)


# torch.distributed process groups


def _rank_and_size(group: Any) -> tuple[int, int]:
    """Return (rank, world size) in a torch process group."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise NcclInvalidUsage(
            "PyNcclCommunicator: torch.distributed is not initialized: call init_process_group first, or pass a "
            "StatelessProcessGroup"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("PyNcclCommunicator: this process is not in the group; only its ranks may create it")
    if dist.get_backend(group) == dist.Backend.NCCL:
        raise ValueError(
            "PyNcclCommunicator: the group uses NCCL; pass a group with a CPU backend, to broadcast the id"
        )
    return rank, dist.get_world_size(group)


def _broadcast_bytes(group: Any, data: bytes) -> bytes:
    """Broadcast bytes from the group's first rank."""
    import torch
    import torch.distributed as dist

    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[0], group=group)
    return bytes(tensor.tolist())
