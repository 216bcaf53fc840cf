"""DataParallelGradients against one process that has all data, and against torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.interop.streams import Handle
from pynccl_autograd.layers.buckets import Bucket, cut_into_buckets
from pynccl_autograd.streams import side_stream

WIDTH, ROWS = 10, 6


class Model(nn.Module):
    """Branches that a rank may leave out, a layer used twice, a frozen parameter, a scalar, a channels-last weight."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 3)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.last = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.steps: Tensor
        self.register_buffer("steps", torch.tensor([True, False]))
        self.to(dtype)

    def forward(self, x: Tensor, branches: str = "lr") -> Tensor:
        x = torch.tanh(self.first(x)) * self.frozen
        y = x * self.scale
        if "l" in branches:
            y = y + self.left(x)
        if "r" in branches:
            y = y + self.right(x)
        images = F.pad(y, (0, 8)).view(-1, 2, 3, 3)
        return torch.tanh(self.last(y)) + self.conv(images).mean() + torch.tanh(self.last(x))  # used twice


def model_of(seed: int, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(seed)
    return Model(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int, branches: str = "lr", dtype: torch.dtype = torch.float64) -> Tensor:
    y: Tensor = model(batch(rank, step, dtype), branches)
    return y.square().mean()


def average(ranks: int, branches: list[str] | None = None, steps: int = 1, seed: int = 0) -> Model:
    """A model whose gradients are those of the mean of all ranks' losses, of `steps` accumulated."""
    model = model_of(seed)
    for step in range(steps):
        for rank in range(ranks):
            (loss_of(model, rank, step, branches[rank] if branches else "lr") / ranks).backward()
    return model


def assert_gradients(model: nn.Module, expected: nn.Module, rtol: float = 1e-10) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None and other.grad is not None:
            assert parameter.grad.shape == parameter.shape
            torch.testing.assert_close(
                parameter.grad, other.grad, rtol=rtol, atol=1e-12, msg=partial("{}: {}".format, name)
            )


@contextlib.contextmanager
def process_group(comm: Communicator, path: str) -> Iterator[None]:
    """gloo, of the same ranks."""
    dist.init_process_group("gloo", store=dist.FileStore(path, comm.size), rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        gc.collect()  # what holds the group
        comm.barrier()
        dist.destroy_process_group()


def equals_one_process(comm: Communicator, bucket_bytes: float, as_view: bool) -> None:
    model = model_of(seed=comm.rank)  # rank 0's are taken
    model.frozen.data += comm.rank
    model.steps.fill_(comm.rank == 0)
    averaged = ad.DataParallelGradients(model, comm, bucket_bytes, gradient_as_bucket_view=as_view)
    assert model.steps.tolist() == [True, True]
    for step in range(3):
        model.zero_grad()
        expected = model_of(seed=0)
        for rank in range(comm.size):
            (loss_of(expected, rank, step) / comm.size).backward()
        loss_of(model, comm.rank, step).backward()
        assert_gradients(model, expected)
    averaged.remove()
    model.zero_grad()
    loss_of(model, comm.rank, 0).backward()
    alone = model_of(seed=0)
    loss_of(alone, comm.rank, 0).backward()
    assert_gradients(model, alone)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize(("n", "bucket_bytes"), [(2, 1), (2, 1000), (3, 1e9)])
def test_gradients_are_those_of_one_process_with_all_data(
    ranks: RankPool, n: int, bucket_bytes: float, as_view: bool
) -> None:
    ranks.run(n, equals_one_process, bucket_bytes, as_view)


def equals_torch(comm: Communicator, path: str, as_view: bool) -> None:
    with process_group(comm, path):
        steps_like_torch(comm, as_view)  # a frame of its own: what it has made ends before the process group


def steps_like_torch(comm: Communicator, as_view: bool) -> None:
    theirs = DistributedDataParallel(
        model_of(0), find_unused_parameters=True, gradient_as_bucket_view=as_view, bucket_cap_mb=1
    )
    model = model_of(0)
    averaged = ad.DataParallelGradients(model, comm, 700, gradient_as_bucket_view=as_view)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (model, theirs)]
    for step, branches in enumerate(["lr", "l", "lr"[comm.rank % 2], "r"]):
        for accumulated in (True, False):
            with averaged.no_sync() if accumulated else contextlib.nullcontext():
                loss_of(model, comm.rank, 2 * step + accumulated, branches).backward()
            with theirs.no_sync() if accumulated else contextlib.nullcontext():
                loss_of(theirs, comm.rank, 2 * step + accumulated, branches).backward()
        assert_gradients(model, theirs.module)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("n", "as_view"), [(2, False), (2, True), (4, False)])
