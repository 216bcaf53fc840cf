"""DTensor, parallelize_module, pipelines and functional collectives with "pynccl", also alongside pynccl_autograd."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from process_groups import numbers, process_group
from ranks import Place, RankPool
from small_transformers import SEQUENCE, TOLERANCE, batch, compare, llama
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import pynccl_autograd as ad
from pynccl import Communicator

EXACT = TOLERANCE[torch.float64]
EACH = (Shard(0), Shard(1), Replicate())


def full(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def layouts(place: Place, path: str) -> None:
    with process_group("pynccl", place, path):
        mesh = init_device_mesh("cpu", (place.size,))
        for shape, dtype in itertools.product(
            [(8, 4), (5, 3), (2, 1, 7)], [torch.float32, torch.bfloat16, torch.int64]
        ):
            x = numbers(0, *shape, dtype=dtype)
            source = x if place.rank == 0 else torch.zeros_like(x)  # rank 0's values are used
            for a, b in itertools.product(EACH, EACH):
                moved = distribute_tensor(source, mesh, [a]).redistribute(mesh, [b])
                assert moved.placements == (b,) and torch.equal(moved.full_tensor(), x), (shape, dtype, a, b)
                chunks = x.chunk(place.size, b.dim) if isinstance(b, Shard) else [x] * place.size
                if place.rank < len(chunks):
                    assert torch.equal(moved.to_local(), chunks[place.rank]), (shape, dtype, a, b)
        parts = torch.stack([numbers(rank, 8, 5) for rank in range(place.size)])
        sums = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.amax(0), "min": parts.amin(0)}
        for (op, expected), to in itertools.product({**sums, "product": parts.prod(0)}.items(), EACH):
            partial_input = DTensor.from_local(parts[place.rank], mesh, [Partial(op)])
            assert torch.equal(partial_input.redistribute(mesh, [to]).full_tensor(), expected), (op, to)


@pytest.mark.parametrize("n", (2, 4))
def test_dtensor_redistribute(processes: RankPool, n: int, tmp_path: Path) -> None:
    processes.run(n, layouts, str(tmp_path / "store"))


def layouts_of_two_axes(place: Place, path: str) -> None:
    with process_group("pynccl", place, path):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = numbers(0, 6, 5)
        pairs: list[tuple[Placement, ...]] = list(itertools.product(EACH, EACH))
        for before, after in itertools.product(pairs, pairs):
            moved = distribute_tensor(x, mesh, before).redistribute(mesh, after)
            assert torch.equal(moved.full_tensor(), x), (before, after)
        unsharded, weight = x.double().requires_grad_(), numbers(1, 5, 4).double().requires_grad_()
        (unsharded @ weight).relu().sum().backward()
        for before, after in zip(pairs, reversed(pairs), strict=True):
            left = distribute_tensor(unsharded.detach(), mesh, before).requires_grad_()
            right = distribute_tensor(weight.detach(), mesh, after).requires_grad_()
            product: Any = left @ right
            full(product.redistribute(mesh, before).relu().sum()).backward()
            for sharded, expected in ((left.grad, unsharded.grad), (right.grad, weight.grad)):
                torch.testing.assert_close(full(sharded), expected, **EXACT)


def test_dtensor_redistribute_on_2d_mesh(processes: RankPool, tmp_path: Path) -> None:
    processes.run(4, layouts_of_two_axes, str(tmp_path / "store"))


def with_dtensor(model: Any, mesh: DeviceMesh) -> Any:
    """Parallelize Llama with sequence parallelism, as torchtitan does."""
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    input_layouts, desired_layouts = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    for layer in model.model.layers:
        block = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts=input_layouts, desired_input_kwarg_layouts=desired_layouts
            ),
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, block)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def unsharded_llama() -> Any:
    torch.manual_seed(0)
    return llama().double()


def loss_of(model: Any, step: int) -> torch.Tensor:
    """Return the loss in the dtype of the model: transformers' own converts the logits to float32."""
    places, words = torch.arange(SEQUENCE).unsqueeze(0), batch(step)
    logits = full(model(words["input_ids"], position_ids=places, use_cache=False).logits)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words["labels"][:, 1:].flatten())


def same_gradients(model: nn.Module, unsharded: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), unsharded.get_parameter(name).grad, **EXACT)


