"""Plans that would give wrong results raise before the model is changed."""

from __future__ import annotations

import copy
import warnings
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
from pynccl_autograd.layers.shards import shard_of

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


def changed_model(change: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    model = Net()
    change(model.blocks[1])
    return model


def bad_plans() -> list[tuple[Any, Any, type[Exception], str]]:
    """Return (model, plan, error, words of its message) for each case."""
    subclass = changed_model(lambda block: setattr(block, "up", Scaled(WIDTH, 12)))
    normed = changed_model(lambda block: weight_norm(block.up))
    hooked = changed_model(lambda block: block.up.register_full_backward_hook(lambda *_: None))
    layers = {"up": nn.Linear(WIDTH, 12), "norm": nn.LayerNorm(7), "odd": nn.Linear(7, 4)}
    odd, net = nn.ModuleDict(layers), Net()
    wrong, value = TypeError, ValueError
    without_norm = {pattern: role for pattern, role in PLAN.items() if pattern != "blocks.*.norm"}
    without_column = {**PLAN, "blocks.1": "shared_input", "blocks.1.up": "replicated"}
    heads, head = ({**PLAN, "blocks.1": ("divide", {"attributes": [name]})} for name in ("heads", "head"))
    return [
        (subclass, PLAN, wrong, "blocks.1.up (Scaled) subclasses torch.nn.Linear"),
        (normed, PLAN, wrong, "blocks.1.up (ParametrizedLinear) subclasses"),
        (hooked, PLAN, wrong, "blocks.1.up (Linear) has a backward hook"),
        (net, without_norm, value, "blocks.0.norm sees a shard of the sequence"),
        (net, {**PLAN, "blocks.*.norm": "replicated"}, value, "blocks.0.norm sees a shard of the sequence"),
        (net, heads, value, "is 3; expected an integer that is divisible by 2"),
        (net, head, value, "'head', which Block does not have"),
        (net, without_column, value, "blocks.1 is 'shared_input', but no module in it is 'column'"),
        (net, {**PLAN, "blocks.1": ("sequence", {"dim": 1})}, value, "option 'dim', expected none"),
        (odd, {"up": "column", "dwn": "row"}, value, "the pattern 'dwn' matches no module"),
        (odd, {"up": "columns"}, value, "'columns' for 'up'"),
        (odd, {"up": ("column", 3)}, value, "a pair of one and a dict"),
        (odd, {"norm": "column"}, wrong, "norm is LayerNorm"),
        (odd, {"up": ["column", "row"]}, value, "up is both 'column' and 'row'"),
        (odd, {"odd": "row"}, value, "in_features is 7, not divisible by 2 ranks"),
        (odd, {"up": ("column", {"heads": "num_heads"})}, value, "model.config.num_heads"),
        (odd, {"up": ("column", {"overlaps": 1})}, wrong, "up, weight [12, 8]"),
        (odd, ad.plans.llama, value, "the plan shards no module of ModuleDict"),
        (odd, ["up"], wrong, "expected a dict of patterns"),
        ("model", {}, wrong, "expected a torch.nn.Module"),
    ]


class Scaling(nn.Module):
    """A model with a parameter and dropout of its own, next to layers that the plan shards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.down(self.up(self.norm(x)).tanh())) * self.scale
        return y


class ScalingAfter(Scaling):
    """Normalizes what the sharded layers return, so that each rank sees all of it."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(self.down(self.up(x).tanh()))) * self.scale
        return y


LAYERS: dict[str, Any] = {"up": "column", "down": "row"}


def trained(comm: Communicator, plan: Any, kind: type[Scaling] = Scaling, **options: Any) -> Any:
    """Return the parallelized model, whose gradients equal those of the unsharded one."""
    torch.manual_seed(0)
    reference = kind().double().eval()
    model: Any = ad.parallelize(copy.deepcopy(reference), comm, plan, **options)
    x = torch.randn(2, 2 * comm.size, WIDTH, dtype=torch.float64)
    outputs = [one(x) for one in (model, reference)]
    torch.testing.assert_close(outputs[0], outputs[1])
    for output in outputs:
        output.square().sum().backward()
    ad.finish_gradients(model)
    for (name, parameter), right in zip(model.named_parameters(), reference.parameters(), strict=True):
        shard = shard_of(parameter)
        torch.testing.assert_close(parameter.grad, right.grad if shard is None else shard.local(right.grad), msg=name)
    return model


def check_plans_of_the_root(comm: Communicator) -> None:
    for pattern in ("", "**"):  # inherited by the modules in it, as from any module
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = trained(comm, {pattern: "replicated", **LAYERS}, sequence_parallel=False)
        assert type(model.drop) is ad.Dropout and not model.drop.sharded
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(comm, {"": ["shared_input", "replicated"], "norm": "partial", **LAYERS}, sequence_parallel=False)
        after = {"": ["shared_input", "replicated"], "norm": "replicated", **LAYERS}
        trained(comm, after, ScalingAfter, sequence_parallel=False)
        begin = ["sequence_begin", "sequence_end", "sequence"]
        model = trained(comm, {"": begin, **LAYERS})
    assert model.drop.sharded and model.scale.shard.partial


def test_the_empty_pattern_names_the_model_itself(ranks: RankPool) -> None:
    ranks.run(2, check_plans_of_the_root)


def check_bad_plans_of_the_root(comm: Communicator) -> None:
    wrong: list[tuple[Any, str]] = [
        (
            LAYERS,
            r"'' \(Scaling, the model itself\) is next to 'column' layers, but is not in the plan; use 'partial' if",
        ),
        ({"": "column", **LAYERS}, r"'' \(Scaling, the model itself\) is 'column' in the plan, but only modules in a"),
        ({"": ["replicated", ("divide", {"attributes": ["n"]})], **LAYERS}, r"''.* attribute 'n', which Scaling does"),
        ({"": "partial", **LAYERS}, "norm is neither between .*, but is 'partial' in the plan"),
        ({**LAYERS, "nrm.": "replicated"}, r"the pattern 'nrm.' matches no module; see \["),
        ({**LAYERS, ".": "replicated"}, r"the pattern '.' matches no module; see \["),
    ]
    for plan, words in wrong:
        with pytest.raises(ValueError, match=words) as caught:
            ad.parallelize(Scaling(), comm, plan, sequence_parallel=False)
        assert "similar: ," not in str(caught.value)
    with pytest.raises(TypeError, match=r"'' .* the function in the plan returned another module"):
        ad.parallelize(Scaling(), comm, {"": lambda module, comm: nn.Identity()}, sequence_parallel=False)
    with pytest.warns(UserWarning, match="the plan does not mention drop: they are replicated"):
        ad.parallelize(Scaling(), comm, {"": lambda module, comm: None, **LAYERS}, sequence_parallel=False)


def test_errors_name_the_model_itself(ranks: RankPool) -> None:
    ranks.run(2, check_bad_plans_of_the_root)


def check_bad_plans(comm: Communicator) -> None:
    for model, plan, error, words in bad_plans():
        before = model_ranks.state(model) if isinstance(model, nn.Module) else None
        with pytest.raises(error) as caught:
            ad.parallelize(model, comm, plan, sequence_parallel="last" in plan)
        assert words in str(caught.value)
        assert before is None or before == model_ranks.state(model)  # the model is unchanged
    options = {"seq_dim": "1", "init": 3, "reduce_dtype": "f", "sequence_parallel": "no", "gather_logits": 0}
    for name, value in options.items():
        with pytest.raises(TypeError, match=f"parallelize: {name} is {value!r}, expected"):
            ad.parallelize(Net(), comm, PLAN, **{name: value})  # type: ignore[arg-type]
    torch.manual_seed(0)
    parallelized = ad.parallelize(Net(), comm, PLAN)
    with pytest.raises(TypeError, match="up is ColumnParallelLinear already; call parallelize once per model"):
        ad.parallelize(parallelized, comm, PLAN)


def check_transformers(comm: Communicator) -> None:
    """Inputs and heads that cannot be sharded, and generate with sharded logits."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    unsharded, odd = MAKE["llama"](), MAKE["gpt2"]()
    with pytest.raises(ValueError, match="pad it to a multiple of 2"):
        ad.parallelize(copy.deepcopy(unsharded), comm, ad.plans.llama)(ids[:, :3])
    with pytest.raises(ValueError, match="num_attention_heads is 3, on 2 ranks; expected a multiple"):
        odd.config.num_attention_heads = 3  # type: ignore[union-attr]
        ad.parallelize(odd, comm, ad.plans.gpt2)
    model: Any = ad.parallelize(unsharded, comm, ad.plans.llama, gather_logits=False)
    with pytest.raises(RuntimeError, match="generate: each rank has only the logits of its vocabulary shard"):
        model.generate(batch(0)["input_ids"])


def check_rank_differences(comm: Communicator) -> None:
    torch.manual_seed(comm.rank)
    with pytest.warns(UserWarning, match="rank 1 and rank 0 have different weights"):
        ad.parallelize(Net(), comm, PLAN)
    torch.manual_seed(0)
    model = Net()
    other_plan = PLAN if comm.rank else {**PLAN, "blocks.0.up": ("column", {"overlap": "off"})}
    rows: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
        (ValueError, "rank 1 and rank 0 differ in the roles of the modules", model, other_plan, {}),
        (ValueError, "rank 1 and rank 0 differ in the options", model, PLAN, {"gather_logits": comm.rank == 0}),
        (ValueError, "differ in names, shapes", Net().double() if comm.rank else model, PLAN, {}),
    ]
    for error, words, each_model, plan, options in rows:
        with pytest.raises(error, match=words):
            ad.parallelize(each_model, comm, plan, **options)
    with pytest.raises(ValueError if comm.rank else RuntimeError, match="the pattern 'lost' matches no module"):
        ad.parallelize(model, comm, {**PLAN, "lost": "column"} if comm.rank else PLAN)
    assert type(model.blocks[0].up) is nn.Linear
    for sequence_parallel in (True, False):
        parallel = ad.parallelize(copy.deepcopy(model), comm, PLAN, sequence_parallel)
        with pytest.raises(ValueError, match=r"Net: the batch on rank 1 has other .* than on rank 0; all 2 "):
            copy.deepcopy(parallel)(torch.full((1, 4, WIDTH), float(comm.rank)))
        x = torch.ones(1, 4, WIDTH)
        torch.testing.assert_close(parallel(x), model(x))


@pytest.mark.parametrize("function", [check_bad_plans, check_transformers, check_rank_differences])
def test_bad_plans_raise(ranks: RankPool, function: Callable[[Communicator], None]) -> None:
    ranks.run(2, function)