def test_steps_are_those_of_distributed_data_parallel(ranks: RankPool, tmp_path: Path, n: int, as_view: bool) -> None:
    """With accumulation under no_sync, and branches that are used by all ranks, some, or none."""
    ranks.run(n, equals_torch, str(tmp_path / "store"), as_view)


def unused(comm: Communicator) -> None:
    branches = ["l", "r", ""][: comm.size]
    model = model_of(0)
    averaged = ad.DataParallelGradients(model, comm, 500)
    loss_of(model, comm.rank, 0, branches[comm.rank]).backward()
    assert_gradients(model, average(comm.size, branches))
    assert model.never.weight.grad is None
    # A rank that has no loss at all:
    model.zero_grad()
    if comm.rank == 0:
        loss_of(model, 0, 0).backward()
    else:
        averaged.finish()
    expected = model_of(0)
    (loss_of(expected, 0, 0) / comm.size).backward()
    assert_gradients(model, expected)
    # One that keeps what it has accumulated, and is not used in the pass that averages:
    model.zero_grad()
    with averaged.no_sync():
        loss_of(model, comm.rank, 0, "lr").backward()
    loss_of(model, comm.rank, 1, "").backward()
    expected = average(comm.size)
    for rank in range(comm.size):
        (loss_of(expected, rank, 1, "") / comm.size).backward()
    assert_gradients(model, expected)


@pytest.mark.parametrize("n", [2, 3])
def test_what_ranks_do_not_use_counts_as_zeros_and_what_none_uses_stays_none(ranks: RankPool, n: int) -> None:
    ranks.run(n, unused)


def in_bfloat16(comm: Communicator) -> None:
    model = model_of(0, torch.float32)
    ad.DataParallelGradients(model, comm, 500, torch.bfloat16, gradient_as_bucket_view=True)
    loss_of(model, comm.rank, 0, dtype=torch.float32).backward()
    own = model_of(0, torch.float32)
    total: list[Tensor | None] = []
    for rank in range(comm.size):
        own.zero_grad()
        loss_of(own, rank, 0, dtype=torch.float32).backward()
        rounded = [None if one.grad is None else one.grad.bfloat16().double() for one in own.parameters()]
        before = total or [None] * len(rounded)
        total = [one if sum_ is None or one is None else sum_ + one for sum_, one in zip(before, rounded, strict=True)]
    for parameter, summed in zip(model.parameters(), total, strict=True):
        assert (parameter.grad is None) == (summed is None)
        if parameter.grad is not None and summed is not None:
            assert torch.equal(parameter.grad, parameter.grad.bfloat16().float())  # it travelled as such
            torch.testing.assert_close(parameter.grad.double(), summed / comm.size, rtol=2**-7, atol=1e-6)


def test_reduce_dtype_is_the_type_of_the_average(ranks: RankPool) -> None:
    ranks.run(2, in_bfloat16)


def as_on_a_gpu(side: Any, keeper: Any) -> Handle:
    """The handle of a side stream, whose buffers the keeper has to keep."""
    handle = Handle(side.stream.handle)
    handle.owner = keeper
    return handle


