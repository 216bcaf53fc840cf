"""Full state dicts and checkpoints of models with sharded parameters.

Names and shapes are those of the unsharded model, without the names of modules that wrap others. So any number of ranks
can load a checkpoint, and so can plain torch. One full tensor at a time is in memory; on rank 0, when it writes files,
the tensors of one file.
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
from pynccl.bindings.values import instance, path_of, shown

from ..agreement import raise_on_all_ranks, run_on_all_ranks, try_call
from ..arguments import check_comm, checked
from ..names import plain_name, plain_names
from ..torch_internals import FSDP1, wrapped_in
from .checkpoint_files import Path_, Saving, Source, check_types, source_of
from .dtensors import distribute_like, full_tensor, local_tensor
from .shard import Shard
from .shards import Sharded, set_shard, shard_of


class IncompatibleKeys(NamedTuple):
    """Returned by `load_full_state_dict`: names missing from the checkpoint, and names that the model does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Entry(NamedTuple):
    """A tensor of a model's state dict, with all its names."""

    names: list[str]
    tensor: Tensor
    shard: Shard | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.shard is None else self.shard.shape

    def local(self, full: Tensor) -> Tensor:
        """Return this rank's shard of the full tensor."""
        return full if self.shard is None else self.shard.local(full)

    @torch.no_grad()
    def gather(self) -> Tensor:
        """Return the full tensor, on the model's device. A collective, if it is sharded."""
        shard = self.tensor.detach()
        return full_tensor(shard) if self.shard is None else self.shard.gather(shard)

    def gather_to_cpu(self) -> Tensor:
        """As `gather`, but return a copy on the CPU."""
        full = self.gather()
        return full.to("cpu", copy=full.data_ptr() == local_tensor(self.tensor).data_ptr())


def _state_of(model: nn.Module) -> dict[str, Any]:
    return {plain_name(model, name): value for name, value in model.state_dict(keep_vars=True).items()}


def entries_of(model: nn.Module) -> tuple[list[Entry], dict[str, Any]]:
    """Return the tensors of the model's state dict, and its other values by name (from `get_extra_state`)."""
    modules = list(model.modules())
    if any(isinstance(one, Sharded) for one in modules) and any(wrapped_in(one) == FSDP1 for one in modules):
        raise TypeError(
            "FullyShardedDataParallel (FSDP1) copies the parameters of a parallel model, whose shards would pass for "
            "whole tensors; use torch's fully_shard (FSDP2) within `with pynccl_autograd.keep_shards(model):`"
        )
    found: dict[int, Entry] = {}
    others: dict[str, Any] = {}
    for name, value in _state_of(model).items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), Entry([], value, shard_of(value))).names.append(name)
        else:
            others[name] = value
    return list(found.values()), others


def comm_of(operation: str, model: nn.Module, comm: Communicator | None) -> Communicator | None:
    """Return `comm`, or else the communicator over which the model is sharded; None: it is not sharded. If there are
    several, it is the one from which the others were split."""
    if comm is not None:
        check_comm(operation, comm, model=model)
    instance(model, nn.Module, f"{operation}: model", "a torch.nn.Module")
    if comm is not None:
        return comm
    shards = [shard for parameter in model.parameters() if (shard := shard_of(parameter)) is not None]
    found = {id(shard.comm): shard.comm for shard in shards}
    if len(found) > 1:
        lines = [one._lineage.line() for one in found.values()]
        above = [one for one in found.values() if all(one._lineage in line for line in lines)]
        if len(above) == 1:
            return above[0]
        raise ValueError(
            f"{operation}: the parameters are sharded over {len(found)} communicators; pass comm= with one of all "
            "their ranks, such as Mesh.comm"
        )
    return next(iter(found.values()), None)


def is_first(comm: Communicator | None) -> bool:
    return comm is None or comm.rank == 0


# ---------------------------------------------------------------------------------------------------------- saving


