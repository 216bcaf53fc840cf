"""SGLang's PyNcclCommunicator, with the names of old vLLM (0.6) and SGLang's additions.

    from pynccl.compat.sglang import PyNcclCommunicator
    # instead of sglang.srt.distributed.device_communicators.pynccl

Differences from vLLM's: all_reduce is in place and takes op as the second argument, all_gather and reduce_scatter take
sizes= instead of all_gatherv and reduce_scatterv, and a new communicator is disabled until
`with comm.change_state(enable=True):`. Follows SGLang 0.5.23.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from ..bindings.abi import RedOp, UniqueId
from ..bindings.listing import public_dir
from ..bindings.structs import CommConfig, struct_of
from . import vllm, wrapper
from .stateless import StatelessProcessGroup
from .wrapper import (
    buffer_type,
    cudaStream_t,
    ncclComm_t,
    ncclDataTypeEnum,
    ncclRedOpTypeEnum,
    ncclUniqueId,
)

__all__ = [
    "NCCLLibrary",
    "PyNcclCommunicator",
    "StatelessProcessGroup",
    "buffer_type",
    "cudaStream_t",
    "ncclComm_t",
    "ncclDataTypeEnum",
    "ncclRedOpTypeEnum",
    "ncclUniqueId",
]
__dir__ = public_dir(globals())


class NCCLLibrary(wrapper.NCCLLibrary):
    """vLLM's NCCLLibrary, with SGLANG_NCCL_SO_PATH for the path of the library."""

    path_variable = "SGLANG_NCCL_SO_PATH"

    def ncclCommInitRankConfig(
        self, world_size: int, unique_id: ncclUniqueId, rank: int, config: CommConfig | None = None
    ) -> ncclComm_t:
        """ncclCommInitRank with a pynccl.CommConfig, whose fields the loaded NCCL must support."""
        comm = ncclComm_t()
        struct = struct_of(config or CommConfig(), CommConfig, self.lib, "split")
        identity = UniqueId.from_buffer_copy(unique_id)
        code = self.lib.ncclCommInitRankConfig(ctypes.byref(comm), world_size, identity, rank, ctypes.byref(struct))
        self._check(code, f"ncclCommInitRankConfig(rank {rank} of {world_size})")
        return comm


class PyNcclCommunicator(vllm.PyNcclCommunicator):
    """See vllm.PyNcclCommunicator.

    is_symmetric_memory_enabled  turn off NCCL's synchronization of CUDA graphs (graphUsageMode 1; NCCL >= 2.29)
    cta_policy                   ncclConfig_t's CTAPolicy: 2 uses copy engines; None: NCCL's default
    """

    library_class = NCCLLibrary

    def __init__(
        self,
        group: Any = None,
        device: Any = None,
        library_path: str | None = None,
        is_symmetric_memory_enabled: bool = False,
        cta_policy: int | None = None,
    ) -> None:
        options: dict[str, Any] = {}
        if is_symmetric_memory_enabled:
            options["graph_usage_mode"] = 1
        if cta_policy is not None:
            options["cta_policy"] = cta_policy
        self.config = CommConfig(**options) if options else None
        super().__init__(group, device, library_path)
        self.disabled = True

    def all_reduce(self, tensor: Any, op: Any = RedOp.SUM) -> None:  # type: ignore[override]
        """Reduce tensor over all ranks, in place."""
        super().all_reduce(tensor, tensor, op)

    def outplace_all_reduce(self, in_tensor: Any, out_tensor: Any = None, op: Any = RedOp.SUM) -> Any:
        """Reduce in_tensor over all ranks into out_tensor (None: a new tensor), and return it."""
        return super().all_reduce(in_tensor, out_tensor, op)

    def all_gather(self, output_tensor: Any, input_tensor: Any, sizes: Sequence[int] | None = None) -> None:
        """Gather input_tensor of all ranks into output_tensor; with sizes, sizes[r] rows from rank r."""
        if sizes is None:
            super().all_gather(output_tensor, input_tensor)
        else:
            super().all_gatherv(output_tensor, input_tensor, sizes)

    def reduce_scatter(
        self, output_tensor: Any, input_tensor: Any, op: Any = RedOp.SUM, sizes: Sequence[int] | None = None
    ) -> None:
        """Reduce input_tensor over all ranks; rank r gets block r in output_tensor; with sizes, its sizes[r] rows."""
        if sizes is None:
            super().reduce_scatter(output_tensor, input_tensor, op)
        else:
            super().reduce_scatterv(output_tensor, input_tensor, sizes, op)

    def all_to_all_single(self, output_tensor: Any, input_tensor: Any) -> None:
        """Send chunk j of input_tensor to rank j, into chunk `rank` of its output_tensor. Chunks have equal size."""
        if comm := self._active("all_to_all_single"):
            comm.all_to_all(vllm.memory("input_tensor", input_tensor), vllm.memory("output_tensor", output_tensor))

    @contextlib.contextmanager
    def change_state(self, enable: bool | None = None) -> Iterator[None]:
        """Enable or disable the communicator within the block. enable=None: enable it if `available`."""
        before = self.disabled
        self.disabled = not (self.available if enable is None else enable)
        try:
            yield
        finally:
            self.disabled = before