def dropped(comm: Communicator) -> list[int]:
    """How many bytes a pass has sent that are still there when it is over, and when all is dropped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(side_stream(comm)), "handle", as_on_a_gpu)
        sent: list[weakref.ref[Tensor]] = []
        launch = type(comm).all_reduce

        def all_reduce(self: Any, send: Tensor, *args: Any, **options: Any) -> Any:
            sent.append(weakref.ref(send))
            return launch(self, send, *args, **options)

        patch.setattr(type(comm), "all_reduce", all_reduce)
        model = model_of(0, torch.float32)
        averaged = ad.DataParallelGradients(model, comm, 500, torch.bfloat16)
        flats = [weakref.ref(bucket.flat) for bucket in averaged._buckets]
        for step in range(4):  # a call is kept when it is made for the second time
            loss_of(model, comm.rank, step, dtype=torch.float32).backward()
        gc.collect()
        between = sum(one.nbytes for ref in sent if (one := ref()) is not None)
        averaged.remove()
        del averaged, model
        gc.collect()
    assert len(sent) >= 8
    return [between, sum(one.nbytes for ref in (*sent, *flats) if (one := ref()) is not None)]


def test_what_was_sent_goes_with_the_pass_and_the_buckets_with_the_model(ranks: RankPool) -> None:
    assert ranks.run(2, dropped) == [[0, 0]] * 2


def complex_numbers(comm: Communicator) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 5, dtype=torch.complex128)
    whole = copy.deepcopy(model)
    ad.DataParallelGradients(model, comm, 100, torch.float32)
    model(batch(comm.rank, 0) * (1 + 2j)).abs().square().sum().backward()
    for rank in range(comm.size):
        (whole(batch(rank, 0) * (1 + 2j)).abs().square().sum() / comm.size).backward()
    assert_gradients(model, whole, rtol=1e-5)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, model.weight.grad.to(torch.complex64).to(torch.complex128))


def test_complex_gradients_are_averaged_in_a_real_type(ranks: RankPool) -> None:
    ranks.run(2, complex_numbers)


def views(comm: Communicator) -> None:
    model = model_of(0)
    averaged = ad.DataParallelGradients(model, comm, 1000, gradient_as_bucket_view=True)
    loss_of(model, comm.rank, 5).backward()  # after which the buckets may be made anew
    averaged.zero_grad()
    addresses = [one.grad.data_ptr() for one in model.parameters() if one.grad is not None]
    for step in range(2):
        loss_of(model, comm.rank, step).backward()
    for way in ("zeros", "none"):
        if way == "zeros":
            averaged.zero_grad()
        else:
            model.zero_grad(set_to_none=True)
        loss_of(model, comm.rank, 0).backward()
        expected = average(comm.size)
        if way == "zeros":  # which also what is never used has
            assert [one.grad.data_ptr() for one in model.parameters() if one.grad is not None] == addresses
            for parameter in expected.never.parameters():
                parameter.grad = torch.zeros_like(parameter)
        assert_gradients(model, expected)
    assert model.conv.weight.grad is not None
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()


def test_gradients_stay_views_of_the_buckets(ranks: RankPool) -> None:
    ranks.run(2, views)


class OneDevice(TorchDispatchMode):
    """Refuses what reads the CPU and writes to another device: a copy that waits for the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        devices = {t.device.type for t in args if isinstance(t, Tensor) and t.dim()}
        assert len(devices) < 2, f"{func} of tensors on {devices}"
        return func(*args, **(kwargs or {}))


def test_a_bucket_is_filled_without_a_copy_from_the_cpu() -> None:
    """Which waits in the middle of a backward pass, and is an error in the capture of a CUDA graph."""
    parameters = [(str(size), nn.Parameter(torch.zeros(size, device="meta"))) for size in (3, 5, 4)]
    for _, parameter in parameters[::2]:
        parameter.grad = torch.zeros_like(parameter)
    bucket = Bucket(parameters)
    with OneDevice():
        bucket.fill()


def test_a_bucket_marks_whose_gradients_there_are() -> None:
    parameters = [(str(size), nn.Parameter(torch.zeros(size))) for size in (3, 5, 4)]
    bucket = Bucket(parameters)
    for has in ([True, False, True], [False, False, False], [True, True, True]):
        for (_, parameter), there in zip(parameters, has, strict=True):
            parameter.grad = torch.ones_like(parameter) if there else None
        bucket.fill()
        assert bucket.marks.bool().tolist() == has
        assert [bool(view.all()) for view in bucket.views] == has