@checked
def full_state_dict(model: nn.Module, comm: Communicator | None = None, rank0_only: bool = True) -> dict[str, Any]:
    """Return the state dict of the unsharded model, on the CPU. A collective: every rank must call it.

    comm        communicator of the ranks that call it; None: the one over which the parameters are sharded, or from
                which the others were split
    rank0_only  True: ranks other than 0 get {}, so that only one has the full model in memory. False: all get it

    Modules that wrap others (torch.compile, activation checkpointing, DDP) do not show in the names, as in torch's
    get_model_state_dict. Parameters are gathered one at a time. Buffers and replicated parameters are this rank's. Tied
    parameters stay tied. ValueError if a tensor is on the meta device, or if the parameters are sharded over unrelated
    communicators and comm is not given.
    """
    comm = comm_of("full_state_dict", model, comm)
    entries, others = entries_of(model)
    run_on_all_ranks(comm, lambda: check_values("full_state_dict", entries))
    keep = not rank0_only or is_first(comm)
    full: dict[str, Any] = dict(others)
    for entry in progress.over(entries, "gathering", "tensor", own=is_first(comm)):
        if keep:
            full.update(dict.fromkeys(entry.names, entry.gather_to_cpu()))
        else:
            entry.gather()
    return {name: full[name] for name in _state_of(model)} if keep else {}


def save_full_state_dict(
    model: nn.Module, path: Path_, max_shard_bytes: float = 5e9, *, comm: Communicator | None = None
) -> None:
    """Save the unsharded model's state dict as safetensors, in Hugging Face's layout.

    A collective: every rank must call it. Rank 0 writes the files.

        ad.save_full_state_dict(model, "checkpoint")
        ad.load_full_state_dict(model, "checkpoint")     # on any number of ranks

    path             a .safetensors file; or a folder, which is created if needed, for model.safetensors, or for several
                     files with model.safetensors.index.json if the model is larger than max_shard_bytes
    max_shard_bytes  maximum size of a file in a folder, in bytes. A larger tensor gets its own file. Default: 5 GB
    comm             as for `full_state_dict`. With data parallelism, save one replica, or pass the communicator of all
                     ranks

    Rank 0 holds the tensors of one file in memory, other ranks one tensor. The save is atomic: the new checkpoint
    replaces the old one when it is complete on disk. If the process is killed, the old or the new one is intact, and
    the next save removes leftover files. If several processes save to the same path at the same time, each writes a
    complete checkpoint and the last one remains; load it after all have returned.

    If the communicator is elastic, the metadata of the files has its generation as "pynccl_generation", and a rank that
    was stopped, and without which the others have gone on, raises NcclRemoteError before it replaces their checkpoint.

    A tied parameter is written once, under its first name. An error on rank 0 raises on every rank, for example OSError
    if the disk is full. TypeError if the state dict has values other than tensors, or dtypes that safetensors does not
    support. ImportError without the package safetensors.
    """
    operation = "save_full_state_dict"
    comm = comm_of(operation, model, comm)
    entries, others = entries_of(model)
    run_on_all_ranks(comm, lambda: _check_save(operation, path, entries, others, max_shard_bytes))
    saving = run_on_all_ranks(
        comm, lambda: Saving(operation, Path(os.fsdecode(path)), max_shard_bytes, comm) if is_first(comm) else None
    )
    problem: Exception | None = None
    try:
        for entry in progress.over(entries, "saving", "tensor", own=is_first(comm)):
            if saving is not None and problem is None:
                _, problem = try_call(partial(_add, saving, entry))
            else:  # also after rank 0 has failed: the other ranks wait in the gather
                entry.gather()
        raise_on_all_ranks(comm, problem)
        run_on_all_ranks(comm, lambda: None if saving is None else saving.finish())
    finally:
        if saving is not None:
            saving.close()


def _add(saving: Saving, entry: Entry) -> None:
    saving.add(entry.names, entry.gather_to_cpu())


def _check_save(operation: str, path: Any, entries: list[Entry], others: dict[str, Any], max_shard_bytes: Any) -> None:
    path_of(path, f"{operation}: path", "a .safetensors file, or a folder")
    instance(max_shard_bytes, (int, float), f"{operation}: max_shard_bytes", "a number of bytes")
    if not max_shard_bytes > 0:
        raise ValueError(f"{operation}: max_shard_bytes is {shown(max_shard_bytes)}, expected a number above 0")
    if others:
        raise TypeError(
            f"{operation}: {next(iter(others))} of the state dict is not a tensor, and safetensors files hold only "
            "tensors; save full_state_dict(model) with torch.save instead"
        )
    check_values(operation, entries)
    check_types(operation, {entry.tensor.dtype: entry.names[0] for entry in entries})


def check_values(operation: str, entries: list[Entry]) -> None:
    for entry in entries:
        if entry.tensor.is_meta:
            raise ValueError(
                f"{operation}: {entry.names[0]} is on the meta device, so it has no values; load a checkpoint first, "
                "or call to_empty() and initialize it"
            )


# --------------------------------------------------------------------------------------------------------- loading