def share_group(place: Place, path: str) -> None:
    """Train with torch's and with our tensor parallelism alternately, over one group."""
    with process_group("pynccl", place, path):
        unsharded, mesh = unsharded_llama(), init_device_mesh("cpu", (place.size,), mesh_dim_names=("tp",))
        theirs = with_dtensor(copy.deepcopy(unsharded), mesh)
        comm = Communicator.from_process_group(mesh.get_group("tp"))
        ours: Any = ad.parallelize(copy.deepcopy(unsharded), comm, ad.plans.llama)
        optimizers = [sgd(model) for model in (unsharded, theirs, ours)]
        for step in range(3):
            losses = [loss_of(model, step) for model in (unsharded, theirs, ours)]
            for loss in losses:
                torch.testing.assert_close(loss, losses[0], **EXACT)
                loss.backward()
            ad.finish_gradients(ours)
            same_gradients(theirs, unsharded)
            compare(ours, unsharded, EXACT)
            norm = nn.utils.clip_grad_norm_(unsharded.parameters(), 0.5)
            torch.testing.assert_close(full(nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)), norm, **EXACT)
            torch.testing.assert_close(ad.clip_grad_norm_(ours.parameters(), 0.5), norm, **EXACT)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="DTensor of torch 2.11 trains this model wrongly, over gloo too")
