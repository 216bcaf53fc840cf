"""The worked examples as a user launches them, and their parts: batch norm over a partition, CLIP's loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import TORCHRUN, RankPool, each_size
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import batch_norm  # noqa: E402
import clip_loss  # noqa: E402

SECONDS = 100.0  # of patience, on a busy machine


def launch(script: str) -> str:
    """What it prints, launched by torchrun on two ranks."""
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(SCRIPTS / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_batch_norm_runs_under_torchrun_and_agrees() -> None:
    printed = launch("batch_norm.py")
    assert "they agree" in printed
    for layer in ("BatchNorm1d of (11, 6)", "BatchNorm2d of (5, 6, 5, 4)"):
        assert layer in printed


@pytest.mark.slow
def test_clip_loss_runs_under_torchrun_and_agrees() -> None:
    printed = launch("clip_loss.py")
    assert "loss and gradients agree with a single process's" in printed
    assert len([line for line in printed.splitlines() if "tolerance" in line]) == 6


# Batch norm


def check_batch_norm(comm: Communicator) -> dict[str, dict[str, float]]:
    return {
        str(grid): batch_norm.compare(comm, grid, size)
        for grid, size in (
            ((4, 1), (9, 3)),
            ((2, 2), (6, 5)),  # batch and channels cut, the channels unevenly
            ((3, 1), (7, 4)),  # rank 3 is inactive
            ((1, 3), (7, 4)),
            ((2, 1, 2), (4, 3, 5)),  # BatchNorm1d of [batch, channels, length], the length cut
            ((1, 2, 2, 1), (3, 4, 5, 2)),
            ((2, 1, 1, 2), (4, 3, 2, 5)),
        )
    }


def test_batch_norm_over_any_partition_equals_the_unsharded_one(ranks: RankPool) -> None:
    for found in ranks.run(4, check_batch_norm):
        assert len(found) == 7
        for grid, differences in found.items():
            assert differences.keys() == set(batch_norm.NAMES)
            assert max(differences.values()) <= 1e-10, f"{grid}: {differences}"


def norm_of_own_part_only(comm: Communicator) -> float:
    """What data parallelism does without synchronisation: the statistics of this rank's part."""
    torch.manual_seed(1)
    full = torch.randn(8, 3, dtype=torch.float64)
    partition = ad.CartesianPartition(comm, (comm.size, 1))
    own = batch_norm.part(full, partition)
    unsynchronised = torch.nn.BatchNorm1d(3, dtype=torch.float64)(own)
    ours = batch_norm.PartitionedBatchNorm(partition, 3)
    trained = ours(own)
    assert torch.equal(ours.eval()(own), ours(own))  # evaluation uses the running statistics and no communication
    return batch_norm.difference(unsynchronised, trained, comm)


def test_the_comparison_tells_global_from_local_statistics(ranks: RankPool) -> None:
    assert min(ranks.run(2, norm_of_own_part_only)) > 1e-2


# CLIP's loss


def check_clip(comm: Communicator) -> dict[tuple[torch.dtype, bool], dict[str, float]]:
    return {
        (dtype, rows): clip_loss.compare(comm, dtype, rows) for dtype in clip_loss.TOLERANCES for rows in (True, False)
    }


@each_size
def test_clip_loss_and_its_gradients_equal_the_single_process_ones(ranks: RankPool, n: int) -> None:
    for found in ranks.run(n, check_clip):
        for (dtype, own_rows), differences in found.items():
            assert differences.keys() == {"loss", "images", "texts", "log_scale"}
            assert max(differences.values()) <= clip_loss.TOLERANCES[dtype], (
                f"{dtype}, own_rows={own_rows}: {differences}"
            )


def check_wrong_convention(comm: Communicator) -> None:
    """The whole loss on every rank with grad="sum" is N times the gradient."""
    images, texts, log_scale = clip_loss.batch(comm, torch.float64)
    own = slice(comm.rank * clip_loss.ROWS, (comm.rank + 1) * clip_loss.ROWS)

    def mixed(images: Tensor, texts: Tensor, log_scale: Tensor) -> Tensor:
        gathered = [ad.all_gather(x, comm, grad="sum") for x in (images, texts)]
        return clip_loss.loss_on_one_process(*gathered, log_scale)

    expected = clip_loss.differentiate(clip_loss.loss_on_one_process, images, texts, log_scale)
    found = clip_loss.differentiate(mixed, images[own], texts[own], log_scale)
    torch.testing.assert_close(found.images, comm.size * expected.images[own])


def test_the_wrong_convention_is_a_factor_of_the_number_of_ranks(ranks: RankPool) -> None:
    ranks.run(3, check_wrong_convention)


def check_reduce_dtype(comm: Communicator) -> None:
    cotangents = torch.randn(comm.size, 64 * comm.size, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    x = torch.zeros(64, 8, dtype=torch.bfloat16, requires_grad=True)
    y = ad.all_gather(x, comm, grad="sum", reduce_dtype=torch.float32)
    (dx,) = torch.autograd.grad(y, x, cotangents[comm.rank])
    assert torch.equal(dx, cotangents.float().sum(0).chunk(comm.size)[comm.rank].bfloat16())

    # float32 has no number between 2**24 and 2**24 + 2, so that adding 1 three times to the former changes nothing.
    x = torch.zeros(1, requires_grad=True)
    found: list[Tensor] = []
    for reduce_dtype in (torch.float64, None):
        y = ad.all_gather(x, comm, grad="sum", reduce_dtype=reduce_dtype)
        found += torch.autograd.grad(y, x, torch.full((comm.size,), 1.0 if comm.rank else 2.0**24))
    assert [value.item() for value in found] == [2.0**24 + 4, 2.0**24]  # 2**24 + 3, rounded once; rounded three times


def test_reduce_dtype_rounds_the_sum_of_gradients_once(ranks: RankPool) -> None:
    ranks.run(4, check_reduce_dtype)