def sizes(kilobytes: list[int], nbytes: float) -> list[list[int]]:
    """Of the parameters in each bucket, KB."""
    named = [(str(place), nn.Parameter(torch.zeros(250 * size))) for place, size in enumerate(kilobytes)]
    return [[one.nbytes // 1000 for _, one in bucket] for bucket in cut_into_buckets(named, nbytes)]


def test_buckets_are_full_with_bucket_bytes_or_an_eighth_of_all() -> None:
    assert sizes([3, 2, 1], 1) == [[1], [2], [3]]
    assert sizes([10, 5, 5, 1] * 10, 12e3) == [[1, 5, 5, 10]] * 10  # by the one that fills it up
    assert sizes([1] * 80, 1e9) == [[1] * 80]  # of a small model one is better
    assert sizes([1] * 80, 100e3) == [[1] * 10] * 8
    assert sizes([1] * 80, 320e3) == [[1] * 20] * 4
    assert sizes([1, 40, 1], 1e9) == [[1, 40, 1]]


class Branches(nn.Module):
    """Whose gradients come in another order on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(6))
        self.order = list(range(6))[rank:] + list(range(6))[:rank]

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = torch.tanh(self.layers[place](x))
        return x


def launched_early(comm: Communicator) -> None:
    model = Branches(0)
    averaged = ad.DataParallelGradients(model, comm, 1)
    counts: list[int] = []
    x = batch(comm.rank, 0).requires_grad_()
    x.register_hook(lambda g: counts.append(len(averaged._launched)))
    with averaged.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    none, most = counts
    assert none == 0 and 10 <= most <= 12  # of 12 parameters, before the pass has ended


def test_buckets_travel_while_the_backward_pass_goes_on(ranks: RankPool) -> None:
    ranks.run(2, launched_early)


class Backwards(nn.Module):
    """Defined in the order of the backward pass, with a layer that is not used between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for place in (6, 5, 4, 2, 1, 0):
            x = torch.tanh(self.layers[place](x))
        return x


def made_anew(comm: Communicator, as_view: bool) -> list[int]:
    torch.manual_seed(0)
    model = Backwards()
    expected = copy.deepcopy(model)
    averaged = ad.DataParallelGradients(model, comm, 1, gradient_as_bucket_view=as_view)
    if comm.rank == 0:  # it shows no order: the next pass does
        averaged.finish()
    else:
        model(batch(comm.rank, 7)).sum().backward()
    model.zero_grad()
    counts: list[int] = []
    for step in range(3):  # .grad is added to, across the change
        x = batch(comm.rank, step).requires_grad_()
        x.register_hook(lambda g: counts.append(len(averaged._launched)))
        model(x).square().mean().backward()
        for rank in range(comm.size):
            (expected(batch(rank, step)).square().mean() / comm.size).backward()
        assert_gradients(model, expected)
    return counts


@pytest.mark.parametrize("as_view", [False, True])
def test_buckets_follow_the_order_of_the_gradients_of_the_first_pass(ranks: RankPool, as_view: bool) -> None:
    for counts in ranks.run(2, made_anew, as_view):
        assert counts[0] <= 2  # the first to leave was that which is full last
        assert min(counts[1:]) >= 10  # of 12 that are used


def in_other_orders(comm: Communicator) -> None:
    torch.manual_seed(0)
    models = [Branches(rank) for rank in range(comm.size)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    expected: list[Tensor] = []
    for rank, model in enumerate(models):
        (model(batch(rank, 0)).square().mean() / comm.size).backward()
        grads = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        expected = [a + b for a, b in zip(expected, grads, strict=True)] if expected else grads
    model = models[comm.rank]
    model.zero_grad()
    ad.DataParallelGradients(model, comm, 1)
    model(batch(comm.rank, 0)).square().mean().backward()
    for parameter, total in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total, rtol=1e-10, atol=1e-12)


def test_ranks_whose_gradients_come_in_other_orders_meet(ranks: RankPool) -> None:
    ranks.run(3, in_other_orders)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(4))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.use_reentrant))
        return x


