"""Nonsense for every parameter of every function: an error that names the argument and what to pass, on all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

# What each function is called with where nothing is wrong; x is [4, 4] on 2 ranks.
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
MATMULS = ("all_gather_matmul", "copy_matmul", "matmul_all_reduce", "matmul_reduce_scatter")
NO_INTEGERS: list[Any] = ["0", 1.5, True, torch.ones(2), object()]
NO_SIZES: list[Any] = [2, "22", [1.5, 2.5], [None, None], torch.ones(2), [True, True], [[1], [3]], [4], [-1, 5]]
NONSENSE: dict[str, list[Any]] = {
    "op": ["mean", None, 3, torch.ones(2), ["sum"], pynccl.RedOp, object()],
    "grad": ["mean", None, 1, torch.ones(2), ["sum"]],
    "reduce_dtype": ["float32", float, 32, np.float32, torch.float8_e4m3fnuz, torch.int32],
    "dim": [*NO_INTEGERS, None, 2, -3],
    "root": [*NO_INTEGERS, None, 2, -1],
    "splits": NO_SIZES,
    "edges": [None, 3, "01", {0: 1}, [(0, 1, 2)], [3], [(0, 2)], [(0.5, 1)], [None]],
    "halo": [None, "1", 1.5, (1,), (1, 2, 3), (1, "1"), True, -1, 3, {}],
}
NONSENSE |= {"split_dim": NONSENSE["dim"], "concat_dim": NONSENSE["dim"], "send_splits": NO_SIZES}
NONSENSE |= {"recv_splits": NO_SIZES, "target": [*NO_INTEGERS, 2, -1], "source": [*NO_INTEGERS, 2, -1]}


def bad_tensors() -> dict[str, tuple[Any, str]]:
    """By name: something that is no plain tensor, and what the message proposes."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.testing._internal.two_tensor import TwoTensor

    warnings.simplefilter("ignore")
    x = torch.ones(4, 4)
    return {
        "array": (np.ones((4, 4)), "numpy.ndarray, expected a torch.Tensor; pass torch.from_numpy(x)"),
        "number": (3.0, "torch.tensor(x)"),
        "none": (None, "NoneType, expected a torch.Tensor"),
        "string": ("x", "str, expected a torch.Tensor"),
        "sparse": (x.to_sparse(), "pass x.to_dense()"),
        "compressed": (x.to_sparse_csr(), "pass x.to_dense()"),
        "strided nested": (torch.nested.nested_tensor([x, x]), "x.to_padded_tensor(0)"),
        "jagged": (torch.nested.nested_tensor([x, x], layout=torch.jagged), "pass x.values()"),
        "quantized": (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "x.int_repr()"),
        "async": (AsyncCollectiveTensor(x), "pass x.wait()"),
        "subclass": (TwoTensor(x, x), "TwoTensor, which is no plain tensor"),
    }


def expect(call: Any, words: tuple[str, ...], what: str) -> None:
    """That the call raises, before anything is launched, a message that has all the words."""
    try:
        call()
    except (TypeError, ValueError) as error:
        text = str(error)
        assert all(word in text for word in words), f"{what}: {text}"
        remedies = ("expected", "pass ", "has shape", " add up to ", "must be", "is missing")
        assert any(remedy in text for remedy in remedies), f"{what}: {text}"
    else:
        raise AssertionError(f"{what}: no error")


NO_CONVENTION: dict[str, Any] = {
    "all_reduce": ad.all_reduce,
    "all_gather": ad.all_gather,
    "broadcast": lambda x, comm: ad.broadcast(x, comm, 0),
    "all_reduce of a list": lambda x, comm: ad.all_reduce([x, x], comm),
    "all_reduce, started": lambda x, comm: ad.start(ad.all_reduce, x, comm),
    "nn.AllReduce": lambda x, comm: ad.nn.AllReduce(comm),
    "nn.AllGather": lambda x, comm: ad.nn.AllGather(comm),
    "nn.Broadcast": lambda x, comm: ad.nn.Broadcast(comm, 0),
}


def nonsense(comm: Communicator) -> None:
    x, bad_ones = torch.ones(4, 4), bad_tensors()
    for name, options in GOOD.items():
        function = getattr(ad, name)
        for parameter, given in options.items():
            for value in NONSENSE[parameter]:
                changed = {**options, parameter: value}
                word = "edge" if parameter == "edges" else parameter
                expect(lambda: function(x, comm, **changed), (name, word), f"{name}({parameter}={value!r})")  # noqa: B023
            assert given is None or function(x, comm, **options) is not None
        for kind, (bad, remedy) in bad_ones.items():
            expect(lambda: function(bad, comm, **options), (name, "x is a ", remedy), f"{name} of {kind}")  # noqa: B023
        for bad, remedy in ((None, "pynccl.init()"), ("world", "expected a pynccl.Communicator"), (3, "pynccl.init()")):
            expect(lambda: function(x, bad, **options), (name, "comm is", remedy), f"{name} on {bad}")  # noqa: B023
    comm.barrier()
    for name, call in NO_CONVENTION.items():
        words = (
            f"{name.split(',')[0].split(' ')[0]}: grad= is missing",
            "'sum' (each rank goes on with work of its own",
            "'replicated' (every rank goes on alike)",
        )
        expect(lambda: call(x, comm), words, name)  # noqa: B023


