"""Batch normalisation of a tensor that is cut over a grid of ranks, beside torch's on the whole tensor.

The statistics of a channel are those of the whole batch, wherever its parts are: sums over this rank's part, then
AllSumReduce over all axes of the grid but the channels'. Derivatives follow from the sum being its own adjoint. It
prints the largest differences from nn.BatchNorm1d and nn.BatchNorm2d, of outputs, of all gradients and of the running
statistics.

examples:
  torchrun --standalone --nproc-per-node=4 scripts/batch_norm.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

TOLERANCE = 1e-10
FEATURES = 6
NAMES = (
    "output",
    "gradient of the input",
    "gradient of weight",
    "gradient of bias",
    "running mean",
    "running variance",
)


class PartitionedBatchNorm(nn.Module):
    """nn.BatchNorm1d / 2d of a tensor [batch, channels, ..] that is cut over a partition with as many axes.

    features  channels of this rank's part: weight and bias hold those, equal on all ranks that share them
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, partition: ad.Partition, features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.axes = [axis for axis in range(len(partition.shape)) if axis != 1]
        self.sum_over_ranks = ad.AllSumReduce(partition, self.axes)
        self.eps, self.momentum = eps, momentum
        device = partition.comm.device
        self.weight = nn.Parameter(torch.ones(features, dtype=torch.float64, device=device))
        self.bias = nn.Parameter(torch.zeros(features, dtype=torch.float64, device=device))
        self.register_buffer("running_mean", torch.zeros_like(self.weight.data))
        self.register_buffer("running_var", torch.ones_like(self.weight.data))

    def forward(self, x: Tensor) -> Tensor:
        comm = self.sum_over_ranks.comm
        if comm is None:  # inactive: x has volume zero
            return x.clone()
        mean, var = self.statistics(x) if self.training else (self.running_mean, self.running_var)
        # Each rank uses its copy of the parameters for its part of the batch: the gradients of the copies are summed.
        weight, bias = ad.copy(self.weight, comm), ad.copy(self.bias, comm)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        return (x - mean.view(shape)) * ((var + self.eps).rsqrt() * weight).view(shape) + bias.view(shape)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each channel over the whole batch.

        The parts may differ in size, so their sizes are summed too. The variance is of the differences from the mean:
        the shorter way by the mean of the squares loses all digits where the mean is large."""
        count = x.new_tensor([x.numel() // max(x.shape[1], 1)])
        sums = self.sum_over_ranks(torch.cat([x.sum(self.axes), count]))
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = x - mean.view([1, -1, *[1] * (x.dim() - 2)])
        var = self.sum_over_ranks((centred * centred).sum(self.axes)) / total
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * total / (total - 1), self.momentum)
        return mean, var


def part(full: Tensor, partition: ad.Partition) -> Tensor:
    """This rank's part of a tensor that every rank has; of volume zero if it is inactive."""
    if partition.coordinates is None:
        return ad.zero_volume_tensor(full.dtype, full.device)
    for axis, (ranks, at) in enumerate(zip(partition.shape, partition.coordinates, strict=True)):
        full = full.tensor_split(ranks, axis)[at]
    return full.detach().clone()


def channels(vector: Tensor, partition: ad.Partition) -> Tensor:
    """The values of this rank's channels; none if it is inactive."""
    if partition.coordinates is None:
        return vector.detach()[:0]
    return vector.detach().tensor_split(partition.shape[1])[partition.coordinates[1]]


def compare(comm: pynccl.Communicator, grid: Sequence[int], size: Sequence[int]) -> dict[str, float]:
    """The largest differences from torch's layer, over all ranks. grid: ranks along each dimension of `size`."""
    partition = ad.CartesianPartition(comm, grid)
    torch.manual_seed(5)  # every rank draws the same
    unsharded = (nn.BatchNorm1d if len(size) < 4 else nn.BatchNorm2d)(size[1], dtype=torch.float64).to(comm.device)
    for parameter in unsharded.parameters():
        nn.init.normal_(parameter)
    whole = (100 + torch.randn(*size, dtype=torch.float64)).to(comm.device).requires_grad_()
    cotangent = torch.randn(*size, dtype=torch.float64).to(comm.device)

    norm = PartitionedBatchNorm(partition, len(channels(unsharded.weight, partition)))
    norm.weight.data = channels(unsharded.weight, partition)
    norm.bias.data = channels(unsharded.bias, partition)
    x = part(whole, partition).requires_grad_()
    y = norm(x)
    y.backward(part(cotangent, partition))

    expected = unsharded(whole)
    expected.backward(cotangent)
    pairs = [(y, part(expected, partition)), (gradient(x), part(gradient(whole), partition))]
    pairs += [
        (gradient(norm.weight), channels(gradient(unsharded.weight), partition)),
        (gradient(norm.bias), channels(gradient(unsharded.bias), partition)),
        (norm.running_mean, channels(unsharded.get_buffer("running_mean"), partition)),
        (norm.running_var, channels(unsharded.get_buffer("running_var"), partition)),
    ]
    partition.destroy()
    return {name: difference(a, b, comm) for name, (a, b) in zip(NAMES, pairs, strict=True)}


def gradient(x: Tensor) -> Tensor:
    """x.grad; zeros where the backward pass did not come by: parameters of an inactive rank."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def difference(ours: Tensor, expected: Tensor, comm: pynccl.Communicator) -> float:
    """The largest one on any rank; infinite where a shape differs or a value is not a number."""
    if ours.shape != expected.shape:
        largest = ours.new_tensor(float("inf"))
    else:
        largest = torch.cat([(ours - expected).detach().abs().flatten(), ours.new_zeros(1)]).max()
    return comm.all_reduce(largest.nan_to_num(nan=float("inf")).reshape(1), op="max").item()


def grid_of(ranks: int) -> tuple[int, int]:
    """Ranks along the batch and along the channels."""
    return (ranks // 2, 2) if ranks % 2 == 0 and ranks > 2 else (ranks, 1)


def main() -> int:
    command.Parser(__doc__, failed="a difference is above 1e-10 (float64)").parse_args()
    with pynccl.init() as comm:
        batch_ranks, channel_ranks = grid_of(comm.size)
        worst = 0.0
        for name, grid, size in (
            ("BatchNorm1d", (batch_ranks, channel_ranks), (4 * comm.size + 3, FEATURES)),
            ("BatchNorm2d", (1, channel_ranks, batch_ranks, 1), (5, FEATURES, 2 * comm.size + 1, 4)),
        ):
            differences = compare(comm, grid, size)
            worst = max(worst, *differences.values())
            if comm.rank == 0:
                print(f"{name} of {size} on a grid {grid} of ranks; largest differences from the whole one")
                for what, value in differences.items():
                    print(f"    {what:<24}{value:.1e}")
        if comm.rank == 0:
            print(
                f"they {'agree' if worst <= TOLERANCE else 'DIFFER'}: {worst:.1e}, tolerance {TOLERANCE:.0e}",
                flush=True,
            )
        return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    command.run(main)
