"""State dicts and files of the unsharded model, of a model whose parameters are parts.

One whole tensor at a time is in memory, a file of them where rank 0 writes files. Names and shapes are those of the
unsharded model, so what one number of ranks saves any other loads, and so does plain torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pynccl import Communicator, progress
from pynccl.bindings.values import instance, shown

from ..agreement import caught, raise_on_all_ranks, run_on_all_ranks
from ..arguments import check_comm
from .checkpoint_files import Path_, Saving, Source, check_types, source_of
from .dtensors import cut_like, full_tensor, local_part
from .shards import Shard, shard_of


class IncompatibleKeys(NamedTuple):
    """Names that a checkpoint has not, and names that the model has not."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Entry(NamedTuple):
    """A tensor of a model, under all the names that it has there."""

    names: list[str]
    tensor: Tensor
    shard: Shard | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.shard is None else self.shard.shape

    def own(self, whole: Tensor) -> Tensor:
        return whole if self.shard is None else self.shard.own(whole)

    @torch.no_grad()
    def gather(self) -> Tensor:
        """The whole, where the model is. A collective, if this is a part."""
        part = self.tensor.detach()
        return full_tensor(part) if self.shard is None else self.shard.gather(part)

    def whole(self) -> Tensor:
        """The same on the CPU, in memory of its own."""
        whole = self.gather()
        return whole.to("cpu", copy=whole.data_ptr() == local_part(self.tensor).data_ptr())


def entries_of(model: nn.Module) -> tuple[list[Entry], dict[str, Any]]:
    """The tensors of its state dict, and what is in there besides them (`get_extra_state`)."""
    found: dict[int, Entry] = {}
    others: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), Entry([], value, shard_of(value))).names.append(name)
        else:
            others[name] = value
    return list(found.values()), others


def comm_of(operation: str, model: nn.Module, comm: Communicator | None) -> Communicator | None:
    """`comm`, or the one that cuts the model's parameters, from which others may be split off; None: none does."""
    if comm is not None:
        check_comm(operation, comm, model=model)
    instance(model, nn.Module, f"{operation}: model", "a torch.nn.Module")
    if comm is not None:
        return comm
    shards = [shard for parameter in model.parameters() if (shard := shard_of(parameter)) is not None]
    found = {id(shard.comm): shard.comm for shard in shards}
    if len(found) > 1:
        lines = [one.origin.line() for one in found.values()]
        above = [one for one in found.values() if all(one.origin in line for line in lines)]
        if len(above) == 1:
            return above[0]
        raise ValueError(
            f"{operation}: the parameters are cut over {len(found)} communicators; pass comm=, that of all their "
            "ranks, such as Mesh.comm"
        )
    return next(iter(found.values()), None)


def is_first(comm: Communicator | None) -> bool:
    return comm is None or comm.rank == 0


# ---------------------------------------------------------------------------------------------------------- saving


def full_state_dict(model: nn.Module, comm: Communicator | None = None, rank0_only: bool = True) -> dict[str, Any]:
    """The state dict of the unsharded model, on the CPU. Every rank must call it.

    comm        the ranks that do; None: the communicator that cuts the parameters; of several, the one that the others
                were split off
    rank0_only  the others get {}, so that one of them has the whole model in memory

    One parameter at a time is gathered. Buffers, and parameters that every rank has, are this rank's. Tied parameters
    are tied. ValueError for parameters on the meta device; for parameters cut over several communicators without comm.
    """
    comm = comm_of("full_state_dict", model, comm)
    entries, others = entries_of(model)
    run_on_all_ranks(comm, lambda: check_values("full_state_dict", entries))
    keep = not rank0_only or is_first(comm)
    wholes: dict[str, Any] = dict(others)
    for entry in progress.over(entries, "gathering", "tensor", own=is_first(comm)):
        if keep:
            wholes.update(dict.fromkeys(entry.names, entry.whole()))
        else:
            entry.gather()
    return {name: wholes[name] for name in model.state_dict(keep_vars=True)} if keep else {}


def save_full_state_dict(
    model: nn.Module, path: Path_, max_shard_bytes: float = 5e9, *, comm: Communicator | None = None
) -> None:
    """The state dict of the unsharded model, in files of safetensors that rank 0 writes. Every rank must call it.

    Of data-parallel replicas let one save, or all with comm= the communicator of all. Several that save with the same
    path each write a whole checkpoint, and the last one stays; it can be loaded when all have returned.

    path             a file .safetensors; or a folder, made if need be: model.safetensors, or files of up to
                     max_shard_bytes (or one tensor) each with model.safetensors.index.json, as Hugging Face names them
    max_shard_bytes  bytes
    comm             as of `full_state_dict`

    One file at a time is in rank 0's memory, on the other ranks one tensor. The checkpoint that is there is replaced
    once the new one is on the disk: whenever the process is killed, one of the two is loaded, whole, and the next save
    removes what was left. A tied parameter is written once, under its first name. What fails on rank 0 raises on every
    rank: OSError if the disk is full, for example. TypeError for what is no tensor, and for types that the format does
    not have; ImportError without the package safetensors.
    """
    operation = "save_full_state_dict"
    comm = comm_of(operation, model, comm)
    entries, others = entries_of(model)
    run_on_all_ranks(comm, lambda: _check_save(operation, path, entries, others, max_shard_bytes))
    saving = run_on_all_ranks(comm, lambda: Saving(operation, Path(path), max_shard_bytes) if is_first(comm) else None)
    problem: Exception | None = None
    try:
        for entry in progress.over(entries, "saving", "tensor", own=is_first(comm)):
            if saving is not None and problem is None:
                _, problem = caught(partial(_add, saving, entry))
            else:  # every rank takes part in every gather, also after rank 0 has failed
                entry.gather()
        raise_on_all_ranks(comm, problem)
        run_on_all_ranks(comm, lambda: None if saving is None else saving.finish())
    finally:
        if saving is not None:
            saving.close()