def test_nonsense_for_any_parameter_is_named_with_a_remedy(ranks: RankPool) -> None:
    ranks.run(2, nonsense)


def misplaced(comm: Communicator) -> None:
    """The communicator in the place of another argument; layers and modules of what is none; what has ended."""
    any_of: Any = ad
    x, model = torch.ones(4, 4), torch.nn.Linear(4, 4)
    swapped: list[tuple[str, Any, str]] = [
        *((name, lambda name=name: getattr(ad, name)(comm, x, **GOOD[name]), "x") for name in GOOD),
        *((name, lambda name=name: getattr(ad, name)(comm, x, x), "x") for name in MATMULS),
        ("all_reduce", lambda: any_of.all_reduce(comm, [x, x], grad="sum"), "x"),
        ("all_gather", lambda: any_of.start(ad.all_gather, comm, x, grad="sum"), "x"),
        ("ColumnParallelLinear", lambda: any_of.ColumnParallelLinear(4, comm, 4), "out_features"),
        ("RowParallelLinear", lambda: any_of.RowParallelLinear(comm, 4, 4), "in_features"),
        ("KeyValueLinear", lambda: any_of.KeyValueLinear(comm, 4, 4, shared=comm), "in_features"),
        ("VocabParallelEmbedding", lambda: any_of.VocabParallelEmbedding(comm, 4, 4), "num_embeddings"),
        ("vocab_parallel_cross_entropy", lambda: any_of.vocab_parallel_cross_entropy(comm, x, x), "logits"),
        ("Dropout", lambda: any_of.Dropout(comm, 0.5), "p"),
        ("DataParallelGradients", lambda: any_of.DataParallelGradients(comm, model), "model"),
        ("parallelize", lambda: any_of.parallelize(comm, model, {}), "model"),
        ("full_state_dict", lambda: any_of.full_state_dict(comm, model), "model"),
        ("Mesh", lambda: any_of.Mesh({"tp": 2}, comm), "shape"),
        ("CartesianPartition", lambda: any_of.CartesianPartition((2,), comm), "shape"),
        ("rng.seed", lambda: any_of.rng.seed(comm, 1), "seed"),
        ("nn.AllReduce", lambda: any_of.nn.AllReduce("sum", comm, grad="sum"), "op"),
        ("check_model", lambda: any_of.testing.check_model(model, model, comm, x), "batch"),
        ("check_adjoint", lambda: any_of.testing.check_adjoint(torch.clone, comm, x), "x"),
    ]
    for name, call, other in swapped:
        words = (f"{name}: {other} and comm are swapped: {other} is <", f"; pass {other} before comm")
        expect(call, words, f"{name}: {other}")
    line = ad.CartesianPartition(comm, (comm.size,))
    row, column = any_of.RowParallelLinear(4, 4, comm), any_of.ColumnParallelLinear(4, 4, comm)
    freed = torch.ones(4, 4)
    freed.untyped_storage().resize_(0)
    check = any_of.testing.check_adjoint
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (lambda: any_of.broadcast(x, 0, comm, grad="sum"), ("broadcast: comm is 0, expected a pynccl.Communicator",)),
        (lambda: any_of.parallelize(model, {}, comm), ("parallelize: comm is {}, expected a pynccl.Communicator",)),
        (lambda: any_of.key_of(None), ("key_of", "comm is None")),
        (lambda: column([torch.ones(4)]), ("x is a list",)),
        (lambda: any_of.Partition("x", [0]), ("Partition: comm is 'x'", "expected a pynccl.Communicator")),
        (lambda: any_of.Partition(comm, ["0"]), ("Partition: ranks is ['0']", "expected a sequence of integers")),
        (lambda: any_of.CartesianPartition(comm, 2), ("CartesianPartition: shape is 2", "expected a sequence")),
        (lambda: any_of.CartesianPartition(comm, (10**30,)), ("CartesianPartition: shape", "expected as many ranks")),
        (lambda: any_of.AllSumReduce("x", 0), ("AllSumReduce: partition is 'x', expected a Partition",)),
        (lambda: any_of.AllSumReduce(line, "x"), ("AllSumReduce: axes is 'x', expected a sequence of integers",)),
        (lambda: any_of.AllSumReduce(line, 0)("x"), ("AllSumReduce: x is a str, expected a torch.Tensor",)),
        (lambda: any_of.Repartition(line, 5), ("Repartition: P_y is 5, expected a Partition",)),
        (lambda: any_of.Repartition(line, line)(freed), ("Repartition: ", "its storage was freed; expected dense")),
        (lambda: any_of.nn.AllReduce("x", grad="sum"), ("nn.AllReduce: comm is 'x', expected a pynccl.Communicator",)),
        (lambda: any_of.anchor(3.0, x), ("anchor: loss is a float, expected a torch.Tensor",)),
        (lambda: any_of.anchor(x, 5), ("anchor: an output is a int, expected a torch.Tensor",)),
        (lambda: any_of.copy(freed, comm), ("copy: x is a tensor (4, 4) whose storage was freed", "pass it while")),
        (lambda: row(x[:, :3]), ("matmul_all_reduce: x has shape (4, 3), expected [.., 2]",)),
        (lambda: row(x[:, :2].double()), ("matmul_all_reduce: x is torch.float64, the weight torch.float32; pass x.",)),
        (lambda: any_of.ColumnParallelLinear(4, 4, comm, dtype="f4"), ("dtype is 'f4', expected a floating-point",)),
        (lambda: any_of.ColumnParallelLinear(4, -2, comm), ("ColumnParallelLinear", "out_features is -2")),
        (lambda: any_of.RowParallelLinear(4.0, 4, comm), ("RowParallelLinear", "in_features is 4.0")),
        (lambda: check(torch.clone, x.int(), comm), ("check_adjoint: x is torch.int32", "pass x.to(torch.float64)")),
        (lambda: check(torch.clone, x, comm, seed="1"), ("check_adjoint: seed is '1', expected an integer",)),
        (lambda: any_of.start(object(), x, comm), ("start: <object", "is no collective of pynccl_autograd; pass")),
        (lambda: ad.all_reduce(x, comm, ad.PreMul([2.0]), grad="sum"), ("the scale of PreMul",)),  # type: ignore[arg-type]
        (lambda: ad.all_reduce(x, comm, ad.PreMul(torch.ones(3, 4, 4)), grad="sum"), ("the scale of PreMul",)),
    ]
    for call, words in cases:
        expect(call, words, words[0])
    ended, alone = comm.split(0), comm.split(comm.rank)
    for gone in (ended, alone):
        assert gone is not None
        gone.destroy()
        for name, options in GOOD.items():
            with pytest.raises(pynccl.NcclInvalidUsage, match="was destroyed; make a new one"):
                getattr(ad, name)(x, gone, **(options if name != "permute" else {"edges": [(0, 0)]}))
    comm.barrier()


