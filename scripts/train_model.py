"""The model of train.py, unsharded or cut over the ranks of a communicator; its text, and its losses compared.

    model = Transformer(ModelConfig(), comm)     # this rank's part
    model = load_checkpoint("out/checkpoint.pt") # the unsharded model, plain torch.nn: no communicator, no pynccl

Activations are [sequence, batch, width], so that dimension 0 is the one that sequence parallelism cuts. N ranks:

    residual stream, norms, embedding, head    [seq/N, batch, width]      each rank has its own positions
    attention, MLP                             [seq, batch, ../N]         each rank has its own heads and hidden units
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from pynccl import Communicator

VOCABULARY = 256  # bytes
SHIPPED = "pydoc_data.topics"  # about 0.7 MB of English that comes with Python: its language reference
HELD_OUT = 10  # one part in so many, the last one, is for validation
COMPARED_STEPS = 50
# Largest relative difference of the two losses within COMPARED_STEPS. Only the order of summation differs, but training
# amplifies rounding errors from step to step, which is also why later steps are shown and not judged.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the weights' shapes follow from; a checkpoint carries it."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    seq: int = 128

    def problem(self, ranks: int) -> str:
        """Why this model cannot be cut over so many ranks, as argparse says it; "" if it can."""
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                return f"argument --{name}: {value}: expected at least 1"
        if self.width % self.heads:
            return (
                f"argument --width: {self.width} is not divisible by --heads {self.heads}; "
                "each head gets width/heads columns"
            )
        if self.heads % ranks:
            return f"argument --heads: {self.heads} is not divisible by {ranks} ranks; each rank computes heads/ranks"
        if self.seq % ranks:
            return f"argument --seq: {self.seq} is not divisible by {ranks} ranks; each rank keeps seq/ranks positions"
        return ""


def column_linear(in_features: int, out_features: int, comm: Communicator | None, overlap: Any) -> nn.Module:
    """[seq/N, .., in] -> [seq, .., out/N]: gathers the sequence, computes this rank's outputs."""
    if comm is None:
        return nn.Linear(in_features, out_features)
    import pynccl_autograd as ad

    options = {"sequence_parallel": True, "device": "cpu", "overlap": overlap}
    return ad.ColumnParallelLinear(in_features, out_features, comm, **options)


def row_linear(in_features: int, out_features: int, comm: Communicator | None, overlap: Any) -> nn.Module:
    """[seq, .., in/N] -> [seq/N, .., out]: sums the ranks' partial products, keeps this rank's positions."""
    if comm is None:
        return nn.Linear(in_features, out_features)
    import pynccl_autograd as ad

    options = {"sequence_parallel": True, "device": "cpu", "overlap": overlap}
    return ad.RowParallelLinear(in_features, out_features, comm, **options)


class Attention(nn.Module):
    """Causal self-attention; a rank computes heads/N heads over the whole sequence."""

    def __init__(self, config: ModelConfig, comm: Communicator | None, overlap: Any) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        # Rows of the weight are ordered [head, (q, k, v), head_width], so that a contiguous slice of rows is a set of
        # whole heads. In the usual order, q then k then v, half of the rows would be q and half of k.
        self.qkv = column_linear(config.width, 3 * config.width, comm, overlap)
        self.out = row_linear(config.width, config.width, comm, overlap)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        seq, batch, _ = qkv.shape
        q, k, v = qkv.view(seq, batch, -1, 3, self.head_width).permute(3, 1, 2, 0, 4)  # [batch, head, seq, head_width]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.permute(2, 0, 1, 3).reshape(seq, batch, -1))


