"""The text that train.py learns: bytes of a file, cut into random windows, the same on every rank."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SHIPPED = "pydoc_data.topics"  # about 0.7 MB of English that comes with Python: its language reference
HELD_OUT = 10  # one part in so many, the last one, is for validation


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
