"""Modules of a parallel model may return tensors in tuples, lists, dicts, NamedTuples, dataclasses and transformers'
outputs: these are gathered, and have the same type as in the unsharded model."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator


class Pair(NamedTuple):
    hidden: Any
    extra: Any


@dataclasses.dataclass
class Output:
    hidden: Any
    extra: Any = None
    made: int = dataclasses.field(init=False, default=0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    extra: Any
    hidden: Any


class Unknown:
    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class Cache(Unknown):
    """Like those of transformers, which may be registered with torch's pytree: it is not copied or changed."""


torch.utils._pytree.register_pytree_node(
    Cache, lambda cache: ([cache.hidden], None), lambda items, _: Cache(next(iter(items)))
)
CACHE = Cache(torch.ones(2, 2, 1, 3))


def transformers_output(hidden: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden)


OUTPUTS: list[Any] = [
    lambda h: h,
    lambda h: (h, 3),
    lambda h: [h],
    lambda h: (None, {"hidden": h}),
    lambda h: Pair(h, CACHE),
    lambda h: Pair(CACHE, h),
    Output,
    lambda h: Frozen(5, h),
    lambda h: {"extra": CACHE, "hidden": h},
    lambda h: OrderedDict(hidden=h),
    lambda h: defaultdict(list, hidden=h),
    lambda h: Output(extra=[Frozen("x", Pair(h, CACHE))], hidden=None),
    transformers_output,
]


class Block(nn.Module):
    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.up, self.down, self.returned = nn.Linear(4, 8), nn.Linear(8, 4), returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(self.down(self.up(x).tanh()))


PLAN: dict[str, Any] = {"0": ["sequence_begin", "sequence_end"], "0.up": "column", "0.down": "row"}


def tensor_in(output: Any) -> Tensor:
    """Return the only tensor outside of the cache."""
    if isinstance(output, Tensor):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, dict):
        output = {one.name: getattr(output, one.name) for one in dataclasses.fields(output)}
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    found = [x for value in values if (x := tensor_in(value)).numel()]
    return found[0] if found else torch.empty(0)


def types_in(output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return type(output), [*map(types_in, output)]
    if dataclasses.is_dataclass(output) and not isinstance(output, dict):
        return type(output), [types_in(getattr(output, one.name)) for one in dataclasses.fields(output)]
    return type(output), output.keys() if isinstance(output, dict) else output is CACHE


def check_outputs(comm: Communicator) -> None:
    for returned in OUTPUTS:
        torch.manual_seed(0)
        reference = nn.Sequential(Block(returned))
        model = ad.parallelize(copy.deepcopy(reference), comm, PLAN)
        for length, grad in ((2 * comm.size, True), (2 * comm.size + 1, False)):  # the second one is not sharded
            with torch.set_grad_enabled(grad):
                x = torch.randn(2, length, 4)
                output, expected = model(x), reference(x)
            assert types_in(output) == types_in(expected)
            torch.testing.assert_close(tensor_in(output), tensor_in(expected))
            if isinstance(output, dict) and hasattr(output, "last_hidden_state"):
                assert output.last_hidden_state is output["last_hidden_state"]


def check_compiled(comm: Communicator) -> None:
    torch.manual_seed(0)
    for returned in (lambda h: Pair(3, h), Output):
        model = ad.parallelize(nn.Sequential(Block(returned)), comm, PLAN)
        x = torch.randn(2, 2 * comm.size, 4)
        compiled, expected = torch.compile(model, backend="eager", fullgraph=True)(x), model(x)
        assert types_in(compiled) == types_in(expected)
        torch.testing.assert_close(tensor_in(compiled), tensor_in(expected))


def test_outputs_are_gathered_in_one_compiled_graph(ranks: RankPool) -> None:
    ranks.run(2, check_compiled, timeout=200)


def test_sequence_end_gathers_the_first_tensor_of_any_output(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    ranks.run(2, check_outputs)


def check_errors(comm: Communicator) -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda h: None, "returned None; .* it has none"),
        (lambda h: (3, "x"), "'sequence_end' and returned .*, but it has none"),
        (Unknown, "'sequence_end' and returned .*Unknown.*, as the first tensor in a tuple, list, dict or dataclass"),
        (lambda h: (h.sum(), h), r"the first tensor of its output has shape \[\]"),
    ]
    for returned, words in wrong:
        model = ad.parallelize(nn.Sequential(Block(returned)), comm, PLAN)
        with pytest.raises(TypeError, match=words) as caught:
            model(torch.ones(1, 2 * comm.size, 4))
        assert str(caught.value).startswith("parallelize: 0 is 'sequence_end'")


def test_an_output_without_a_sequence_raises_an_error_that_names_the_module(ranks: RankPool) -> None:
    ranks.run(2, check_errors)


class Stack(nn.Module):
    """Returns the hidden states of all layers, as transformers does."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.layers, self.returned = nn.ModuleList(Block(lambda h: h) for _ in range(2)), returned
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Any:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.returned(self.norm(states[-1]), tuple(states[1:]))


STACK_PLAN: dict[str, Any] = {
    "layers.0": "sequence_begin",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "norm": ["sequence", "sequence_end"],
}


def check_hidden_states(comm: Communicator) -> None:
    for returned in (Pair, Output, lambda h, all_: Frozen(all_, h), lambda h, all_: (h, [*all_]), dict_of):
        torch.manual_seed(0)
        reference = Stack(returned)
        model = ad.parallelize(copy.deepcopy(reference), comm, STACK_PLAN)
        x = torch.randn(2, 2 * comm.size, 4)
        output, expected = model(x), reference(x)
        assert type(output) is type(expected)
        for found, right in zip(layers_of(output), layers_of(expected), strict=True):
            torch.testing.assert_close(found, right)


def dict_of(hidden: Tensor, states: Any) -> Any:
    return {"hidden": hidden, "states": states}


def layers_of(output: Any) -> Any:
    if isinstance(output, dict):
        return output["states"]
    values = output if isinstance(output, tuple) else vars(output).values()
    return next(one for one in values if isinstance(one, (tuple, list)))


def test_hidden_states_of_all_layers_are_gathered_in_any_output(ranks: RankPool) -> None:
    ranks.run(2, check_hidden_states)


@dataclasses.dataclass
class Batch:
    x: Tensor


class OfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, batch: Any) -> Any:
        return self.down(self.up(batch.x if isinstance(batch, Batch) else batch))


def check_inputs(comm: Communicator) -> None:
    plan = {"up": "column", "down": "row"}
    model = ad.parallelize(OfBatch(), comm, plan, sequence_parallel=False)
    with pytest.raises(ValueError, match=r"OfBatch: the batch on rank \d has other values"):
        model(Batch(torch.full((2, 4), 1.0 + comm.rank)))
    model = ad.parallelize(nn.Sequential(OfBatch()), comm, {f"0.{name}": role for name, role in plan.items()} | BEGIN)
    with pytest.raises(
        TypeError, match=r"parallelize: 0 was called without a tensor argument; .* name it by the role's"
    ):
        model(Batch(torch.ones(1, 4, 4)))


BEGIN: dict[str, Any] = {"0": ["sequence_begin", "sequence_end"]}


def test_tensors_in_dataclasses_are_compared_and_not_silently_passed_unsplit(ranks: RankPool) -> None:
    ranks.run(2, check_inputs)
