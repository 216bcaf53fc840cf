"""The rank side of random models: parallelize, which may raise, and compare with the unsharded model."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.shards import shard_of

from .model_families import WORDS, Trial

RTOL = 2e-4  # of the largest entry: norms and rotations are computed in single precision
BATCH = 2


class Found(NamedTuple):
    what: str  # "equal", "rejected", "wrong", "failed"
    text: str
    comparisons: int = 0


class Reward(nn.Module):
    """A model with a reward head on a hidden state of the inner transformers model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        config = inner.config
        self.score = nn.Linear(getattr(config, "hidden_size", None) or config.d_model, 1)

    def forward(self, **inputs: Any) -> Any:
        inputs.pop("labels", None)
        output = self.inner(**{**inputs, "output_hidden_states": True, "return_dict": True})
        states = [name for name in ("hidden_states", "decoder_hidden_states") if getattr(output, name, None)]
        chosen = getattr(output, states[0])[1]
        return self.score(chosen).square().mean(), chosen, output.logits


class Two(nn.Module):
    """Two copies of a model, one as the reference of the other."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.models = nn.ModuleList([inner, copy.deepcopy(inner)])

    def forward(self, **inputs: Any) -> Any:
        outputs = [model(**inputs) for model in self.models]
        first, second = (
            output.logits if hasattr(output, "logits") else output[inputs.get("labels") is not None]
            for output in outputs
        )
        return (first - 2 * second).square().mean(), first, outputs


class Outer(nn.Module):
    """A model that returns the output of the inner one."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


class Tied(nn.Module):
    """A separate head that shares the embedding's weight."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        embedding = inner.get_input_embeddings()
        self.head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        self.head.weight = embedding.weight

    def forward(self, **inputs: Any) -> Any:
        inputs.pop("labels", None)
        output = self.inner(**{**inputs, "output_hidden_states": True, "return_dict": True})
        states = [name for name in ("hidden_states", "decoder_hidden_states") if getattr(output, name, None)]
        logits = self.head(getattr(output, states[0])[-1])
        return logits.square().mean() + output.logits.square().mean(), logits


def load(comm: Communicator) -> None:
    """Import transformers, which is slow on a busy machine."""
    from transformers import LlamaForCausalLM  # noqa: F401


def make(trial: Trial) -> nn.Module:
    import transformers

    kind = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"}.get(trial.family)
    kind = kind or f"{trial.family}For{'MaskedLM' if trial.family in ('Bert', 'Roberta') else 'CausalLM'}"
    config = getattr(transformers, f"{trial.family}Config")(**trial.sizes)
    if trial.call["output_attentions"]:
        config._attn_implementation = "eager"
    torch.manual_seed(trial.seed)
    model: Any = getattr(transformers, kind)(config)
    around: Any = {"reward": Reward, "two": Two, "tied": Tied, "outer": Outer}
    if trial.around:
        model = around[trial.around](model)
    model = model.double()
    rng = random.Random(trial.seed)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.requires_grad_(rng.random() >= trial.frozen)
    return model


def batch(trial: Trial) -> dict[str, Any]:
    torch.manual_seed(trial.seed + 1)
    ranks = trial.mesh[1]
    ids = torch.randint(3, WORDS, (BATCH, 4 * ranks))
    inputs: dict[str, Any] = {"input_ids": ids}
    inputs |= {name: value for name, value in trial.call.items() if name != "labels"}
    if trial.family == "T5":
        inputs["labels"] = torch.randint(3, WORDS, (BATCH, ranks * random.Random(trial.seed).choice((1, 2, 4, 8))))
    elif trial.call["labels"] and (trial.gather_logits or trial.family not in ("Bert", "Roberta")):
        inputs["labels"] = torch.randint(3, WORDS, ids.shape)
    return inputs


def leaves(output: Any, at: str = "") -> dict[str, Tensor]:
    if isinstance(output, Tensor):
        return {at: output}
    if isinstance(output, Mapping):
        items: Any = output.items()
    elif isinstance(output, (tuple, list)):
        items = enumerate(output)
    else:
        return {}
    return {path: leaf for key, value in items for path, leaf in leaves(value, f"{at}.{key}").items()}


def state(model: nn.Module) -> list[Any]:
    """Return the state of a model that must not change when a plan raises."""
    found: list[Any] = []
    for path, module in model.named_modules(remove_duplicate=False):
        parameters = [
            (name, id(value), hasattr(value, "shard")) for name, value in module.named_parameters(recurse=False)
        ]
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module)
        numbers = sorted((name, value) for name, value in vars(module).items() if isinstance(value, int))
        found.append((path, id(module), parameters, hooks, numbers))
    return found


def differs(what: str, found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape:
        return f"{what} has shape {list(found.shape)}, expected {list(expected.shape)}"
    if not expected.numel() or not expected.is_floating_point():
        return "" if torch.equal(found, expected) else f"{what} differs"
    off = float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-6)
    return "" if off <= RTOL else f"{what} is off by {off:.2g} of its largest entry"


def loss_of(output: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return a loss that depends on every unsharded floating-point tensor of the output."""
    total = torch.zeros((), dtype=torch.float64)
    for at, tensor in leaves(output).items():
        if tensor.requires_grad and tensor.is_floating_point() and "past_key" not in at:
            total = total + tensor.double().square().mean() * 3 + tensor.double().sin().mean()
    return total


