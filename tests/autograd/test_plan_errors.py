"""Plans that would be silently wrong: said before anything is changed, or mended."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz import model_ranks
from ranks import RankPool
from small_transformers import MAKE, batch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import pynccl_autograd as ad
from pynccl import Communicator

WIDTH = 8


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.heads = 3

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.last(x)
        return y


PLAN: dict[str, Any] = {
    "blocks.0": "sequence_begin",
    "blocks.*.norm": "sequence",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "last": ["sequence", "sequence_end"],
}


def planted(change: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    model = Net()
    change(model.blocks[1])
    return model


def option(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {**PLAN, "blocks.1": (name, options)}


SILENT = {pattern: role for pattern, role in PLAN.items() if pattern != "blocks.*.norm"}
Row = tuple[Any, Any, type[Exception], tuple[str, ...]]


def refusals() -> list[Row]:
    """(model, plan, error, words of it)"""
    subclass = planted(lambda block: setattr(block, "up", Scaled(WIDTH, 12)))
    normed = planted(lambda block: weight_norm(block.up))
    hooked = planted(lambda block: block.up.register_forward_hook(lambda *_: None))
    odd = nn.ModuleDict(
        {"up": nn.Linear(WIDTH, 12), "down": nn.Linear(12, WIDTH), "norm": nn.LayerNorm(7), "odd": nn.Linear(7, 4)}
    )
    wrong, value = TypeError, ValueError
    part = "blocks.0.norm sees a part of the sequence"
    attribute = "blocks.1: the plan names its attribute"
    return [
        (subclass, PLAN, wrong, ("blocks.1.up is Scaled with more than a torch.nn.Linear", "say 'replicated'")),
        (normed, PLAN, wrong, ("blocks.1.up is ParametrizedLinear with more than",)),
        (hooked, PLAN, wrong, ("blocks.1.up is Linear with hooks",)),
        (Net(), SILENT, value, (part, "say 'sequence'")),
        (Net(), {**PLAN, "blocks.*.norm": "replicated"}, value, (part,)),
        (
            Net(),
            option("divide", {"attributes": ["heads"]}),
            value,
            (attribute, "'heads'", "is 3: expected an integer that 2"),
        ),
        (Net(), option("divide", {"attributes": ["head"]}), value, (attribute, "'head'", "does not have")),
        (
            Net(),
            {**PLAN, "blocks.1": "shared_input", "blocks.1.up": "replicated"},
            value,
            ("says 'shared_input' of it, and of no module in it 'column'",),
        ),
        (Net(), option("shared_input", {"inptu": "x"}), value, ("option 'inptu', expected input",)),
        (Net(), option("sequence", {"dim": 1}), value, ("option 'dim', expected none",)),
        (
            Net(),
            {**PLAN, "blocks.1.up": ["column", lambda module, comm: module]},
            value,
            ("blocks.1.up: the plan says column and gives a function",),
        ),
        (
            nn.MultiheadAttention(WIDTH, 2),
            {"out_proj": "row"},
            wrong,
            ("out_proj is NonDynamicallyQuantizableLinear with more than",),
        ),
        (odd, {"up": "column", "dwn": "row"}, value, ("no module fits the pattern 'dwn'",)),
        (odd, {"mlp.up": "column"}, value, ("there are up",)),
        (odd, {"up": "columns"}, value, ("'columns' of 'up'", "vocab_head")),
        (odd, {"up": ("column", 3)}, value, ("a pair of one and a dict",)),
        (odd, {"norm": "column"}, wrong, ("norm is LayerNorm", "expected a torch.nn.Linear")),
        (odd, {"up": ["column", "row"]}, value, ("up: the plan says column and row",)),
        (odd, {"odd": "row"}, value, ("odd, weight [4, 7]", "in_features is 7, not divisible by 2 ranks")),
        (odd, {"up": ("column", {"heads": "num_heads"})}, value, ("model.config.num_heads",)),
        (odd, {"up": ("column", {"overlaps": 1})}, wrong, ("up, weight [12, 8]", "overlaps")),
        (odd, ad.plans.llama, value, ("no module of ModuleDict is cut",)),
        (odd, ["up"], wrong, ("expected a dict of patterns",)),
        ("model", {}, wrong, ("expected a torch.nn.Module",)),
    ]


OPTIONS = {"seq_dim": "1", "init": 3, "reduce_dtype": "f", "sequence_parallel": "no", "gather_logits": 0}


def refused(comm: Communicator) -> None:
    for model, plan, error, parts in refusals():
        before = model_ranks.state(model) if isinstance(model, nn.Module) else None
        with pytest.raises(error) as caught:
            ad.parallelize(model, comm, plan, sequence_parallel="last" in plan)
        for part in parts:
            assert part in str(caught.value), str(caught.value)
        assert before is None or before == model_ranks.state(model)  # nothing has changed
    for name, value in OPTIONS.items():
        with pytest.raises(TypeError, match=f"parallelize: {name} is {value!r}, expected"):
            ad.parallelize(Net(), comm, PLAN, **{name: value})  # type: ignore[arg-type]
    once = ad.parallelize(Net(), comm, PLAN)
    with pytest.raises(TypeError, match="up is ColumnParallelLinear already; make a model parallel once"):
        ad.parallelize(once, comm, PLAN)


def test_what_a_plan_cannot_do_is_said_before_anything_changes(ranks: RankPool) -> None:
    ranks.run(2, refused)


class Cross(nn.Module):
    """Attention to another input, nearly."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, other: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q(x).tanh() * self.k(other).tanh())
        return y


