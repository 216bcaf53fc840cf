"""What a model has before parallelize: hooks that move to the parallel layers, and what would be lost, which raises."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import PLAN, Model, check_output, full_model, words
from ranks import RankPool
from small_transformers import MAKE, batch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune, spectral_norm

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.shards import shard_of


class Dropped(Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y: Tensor = self.head(self.norm(x + self.drop(self.down(torch.tanh(self.up(x))))) * self.norm_scale)
        return y


DROPPED_PLAN = {**PLAN, "drop": "replicated"}
REPLACED = ("embedding", "up", "down", "head", "drop")


class Hooks:
    """Hooks of all kinds that look at inputs and outputs, some of which change them."""

    def __init__(self, model: Any) -> None:
        self.seen: list[Any] = []
        self.handles = []
        for name in REPLACED:
            module = model.get_submodule(name)
            self.handles += [
                module.register_forward_pre_hook(partial(self.see, name, "pre")),
                module.register_forward_pre_hook(partial(self.see, name, "pre, kwargs"), with_kwargs=True),
                module.register_forward_hook(partial(self.see, name, "hook")),
                module.register_forward_hook(partial(self.see, name, "hook, kwargs"), with_kwargs=True),
                module.register_forward_hook(partial(self.see, name, "always"), always_call=True),
                module.register_forward_hook(lambda module, args, output: 2 * output),
            ]
        self.handles.append(model.up.register_forward_pre_hook(lambda module, args: (args[0] + 1,)))

    def see(self, name: str, kind: str, module: nn.Module, *values: Any) -> None:
        self.seen.append((name, kind, len(values)))


def check_hooks(comm: Communicator) -> None:
    torch.manual_seed(0)
    reference = Dropped().eval()
    model = copy.deepcopy(reference)
    expected, found = Hooks(reference), Hooks(model)
    ad.parallelize(model, comm, DROPPED_PLAN, sequence_parallel=False)
    assert type(model.drop) is ad.Dropout
    twin = copy.deepcopy(model)
    torch.testing.assert_close(model(words()), reference(words()))
    assert found.seen == expected.seen and len(found.seen) == 5 * len(REPLACED)
    torch.testing.assert_close(twin(words()), reference(words()))
    for hooks in (found, expected):
        hooks.seen = []
        for handle in hooks.handles:
            handle.remove()
    plain = copy.deepcopy(reference)
    torch.testing.assert_close(model(words()), plain(words()))
    assert not found.seen
    with pytest.raises(TypeError):  # hooks with always_call run if the layer raises
        handle = model.up.register_forward_hook(partial(found.see, "up", "always"), always_call=True)
        model.up(None)
    handle.remove()
    assert found.seen == [("up", "always", 2)]


def test_hooks_of_inputs_and_outputs_move_to_the_parallel_layers(ranks: RankPool) -> None:
    ranks.run(2, check_hooks)


def check_shared_input(comm: Communicator) -> None:
    """The check of the layer's own input comes after the hooks of the user."""
    up = nn.Linear(4, 8)
    net = nn.Sequential(nn.Sequential(up, nn.Linear(8, 4))).double()
    up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    reference = copy.deepcopy(net)
    plan = {"0": ["shared_input", "sequence_begin", "sequence_end"], "0.0": "column", "0.1": "row"}
    model = ad.parallelize(net, comm, plan)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(2, 4, 4)
    for one in (model, reference):
        one(x).square().sum().backward()
    ad.finish_gradients(model)
    for (name, parameter), right in zip(model.named_parameters(), reference.parameters(), strict=True):
        shard = shard_of(parameter)
        torch.testing.assert_close(parameter.grad, right.grad if shard is None else shard.local(right.grad), msg=name)


def test_hooks_within_a_shared_input(ranks: RankPool) -> None:
    ranks.run(2, check_shared_input)


def state_hook(module: Any) -> None:
    module.register_state_dict_post_hook(lambda *_: None)


def load_hook(module: Any) -> None:
    module.register_load_state_dict_pre_hook(lambda *_: None)


def gradient_hook(module: Any) -> None:
    module.weight.register_hook(lambda grad: grad)


def accumulated_hook(module: Any) -> None:
    module.weight.register_post_accumulate_grad_hook(lambda one: None)


def own_forward(module: Any) -> None:
    module.forward = lambda x: x


