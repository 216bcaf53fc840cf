"""Sizes of well-known models, and the four linear layers of their blocks on one rank of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pynccl.bindings.values import integer


@dataclass(frozen=True)
class Model:
    """A dense transformer.

    hidden, ffn  features of the residual stream, and within the MLP
    heads        of queries, each of hidden / heads features; kv_heads of keys and of values
    layers       transformer blocks
    gated        whether fc1 makes a gate beside what it gates, as SwiGLU does
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    gated: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn", "heads", "kv_heads", "layers"):
            integer(getattr(self, name), name, low=1, expected="an integer >= 1")
        for name, of in (("hidden", "heads"), ("heads", "kv_heads")):
            if getattr(self, name) % getattr(self, of):
                raise ValueError(f"{name} is {getattr(self, name)}, not divisible by {getattr(self, of)} {of}")


class Layer(NamedTuple):
    """A linear layer on one rank: n output and k input features of its own.

    column  cut by its outputs, and its input is gathered; else by its inputs, and its output is summed"""

    name: str
    column: bool
    n: int
    k: int


# From the configurations that were published with the models, and GPT-3's table 2.1 (arXiv:2005.14165).
MODELS = {
    "llama-8b": Model(4096, 14336, 32, 8, 32),
    "llama-70b": Model(8192, 28672, 64, 8, 80),
    "llama-405b": Model(16384, 53248, 128, 8, 126),
    "gpt-3-175b": Model(12288, 4 * 12288, 96, 96, 96, gated=False),
}


def layers_of(model: Model, tp: int) -> list[Layer]:
    """Those of one block on each of tp ranks. ValueError where tp does not divide what it cuts."""
    for name in ("heads", "kv_heads", "ffn"):
        if (size := getattr(model, name)) % tp:
            raise ValueError(f"{name} is {size}, not divisible by tp = {tp}")
    head = model.hidden // model.heads
    attention, mlp = model.heads * head // tp, model.ffn // tp
    return [
        Layer("qkv", True, attention + 2 * model.kv_heads * head // tp, model.hidden),
        Layer("proj", False, model.hidden, attention),
        Layer("fc1", True, (2 if model.gated else 1) * mlp, model.hidden),
        Layer("fc2", False, model.hidden, mlp),
    ]