def test_swapped_arguments_nonsense_for_layers_and_ended_communicators_are_named(ranks: RankPool) -> None:
    ranks.run(2, misplaced)


def groups(comm: Communicator) -> None:
    """A process group in place of a communicator; a DTensor."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    any_of: Any = ad
    x = torch.ones(4, 4)
    dist.init_process_group("fake", store=FakeStore(), rank=comm.rank, world_size=comm.size)
    try:
        sharded = DTensor.from_local(x, init_device_mesh("cpu", (comm.size,)), [Shard(0)])
        group = "pass pynccl.Communicator.from_process_group(group)"
        expect(lambda: any_of.all_reduce(x, dist.group.WORLD, grad="sum"), (group,), "a process group")
        expect(lambda: ad.all_gather(sharded, comm, grad="sum"), ("DTensor", "x.to_local()"), "a DTensor")
    finally:
        dist.destroy_process_group()


def test_process_groups_and_distributed_tensors_are_named(ranks: RankPool) -> None:
    ranks.run(2, groups)


def other_integers(comm: Communicator) -> None:
    """Integers, sizes and operators of other libraries; subclasses of tensors that have memory of their own."""
    x = torch.arange(16.0).reshape(4, 4) + comm.rank
    one, zero = np.int64(1), torch.tensor(0)

    class Marked(Tensor):
        pass

    same: list[tuple[Tensor, Tensor]] = [
        (ad.broadcast(x, comm, one, grad="sum"), ad.broadcast(x, comm, 1, grad="sum")),
        (ad.reduce(x, comm, zero, pynccl.RedOp.SUM), ad.reduce(x, comm, 0)),
        (ad.all_gather(x, comm, one, grad="sum"), ad.all_gather(x, comm, 1, grad="sum")),
        (ad.split(x, comm, splits=torch.tensor([1, 3])), ad.split(x, comm, splits=[1, 3])),
        (ad.reduce_scatter(x, comm, splits=np.array([3, 1])), ad.reduce_scatter(x, comm, splits=[3, 1])),
        (ad.permute(x, comm, torch.tensor([[0, 1], [1, 0]])), ad.permute(x, comm, [(0, 1), (1, 0)])),
        (ad.permute(x, comm, iter([(one, 0)])), ad.permute(x, comm, [(1, 0)])),
        (ad.halo_exchange(x, comm, zero, one), ad.halo_exchange(x, comm, 0, 1)),
        (ad.all_reduce(x, comm, pynccl.RedOp.MAX, grad="sum"), ad.all_reduce(x, comm, "max", grad="sum")),
        (ad.all_reduce(torch.nn.Parameter(x), comm, grad="sum"), ad.all_reduce(x, comm, grad="sum")),
        (ad.all_reduce(x.as_subclass(Marked), comm, grad="sum"), ad.all_reduce(x, comm, grad="sum")),
    ]
    for found, expected in same:
        assert torch.equal(found.detach().as_subclass(Tensor), expected.detach())


def test_integers_and_sizes_of_other_libraries_are_taken(ranks: RankPool) -> None:
    ranks.run(2, other_integers)
