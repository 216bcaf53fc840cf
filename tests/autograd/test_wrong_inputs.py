"""Bad values for every parameter of every function raise an error that names the argument and what to pass."""

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

# Valid arguments of each function; x is [4, 4] on 2 ranks.
GOOD: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "sum", "grad": "sum", "reduce_dtype": None},
    "copy": {"reduce_dtype": None},
    "reduce_scatter": {"dim": 0, "op": "sum", "splits": [1, 3], "reduce_dtype": None},
    "all_gather": {"dim": 0, "grad": "sum", "splits": [4, 4], "reduce_dtype": None},
    "split": {"dim": 0, "splits": [1, 3]},
    "broadcast": {"root": 0, "grad": "sum", "reduce_dtype": None},
    "reduce": {"root": 0, "op": "sum", "reduce_dtype": None},
    "scatter": {"root": 0, "dim": 0, "splits": [1, 3]},
    "gather": {"root": 0, "dim": 0, "splits": [4, 4]},
    "all_to_all": {"split_dim": 0, "concat_dim": 0, "send_splits": [2, 2], "recv_splits": [2, 2]},
    "permute": {"edges": [(0, 1), (1, 0)]},
    "send_recv": {"target": None, "source": None},
    "halo_exchange": {"dim": 0, "halo": (1, 1)},
}
LAYERS: list[Any] = [ad.ColumnParallelLinear, ad.RowParallelLinear, ad.VocabParallelEmbedding, ad.VocabParallelHead]
BAD_INTEGERS: list[Any] = ["0", 1.5, True, torch.ones(2), object()]
BAD_SIZES: list[Any] = [2, "22", [1.5, 2.5], [None, None], torch.ones(2), [True, True], [[1], [3]], [4], [-1, 5]]
BAD_VALUES: dict[str, list[Any]] = {
    "op": ["mean", None, 3, torch.ones(2), ["sum"], pynccl.RedOp, object()],
    "grad": ["mean", None, 1, torch.ones(2), ["sum"]],
    "reduce_dtype": ["float32", float, 32, np.float32, torch.float8_e4m3fnuz, torch.int32, torch.complex64],
    "dim": [*BAD_INTEGERS, None, 2, -3],
    "root": [*BAD_INTEGERS, None, 2, -1],
    "splits": BAD_SIZES,
    "edges": [None, 3, "01", {0: 1}, [(0, 1, 2)], [3], [(0, 2)], [(0.5, 1)], [None]],
    "halo": [None, "1", 1.5, (1,), (1, 2, 3), (1, "1"), True, -1, 3, {}],
}
BAD_VALUES |= {"split_dim": BAD_VALUES["dim"], "concat_dim": BAD_VALUES["dim"], "send_splits": BAD_SIZES}
BAD_VALUES |= {"recv_splits": BAD_SIZES, "target": [*BAD_INTEGERS, 2, -1], "source": [*BAD_INTEGERS, 2, -1]}


def bad_tensors() -> list[tuple[Any, str]]:
    """Return values that are not plain tensors, with the remedy in the message."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.testing._internal.two_tensor import TwoTensor

    warnings.simplefilter("ignore")
    x = torch.ones(4, 4)
    return [
        (np.ones((4, 4)), "numpy.ndarray, expected a torch.Tensor; pass torch.from_numpy(x)"),
        (3.0, "torch.tensor(x)"),
        (None, "NoneType, expected a torch.Tensor; pass a tensor of the same shape and dtype on every rank"),
        (x.to_sparse(), "pass x.to_dense()"),
        (torch.nested.nested_tensor([x, x]), "x.to_padded_tensor(0)"),
        (torch.nested.nested_tensor([x, x], layout=torch.jagged), "pass x.values()"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "x.int_repr()"),
        (AsyncCollectiveTensor(x), "pass x.wait()"),
        (TwoTensor(x, x), "TwoTensor, expected a plain tensor"),
    ]


def expect(call: Any, words: tuple[str, ...], what: str) -> None:
    """Check that the call raises with a message that has all the words and a remedy."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
        raise AssertionError(f"{what}: no error")
    text = str(caught.value)
    assert all(word in text for word in words), f"{what}: {text}"
    remedies = ("expected", "pass ", "has shape", " add up to ", "must be", "is missing")
    assert any(remedy in text for remedy in remedies), f"{what}: {text}"


