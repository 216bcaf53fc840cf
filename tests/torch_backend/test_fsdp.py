"""FSDP2 and FSDP1 with "pynccl": losses match a single process and gloo; checkpoints load on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from process_groups import process_group
from ranks import Place, RankPool
from small_transformers import WORDS, llama
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

ROWS, SEQUENCE, STEPS = 4, 8, 4  # ROWS: of all ranks together
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
Losses = list[tuple[float, float]]


def full_model() -> Any:
    torch.manual_seed(0)
    return llama()


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def rows_of(place: Place, step: int) -> torch.Tensor:
    """Return sequences in which each word id is that of its predecessor plus 1, so that there is something to learn."""
    starts = torch.randint(0, WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(100 + step))
    ids = (starts + torch.arange(SEQUENCE)) % WORDS
    return ids.chunk(place.size)[place.rank]


def train(model: Any, optimizer: Any, place: Place, steps: range, accumulate: bool = False) -> Losses:
    """Return for each step the mean loss of all ranks and the gradient norm, which checks the scale that AdamW ignores.

    accumulate  process row by row, and reduce the gradients after the last row"""
    found = []
    for step in steps:
        ids = rows_of(place, step)
        parts = ids.split(1) if accumulate else [ids]
        loss = torch.zeros(())
        for i, part in enumerate(parts):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(i == len(parts) - 1)
            part_loss = model(input_ids=part, labels=part, use_cache=False).loss / len(parts)
            part_loss.backward()
            loss += part_loss.detach().float()
        clip = getattr(model, "clip_grad_norm_", lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm))
        norm = clip(0.5)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        if place.size > 1:
            dist.all_reduce(loss)
            loss /= place.size
        found.append((loss.item(), norm.item()))
    return found


def sharded(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def reference(steps: int = STEPS) -> tuple[Losses, dict[str, torch.Tensor]]:
    """Train one process on all rows; return the losses and the final state dict."""
    model = full_model()
    losses = train(model, adamw(model), Place(0, 1), range(steps))
    assert losses[-1][0] < losses[0][0] - 0.1  # otherwise equal losses would prove little
    return losses, model.state_dict()


def check_close(found: Any, expected: Any, **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, **(tolerance or TOLERANCE))


def steps_of_fsdp2(place: Place, path: str) -> None:
    losses, state = reference()
    by_backend = {}
    for backend in ("pynccl", "gloo"):
        with process_group(backend, place, path + backend):
            model = sharded(full_model())
            optimizer = adamw(model)
            by_backend[backend] = train(model, optimizer, place, range(STEPS))
            check_close(by_backend[backend], losses)
            full_options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            found = get_model_state_dict(model, options=full_options)
            assert bool(found) == (place.rank == 0)  # rank 0 only
            if found:
                check_close(found, dict(state))
            again = sharded(full_model())
            broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(again, found, options=broadcast)
            for name, parameter in again.named_parameters():
                check_close(parameter.full_tensor(), state[name])
    check_close(by_backend["pynccl"], by_backend["gloo"], rtol=1e-6, atol=1e-6)


def test_fsdp2_losses_match_gloo_and_single_process(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, steps_of_fsdp2, str(tmp_path / "store"))


def fsdp2_options(place: Place, path: str) -> None:
    """Check mixed precision, gradient accumulation, reshard_after_forward, and prefetching."""
    losses, _ = reference()
    with process_group("pynccl", place, path):
        for reduced in (torch.float32, torch.bfloat16):
            half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
            model = sharded(full_model(), mp_policy=half)
            check_close(train(model, adamw(model), place, range(STEPS)), losses, rtol=0.02, atol=0.02)
        for reshard in (True, False):
            model = sharded(full_model(), reshard_after_forward=reshard)
            check_close(train(model, adamw(model), place, range(STEPS), accumulate=True), losses)
        model = sharded(full_model())
        optimizer = adamw(model)
        first, second = model.model.layers
        model.set_modules_to_forward_prefetch([first])
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
        model.unshard(async_op=True).wait()
        check_close(train(model, optimizer, place, range(STEPS)), losses)


def gradient_divide_factor(place: Place, path: str) -> None:
    """Check set_gradient_divide_factor, which uses a PREMUL_SUM reduction; gloo has none."""
    unsharded, ids = full_model(), rows_of(Place(0, 1), 0)
    unsharded(input_ids=ids, labels=ids).loss.backward()
    with process_group("pynccl", place, path):
        model, ids = sharded(full_model()), rows_of(place, 0)
        for module in (model, *model.model.layers):
            module.set_gradient_divide_factor(8.0)
        model(input_ids=ids, labels=ids).loss.backward()
        for name, parameter in model.named_parameters():
            expected = unsharded.get_parameter(name).grad * place.size / 8
            check_close(parameter.grad.full_tensor(), expected)


def test_fsdp2_gradient_divide_factor(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, gradient_divide_factor, str(tmp_path / "store"))


def test_fsdp2_options(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, fsdp2_options, str(tmp_path / "store"))


def steps_of_fsdp1(place: Place, path: str) -> None:
    losses, state = reference()
    by_backend: dict[str, list[Losses]] = {}
    for backend in ("gloo", "pynccl"):
        with process_group(backend, place, path + backend):
            for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
                model = FullyShardedDataParallel(
                    full_model(),
                    sharding_strategy=strategy,
                    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                    device_id=torch.device("cpu"),
                    use_orig_params=True,
                )
                by_backend.setdefault(backend, []).append(train(model, adamw(model), place, range(STEPS)))
                check_close(by_backend[backend][-1], losses)
                with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                    check_close({name: x.detach() for name, x in model.named_parameters()}, dict(state))
    check_close(by_backend["pynccl"], by_backend["gloo"], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_losses_match_gloo_and_single_process(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, steps_of_fsdp1, str(tmp_path / "store"))


def mesh_of(shape: tuple[int, ...]) -> Any:
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def save(place: Place, path: str, folder: str, shape: tuple[int, ...], later: bool) -> Losses:
    with process_group("pynccl", place, path):
        model = sharded(full_model(), mesh=mesh_of(shape))
        optimizer = adamw(model)
        losses = train(model, optimizer, place, range(2))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        if later:  # in a thread with its own group, while training continues
            writing: Any = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
            train(model, optimizer, place, range(2, 3))
            writing.result()
        else:
            dcp.save(state, checkpoint_id=folder)
        return losses


def resume(place: Place, path: str, folder: str) -> Losses:
    with process_group("pynccl", place, path):
        model = sharded(full_model())
        optimizer = adamw(model)
        train(model, optimizer, place, range(7, 8))  # a different state, which loading must replace
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return train(model, optimizer, place, range(2, STEPS))


@pytest.mark.parametrize(("shape", "later"), [((4,), False), ((2, 2), True)])
def test_two_ranks_resume_checkpoint_of_four(
    processes: RankPool, tmp_path: Path, shape: tuple[int, ...], later: bool
) -> None:
    losses, _ = reference()
    folder = str(tmp_path / "checkpoint")
    for first in processes.run(4, save, str(tmp_path / "four"), folder, shape, later):
        check_close(first, losses[:2])
    for then in processes.run(2, resume, str(tmp_path / "two"), folder):
        check_close(then, losses[2:])