class Block(nn.Module):
    """Pre-norm: what is added to the residual stream comes back from a reduce-scatter, already cut by position."""

    def __init__(self, config: ModelConfig, comm: Communicator | None, overlap: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config, comm, overlap)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = column_linear(config.width, 4 * config.width, comm, overlap)
        self.down = row_linear(4 * config.width, config.width, comm, overlap)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Byte-level language model. comm=None: unsharded, of nn.Linear. Both have the same names.

    overlap  of the parallel layers: "auto", "off", or what else they take"""

    def __init__(self, config: ModelConfig, comm: Communicator | None = None, overlap: Any = "auto") -> None:
        super().__init__()
        self.config, self.comm = config, comm
        self.rank, self.ranks = (comm.rank, comm.size) if comm else (0, 1)
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Parameter(torch.empty(config.seq, 1, config.width))
        self.blocks = nn.ModuleList(Block(config, comm, overlap) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for parameter in (self.embedding.weight, self.position, self.head.weight):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets [seq, batch], the same on all ranks -> this rank's share of the mean loss, a scalar.

        The shares add up to the mean over all seq*batch positions: the convention grad="sum", in which every adjoint
        of the parallel layers is exact as it stands.
        """
        own = slice(self.rank * len(tokens) // self.ranks, (self.rank + 1) * len(tokens) // self.ranks)
        x = self.embedding(tokens[own]) + self.position[own]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float() if x.dtype.itemsize < 4 else self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets[own].flatten(), reduction="sum")
        return loss / targets.numel()

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Those that every rank holds whole but uses for its own positions only: embedding, positions, norms, head.

        After backward() each rank has the part of their gradient that its positions contribute, so these must be
        summed over the ranks, or the copies drift apart. The parallel layers have done all that theirs need.
        """
        inside = {id(p) for layer in self._parallel_layers().values() for p in layer.parameters()}
        return [p for p in self.parameters() if id(p) not in inside]

    @torch.no_grad()
    def load_unsharded(self, state: dict[str, Tensor]) -> None:
        """Take this rank's part of the state_dict of an unsharded model."""
        layers = self._parallel_layers()
        for name, layer in layers.items():
            layer.load_full(state[f"{name}.weight"], state[f"{name}.bias"])
        own = {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] not in layers}
        missing, unexpected = self.load_state_dict(own, strict=False)
        missing = [name for name in missing if name.rpartition(".")[0] not in layers]
        if missing or unexpected:
            raise ValueError(f"the state is of another model: it lacks {missing} and holds {unexpected} in excess")

    def unsharded_state(self) -> dict[str, Tensor]:
        """The state_dict of the unsharded model, on the CPU of every rank. A collective: every rank must call it."""
        state = self.state_dict()
        for name, layer in self._parallel_layers().items():
            state.update({f"{name}.{key}": tensor for key, tensor in layer.full_state().items()})
        return {name: tensor.cpu() for name, tensor in state.items()}

    def _parallel_layers(self) -> dict[str, Any]:
        return {name: module for name, module in self.named_modules() if hasattr(module, "full_state")}


def save_checkpoint(path: str, state: dict[str, Tensor], config: ModelConfig, **more: Any) -> None:
    """Write an unsharded model and its shape; `more` is kept beside them. A broken-off write leaves the old file."""
    torch.save({"model": state, "config": dataclasses.asdict(config), **more}, path + ".part")
    os.replace(path + ".part", path)


def load_checkpoint(path: str) -> Transformer:
    """The unsharded model of a checkpoint, on the CPU, without any communication."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model = Transformer(ModelConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    return model.to(checkpoint["model"]["position"].dtype)


def llama_kv_heads(heads: int, ranks: int) -> int:
    """Heads of keys and values where --kv-heads does not say how many: half of the heads, or 1 if that does not fit."""
    half = heads // 2
    return half if half and heads % half == 0 and (half % ranks == 0 or ranks % half == 0) else 1


def llama_problem(config: ModelConfig, kv_heads: int, ranks: int) -> str:
    """Why this Llama cannot be cut over so many ranks, as argparse says it; "" if it can."""
    if config.width % (2 * config.heads):
        return (
            f"argument --width: {config.width} is not a multiple of {2 * config.heads}, twice --heads {config.heads}; "
            "a head has an even number of columns, which are rotated in pairs"
        )
    if problem := config.problem(ranks):
        return problem
    if config.heads % kv_heads:
        return f"argument --kv-heads: {kv_heads} does not divide --heads {config.heads}; each serves heads/kv-heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"argument --kv-heads: {kv_heads} on {ranks} ranks: expected one to be a multiple of the other"
    return ""


def llama(config: ModelConfig, kv_heads: int) -> nn.Module:
    """A Llama of transformers with random weights, and bytes as words.

    kv_heads  heads of keys and values
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=config.width,
            intermediate_size=2 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=config.seq,
            tie_word_embeddings=True,
        )
    )


class Batch(NamedTuple):
    """targets are tokens shifted by one; both [seq, batch], int64."""

    tokens: Tensor
    targets: Tensor


