"""The model of train.py, unsharded or cut over ranks, and the text that it learns.

Activations are [sequence, batch, width], so that dimension 0 is the one that sequence parallelism cuts. N ranks:

    residual stream, norms, embedding, head    [seq/N, batch, width]      each rank has its own positions
    attention, MLP                             [seq, batch, ../N]         each rank has its own heads and hidden units
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

VOCABULARY = 256  # bytes
SHIPPED = "pydoc_data.topics"  # about 0.7 MB of English that comes with Python: its language reference
HELD_OUT = 10  # one part in so many, the last one, is for validation


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the weights' shapes follow from; a checkpoint carries it."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    seq: int = 128

    def problem(self, ranks: int) -> str:
        """Why this model cannot be cut over so many ranks, as argparse says it; "" if it can."""
        if self.width % (2 * self.heads):
            twice = f"{2 * self.heads}, twice --heads {self.heads}"
            return f"argument --width: {self.width} is not a multiple of {twice}: a head has an even number of columns"
        if self.heads % ranks:
            return f"argument --heads: {self.heads} is not divisible by {ranks} ranks; each rank computes heads/ranks"
        if self.seq % ranks:
            return f"argument --seq: {self.seq} is not divisible by {ranks} ranks; each rank keeps seq/ranks positions"
        return ""


class Attention(nn.Module):
    """Causal self-attention; a rank computes heads/N heads over the whole sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        # Rows of the weight are ordered [head, (q, k, v), head_width], so that a contiguous slice of rows is a set of
        # whole heads. In the usual order, q then k then v, half of the rows would be q and half of k.
        self.qkv: nn.Module = nn.Linear(config.width, 3 * config.width)
        self.out: nn.Module = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        seq, batch, _ = qkv.shape
        q, k, v = qkv.view(seq, batch, -1, 3, self.head_width).permute(3, 1, 2, 0, 4)  # [batch, head, seq, head_width]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.permute(2, 0, 1, 3).reshape(seq, batch, -1))


class Block(nn.Module):
    """Pre-norm: what is added to the residual stream comes back from a reduce-scatter, already cut by position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up: nn.Module = nn.Linear(config.width, 4 * config.width)
        self.down: nn.Module = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def shard(self, comm: Communicator, overlap: Any) -> None:
        """[seq/N, ..] is gathered by qkv and up, and their outputs are cut; out and down sum and cut the sequence."""
        options = {"sequence_parallel": True, "overlap": overlap}
        self.attention.qkv = ad.ColumnParallelLinear.from_linear(self.attention.qkv, comm, **options)
        self.attention.out = ad.RowParallelLinear.from_linear(self.attention.out, comm, **options)
        self.up = ad.ColumnParallelLinear.from_linear(self.up, comm, **options)
        self.down = ad.RowParallelLinear.from_linear(self.down, comm, **options)


class Transformer(nn.Module):
    """Byte-level language model, unsharded until `shard` is called."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.comm: Communicator | None = None
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Parameter(torch.empty(config.seq, 1, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for parameter in (self.embedding.weight, self.position, self.head.weight):
            nn.init.normal_(parameter, std=0.02)

    def shard(self, comm: Communicator, overlap: Any = "auto") -> Transformer:
        """Keep this rank's part of the weights, which are equal on all ranks; returns the model.

        Embedding, positions, norms and head stay whole, but each rank uses them for its own positions only: their
        gradients are parts, which `finish_gradients` sums. The parallel layers do all that theirs need.
        """
        self.comm = comm
        for block in self.blocks:
            assert isinstance(block, Block)
            block.shard(comm, overlap)
        for parameter in self.parameters():
            if not hasattr(parameter, "shard"):
                parameter.shard = ad.Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]
        return self

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [seq, batch], the same on all ranks -> their mean loss, the same on all ranks, a scalar."""
        rank, ranks = (self.comm.rank, self.comm.size) if self.comm else (0, 1)
        own = slice(rank * len(tokens) // ranks, (rank + 1) * len(tokens) // ranks)
        x = self.embedding(tokens[own]) + self.position[own]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a softmax follows
        loss = F.cross_entropy(logits.flatten(0, 1), targets[own].flatten(), reduction="sum") / targets.numel()
        return ad.all_reduce(loss, self.comm, grad="replicated") if self.comm else loss


def llama(config: ModelConfig) -> nn.Module:
    """A Llama of transformers with random weights, and bytes as words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=config.width,
            intermediate_size=2 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=1,  # which every rank has whole
            max_position_embeddings=config.seq,
            tie_word_embeddings=True,
        )
    )


class Batch(NamedTuple):
    """targets are tokens shifted by one; both [seq, batch], int64."""

    tokens: Tensor
    targets: Tensor


class Windows:
    """An endless supply of random windows of a text, determined by the seed alone."""

    def __init__(self, text: bytes, seq: int, batch: int, device: str, seed: int = 0) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.seq, self.batch, self.device = seq, batch, device
        self.generator = torch.Generator().manual_seed(seed)  # of the CPU: the same numbers on every device

    def next(self) -> Batch:
        starts = torch.randint(len(self.text) - self.seq, (self.batch,), generator=self.generator)
        windows = torch.stack([self.text[i : i + self.seq + 1] for i in starts.tolist()], dim=1).long()
        windows = windows.to(self.device)
        return Batch(windows[:-1], windows[1:])


def read_text(seq: int) -> tuple[bytes, bytes]:
    """(to learn from, to validate on) of a module that comes with Python. ValueError if it is too short for `seq`."""
    spec = importlib.util.find_spec(SHIPPED)
    if spec is None or spec.origin is None:
        raise ValueError(f"this Python comes without {SHIPPED}, the text that is learnt")
    text = Path(spec.origin).read_bytes()
    if len(text) < (needed := (seq + 1) * HELD_OUT):
        raise ValueError(f"the text has {len(text)} bytes, --seq {seq} needs at least {needed}; pass a smaller --seq")
    cut = len(text) - len(text) // HELD_OUT
    return text[:cut], text[cut:]