class Wrapped(nn.Module):
    """A layer within one, such as adapters make."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) * 2
        return y


def crosses(comm: Communicator) -> None:
    torch.manual_seed(1)
    whole = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "cross": Cross()}).double()
    value = torch.randn(2, 4, WIDTH, dtype=torch.float64)

    def compare(plan: dict[str, Any], change: Callable[[Any], Any] = lambda model: None) -> None:
        one: Any = copy.deepcopy(whole)
        change(one)
        model: Any = ad.parallelize(copy.deepcopy(one), comm, {**plan, "first": "replicated"}, False)
        ys = []
        for each in (one, model):
            x = value.clone().requires_grad_()
            y = each["cross"](each["first"](x).sin(), each["first"](x))
            y.square().sum().backward()
            ys += [(y, x.grad, each["first"].weight.grad)]
        torch.testing.assert_close(ys[1], ys[0], rtol=1e-10, atol=1e-10)

    shared = {"cross": ("shared_input", {"input": "x"}), "cross.q": "column", "cross.out": "row"}
    compare({**shared, "cross.k": ("column", {"gather_input": True, "sequence_parallel": False})})
    with pytest.raises(ValueError, match=r"cross\.k was called with an input that does not come from that of cross"):
        compare({**shared, "cross.k": "column"})
    with pytest.raises(TypeError, match="cross was called without a tensor y"):
        compare({**shared, "cross": ("shared_input", {"input": "y"}), "cross.k": "column"})
    key = {"cross.k": ("column", {"gather_input": True})}

    def wrap(model: Any) -> None:
        model["cross"].q = Wrapped(model["cross"].q)

    compare(
        {**{name: role for name, role in shared.items() if name != "cross.q"}, **key, "cross.q.base": "column"}, wrap
    )


def test_layers_that_share_an_input_are_looked_at(ranks: RankPool) -> None:
    ranks.run(2, crosses)


def cut_logits(comm: Communicator) -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="told that dimension 5 is the sequence"):
        ad.parallelize(MAKE["llama"](), comm, ad.plans.llama, seq_dim=5)(ids)
    with pytest.raises(ValueError, match="pad it to a multiple of 2"):
        ad.parallelize(MAKE["llama"](), comm, ad.plans.llama)(ids[:, :3])
    with pytest.raises(ValueError, match="num_attention_heads is 3, on 2 ranks; expected a multiple"):
        odd: Any = MAKE["gpt2"]()
        odd.config.num_attention_heads = 3
        ad.parallelize(odd, comm, ad.plans.gpt2)
    model: Any = ad.parallelize(MAKE["llama"](), comm, ad.plans.llama, gather_logits=False)
    with pytest.raises(RuntimeError, match="generate: each rank has the logits of its own words"):
        model.generate(batch(0)["input_ids"])
    whole: Any = MAKE["bert"]().double()
    bert: Any = ad.parallelize(copy.deepcopy(whole), comm, ad.plans.bert, gather_logits=False)
    example = batch(0)
    logits = bert(input_ids=example["input_ids"]).logits
    expected = nn.functional.cross_entropy(whole(**example).logits.flatten(0, 1), example["labels"].flatten())
    splits = bert.cls.predictions.decoder.splits
    loss = ad.vocab_parallel_cross_entropy(logits.flatten(0, 1), example["labels"].flatten(), comm, splits=splits)
    torch.testing.assert_close(loss, expected)


def test_inputs_that_cannot_be_cut_and_logits_that_are(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    ranks.run(2, cut_logits)


def named_twice(comm: Communicator) -> None:
    torch.manual_seed(2)
    whole: Any = Net().double()
    whole.blocks[1].up = whole.blocks[0].up
    model: Any = ad.parallelize(copy.deepcopy(whole), comm, PLAN)
    assert model.blocks[1].up is model.blocks[0].up
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(model(x), whole(x))
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True).double()
    cut = copy.deepcopy(layer)
    plan = {"linear1": "column", "linear2": "row", "self_attn": "replicated", "norm*": "replicated"}
    ad.parallelize(cut, comm, plan, False)
    with torch.no_grad():
        for training in (True, False):
            torch.testing.assert_close(cut.train(training)(x), layer.train(training)(x))


def test_one_module_of_two_names_and_layers_with_a_fast_path(ranks: RankPool) -> None:
    ranks.run(2, named_twice)


def other_than_rank_0(comm: Communicator) -> None:
    torch.manual_seed(comm.rank)
    with pytest.warns(UserWarning, match="rank 1 and rank 0 have other weights"):
        ad.parallelize(Net(), comm, PLAN)
    torch.manual_seed(0)
    model = Net()
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ in what the plan says"):
        ad.parallelize(model, comm, PLAN if comm.rank else {**PLAN, "blocks.0.up": ("column", {"overlap": "off"})})
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ in the options"):
        ad.parallelize(model, comm, PLAN, sequence_parallel=True, gather_logits=comm.rank == 0)
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ in names, shapes"):
        ad.parallelize(Net().double() if comm.rank else model, comm, PLAN)
    with pytest.raises(ValueError if comm.rank else RuntimeError, match="no module fits the pattern 'lost'"):
        ad.parallelize(model, comm, {**PLAN, "lost": "column"} if comm.rank else PLAN)
    assert type(model.blocks[0].up) is nn.Linear
    for sequence_parallel in (True, False):
        cut = ad.parallelize(copy.deepcopy(model), comm, PLAN, sequence_parallel)
        for other in (torch.full((1, 4, WIDTH), float(comm.rank)), torch.zeros(1, 4 + 2 * comm.rank, WIDTH)):
            with pytest.raises(ValueError, match=r"Net: rank 1 was given a batch .* than rank 0; expected the same"):
                copy.deepcopy(cut)(other)
        x = torch.ones(1, 4, WIDTH)
        torch.testing.assert_close(cut(x), model(x))


def test_ranks_that_differ_are_told(ranks: RankPool) -> None:
    ranks.run(2, other_than_rank_0)