def test_torch_and_pynccl_autograd_tensor_parallel_share_a_group(processes: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    processes.run(2, share_group, str(tmp_path / "store"))


def two_axes(place: Place, path: str) -> None:
    """Combine fully_shard over one mesh axis with tensor parallelism over the other: torch's and ours."""
    with process_group("pynccl", place, path):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        replica = mesh["dp"].get_local_rank()
        unsharded = unsharded_llama()
        theirs = with_dtensor(copy.deepcopy(unsharded), mesh["tp"])
        tp = Communicator.from_process_group(mesh.get_group("tp"))
        ours: Any = ad.parallelize(copy.deepcopy(unsharded), tp, ad.plans.llama)
        with ad.keep_shards(ours):
            for block in (*theirs.model.layers, theirs, *ours.model.layers, ours):
                fully_shard(block, mesh=mesh["dp"])
        optimizers = [sgd(model) for model in (unsharded, theirs, ours)]
        for step in range(2):
            batches = [10 * step + each for each in range(2)]
            expected = [loss_of(unsharded, each) for each in batches]
            (torch.stack(expected).mean()).backward()
            for model in (theirs, ours):
                loss = loss_of(model, batches[replica])
                torch.testing.assert_close(loss, expected[replica], **EXACT)
                loss.backward()
            ad.finish_gradients(ours)
            same_gradients(theirs, unsharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(full(value), unsharded.state_dict()[name], **EXACT)
        found = ad.full_state_dict(ours, Communicator.from_process_group(), rank0_only=False)
        torch.testing.assert_close(found, {**unsharded.state_dict()}, **EXACT)


def test_tensor_parallel_with_fully_shard(processes: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    processes.run(4, two_axes, str(tmp_path / "store"))


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).double() for _ in range(count)]


def pipeline(place: Place, path: str) -> None:
    r, n, mse = place.rank, place.size, nn.functional.mse_loss
    x, y = numbers(0, 8, 6).double(), numbers(1, 8, 6).double()
    with process_group("pynccl", place, path):
        for schedule, each in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
            unsharded, parts = blocks(n * each), blocks(n * each)
            expected = mse(nn.Sequential(*unsharded)(x), y)
            expected.backward()
            indices = range(r, n * each, n)
            mine, right = (nn.ModuleList(models[i] for i in indices) for models in (parts, unsharded))
            stages = [PipelineStage(parts[i], i, n * each, torch.device("cpu")) for i in indices]
            made: Any = schedule(stages if each > 1 else stages[0], 4, mse)  # type: ignore[operator]
            for _ in range(2):
                losses: list[torch.Tensor] = []
                mine.zero_grad()
                made.step(*([x] if r == 0 else []), **({"target": y, "losses": losses} if r == n - 1 else {}))
                if r == n - 1:
                    torch.testing.assert_close(torch.stack(losses).mean(), expected.detach())
                for a, b in zip(mine.parameters(), right.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad, msg=schedule.__name__)


def test_pipelines(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, pipeline, str(tmp_path / "store"))


def functional(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    total, rows = fc.all_reduce(x * 2, "sum", group), fc.all_gather_tensor(x + 1, 0, group)
    part = fc.reduce_scatter_tensor(rows * rows, "avg", 1, group)
    swapped = fc.all_to_all_single(x + 1, None, None, group)
    several = fc.all_reduce_coalesced([x, total], "max", group)
    return total, rows, part, swapped, fc.broadcast(x, 1, group), *several


def expected_results(xs: list[torch.Tensor], rank: int) -> tuple[torch.Tensor, ...]:
    n, every, total = len(xs), torch.cat(xs) + 1, 2 * torch.stack(xs).sum(0)
    swapped = torch.cat([x.chunk(n)[rank] + 1 for x in xs])
    return total, every, (every * every).chunk(n, 1)[rank], swapped, xs[1], torch.stack(xs).amax(0), total


def differentiable(x: torch.Tensor, group: Any) -> torch.Tensor:
    rows = fc.all_gather_tensor_autograd(x.sin(), 0, group)
    part = fc.reduce_scatter_tensor_autograd(rows * rows, "sum", 0, group)
    return fc.all_to_all_single_autograd(part.exp(), None, None, group) * x


def compiled(place: Place, path: str) -> None:
    with process_group("pynccl", place, path):
        group, x = dist.group.WORLD, numbers(place.rank, 4, 6)
        leaf = x.div(8).double().requires_grad_()
        expected = expected_results([numbers(rank, 4, 6) for rank in range(place.size)], place.rank)
        out = differentiable(leaf, group)
        [slope] = torch.autograd.grad(out.sum(), leaf)
        assert all(map(torch.equal, functional(x, group), expected))
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            found = torch.compile(functional, fullgraph=True, backend=backend)(x, group)
            assert all(map(torch.equal, found, expected)), backend
            again = torch.compile(differentiable, fullgraph=True, backend=backend)(leaf, group)
            torch.testing.assert_close(again, out, **EXACT)
            torch.testing.assert_close(torch.autograd.grad(again.sum(), leaf)[0], slope, **EXACT)
        torch._dynamo.reset()


def test_functional_collectives_compiled(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, compiled, str(tmp_path / "store"))


def mesh_communicators(place: Place, path: str) -> None:
    with process_group("pynccl", place, path):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        comms = {name: Communicator.from_process_group(mesh.get_group(name)) for name in ("dp", "tp")}
        for name, comm in comms.items():
            assert Communicator.from_process_group(mesh.get_group(name)) is comm
            assert (comm.size, comm.rank) == (2, mesh.get_local_rank(name))
            ranks = dist.get_process_group_ranks(mesh.get_group(name))
            x = numbers(place.rank, 3, 4).double().requires_grad_()
            y = ad.all_reduce(x, comm=comm, grad="sum")
            assert torch.equal(y, sum(numbers(rank, 3, 4).double() for rank in ranks))
            y.backward(torch.full_like(y, place.rank + 1.0))
            assert torch.equal(x.grad, torch.full_like(x, sum(ranks) + 2.0))  # type: ignore[arg-type]
            z = y.detach().clone()
            dist.all_reduce(z, group=mesh.get_group(name))  # the group still works
            assert torch.equal(z, 2 * y)
        assert Communicator.from_process_group() is Communicator.from_process_group(dist.group.WORLD)


def test_communicators_of_mesh_axes(processes: RankPool, tmp_path: Path) -> None:
    processes.run(4, mesh_communicators, str(tmp_path / "store"))


def compiled_calls(place: Place, path: str) -> None:
    """Lengths that differ by rank: the compiler must not order the calls by memory."""
    rows = (64, 1024) if place.rank == 0 else (1024, 64)
    leaves = [numbers(place.rank + i, n, 4, dtype=torch.float64) for i, n in enumerate(rows)]

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        s, t, ignored = a.mean(0), b.mean(0), a.sum(0)
        dist.all_reduce(ignored)
        dist.all_reduce(s)
        dist.all_reduce(t)
        return torch.stack([(t * b.square()).mean(0), (s * a.square()).mean(0)])

    with process_group("pynccl", place, path), torch.no_grad():
        torch.testing.assert_close(torch.compile(program, fullgraph=True)(*leaves), program(*leaves))


def test_compiled_code_calls_the_backend_in_its_order(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, compiled_calls, str(tmp_path / "store"), timeout=110)
