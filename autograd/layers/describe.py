"""describe: what the parameters of a model are on this rank, and how its layers overlap."""

from __future__ import annotations

import torch
from torch import nn

from ..overlap.routes import decisions_of
from .shards import shard_of


def describe(model: nn.Module) -> str:
    """A table of a model's parameters: path, type of the module, shape of the whole, what this rank has of it and in
    which dimension, bytes on this rank; and their sum. Tied parameters count once. `print(ad.describe(model))`.

    Between them, what was decided of each pass that `overlap` is to hide, or how far its trial is."""
    rows = [("parameter", "in a", "whole", "here", "cut in", "bytes")]
    seen: dict[int, str] = {}
    total = whole_total = 0
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            shard = shard_of(parameter)
            whole = list(parameter.shape) if shard is None else list(shard.shape)
            if id(parameter) in seen:
                rows.append((full, type(module).__name__, str(whole), f"is {seen[id(parameter)]}", "", ""))
                continue
            seen[id(parameter)] = full
            cut = "" if shard is None or shard.dim is None else f"{shard.dim} of {shard.comm.size}"
            if shard is not None and len(shard.blocks) > 1:
                cut += f", {len(shard.blocks)} blocks"
            if shard is not None and shard.partial:
                cut = "gradients summed"
            total += parameter.nbytes
            whole_total += torch.Size(whole).numel() * parameter.element_size()
            rows.append(
                (full, type(module).__name__, str(whole), str(list(parameter.shape)), cut, f"{parameter.nbytes:,}")
            )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for path, module in model.named_modules():
        for one in decisions_of(module):
            name = f"{path or 'model'}, {one.pattern} of {one.m} rows"
            lines.append(f"{name}: {one.way if one.settled else 'undecided'}, {one.reason}")
    lines.append(f"{total:,} bytes on this rank, {whole_total:,} in the whole model")
    return "\n".join(lines)
