"""Gradients averaged beside the backward pass: a bucket travels on a side stream as soon as its last gradient is there.

    torchrun --standalone --nproc-per-node=2 scripts/examples/gradient_buckets.py
    gradient_buckets: 6 groups in 2 steps; the gradients equal those of the whole batch

Each bucket is one `pynccl.group`: one launch, in place, no copy into a flat piece of memory. The side stream waits for
the stream that makes the gradients; at the end the optimizer's stream waits for the side stream. All ranks launch the
buckets in the same order, because they run the same graph. `ad.DataParallelGradients` does more of it: parameters that
not every rank uses, accumulation over several passes, reduce_dtype, an optimizer whose state is cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pynccl

ROWS, WIDTH, LAYERS, LAYERS_A_BUCKET = 4, 16, 6, 2


class GradientBuckets:
    """Hooks that average the gradients of `model` over `comm`; call wait() before the optimizer's step."""

    def __init__(self, model: nn.Module, comm: pynccl.Communicator, parameters_a_bucket: int) -> None:
        self.comm, self.side = comm, pynccl.create_stream(comm.device)
        self.launched = 0
        backwards = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
        for first in range(0, len(backwards), parameters_a_bucket):
            bucket = backwards[first : first + parameters_a_bucket]
            missing = set(bucket)
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, bucket=bucket, missing=missing: self.arrived(parameter, bucket, missing)
                )

    def arrived(self, parameter: Tensor, bucket: list[nn.Parameter], missing: set[nn.Parameter]) -> None:
        missing.discard(parameter)
        if missing:
            return
        missing.update(bucket)  # for the next step
        self.side.wait(pynccl.current_stream(self.comm.device))  # the gradients are there
        with pynccl.group():
            for one in bucket:
                self.comm.all_reduce(one.grad, one.grad, "avg", stream=self.side)
        self.launched += 1

    def wait(self) -> None:
        pynccl.current_stream(self.comm.device).wait(self.side)


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).double().to(comm.device)
    x, target = torch.randn(2, comm.size * ROWS, WIDTH, dtype=torch.float64).to(comm.device)
    expected = torch.autograd.grad(F.mse_loss(model(x), target), list(model.parameters()))

    buckets = GradientBuckets(model, comm, 2 * LAYERS_A_BUCKET)  # a layer is a weight and a bias
    own = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    for _ in range(2):  # as in two steps
        model.zero_grad()
        F.mse_loss(model(x[own]), target[own]).backward()
        buckets.wait()
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(expected))
    return f"gradient_buckets: {buckets.launched} groups in 2 steps; the gradients equal those of the whole batch"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