def read_text(path: str | None, seq: int) -> bytes:
    """The bytes of `path`, else of the module that every Python ships. ValueError if there are too few for `seq`."""
    if path is None:
        spec = importlib.util.find_spec(SHIPPED)
        if spec is None or spec.origin is None:
            raise ValueError(f"this Python comes without {SHIPPED}; pass --data FILE with any text")
        path = spec.origin
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--data {path}: {error.strerror}; pass the path of a text file") from error
    needed = (seq + 1) * HELD_OUT
    if len(text) < needed:
        raise ValueError(
            f"--data {path} has {len(text)} bytes, --seq {seq} needs at least {needed} "
            f"(one part in {HELD_OUT} is held out for validation); pass a longer text or a smaller --seq"
        )
    return text


class Windows:
    """An endless supply of random windows of the text, determined by the seed alone."""

    def __init__(self, text: bytes, seq: int, batch: int, seed: int, device: str) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.seq, self.batch, self.device = seq, batch, device
        self.generator = torch.Generator().manual_seed(seed)  # of the CPU: the same numbers on every device

    def next(self) -> Batch:
        starts = torch.randint(len(self.text) - self.seq, (self.batch,), generator=self.generator)
        windows = torch.stack([self.text[i : i + self.seq + 1] for i in starts.tolist()], dim=1).long()
        windows = windows.to(self.device)
        return Batch(windows[:-1], windows[1:])


def split_text(text: bytes) -> tuple[bytes, bytes]:
    """(to learn from, to validate on)."""
    cut = len(text) - len(text) // HELD_OUT
    return text[:cut], text[cut:]


class Comparison:
    """The losses of the sharded model, and of the unsharded one if it is trained beside it, step by step."""

    HEADER = "    step      sharded    unsharded   difference"

    def __init__(self, steps: int, dtype: str) -> None:
        self.sharded: list[float] = []
        self.unsharded: list[float] = []
        self.every = max(1, steps // 10)
        self.tolerance = TOLERANCE[dtype]

    def differences(self) -> list[float]:
        """|sharded - unsharded| / |unsharded| of each step; NaN counts as infinite."""
        pairs = zip(self.sharded, self.unsharded, strict=True)
        values = [abs(a - b) / abs(b) if b else abs(a - b) for a, b in pairs]
        return [value if value == value else float("inf") for value in values]

    def row(self) -> str:
        """The last step as a line of the table; "" where none is due."""
        step = len(self.sharded)
        if step % self.every and step != 1:
            return ""
        row = f"{step:8d} {self.sharded[-1]:12.6f} {self.unsharded[-1]:12.6f} {self.differences()[-1]:12.1e}"
        return f"{self.HEADER}\n{row}" if step == 1 else row

    def agrees(self) -> bool:
        return max(self.differences()[:COMPARED_STEPS]) < self.tolerance

    def verdict(self) -> str:
        judged = self.differences()[:COMPARED_STEPS]
        rest = self.differences()[COMPARED_STEPS:]
        found = f"largest relative difference in {len(judged)} steps {max(judged):.1e}, limit {self.tolerance:.0e}"
        later = f" (later steps: {max(rest):.1e})" if rest else ""
        if self.agrees():
            return f"check: the sharded and the unsharded model agree: {found}{later}"
        return f"check FAILED: the sharded and the unsharded model differ: {found}{later}"


def plot(path: str, losses: Comparison, title: str) -> str:
    """Draw the loss curve, with --check both curves and their difference; returns what was done, in words."""
    try:
        import matplotlib
    except ImportError:
        return "no loss curve: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    rows = 2 if losses.unsharded else 1
    figure, axes = plt.subplots(
        rows, squeeze=False, sharex=True, figsize=(8, 3 + 2 * rows), height_ratios=[3, 1][:rows], layout="constrained"
    )
    steps = range(1, len(losses.sharded) + 1)
    top = axes[0][0]
    if losses.unsharded:  # thick and pale below, since the two curves are meant to lie on each other
        top.plot(steps, losses.unsharded, color="#f2b134", linewidth=6, label="unsharded model")
    top.plot(steps, losses.sharded, color="#1b4f8f", linewidth=1.8, marker="o" if len(steps) == 1 else "", label=title)
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    if losses.unsharded:
        low = axes[1][0]
        shown = [value or float("nan") for value in losses.differences()]  # zero has no logarithm: a gap
        low.semilogy(steps, shown, color="#1b4f8f", marker=".", linestyle="")
        low.axhline(losses.tolerance, color="#c0392b", linestyle="--", linewidth=1, label="limit")
        low.set_ylabel("relative difference\n(if any)")
        low.legend(loc="center right")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
    axes[-1][0].set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"wrote {path}"
