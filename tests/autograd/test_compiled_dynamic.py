"""Compiled programs whose lengths vary, as those of sequences do: torch.compile makes the sizes symbolic.

dynamic=None does so at the second length, dynamic=True at the first. test_compiled.py is about the order of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case
from small_transformers import MAKE, TOLERANCE, WORDS, compare
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

pytestmark = pytest.mark.timeout(320)  # torch takes seconds to compile a graph, and minutes on a busy machine

LENGTHS = (6, 10, 14)  # none of them the size of another dimension
CLOSE = TOLERANCE[torch.float64]
SLOW = pytest.mark.slow


def compiled(function: Any, dynamic: bool | None, backend: str = "aot_eager", fullgraph: bool = True) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=dynamic, backend=backend, fullgraph=fullgraph)


def recompiling(last: bool) -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiling again is an error, if this is the last length: no size may be a constant."""
    return torch.compiler.set_stance("fail_on_recompile") if last else contextlib.nullcontext()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs_and_gradients(
    function: Callable[..., Sequence[Tensor]], inputs: Iterable[Tensor], parameters: Iterable[Tensor] = ()
) -> list[Tensor | None]:
    """Return outputs, and the gradients of inputs and parameters for cotangents that are equal on all ranks."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    ys = function(*leaves)
    torch.autograd.backward(ys, [normal(*y.shape, seed=i) for i, y in enumerate(ys)])
    gradients = [x.grad for x in (*leaves, *parameters)]
    for one in parameters:
        one.grad = None
    return [*(y.detach() for y in ys), *gradients]


# ------------------------------------------------------------------------------------------------- functions


def call_all_functions(comm: Communicator, dynamic: bool | None) -> None:
    """Call every collective on slices of one length, which varies."""

    def program(x: Tensor) -> list[Tensor]:
        ys = [operation.call(x, comm, Case(comm.size)) for operation in OPERATIONS.values()]
        rows = [x.shape[0] * (rank + 1) for rank in range(comm.size)]
        gathered = ad.all_gather(x.repeat(comm.rank + 1, 1, 1), comm, grad="sum", splits=rows)
        own = ad.reduce_scatter(gathered, comm, splits=rows)
        received = ad.all_to_all(gathered, comm, send_splits=rows, recv_splits=[rows[comm.rank]] * comm.size)
        pair = ad.all_reduce([x, x[1:]], comm, grad="sum")
        waited = ad.start(ad.all_gather, x, comm, grad="replicated").wait()
        ring = ad.send_recv(x, comm, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
        return [*ys, own, received, *pair, waited, ad.anchor(ring.sum(), own)]

    function = compiled(program, dynamic)
    for length in LENGTHS:
        x = normal(length, 3, 2, seed=comm.rank)
        expected = outputs_and_gradients(program, [x])
        with recompiling(last=length == LENGTHS[-1]):
            found = outputs_and_gradients(function, [x])
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=SLOW)])
def test_the_functions_take_symbolic_sizes(ranks: RankPool, dynamic: bool | None) -> None:
    ranks.run(2, call_all_functions, dynamic, timeout=300)


# ------------------------------------------------------------------------------------------------- layers


class Layers(nn.Module):
    """All layers, with their options."""

    def __init__(self, comm: Communicator, mesh: ad.Mesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.comm = comm
        options: Any = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
        other: Any = {"seq_dim": 1, "blocks": 2, "bias": False, "grad_accumulation_fusion": True}
        column: list[Any] = [{}, other, {"gather_input": False}, {"gather_output": True}]
        self.column = nn.ModuleList(ad.ColumnParallelLinear(8, 12, comm, **{**options, **one}) for one in column)
        self.row = nn.ModuleList(ad.RowParallelLinear(8, 12, comm, **{**options, **one}) for one in (column[0], other))
        for layer in (self.column[1], self.row[1]):
            layer.weight.main_grad = torch.zeros_like(layer.weight)  # type: ignore[union-attr]
        self.embedding = ad.VocabParallelEmbedding(13, 8, comm, **options, seq_dim=1, padding_idx=2)
        self.key_value = ad.KeyValueLinear(8, 6, mesh["heads"], shared=mesh["shared"], dtype=torch.float64)
        self.head = ad.VocabParallelHead(8, 13, comm, dtype=torch.float64)
        self.full_head = ad.VocabParallelHead(8, 13, comm, dtype=torch.float64, bias=True, gather_output=True)
        self.dropout = ad.Dropout(0.5, comm).eval()

    def forward(self, x: Tensor, part: Tensor, ids: Tensor) -> list[Tensor]:
        ys = [layer(x) for layer in self.column] + [layer(part) for layer in self.row]
        logits, splits = self.head(x), self.head.splits
        loss = ad.vocab_parallel_cross_entropy(logits, ids, self.comm, label_smoothing=0.1, z_loss=0.1, splits=splits)
        return [*ys, self.embedding(ids), loss, self.full_head(x), self.dropout(self.key_value(x))]


def run_layers(comm: Communicator, dynamic: bool | None, sequence_parallel: bool) -> None:
    with ad.Mesh(comm, {"heads": 1, "shared": -1}) as mesh:
        layers = Layers(comm, mesh, sequence_parallel)
        function = compiled(layers, dynamic)
        fused = [one for one in layers.parameters() if hasattr(one, "main_grad")]
        for length in LENGTHS:
            ids = torch.randint(13, (length, length), generator=torch.Generator().manual_seed(1))
            x, part = normal(length, length, 8), normal(length, length, 4, seed=comm.rank)
            found = []
            for each in (layers, function):
                with recompiling(last=each is function and length == LENGTHS[-1]):
                    found.append(outputs_and_gradients(each, (x, part, ids), list(layers.parameters())))
                found[-1] += [one.main_grad.clone() for one in fused]
                for one in fused:
                    one.main_grad.zero_()
            torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.parametrize(
    ("dynamic", "sequence_parallel"),
    [(True, True), *(pytest.param(*one, marks=SLOW) for one in ((None, True), (None, False), (True, False)))],
)
def test_the_layers_take_symbolic_sizes(ranks: RankPool, dynamic: bool | None, sequence_parallel: bool) -> None:
    ranks.run(2, run_layers, dynamic, sequence_parallel, timeout=300)


# ------------------------------------------------------------------------------------------------- models


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 6)
        self.scale = nn.LayerNorm(1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.gate(x)) * self.up(x)
        y: Tensor = self.down(self.scale(hidden.unsqueeze(-1)).squeeze(-1) + hidden)
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.up, self.down = nn.LayerNorm(6), Gate(), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


PLAN: dict[str, Any] = {
    "0": ["sequence_begin", "sequence_end"],
    "0.norm": "sequence",
    "0.mlp": "shared_input",
    "0.mlp.gate": "column",
    "0.mlp.up": "column",
    "0.mlp.scale": "partial",
    "0.mlp.down": "row",
    "0.up": "column",
    "0.down": "row",
}


def make_pair(comm: Communicator, make: Any, plan: Any, **options: Any) -> tuple[Any, Any]:
    """Return an unsharded model and the same parallelized."""
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(make().to(torch.float64))
    return models[0], ad.parallelize(models[1], comm, plan, **options)


def train(comm: Communicator, dynamic: bool | None, sequence_parallel: bool, seq_dim: int, backend: str) -> None:
    """Compare a compiled model with the unsharded one, in training, and without gradients for all kinds of lengths."""
    unsharded, model = make_pair(
        comm, lambda: nn.Sequential(Block()), PLAN, sequence_parallel=sequence_parallel, seq_dim=seq_dim
    )
    function = compiled(model, dynamic, backend)
    steps = ((4, True), (8, True), (10, True), (5, False), (8, False), (7, False), (14, False), (16, True))
    for at, (length, grad) in enumerate(steps):
        x = normal(3, length, 6).movedim(1, seq_dim)
        with torch.set_grad_enabled(grad), recompiling(last=at in (2, 5, 6, 7)):
            expected, y = unsharded(x), function(x)
        torch.testing.assert_close(y, expected, **CLOSE)
        if grad:
            for one, output in ((unsharded, expected), (model, y)):
                one.zero_grad()
                output.square().sum().backward()
            ad.finish_gradients(model)
            compare(model, unsharded, CLOSE)


@pytest.mark.parametrize(
    ("dynamic", "sequence_parallel"),
    [(None, True), (True, True), *(pytest.param(one, False, marks=SLOW) for one in (None, True))],
)
def test_a_model_compiles_for_all_lengths(ranks: RankPool, dynamic: bool | None, sequence_parallel: bool) -> None:
    ranks.run(2, train, dynamic, sequence_parallel, 0 if dynamic else 1, "aot_eager", timeout=300)


@pytest.mark.slow
def test_a_model_compiles_for_all_lengths_with_inductor(ranks: RankPool) -> None:
    ranks.run(2, train, None, True, 0, "inductor", timeout=300)


def train_transformer(comm: Communicator, name: str, dynamic: bool | None, sequence_parallel: bool) -> None:
    plan = getattr(ad.plans, name)
    unsharded, model = make_pair(comm, MAKE[name], plan, sequence_parallel=sequence_parallel)
    function = compiled(model, dynamic, fullgraph=False)
    for length, grad in ((6, True), (10, True), (14, True), (9, False), (12, False), (8, True)):
        ids = torch.randint(WORDS, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.set_grad_enabled(grad):
            expected, found = unsharded(input_ids=ids, labels=ids), function(input_ids=ids, labels=ids)
        torch.testing.assert_close((found.loss, found.logits), (expected.loss, expected.logits), **CLOSE)
        if grad:
            for one, loss in ((unsharded, expected.loss), (model, found.loss)):
                one.zero_grad()
                loss.backward()
            ad.finish_gradients(model)
            compare(model, unsharded, CLOSE)


@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("dynamic", "sequence_parallel"), [(None, True), (True, True), (None, False)])
def test_a_model_of_transformers_compiles_for_all_lengths(
    ranks: RankPool, name: str, dynamic: bool | None, sequence_parallel: bool
) -> None:
    pytest.importorskip("transformers")
    ranks.run(2, train_transformer, name, dynamic, sequence_parallel, timeout=600)