def checkpointed(comm: Communicator, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant)
    expected = copy.deepcopy(model)
    averaged = ad.DataParallelGradients(model, comm, 1500)
    model(batch(comm.rank, 0).requires_grad_()).square().mean().backward()
    for rank in range(comm.size):
        (expected(batch(rank, 0).requires_grad_()).square().mean() / comm.size).backward()
    assert_gradients(model, expected)
    assert averaged is not None
    if use_reentrant:
        model.zero_grad()
        with pytest.raises(RuntimeError, match="has its gradient twice in one backward pass"):
            model(model(batch(comm.rank, 0).requires_grad_())).sum().backward()
    model.zero_grad()  # a pass that raised leaves nothing behind
    model(batch(comm.rank, 0).requires_grad_()).square().mean().backward()
    assert_gradients(model, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_both_kinds(ranks: RankPool, use_reentrant: bool) -> None:
    ranks.run(2, checkpointed, use_reentrant)


def other_uses(comm: Communicator) -> None:
    model = model_of(0)
    ad.DataParallelGradients(model, comm)
    (grad,) = torch.autograd.grad(loss_of(model, comm.rank, 0), [model.scale])
    alone = model_of(0)
    (expected,) = torch.autograd.grad(loss_of(alone, comm.rank, 0), [alone.scale])
    torch.testing.assert_close(grad, expected)
    loss = loss_of(model, comm.rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()  # to the average of the first is added
    assert_gradients(model, twice(comm.size))
    copied = copy.deepcopy(model)
    copied.zero_grad()
    loss_of(copied, comm.rank, 0).backward()
    loss_of(alone, comm.rank, 0).backward()
    assert_gradients(copied, alone)  # a copy is not averaged
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    loss_of(compiled, comm.rank, 0).backward()
    assert_gradients(model, average(comm.size))


def twice(ranks: int) -> Model:
    model = average(ranks)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 2
    return model


def test_other_ways_to_differentiate(ranks: RankPool) -> None:
    """torch.autograd.grad, a graph that is used twice, a copy of the model, torch.compile."""
    ranks.run(2, other_uses)


class TensorParallel(nn.Module):
    def __init__(self, up: nn.Module, norm: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = up, norm, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return y


def whole_model() -> TensorParallel:
    torch.manual_seed(0)
    return TensorParallel(nn.Linear(WIDTH, 8), nn.LayerNorm(WIDTH), nn.Linear(8, WIDTH)).double()


def adamw(named: Any) -> torch.optim.Optimizer:
    """Without decay of biases, by name."""
    biases = [one for one in named if one[0].endswith("bias")]
    others = [one for one in named if not one[0].endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.1}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def tensor_parallel(comm: Communicator) -> None:
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        whole, place = whole_model(), mesh.coordinate["dp"]
        assert isinstance(whole.up, nn.Linear) and isinstance(whole.down, nn.Linear)
        up, down = (
            ad.ColumnParallelLinear.from_linear(whole.up, mesh["tp"]),
            ad.RowParallelLinear.from_linear(whole.down, mesh["tp"]),
        )
        model = TensorParallel(up, copy.deepcopy(whole.norm), down)
        ad.DataParallelGradients(model, mesh["dp"], 300)
        optimizer = adamw(list(model.named_parameters()))
        reference = adamw(list(whole.named_parameters()))
        for step in range(3):
            model(batch(place, step)).square().sum().backward()
            for rank in range(2):
                (whole(batch(rank, step)).square().sum() / 2).backward()
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            norm = ad.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0.0)
            reference.step()
            reference.zero_grad()
        for (name, parameter), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            shard = getattr(parameter, "shard", None)
            own = full if shard is None or shard.dim is None else shard.own(full)
            torch.testing.assert_close(parameter, own, rtol=1e-6, atol=1e-7, msg=partial("{}: {}".format, name))


def test_parameters_cut_over_another_axis(ranks: RankPool) -> None:
    ranks.run(4, tensor_parallel)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,  # of which two ranks have unequal parts
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).double()


def words(rank: int, number: int) -> dict[str, Tensor]:
    ids = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(100 * number + rank))
    return {"input_ids": ids, "labels": ids}


