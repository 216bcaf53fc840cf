"""Within pynccl.group(), which launches at its end, each function works or raises at once, with its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator, NcclInvalidUsage

# They do not communicate, or their results are read only after the block.
WORK = {
    *("copy", "split", "nn.Copy", "nn.Split", "VocabParallelHead", "KeyValueLinear", "rng.sharded", "rng.replicated"),
    *("finish_gradients_in_backward", "dcp_state_dict", "dcp_optimizer_state_dict", "key_of", "set_side_stream"),
    *("Mesh", "Partition", "CartesianPartition", "CommOverlap", "CommOverlapHelper.all_gather"),
}
# What the error names in place of the function: the collective that it runs.
NAMED = {
    "send_recv": "permute",
    "vocab_parallel_cross_entropy": "extremum",
    "AllSumReduce": "all_reduce",
    "VocabParallelEmbedding": "all_reduce",
    "start": "all_reduce",
    "a backward pass": "reduce_scatter",
}
NOT_CALLED = {
    # modules, constants, and functions that take no communicator
    *("nn", "operators", "overlap", "partition", "plans", "rng", "testing", "TOLERANCE", "anchor", "describe"),
    *("set_shard", "keep_shards", "decisions", "retry", "save", "load", "recording", "report", "zero_volume_tensor"),
    *("get_state", "set_state"),
    # types: what functions return or raise, options, base classes
    *("Shard", "PreMul", "OverlapConfig", "Decision", "Report", "Slices", "Trace", "Tracing", "Work", "Collective"),
    *("AdjointError", "GradientError", "ModelError", "ModelReport", "Difference", "IncompatibleKeys"),
    *("FinishedInBackward", "CommOverlapP2P"),
    # the autograd.Functions of functions that are called
    *("AllGather", "AllReduce", "AllToAll", "AtRoot", "Broadcast", "Coalesced", "Copy", "Extremum", "Gather"),
    *("HaloExchange", "HaloReduce", "Permute", "Product", "Reduce", "ReduceScatter", "Scatter", "Split"),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def parallel(comm: Communicator) -> nn.Module:
    torch.manual_seed(0)
    return ad.parallelize(Net(), comm, {"up": "column", "down": "row"}, sequence_parallel=False)


def enter(block: Any) -> None:
    with block:
        pass


def calls(comm: Communicator, folder: str) -> dict[str, Callable[[], Any]]:
    """Return a call of each function, by name."""
    x, w = torch.arange(16.0).view(4, 4).requires_grad_(), torch.ones(4, 4)
    double, ids, other = x.detach().double(), torch.tensor([0, 1, 2, 3]), comm.split(0, comm.rank)
    assert other is not None
    overlap: dict[str, Any] = {"overlap": ad.OverlapConfig("slices", chunks=2)}
    model = parallel(comm)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    full, state = ad.full_state_dict(model, rank0_only=False), ad.full_optimizer_state_dict(model, optimizer)
    bias, averaged = nn.Linear(1, 4), nn.Linear(4, 4)
    ad.set_shard(bias.weight, ad.Shard(comm, None, bias.weight.shape, partial=True))
    bias.weight.grad = torch.ones(4, 1)
    data_parallel = ad.DataParallelGradients(averaged, comm)
    both, first = ad.CartesianPartition(comm, (2,)), ad.CartesianPartition(comm, (1,), ranks=[0])
    helper, dropout, gathered = ad.CommOverlapHelper(comm), ad.Dropout(0.5, other), ad.all_gather(x, comm, grad="sum")
    column = ad.ColumnParallelLinear(4, 8, comm, sequence_parallel=True, **overlap)
    row = ad.RowParallelLinear(8, 4, comm, sequence_parallel=True, **overlap)
    key_value, head = ad.KeyValueLinear(4, 8, comm, shared=other), ad.VocabParallelHead(4, 8, comm)
    embedding = ad.VocabParallelEmbedding(8, 4, comm)
    (scaler := ad.GradScaler(comm)).scale(torch.ones(()))
    ad.rng.seed(0, comm)
    found: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: ad.all_reduce(x, comm, grad="sum"),
        "all_gather": lambda: ad.all_gather(x, comm, grad="sum"),
        "reduce_scatter": lambda: ad.reduce_scatter(x, comm),
        "broadcast": lambda: ad.broadcast(x, comm, 0, grad="sum"),
        "reduce": lambda: ad.reduce(x, comm, 0),
        "scatter": lambda: ad.scatter(x, comm, 0),
        "gather": lambda: ad.gather(x, comm, 0),
        "all_to_all": lambda: ad.all_to_all(x, comm),
        "all_to_all, recv_splits unknown": lambda: ad.all_to_all(x, comm, send_splits=[2, 2]),
        "permute": lambda: ad.permute(x, comm, [(0, 1), (1, 0)]),
        "send_recv": lambda: ad.send_recv(x, comm, 1 - comm.rank, 1 - comm.rank),
        "halo_exchange": lambda: ad.halo_exchange(x, comm, 0, 1),
        "copy": lambda: ad.copy(x, comm),
        "split": lambda: ad.split(x, comm),
        "a backward pass": lambda: gathered.sum().backward(),
        "start": lambda: ad.start(ad.all_reduce, x, comm, grad="sum").wait(),
        "all_gather_matmul": lambda: ad.all_gather_matmul(x, w, comm, **overlap),
        "matmul_reduce_scatter": lambda: ad.matmul_reduce_scatter(x, w, comm, **overlap),
        "matmul_all_reduce": lambda: ad.matmul_all_reduce(x, w, comm, **overlap),
        "copy_matmul": lambda: ad.copy_matmul(x, w, comm, **overlap),
        "ColumnParallelLinear": lambda: column(x),
        "RowParallelLinear": lambda: row(x),
        "KeyValueLinear": lambda: key_value(x),
        "VocabParallelHead": lambda: head(x),
        "VocabParallelEmbedding": lambda: embedding(ids),
        "vocab_parallel_cross_entropy": lambda: ad.vocab_parallel_cross_entropy(x, ids, comm),
        "Dropout": lambda: dropout(x),
        "rng.seed": lambda: ad.rng.seed(1, comm),
        "rng.sharded": lambda: enter(ad.rng.sharded(comm)),
        "rng.replicated": lambda: enter(ad.rng.replicated(comm)),
        "parallelize": lambda: parallel(comm),
        "Net": lambda: model(x),
        "DataParallelGradients": lambda: ad.DataParallelGradients(nn.Linear(4, 4), comm),
        "DataParallelGradients, finish": data_parallel.finish,
        "DataParallelGradients, backward": lambda: averaged(x).sum().backward(),
        "finish_gradients": lambda: ad.finish_gradients(bias),
        "finish_gradients_in_backward": lambda: ad.finish_gradients_in_backward(bias).remove(),
        "clip_grad_norm_": lambda: ad.clip_grad_norm_(model, 1.0),
        "GradScaler": lambda: scaler.unscale_(optimizer),
        "full_state_dict": lambda: ad.full_state_dict(model),
        "load_full_state_dict": lambda: ad.load_full_state_dict(model, full),
        "save_full_state_dict": lambda: ad.save_full_state_dict(model, f"{folder}/model"),
        "full_optimizer_state_dict": lambda: ad.full_optimizer_state_dict(model, optimizer),
        "load_full_optimizer_state_dict": lambda: ad.load_full_optimizer_state_dict(model, optimizer, state),
        "dcp_state_dict": lambda: list(ad.dcp_state_dict(model)),
        "dcp_optimizer_state_dict": lambda: list(ad.dcp_optimizer_state_dict(model, optimizer).state_dict()),
        "Mesh": lambda: ad.Mesh(comm, {"a": 2, "b": 1})["b"].size,
        "Partition": lambda: ad.Partition(comm, [0, 1]).size,
        "CartesianPartition": lambda: ad.CartesianPartition(comm, (2,)).size,
        "AllSumReduce": lambda: ad.AllSumReduce(both, (0,))(x),
        "SumReduce": lambda: ad.SumReduce(both, first)(x),
        "Repartition": lambda: ad.Repartition(both, first)(x),
        "Broadcast": lambda: ad.partition.Broadcast(first, both)(x),
        "CommOverlapHelper": lambda: ad.CommOverlapHelper(comm),
        "CommOverlapHelper.all_gather": lambda: helper.all_gather(x.detach()),
        "CommOverlap": lambda: ad.CommOverlap(helper, [4, 4], torch.float32).close(),
        "set_side_stream": lambda: ad.set_side_stream(comm.split(0, 0), pynccl.create_stream()),
        "trace": lambda: enter(ad.trace(f"{folder}/trace.json", comm)),
        "check_adjoint": lambda: ad.testing.check_adjoint(torch.neg, double, comm),
        "check_gradients": lambda: ad.testing.check_gradients(torch.square, double, comm),
        "check_model": lambda: ad.testing.check_model(model, Net(), x.detach(), comm),
        "key_of": lambda: ad.key_of(comm),
    }  # fmt: skip
    for name, kind in vars(ad.nn).items():
        if inspect.isclass(kind) and issubclass(kind, ad.nn.Operation) and kind is not ad.nn.Operation:
            needed = {"grad": "sum", "root": 0, "edges": [(0, 1), (1, 0)], "halo": 1, "dim": 0}
            options = {key: needed[key] for key in inspect.signature(kind).parameters if key in needed}
            found[f"nn.{name}"] = partial(kind(comm, **options), x)
    return found


def check_calls(comm: Communicator, folder: str) -> list[str]:
    made = calls(comm, folder)
    assert made.keys() >= WORK
    for name, call in made.items():
        if name in WORK:
            with pynccl.group():
                found = call()
            expected = call()
            assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected, name
            continue
        words = r"\w+" if name.startswith("nn.") else NAMED.get(name, name.partition(",")[0])
        with pytest.raises(NcclInvalidUsage, match=rf"^{words} within a pynccl\.group\(\)"), pynccl.group():
            call()
            pytest.fail(f"{name} did not raise")
    assert float(comm.all_reduce(torch.ones(1))) == comm.size  # the ranks are in step
    return list(made)


def test_each_function_works_within_a_group_or_raises_with_its_name(ranks: RankPool, tmp_path: Any) -> None:
    called, _ = ranks.run(2, check_calls, str(tmp_path))
    names = {*ad.__all__, *ad.testing.__all__, *ad.overlap.__all__, *ad.partition.__all__}
    assert names - NOT_CALLED <= set(called)