def run(comm: Communicator, trial: Trial) -> Found:
    warnings.simplefilter("ignore")
    mesh = None if trial.mesh[0] == 1 else ad.Mesh(comm, {"dp": trial.mesh[0], "tp": trial.mesh[1]})
    return _run(comm if mesh is None else mesh["tp"], trial)


def _run(comm: Communicator, trial: Trial) -> Found:
    try:
        unsharded: Any = make(trial)
    except (ValueError, KeyError) as error:  # sizes that this family does not have
        return Found("rejected", f"by transformers: {error}")
    model: Any = copy.deepcopy(unsharded)
    before = state(model)
    try:
        ad.parallelize(model, comm, trial.plan, trial.sequence_parallel, gather_logits=trial.gather_logits)
    except (ValueError, TypeError) as error:
        if state(model) != before:
            return Found("wrong", f"rejected, but the model was changed: {error}")
        return Found("rejected", str(error))
    inputs = batch(trial)
    outputs = []
    for candidate in (unsharded, model):
        try:
            outputs.append(candidate(**inputs))
        except Exception as error:
            if candidate is unsharded:
                return Found("rejected", f"by the unsharded model: {error}")
            return Found("failed", f"forward: {type(error).__name__}: {error}")
    expected, found = (leaves(candidate) for candidate in outputs)
    return _compare(comm, trial, (unsharded, model), (expected, found), inputs)


def _compare(comm: Communicator, trial: Trial, models: Any, outputs: Any, inputs: Mapping[str, Any]) -> Found:
    (unsharded, model), (expected, found) = models, outputs
    if expected.keys() != found.keys():
        return Found("wrong", f"gives {sorted(found)}, expected {sorted(expected)}")
    # A cache holds the keys and values of this rank's heads; without gather_logits, the logits are this rank's shard.
    kept = {at for at in expected if "past_key_values" not in at}
    if not trial.gather_logits:
        kept = {at for at in kept if expected[at].shape[-1:] != (WORDS,)}
    problems = [text for at in kept if (text := differs(f"output {at}", found[at], expected[at]))]
    if trial.in_backward:
        ad.finish_gradients_in_backward(model)
    losses = [loss_of({at: result[at] for at in sorted(kept)}, inputs) for result in (expected, found)]
    if not losses[0].requires_grad:
        return Found("wrong" if problems else "equal", "\n".join(problems), len(kept))
    for result in losses:
        result.backward()
    ad.finish_gradients(model)
    theirs, ours = dict(unsharded.named_parameters()), dict(model.named_parameters())
    if theirs.keys() != ours.keys():
        return Found("wrong", f"has parameters {sorted(ours.keys() ^ theirs.keys())}")
    for path, parameter in ours.items():
        grad, shard = theirs[path].grad, shard_of(parameter)
        if (grad is None) != (parameter.grad is None):
            problems.append(f"gradient of {path}: {parameter.grad is not None}, expected {grad is not None}")
        elif grad is not None:
            expected_shard = grad if shard is None else shard.local(grad)
            scale = max(float(grad.abs().max()), 1e-6)
            off = float((parameter.grad - expected_shard).abs().max()) / scale if expected_shard.numel() else 0.0
            if parameter.grad.shape != expected_shard.shape or off > RTOL:
                problems.append(f"gradient of {path} is off by {off:.2g} of its largest entry")
    norms = nn.utils.clip_grad_norm_(unsharded.parameters(), 1e9), ad.clip_grad_norm_(model.parameters(), 1e9)
    problems += [text for text in [differs("norm", norms[1].double(), norms[0].double())] if text]
    return Found("wrong" if problems else "equal", "\n".join(problems), len(kept) + len(ours) + 1)
