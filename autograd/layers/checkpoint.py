"""State dicts and files of the unsharded model, made from and loaded into one whose parameters are parts.

One whole tensor at a time is in memory. Names and shapes are those of the unsharded model, so what one number of ranks
saves any other loads, and so does plain torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pynccl import Communicator, progress
from pynccl.bindings.values import instance, shown

from ..agreement import raise_alike
from ..arguments import check_comm
from .checkpoint_sources import Path_, Source, caught, source_of
from .dtensors import cut_like, full_tensor, local_part
from .safetensors_files import Row, check_rows, claim_of, in_order, plan_of, write
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
    raise_alike(comm, _without_values("full_state_dict", entries))
    keep = not rank0_only or comm is None or comm.rank == 0
    wholes: dict[str, Any] = dict(others)
    for entry in progress.over(entries, "gathering", "tensor", own=_speaks(comm)):
        if keep:
            wholes.update(dict.fromkeys(entry.names, entry.whole()))
        else:
            entry.gather()
    return {name: wholes[name] for name in model.state_dict(keep_vars=True)} if keep else {}


def save_full_state_dict(
    model: nn.Module, path: Path_, max_shard_bytes: float = 5e9, *, comm: Communicator | None = None
) -> None:
    """The state dict of the unsharded model, in files of safetensors that rank 0 writes. Every rank must call it.

    Data-parallel replicas, which have the same parts, may all call it with the same path: one of them writes, the
    others wait for it. RuntimeError on all ranks of a job that comes while another one is saving there.

    path             a file .safetensors; or a folder, made if need be: model.safetensors, or files of up to
                     max_shard_bytes (or one tensor) each with model.safetensors.index.json, as Hugging Face names them
    max_shard_bytes  bytes
    comm             as of `full_state_dict`

    One whole tensor at a time is in rank 0's memory. The checkpoint that is there is replaced once the new one is on
    the disk: whenever the process is killed, one of the two is loaded, whole. A tied parameter is written once, under
    its first name. What fails on rank 0 raises on every rank. TypeError for what is no tensor, and for types that the
    format does not have.
    """
    operation = "save_full_state_dict"
    comm = comm_of(operation, model, comm)
    entries, others = entries_of(model)
    by_name = {entry.names[0]: entry for entry in entries}
    rows = in_order(Row(name, entry.shape, entry.tensor.dtype) for name, entry in by_name.items())
    _, problem = caught(lambda: _check_save(operation, path, rows, others, max_shard_bytes))
    claim, plan, problem = None, None, problem or _without_values(operation, entries)
    if problem is None and _speaks(comm):
        claim, problem = caught(lambda: claim_of(operation, Path(path), rows))
        if claim is not None and claim.own:
            plan, problem = caught(lambda: plan_of(operation, Path(path), rows, max_shard_bytes))
            if problem is not None:
                claim.finish(saved=False)
    raise_alike(comm, problem)
    left = iter([by_name[row.name] for row in rows])
    if plan is not None:
        ties = {tied: entry.names[0] for entry in entries for tied in entry.names[1:]}
        with progress.Bar(len(rows), "saving", "tensor") as bar:

            def wholes() -> Iterator[Tensor]:
                for entry in left:
                    yield entry.whole()
                    bar.step()

            _, problem = caught(lambda: write(plan, wholes(), ties))
    for entry in left:  # on the other ranks, and on rank 0 if it failed: the others wait for it in the rest
        entry.gather()
    if claim is not None:
        _, wrong = caught(lambda: claim.finish(saved=problem is None))
        problem = problem or wrong
    raise_alike(comm, problem)


def _speaks(comm: Communicator | None) -> bool:
    return comm is None or comm.rank == 0


def _check_save(operation: str, path: Any, rows: list[Row], others: dict[str, Any], max_shard_bytes: Any) -> None:
    instance(path, (str, os.PathLike), f"{operation}: path", "a file .safetensors, or a folder")
    instance(max_shard_bytes, (int, float), f"{operation}: max_shard_bytes", "a number of bytes")
    if not max_shard_bytes > 0:
        raise ValueError(f"{operation}: max_shard_bytes is {shown(max_shard_bytes)}, expected a number above 0")
    if others:
        raise TypeError(f"{operation}: {next(iter(others))} is no tensor: files of safetensors hold tensors alone")
    check_rows(operation, rows)


def _without_values(operation: str, entries: list[Entry]) -> Exception | None:
    names = [entry.names[0] for entry in entries if entry.tensor.is_meta]
    return ValueError(f"{operation}: {names[0]} is on the meta device: it has no values") if names else None


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
    given, shapes = source.others, source.shapes
    known = {name for entry in entries for name in entry.names} | set(extra)
    chosen = {id(entry): name for entry in entries if (name := _name_in(source, entry)) is not None}
    missing = [name for entry in entries if id(entry) not in chosen for name in entry.names]
    missing += [name for name in extra if name not in given]
    unexpected = [name for name in (*shapes, *given) if name not in known]
    wrong = [
        f"size mismatch for {name}: found {list(shapes[name])}, expected {list(entry.shape)}, that of the whole"
        for entry in entries
        for name in (*entry.names, chosen.get(id(entry), ""))
        if name in shapes and shapes[name] != entry.shape
    ]
    if strict:
        wrong = _listed("Unexpected", unexpected) + _listed("Missing", missing) + wrong + _left_on_meta(model)
    problem: Exception | None = None
    if wrong:
        text = "\n\t".join(dict.fromkeys(wrong))
        problem = RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{text}")
    raise_alike(comm, problem)
    for entry in progress.over(entries, "loading", "tensor", own=_speaks(comm)):
        if id(entry) in chosen:
            _, wrong_here = caught(partial(_load, model, entry, source, chosen[id(entry)], device, comm))
            problem = problem or wrong_here
    raise_alike(comm, problem)
    for name in extra:
        if name in given:
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(given[name])
    return IncompatibleKeys(missing, unexpected)


def _name_in(source: Source, entry: Entry) -> str | None:
    """Under which the checkpoint has it: the last one, as torch's load_state_dict has it."""
    for name in reversed(entry.names):
        if name in source.shapes:
            return name
    return next((source.ties[name] for name in entry.names if name in source.ties), None)


def _listed(which: str, names: list[str]) -> list[str]:
    text = ", ".join(f'"{name}"' for name in names)
    return [f"{which} key(s) in state_dict: {text}. "] if names else []


def _left_on_meta(model: nn.Module) -> list[str]:
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in kept]
    names = ", ".join(left)
    return (
        [f"on the meta device and in no checkpoint, since not persistent: {names}; compute them first"] if left else []
    )


def _device(entry: Entry, comm: Communicator | None) -> torch.device:
    comm = comm if entry.shard is None else entry.shard.comm
    return torch.device("cpu" if comm is None else comm.device)


def _load(model: nn.Module, entry: Entry, source: Source, name: str, device: Any, comm: Communicator | None) -> None:
    _take(model, entry, source.whole(name), device or _device(entry, comm))


@torch.no_grad()
def _take(model: nn.Module, entry: Entry, whole: Tensor, device: Any) -> None:
    own = entry.own(whole)
    if not entry.tensor.is_meta:
        entry.tensor.copy_(cut_like(own, entry.tensor))
        return
    made = torch.empty_like(entry.tensor, device=device)
    made.copy_(own)
    if isinstance(entry.tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=entry.tensor.requires_grad)
        made.__dict__.update(entry.tensor.__dict__)
    for module in model.modules():
        own_ones = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, there in own_ones:
            if there is entry.tensor:
                setattr(module, name, made)