def check_bad_values(comm: Communicator) -> None:
    x, not_tensors = torch.ones(4, 4), bad_tensors()
    for name, options in GOOD.items():
        function = getattr(ad, name)
        for parameter, good_value in options.items():
            for value in BAD_VALUES[parameter]:
                changed = {**options, parameter: value}
                word = "edge" if parameter == "edges" else parameter
                expect(lambda: function(x, comm, **changed), (name, word), f"{name}({parameter}={value!r})")  # noqa: B023
            assert good_value is None or function(x, comm, **options) is not None
        for bad, remedy in not_tensors:
            expect(lambda: function(bad, comm, **options), (name, "x is a ", remedy), f"{name}, {remedy}")  # noqa: B023
        for bad, remedy in ((None, "pynccl.init()"), ("world", "expected a pynccl.Communicator")):
            expect(lambda: function(x, bad, **options), (name, "comm is", remedy), f"{name} on {bad}")  # noqa: B023
        words = (f"{name}: x and comm are swapped: x is <", "; pass x before comm")
        expect(lambda: function(comm, x, **options), words, f"{name}, swapped")  # noqa: B023
        if "grad" in options:
            good_value = {key: value for key, value in options.items() if key != "grad"}
            text = (f"{name}: grad= is missing", "'replicated' (every rank does the same", "'sum' (ranks do different")
            expect(lambda: function(x, comm, **good_value), text, f"{name} without grad")  # noqa: B023
            module = getattr(ad.nn, name.title().replace("_", ""))
            expect(lambda: module(comm, **good_value), ("grad= is missing",), f"nn, {name} without grad")  # noqa: B023
    for destroyed in (comm.split(0), comm.split(comm.rank)):
        assert destroyed is not None
        destroyed.destroy()
        for name, options in GOOD.items():
            with pytest.raises(pynccl.NcclInvalidUsage, match="was destroyed; make a new one"):
                getattr(ad, name)(x, destroyed, **(options if name != "permute" else {"edges": [(0, 0)]}))
        for layer in LAYERS:
            with pytest.raises(pynccl.NcclInvalidUsage, match="was destroyed; make a new one"):
                layer(4, 4, destroyed)
    comm.barrier()


def test_bad_values_for_any_parameter_raise_with_a_remedy(ranks: RankPool) -> None:
    ranks.run(2, check_bad_values)