@checked
def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | Path_ | None,
    strict: bool = True,
    *,
    comm: Communicator | None = None,
    device: Any = None,
) -> IncompatibleKeys:
    """Load an unsharded checkpoint into a sharded model: each rank reads its shard. Every rank must call it.

    state   a state dict; or the path of a .safetensors file, of an index .safetensors.index.json, or of a folder with
            one of them, which each rank maps into memory. If only rank 0 has it, pass None on the other ranks: rank 0
            broadcasts one tensor at a time
    strict  True: raise RuntimeError if the names in the checkpoint and in the model differ, as Module.load_state_dict
            does. Nothing is loaded then. Names of a wrapped model ("_orig_mod.", "module.") are those without wrappers
    comm    as for `full_state_dict`
    device  where to allocate tensors that are on the meta device, one at a time; None: the communicator's device

    Returns the missing and unexpected names. For a tied parameter, one of its names is enough. Values are converted to
    the parameter's dtype. RuntimeError if a shape is not that of the full parameter, ValueError if a file is not
    complete. An error on one rank raises on all, before anything is loaded. Only a read error during loading leaves the
    model with a part of the checkpoint.
    """
    operation = "load_full_state_dict"
    comm = comm_of(operation, model, comm)
    entries, extra = entries_of(model)
    known = {*extra, *(name for entry in entries for name in entry.names)}
    source = source_of(operation, comm, state)
    source = source.renamed(plain_names(model, [*source.shapes, *source.others], known))
    # Of a tied parameter's names, the last one in the checkpoint counts, as in torch's load_state_dict.
    names = [next((name for name in reversed(entry.names) if name in source.shapes), None) for entry in entries]
    missing = [name for entry, there in zip(entries, names, strict=True) if there is None for name in entry.names]
    missing += [name for name in extra if name not in source.others]
    found = IncompatibleKeys(missing, [name for name in (*source.shapes, *source.others) if name not in known])
    run_on_all_ranks(comm, lambda: _check_load(model, source, entries, found if strict else None))
    problem: Exception | None = None
    pairs = list(zip(entries, names, strict=True))
    for entry, name in progress.over(pairs, "loading", "tensor", own=is_first(comm)):
        if name is not None:
            _, wrong = try_call(partial(_load, model, entry, source, name, device, comm))
            problem = problem or wrong
    raise_on_all_ranks(comm, problem)
    modules = {plain_name(model, path): module for path, module in model.named_modules()}  # the innermost counts
    for name in extra:
        if name in source.others:
            modules[name.rpartition(".")[0]].set_extra_state(source.others[name])
    return found


def _check_load(model: nn.Module, source: Source, entries: list[Entry], strict: IncompatibleKeys | None) -> None:
    """Raise RuntimeError for wrong shapes and, if strict, for missing and unexpected names."""
    wrong = [
        f"size mismatch for {name}: found {list(source.shapes[name])}, expected the full {list(entry.shape)}"
        for entry in entries
        for name in entry.names
        if name in source.shapes and source.shapes[name] != entry.shape
    ]
    if strict is not None:
        names = _keys_error("Unexpected", strict.unexpected_keys) + _keys_error("Missing", strict.missing_keys)
        wrong = names + wrong + _left_on_meta(model)
    if wrong:
        text = "\n\t".join(wrong)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{text}")


def _keys_error(which: str, names: list[str]) -> list[str]:
    text = ", ".join(f'"{name}"' for name in names)
    return [f"{which} key(s) in state_dict: {text}. "] if names else []


def _left_on_meta(model: nn.Module) -> list[str]:
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    left = (name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in kept)
    names = ", ".join(plain_name(model, name) for name in left)
    text = f"non-persistent buffers on the meta device, which no checkpoint has: {names}; compute them first"
    return [text] if names else []


@torch.no_grad()
def _load(model: nn.Module, entry: Entry, source: Source, name: str, device: Any, comm: Communicator | None) -> None:
    local = entry.local(source.read(name))
    if not entry.tensor.is_meta:
        entry.tensor.copy_(distribute_like(local, entry.tensor))
        return
    comm = comm if entry.shard is None else entry.shard.comm
    made = torch.empty_like(entry.tensor, device=device or ("cpu" if comm is None else comm.device))
    made.copy_(local)
    if isinstance(entry.tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=entry.tensor.requires_grad)
    made.__dict__.update(entry.tensor.__dict__)
    if "detach" in made.__dict__:
        set_shard(made, entry.shard)  # with its own methods, not those of the other
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name_here, there in [*parameters, *buffers]:
            if there is entry.tensor:
                setattr(module, name_here, made)
