"""GradScaler: torch.amp's, for models whose gradients are sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch

from pynccl import Communicator

from ..agreement import check_not_in_group
from ..arguments import check_comm, checked


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for several ranks: if one of them finds an inf or a NaN, all skip the step and reduce the
    scale. With torch's own, the rank that has it in its shard would skip the step, and the others would not.

        scaler = ad.GradScaler(comm)
        scaler.scale(loss).backward()
        ad.finish_gradients(model)
        scaler.unscale_(optimizer)
        ad.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()

    comm     communicator of all ranks that train the model: with several, the one from which they were split, such as
             `Mesh.comm`
    device   "cuda" or "cpu"; None: that of the communicator
    options  init_scale, growth_factor, backoff_factor, growth_interval and enabled of torch.amp.GradScaler, which
             checks them (AssertionError)

    Every rank must call the same methods. `unscale_` (or `step` without it) makes an all_reduce of one number. Source:
    torch.distributed.fsdp.sharded_grad_scaler does the same for a process group.
    """

    @checked
    def __init__(self, comm: Communicator, device: str | None = None, **options: Any) -> None:
        check_comm("GradScaler", comm)
        comm.check_alive()
        super().__init__(device or torch.device(comm.device).type, **options)
        self.comm = comm

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        check_not_in_group("GradScaler")
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        anywhere = torch.zeros(1, device=self.comm.device)
        for one in found.values():
            anywhere = torch.maximum(anywhere, one.to(anywhere))
        self.comm.all_reduce(anywhere, anywhere, op="max")
        for one in found.values():
            one.copy_(anywhere.view_as(one))
        return found or {anywhere.device: anywhere}
