"""The model of train.py, unsharded or sharded over ranks, and its training text.

Activations are [sequence, batch, width], so that sequence parallelism shards dimension 0. On N ranks:

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
TEXT_MODULE = "pydoc_data.topics"  # Python's language reference, about 0.7 MB of English, included in Python
HELD_OUT = 10  # the last tenth of the text is for validation


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes that determine the shapes of the weights; saved in the checkpoint."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    seq: int = 128

    def problem(self, ranks: int) -> str:
        """Return why this model cannot be sharded over this number of ranks, in argparse's format, or ""."""
        if self.width % (2 * self.heads):
            return (
                f"--heads {self.heads}: --width {self.width} must be a multiple of {2 * self.heads}, so that each head "
                "has an even number of features"
            )
        if self.heads % ranks:
            return f"argument --heads: {self.heads} is not divisible by {ranks} ranks; each rank computes heads/ranks"
        if self.seq % ranks:
            return f"argument --seq: {self.seq} is not divisible by {ranks} ranks; each rank keeps seq/ranks positions"
        return ""


class Attention(nn.Module):
    """Causal self-attention. A rank computes heads/N heads over the full sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        # Rows of the weight are ordered [head, (q, k, v), head_width], so that a contiguous slice of rows contains
        # complete heads. In the usual order (all of q, then k, then v) a slice would mix rows of q and k.
        self.qkv: nn.Module = nn.Linear(config.width, 3 * config.width)
        self.out: nn.Module = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        seq, batch, _ = qkv.shape
        q, k, v = qkv.view(seq, batch, -1, 3, self.head_width).permute(3, 1, 2, 0, 4)  # [batch, head, seq, head_width]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.permute(2, 0, 1, 3).reshape(seq, batch, -1))


class Block(nn.Module):
    """Pre-norm transformer block. A reduce-scatter returns the additions to the residual stream sharded by position."""

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
        """Shard the layers: qkv and up gather [seq/N, ..], out and down sum over ranks and scatter the sequence."""
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
        """Keep this rank's shard of the weights, which must be equal on all ranks. Return the model.

        Embedding, positions, norms and head stay replicated, but each rank applies them to its own positions only, so
        their gradients are partial and `finish_gradients` sums them. The parallel layers complete their own gradients.
        """
        self.comm = comm
        for block in self.blocks:
            assert isinstance(block, Block)
            block.shard(comm, overlap)
        for parameter in self.parameters():
            if not hasattr(parameter, "shard"):
                ad.set_shard(parameter, ad.Shard(comm, None, parameter.shape, partial=True))
        return self

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar mean loss of tokens, targets [seq, batch]. Inputs and loss are the same on all ranks."""
        rank, ranks = (self.comm.rank, self.comm.size) if self.comm else (0, 1)
        local = slice(rank * len(tokens) // ranks, (rank + 1) * len(tokens) // ranks)
        x = self.embedding(tokens[local]) + self.position[local]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # for the softmax
        loss = F.cross_entropy(logits.flatten(0, 1), targets[local].flatten(), reduction="sum") / targets.numel()
        return ad.all_reduce(loss, self.comm, grad="replicated") if self.comm else loss


def llama(config: ModelConfig) -> nn.Module:
    """Return a transformers Llama with random weights and a vocabulary of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=config.width,
            intermediate_size=2 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=1,  # replicated on every rank
            max_position_embeddings=config.seq,
            tie_word_embeddings=True,
        )
    )


class Batch(NamedTuple):
    """Token ids and targets, both [seq, batch], int64. Targets are the tokens shifted by one."""

    tokens: Tensor
    targets: Tensor


class Windows:
    """Random windows of a text, determined by the seed only."""

    def __init__(self, text: bytes, seq: int, batch: int, device: str, seed: int = 0) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.seq, self.batch, self.device = seq, batch, device
        self.generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers for every device

    def next(self) -> Batch:
        starts = torch.randint(len(self.text) - self.seq, (self.batch,), generator=self.generator)
        windows = torch.stack([self.text[i : i + self.seq + 1] for i in starts.tolist()], dim=1).long()
        windows = windows.to(self.device)
        return Batch(windows[:-1], windows[1:])


def read_text(seq: int) -> tuple[bytes, bytes]:
    """Return (training text, validation text) from Python's documentation. Raises ValueError if too short for `seq`."""
    spec = importlib.util.find_spec(TEXT_MODULE)
    if spec is None or spec.origin is None:
        raise ValueError(f"this Python lacks {TEXT_MODULE}, the training text; use a Python that includes it")
    text = Path(spec.origin).read_bytes()
    if len(text) < (needed := (seq + 1) * HELD_OUT):
        raise ValueError(f"the text has {len(text)} bytes, --seq {seq} needs at least {needed}; pass a smaller --seq")
    end = len(text) - len(text) // HELD_OUT
    return text[:end], text[end:]