def weight_norm(module: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(module)


LOST: list[tuple[Callable[[Any], Any], str]] = [
    (lambda module: module.register_full_backward_hook(lambda *_: None), "has a backward hook"),
    (lambda module: module.register_full_backward_pre_hook(lambda *_: None), "has a backward hook"),
    (state_hook, "has a state-dict hook"),
    (load_hook, "has a state-dict hook"),
    (gradient_hook, "has a parameter with a gradient hook"),
    (accumulated_hook, "has a parameter with a gradient hook"),
    (weight_norm, "has weight_g of its own"),
    (spectral_norm, "has weight_orig of its own"),
    (lambda module: prune.l1_unstructured(module, "weight", 0.5), "has weight_mask of its own"),
    (lambda module: module.register_buffer("scale", torch.ones(1)), "has scale of its own"),
    (lambda module: module.add_module("adapter", nn.Linear(1, 1)), "has adapter of its own"),
    (own_forward, "has a forward of its own"),
]


def check_lost(comm: Communicator) -> None:
    for name, role in (("up", "'column'"), ("down", "'row'"), ("embedding", "'vocab_embedding'")):
        for change, what in LOST:
            model = full_model()
            change(model.get_submodule(name))
            names = list(model.state_dict())
            with pytest.raises(TypeError) as caught:
                ad.parallelize(model, comm, PLAN, sequence_parallel=False)
            kind = "Embedding" if name == "embedding" else "Linear"
            assert str(caught.value).startswith(f"parallelize: {name} ({kind}) {what}, which {role} would lose; add it")
            assert list(model.state_dict()) == names and type(model.head) is nn.Linear
    dropped = Dropped()
    dropped.drop.register_full_backward_hook(lambda *_: None)
    with pytest.raises(TypeError, match=r"drop \(Dropout\) has a backward hook, which ad.Dropout would lose"):
        ad.parallelize(dropped, comm, DROPPED_PLAN, sequence_parallel=False)


def test_what_a_parallel_layer_would_lose_raises(ranks: RankPool) -> None:
    ranks.run(2, check_lost)


def check_wrapped_before(comm: Communicator) -> None:
    model = ad.parallelize(torch.compile(full_model(), backend="eager"), comm, PLAN, sequence_parallel=False)
    assert type(model).__name__ == "OptimizedModule"
    check_output(model)
    wrapped: Any = full_model()
    wrapped.up = checkpoint_wrapper(wrapped.up)
    with pytest.raises(TypeError, match=r"up \(CheckpointWrapper\) wraps a module; call parallelize first"):
        ad.parallelize(wrapped, comm, {"**.up": "column", "**.down": "row"}, sequence_parallel=False)


def test_wrappers_come_after_parallelize_and_torch_compile_also_before(ranks: RankPool) -> None:
    ranks.run(2, check_wrapped_before)


def check_checkpointing(comm: Communicator) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    for before in ("gradient_checkpointing_enable", "enable_input_require_grads"):
        torch.manual_seed(0)
        reference = MAKE["llama"]().double()
        model: Any = copy.deepcopy(reference)
        getattr(model, before)()
        if before == "enable_input_require_grads":  # of adapters: the embedding itself is frozen
            for one in (model, reference):
                one.get_input_embeddings().requires_grad_(False)
        ad.parallelize(model, comm, ad.plans.llama)
        inputs: list[Tensor] = []
        model.model.layers[0].register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
        for one in (model, reference):
            one(**batch(0)).loss.backward()
        ad.finish_gradients(model)
        assert all(x.requires_grad for x in inputs) and inputs
        for (name, parameter), right in zip(model.named_parameters(), reference.parameters(), strict=True):
            shard, grad = shard_of(parameter), right.grad
            expected = grad if shard is None or grad is None else shard.local(grad)
            torch.testing.assert_close(parameter.grad, expected, msg=name, rtol=1e-9, atol=1e-9)
        if before == "enable_input_require_grads":
            assert model.model.embed_tokens._forward_hooks
            model.disable_input_require_grads()
            assert not model.model.embed_tokens._forward_hooks


def test_activation_checkpointing_of_transformers_may_come_first(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    ranks.run(2, check_checkpointing, timeout=120)


def check_resize(comm: Communicator) -> None:
    for name in ("llama", "gpt2", "bert"):
        torch.manual_seed(0)
        model: Any = MAKE[name]()
        rows = model.config.vocab_size
        ad.parallelize(model, comm, getattr(ad.plans, name))
        embedding, parameters = model.get_input_embeddings(), dict(model.named_parameters(remove_duplicate=False))
        for args in ((), (rows,), (None, 1)):
            assert model.resize_token_embeddings(*args) is embedding
        for one in (model, model.base_model, copy.deepcopy(model)):
            for options in ({"new_num_tokens": rows + 3}, {"pad_to_multiple_of": 64}, {"new_num_tokens": rows // 2}):
                with pytest.raises(RuntimeError, match=f"the {rows} rows of the embedding are sharded .* before par"):
                    one.resize_token_embeddings(**options)
        assert model.config.vocab_size == rows
        model.tie_weights()  # changes nothing: they are tied
        again = dict(model.named_parameters(remove_duplicate=False))
        assert again.keys() == parameters.keys() and all(again[key] is parameters[key] for key in again)


def test_the_embedding_of_transformers_is_resized_before(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    ranks.run(2, check_resize)