def check_swapped_arguments(comm: Communicator) -> None:
    any_of: Any = ad
    x, w, check = torch.ones(4, 4), torch.ones(3, 4), cast(Any, ad.testing.check_adjoint)
    line = ad.CartesianPartition(comm, (comm.size,))
    row, linear = any_of.RowParallelLinear(4, 4, comm), torch.nn.Linear(4, 4)
    freed = torch.ones(4, 4)
    freed.untyped_storage().resize_(0)
    premul = cast(Any, dist)._make_nccl_premul_sum(2.0)
    cases: list[tuple[Any, str]] = [
        (lambda: any_of.matmul_all_reduce(comm, x, x), "matmul_all_reduce: x and comm are swapped"),
        (lambda: any_of.start(ad.all_gather, comm, x, grad="sum"), "all_gather: x and comm are swapped"),
        (lambda: any_of.ColumnParallelLinear(4, comm, 4), "ColumnParallelLinear: out_features and comm are swapped"),
        (lambda: any_of.nn.AllReduce("sum", comm, grad="sum"), "nn.AllReduce: op and comm are swapped"),
        (lambda: any_of.broadcast(x, 0, comm, grad="sum"), "broadcast: comm is 0, expected a pynccl.Communicator"),
        (lambda: any_of.Partition("x", [0]), "Partition: comm is 'x', expected a pynccl.Communicator"),
        (lambda: any_of.Partition(comm, ["0"]), "Partition: ranks is ['0'], expected a sequence of integers"),
        (lambda: any_of.AllSumReduce("x", 0), "AllSumReduce: partition is 'x', expected a Partition"),
        (lambda: any_of.AllSumReduce(line, 0)("x"), "AllSumReduce: x is a str, expected a torch.Tensor"),
        (lambda: any_of.Repartition(line, line)(freed), "or its storage was freed); expected dense ones"),
        (lambda: any_of.anchor(3.0, x), "anchor: loss is 3.0, expected a dense torch.Tensor"),
        (lambda: any_of.anchor(freed, x), "anchor: loss is a tensor (4, 4) whose storage was freed"),
        (
            lambda: any_of.anchor(x, x.to_sparse()),
            "anchor: output is a sparse (torch.sparse_coo) tensor, expected a de",
        ),
        (lambda: any_of.anchor(x, torch.nested.nested_tensor([x])), "pass output.to_padded_tensor(0), or the tensors"),
        (lambda: any_of.anchor(x, x.to("meta")), "anchor: only one of output and loss is a meta or fake tensor, expe"),
        (lambda: any_of.anchor(x.to(torch.float8_e4m3fn), x), "anchor: loss is torch.float8_e4m3fn, expected a dtype"),
        (lambda: any_of.anchor(torch.tensor(1), x), "anchor: loss is torch.int64, expected a dtype with gradients and"),
        (
            lambda: any_of.vocab_parallel_cross_entropy(x.to_sparse_csr(), torch.ones(4, dtype=torch.int64), comm),
            "vocab_parallel_cross_entropy: logits is a sparse (torch.sparse_csr) tensor, expected a dense one; pass",
        ),
        # A set loses equal elements, and has no order.
        (lambda: any_of.Shard(comm, 0, {4}), "Shard: shape is {4}, expected a sequence of sizes"),
        (lambda: any_of.Partition(comm, {0, 1}), "Partition: ranks is {0, 1}, expected a sequence of integers"),
        (lambda: any_of.CartesianPartition(comm, {2}), "CartesianPartition: shape is {2}, expected a sequence of int"),
        (lambda: any_of.split(x, comm, splits={1, 3}), "split: splits is {1, 3}, expected a list with one integer for"),
        (lambda: any_of.halo_exchange(x, comm, 1, {0, 1}), "halo_exchange: halo is {0, 1}, expected a width, a pair"),
        (
            lambda: any_of.clip_grad_norm_(set(row.parameters()), 1.0),
            "clip_grad_norm_: parameters is {Parameter contai",
        ),
        (lambda: any_of.copy(freed, comm), "copy: x is a tensor (4, 4) whose storage was freed"),
        (lambda: row(x[:, :3]), "RowParallelLinear: x has shape (4, 3), expected [.., 2]"),
        (lambda: row(x[:, :2].double()), "RowParallelLinear: x is torch.float64, the weight torch.float32; pass x.to("),
        (
            lambda: any_of.ColumnParallelLinear(4, 4, comm, dtype="f4"),
            "ColumnParallelLinear: dtype is 'f4', expected a torch.dtype",
        ),
        (lambda: any_of.ColumnParallelLinear(4, -2, comm), "out_features is -2"),
        (lambda: check(torch.clone, x.int(), comm), "check_adjoint: x is torch.int32"),
        (lambda: any_of.start(object(), x, comm), "is not a collective of pynccl_autograd; pass"),
        (lambda: any_of.all_reduce(x, comm, ad.PreMul([2.0]), grad="sum"), "the scale of PreMul"),
        # As in a program of torch.distributed.
        (lambda: any_of.all_reduce(x, comm, dist.ReduceOp.MAX, grad="sum"), "or 'prod'; pass op=\"max\""),
        (lambda: any_of.all_reduce(x, comm, premul, grad="sum"), "for a pre-multiplied sum pass ad.PreMul(scale)"),
        (lambda: any_of.nn.AllReduce(comm, grad="sum", op=dist.ReduceOp.BOR), "nn.AllReduce: op is <RedOpType.BOR"),
        (lambda: any_of.nn.ReduceScatter(comm, op="average"), "nn.ReduceScatter: op is 'average', expected 'sum' or"),
        (lambda: any_of.reduce_scatter(x, comm, op=dist.ReduceOp.AVG), "expected 'sum' or 'avg'; pass op=\"avg\""),
        (
            lambda: any_of.reduce(x, comm, 0, op="mean"),
            "reduce: op is 'mean', expected 'sum' or 'avg'; pass op=\"avg\"",
        ),
        (
            lambda: any_of.all_gather(x, x, grad="sum"),
            "pass the communicator; the output is the result, not an argument",
        ),
        (lambda: any_of.all_gather(x, comm, async_op=True), "all_gather: async_op is not an argument; pass"),
        (lambda: any_of.permute(x, comm, [], async_op=True), "pass ad.permute to ad.start, which returns a Wo"),
        (lambda: ad.halo_exchange(x, comm, 1, -1), "halo_exchange: halo is -1, expected widths >= 0"),
        (lambda: ad.halo_exchange(x, comm, 1, 3), "halo_exchange: halos (3, 3) need size 9 along dim 1 (the interior"),
        (lambda: ad.all_gather_matmul(x, w, comm, x[0]), "matmul: bias has shape (4,), expected (3,), the out "),
        (lambda: ad.copy_matmul(x, w, comm, w[:, 0].double()), "copy_matmul: bias is torch.float64, the weight torch"),
        (lambda: ad.matmul_all_reduce(x, w, comm, w[:, 0].to("meta")), "bias is on meta, the weight on cpu; "),
        (lambda: any_of.matmul_reduce_scatter(x, w, comm, True), "bias is True, expected a torch.Tensor, or None"),
        (lambda: ad.Shard(comm, 3, (4, 6)), "Shard: dim is 3, expected a dimension of shape [4, 6], or None"),
        (lambda: ad.Shard(comm, 0, (8,), [2, 6], blocks=2), "Shard: splits is (2, 6), expected equal sizes"),
        (lambda: ad.Shard(comm, None, (8,), blocks=2), "Shard: blocks is 2, but dim is None"),
        (lambda: ad.Shard(comm, 0, (8,), transposed=True), "Shard: transposed is True, expected shape [8] to have 2"),
        (lambda: ad.Shard(comm, 0, (5, 6)), "dimension 0 of shape [5, 6] is not divisible by 2 ranks; pass splits="),
        (lambda: ad.Shard(comm, 0, (4, 6), partial=True), "partial=True is for replicated parameters; pass dim=None"),
        (lambda: ad.set_shard(x, ad.Shard(comm, 0, (4, 4))), "has shape (4, 4), expected (2, 4), this rank's shard of"),
        (lambda: ad.CartesianPartition(comm, (2, 2)), "needs 4 ranks, but the communicator has 2; pass a smaller"),
        (
            lambda: any_of.set_side_stream(comm, 0),
            "stream is 0, expected a stream of pynccl.create_stream() for the host",
        ),
        (lambda: any_of.Mesh(comm, {"tp": 2})[0], "mesh[axes]: axes is 0, expected names, some of 'tp'"),
        (lambda: any_of.clip_grad_norm_(row, "a"), "clip_grad_norm_: max_norm is 'a', expected a number"),
        (lambda: any_of.clip_grad_norm_(row, 1.0, "a"), "clip_grad_norm_: norm_type is 'a', expected a number"),
        (
            lambda: any_of.ColumnParallelLinear(4, 4, comm, bias=np.ones(2)),
            "ColumnParallelLinear: bias is array([1., 1.])",
        ),
        (lambda: any_of.VocabParallelHead(4, 4, comm, dtype="f4"), "VocabParallelHead: dtype is 'f4', expected a"),
        (lambda: any_of.VocabParallelHead(4, 4, comm, device=1.5), "VocabParallelHead: device is 1.5, expected a"),
        (lambda: any_of.ColumnParallelLinear.from_linear(linear, comm, device="cpu"), "from_linear: device is that of"),
        (lambda: any_of.Shard(1.5, 0, (4, 4)), "Shard: comm is 1.5, expected a pynccl.Communicator"),
        (lambda: any_of.Shard(comm, 0, 4), "Shard: shape is 4, expected a sequence of sizes"),
        (lambda: any_of.set_side_stream(1.5, 0), "set_side_stream: comm is 1.5, expected a pynccl.Communicator"),
        (lambda: any_of.copy_matmul(x, 3, comm), "copy_matmul: w is 3, expected a weight"),
        (lambda: any_of.overlap.save(3), "overlap.save: path is 3, expected the path of a file"),
        (lambda: line.rank_at(1.5), "rank_at: coordinates is 1.5, expected a sequence of integers"),
        (lambda: any_of.finish_gradients(3), "finish_gradients: parameters is 3, expected a torch.nn.Module or its"),
        (lambda: any_of.overlap.report(3).__enter__(), "overlap.report: model is 3, expected a torch.nn.Module, or"),
        (lambda: any_of.overlap.decisions(3), "overlap.decisions: model is 3, expected a torch.nn.Module"),
        (lambda: check(lambda _: 1, x, comm), "check_adjoint: the output of fn is 1, expected a torch.Tensor"),
        (lambda: ad.OverlapConfig("ring", chunks=4), "chunks is 4, but method 'ring' has no slices; omit chunks, or "),
    ]
    for call, words in cases:
        expect(call, (words,), words)
    root = np.int64(1)  # integers and sizes of other libraries are accepted
    same = [
        (any_of.broadcast(x * comm.rank, comm, root, grad="sum"), x),
        (ad.split(x, comm, splits=torch.tensor([1, 3])), ad.split(x, comm, splits=[1, 3])),
        (any_of.permute(x, comm, torch.tensor([[0, 1], [1, 0]])), x),
        (any_of.all_reduce(x, comm, pynccl.RedOp.MAX, grad="sum"), x),
        (ad.all_reduce(torch.nn.Parameter(x), comm, "avg", grad="sum").detach(), x),
    ]
    assert all(torch.equal(found, expected) for found, expected in same)
    comm.barrier()


def test_swapped_arguments_and_bad_values_for_layers_partitions_and_modules_raise(ranks: RankPool) -> None:
    ranks.run(2, check_swapped_arguments)