def sequence_parallel(comm: Communicator, bucket_bytes: float) -> None:
    """Of which the other axis is finished in the same pass: it averages whole gradients."""
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        whole, place = llama(), mesh.coordinate["dp"]
        model: Any = ad.parallelize(copy.deepcopy(whole), mesh["tp"], ad.plans.llama)
        ad.finish_gradients_in_backward(model)
        averaged = ad.DataParallelGradients(model, mesh["dp"], bucket_bytes)
        optimizer, reference = adamw(list(model.named_parameters())), adamw(list(whole.named_parameters()))

        def backward(number: int) -> None:
            model(**words(place, number)).loss.backward()
            for rank in range(2):
                (whole(**words(rank, number)).loss / 2).backward()

        for step in range(3):
            with averaged.no_sync():
                backward(10 * step)
            backward(10 * step + 1)
            backward(10 * step + 2)  # to the average is added
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            torch.testing.assert_close(ad.clip_grad_norm_(model, 0.5).double(), expected, rtol=1e-6, atol=0.0)
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        for (name, parameter), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            shard = getattr(parameter, "shard", None)
            own = full if shard is None else shard.own(full)
            torch.testing.assert_close(parameter, own, rtol=1e-7, atol=1e-9, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("bucket_bytes", [1e9, 2000])
def test_what_sequence_parallelism_leaves_partial_is_finished_in_the_same_pass(
    ranks: RankPool, bucket_bytes: float
) -> None:
    pytest.importorskip("transformers")
    ranks.run(4, sequence_parallel, bucket_bytes)


def wrong(comm: Communicator) -> None:
    model = model_of(0)

    def refuses(kind: type[Exception], match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            ad.DataParallelGradients(*args, **options)

    refuses(TypeError, r"model is \[\], expected a torch\.nn\.Module", [], comm)
    refuses(TypeError, "comm is None", model, None)
    for nbytes in (0, -1, "25", True, float("nan")):
        refuses(ValueError, "bucket_bytes is", model, comm, nbytes)
    refuses(TypeError, "reduce_dtype is 'bf16'", model, comm, reduce_dtype="bf16")
    refuses(TypeError, r"reduce_dtype is torch\.int32", model, comm, reduce_dtype=torch.int32)
    refuses(ValueError, "no parameter that requires a gradient", nn.Linear(2, 2).requires_grad_(False), comm)
    refuses(ValueError, "weight is on meta", nn.Linear(2, 2, device="meta"), comm)
    refuses(TypeError, "sparse gradients", nn.Embedding(4, 2, sparse=True), comm)
    refuses(ValueError, "rank 1 and rank 0 differ in names, shapes", nn.Linear(2, 2 + comm.rank), comm)
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2 + comm.rank).requires_grad_(False))
    refuses(ValueError, "rank 1 and rank 0 differ in names, shapes", frozen, comm)
    ad.DataParallelGradients(frozen, comm, broadcast=False)
    refuses(ValueError, "rank 1 and rank 0 differ in bucket_bytes", model, comm, 100 + comm.rank)
    fused = nn.Linear(2, 2)
    fused.weight.main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
    refuses(ValueError, "weight has main_grad", fused, comm)
    averaged = ad.DataParallelGradients(model, comm)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(averaged).__reduce_ex__(2)
    shared = nn.Linear(4, 3)
    ad.DataParallelGradients(shared, comm)
    ids = torch.tensor([0, 2])
    with pytest.raises(TypeError, match=r"the gradient of weight is torch\.sparse_coo, expected a dense one"):
        F.embedding(ids, shared.weight, sparse=True).sum().backward()


def test_what_is_wrong_is_said_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(2, wrong)