def _add(saving: Saving, entry: Entry) -> None:
    saving.add(entry.names, entry.whole())


def _check_save(operation: str, path: Any, entries: list[Entry], others: dict[str, Any], max_shard_bytes: Any) -> None:
    instance(path, (str, os.PathLike), f"{operation}: path", "a file .safetensors, or a folder")
    instance(max_shard_bytes, (int, float), f"{operation}: max_shard_bytes", "a number of bytes")
    if not max_shard_bytes > 0:
        raise ValueError(f"{operation}: max_shard_bytes is {shown(max_shard_bytes)}, expected a number above 0")
    if others:
        raise TypeError(f"{operation}: {next(iter(others))} is no tensor: files of safetensors hold tensors alone")
    check_values(operation, entries)
    check_types(operation, {entry.tensor.dtype: entry.names[0] for entry in entries})


def check_values(operation: str, entries: list[Entry]) -> None:
    for entry in entries:
        if entry.tensor.is_meta:
            raise ValueError(
                f"{operation}: {entry.names[0]} is on the meta device: it has no values; load a checkpoint first, or "
                "use to_empty() and an init"
            )


# --------------------------------------------------------------------------------------------------------- loading


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | Path_ | None,
    strict: bool = True,
    *,
    comm: Communicator | None = None,
    device: Any = None,
) -> IncompatibleKeys:
    """Each rank's part of an unsharded checkpoint, into the model's parameters and buffers. Every rank must call it.

    state   a state dict; or a file .safetensors, an index .safetensors.index.json, or a folder with one of them, of
            which each rank maps what it needs. None on all ranks but 0: it broadcasts tensor by tensor
    strict  RuntimeError, as of Module.load_state_dict, for names that either side has not. Nothing is loaded then
    comm    as of `full_state_dict`
    device  for what is on the meta device, which is made when its turn comes; None: that of the communicator

    A tied parameter needs one of its names. Values take the parameter's type. RuntimeError if a shape is not that of
    the whole parameter; ValueError for files that are not whole. What is wrong on one rank raises on all, before
    anything is loaded; but what then cannot be read leaves the model with a part of the checkpoint.
    """
    operation = "load_full_state_dict"
    comm = comm_of(operation, model, comm)
    source = source_of(operation, comm, state)
    entries, extra = entries_of(model)
    # Of several names the last one that is there, as torch's load_state_dict has it.
    names = [next((name for name in reversed(entry.names) if name in source.shapes), None) for entry in entries]
    missing = [name for entry, there in zip(entries, names, strict=True) if there is None for name in entry.names]
    missing += [name for name in extra if name not in source.others]
    known = {*extra, *(name for entry in entries for name in entry.names)}
    found = IncompatibleKeys(missing, [name for name in (*source.shapes, *source.others) if name not in known])
    run_on_all_ranks(comm, lambda: _check_load(model, source, entries, found if strict else None))
    problem: Exception | None = None
    pairs = list(zip(entries, names, strict=True))
    for entry, name in progress.over(pairs, "loading", "tensor", own=is_first(comm)):
        if name is not None:
            _, wrong = caught(partial(_load, model, entry, source, name, device, comm))
            problem = problem or wrong
    raise_on_all_ranks(comm, problem)
    for name in extra:
        if name in source.others:
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(source.others[name])
    return found


def _check_load(model: nn.Module, source: Source, entries: list[Entry], strict: IncompatibleKeys | None) -> None:
    """RuntimeError for other shapes and, if strict, for names that either side has not."""
    wrong = [
        f"size mismatch for {name}: found {list(source.shapes[name])}, expected {list(entry.shape)}, that of the whole"
        for entry in entries
        for name in entry.names
        if name in source.shapes and source.shapes[name] != entry.shape
    ]
    if strict is not None:
        unexpected, missing = _listed("Unexpected", strict.unexpected_keys), _listed("Missing", strict.missing_keys)
        wrong = unexpected + missing + wrong + _left_on_meta(model)
    if wrong:
        text = "\n\t".join(wrong)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{text}")


def _listed(which: str, names: list[str]) -> list[str]:
    text = ", ".join(f'"{name}"' for name in names)
    return [f"{which} key(s) in state_dict: {text}. "] if names else []


def _left_on_meta(model: nn.Module) -> list[str]:
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    names = ", ".join(name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in kept)
    text = f"on the meta device and in no checkpoint, since not persistent: {names}; compute them first"
    return [text] if names else []


@torch.no_grad()
def _load(model: nn.Module, entry: Entry, source: Source, name: str, device: Any, comm: Communicator | None) -> None:
    own = entry.own(source.read(name))
    if not entry.tensor.is_meta:
        entry.tensor.copy_(cut_like(own, entry.tensor))
        return
    comm = comm if entry.shard is None else entry.shard.comm
    made = torch.empty_like(entry.tensor, device=device or ("cpu" if comm is None else comm.device))
    made.copy_(own)
    if isinstance(entry.tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=entry.tensor.requires_grad)
        made.__dict__.update(entry.tensor.__dict__)
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name_here, there in [*parameters, *buffers]:
            if there is entry.tensor:
                setattr(module, name_here, made)
