"""Sources of the tensors of a checkpoint, and safetensors files in the layout of Hugging Face.

A checkpoint is `model.safetensors`, or several files with an index, `model.safetensors.index.json`, that maps each
tensor to its file. The package safetensors reads and writes them.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import path_of, shown

from ..agreement import broadcast_object, gathered, run_on_all_ranks, try_call

Path_ = str | os.PathLike[str]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "pynccl_generation"  # in the metadata of files that a rank of an elastic communicator writes
_SHARD_FILE = re.compile(r"model(-[0-9a-f]+)?-\d{5}-of-\d{5}\.safetensors")


class Source(NamedTuple):
    """The tensors of a checkpoint. `read` loads one by its name."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    others: dict[str, Any]  # values that are not tensors
    read: Callable[[str], Tensor]

    def renamed(self, names: Mapping[str, str]) -> Source:
        """Return the source with other names. names: old name -> new one"""
        old = {new: one for one, new in names.items()}

        def with_names(values: dict[str, Any]) -> dict[str, Any]:
            return {names[name]: value for name, value in values.items()}

        tables = with_names(self.shapes), with_names(self.dtypes), with_names(self.others)
        return Source(*tables, lambda name: self.read(old[name]))


def _package(operation: str) -> Any:
    """Import and return safetensors, with its submodule torch."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            f"{operation}: checkpoint files need the package safetensors; pip install safetensors"
        ) from error
    return safetensors


# -------------------------------------------------------------------------------------------------------- reading


def source_of(operation: str, comm: Communicator | None, state: Any) -> Source:
    """Return the source of the tensors: a dict, files, or rank 0, if only rank 0 has one of these. An error in `state`
    on one rank raises on all."""
    source = run_on_all_ranks(comm, lambda: None if state is None else _local_source(operation, state))
    without = [] if comm is None else [rank for rank, (none,) in enumerate(gathered(comm, [state is None])) if none]
    if comm is not None and comm.size > 1 and without == list(range(1, comm.size)):
        return _source_of_rank_0(comm, source)
    if source is None or without:
        raise ValueError(
            f"{operation}: state is None on ranks {without or [0]}; pass it on all ranks, or on rank 0 only"
        )
    return source


def _local_source(operation: str, state: Any) -> Source:
    if isinstance(state, (str, os.PathLike)):
        return _source_of_files(operation, Path(path_of(state, f"{operation}: state")))
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise TypeError(
            f"{operation}: state is {shown(state)}, expected a state dict, a path, or None if only rank 0 has it"
        )
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    for name, one in tensors.items():
        if one.is_meta or one.layout != torch.strided or one.is_quantized:
            what = "on the meta device, so it has no values" if one.is_meta else f"{one.layout} of {one.dtype}"
            raise ValueError(f"{operation}: {name} of state is {what}; expected a dense tensor")
    shapes = {name: tuple(one.shape) for name, one in tensors.items()}
    dtypes = {name: one.dtype for name, one in tensors.items()}
    others = {name: value for name, value in state.items() if name not in tensors}
    return Source(shapes, dtypes, others, tensors.__getitem__)


def _source_of_rank_0(comm: Communicator, source: Source | None) -> Source:
    """Return a source that broadcasts each tensor from rank 0 when it is read. Every rank must read the same ones."""
    shapes, dtypes, others = broadcast_object(comm, None if source is None else source[:-1])

    def read(name: str) -> Tensor:
        wire, problem = torch.empty(shapes[name], dtype=dtypes[name], device=comm.device), None
        if source is not None:
            _, problem = try_call(lambda: wire.copy_(source.read(name)))
        if wire.numel():  # also after a read error: the other ranks wait for it
            sent = wire.reshape(-1).view(torch.uint8)
            comm.broadcast(sent, sent, 0)
        if problem is not None:
            raise problem
        return wire

    return Source(shapes, dtypes, others, read)


def _source_of_files(operation: str, path: Path) -> Source:
    """Return the tensors of a file, an index or a folder."""
    path = _in_folder(operation, path) if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"{operation}: {path} does not exist")
    files: dict[str, Path] = {}  # of an index: tensor -> file
    if path.name.endswith(".safetensors.index.json"):
        files = {name: path.parent / file for name, file in _weight_map(operation, path).items()}
    elif path.suffix != ".safetensors":
        raise ValueError(
            f"{operation}: state is {path}, expected a .safetensors file, an index .safetensors.index.json, or a "
            "folder with one of them"
        )
    stored: dict[str, tuple[Path, str]] = {}  # tensor -> its file, and its name there (of a tied tensor, another one)
    found = Source({}, {}, {}, lambda name: _read(operation, *stored[name]))
    for file in dict.fromkeys(files.values()) if files else [path]:
        with _open(operation, file) as opened:
            held, metadata = set(opened.keys()), opened.metadata() or {}
            known = {*held, "format", GENERATION}
            ties = [(tied, name) for tied, name in metadata.items() if name in held and tied not in known]
            for name, of_file in (*zip(held, held, strict=True), *ties):
                if files.get(name, file) == file:
                    tensor = opened.get_tensor(of_file)
                    found.shapes[name], found.dtypes[name] = tuple(tensor.shape), tensor.dtype
                    stored[name] = file, of_file
    for name, file in files.items():
        if name not in stored:
            raise ValueError(f"{operation}: {name} is not in {file}, where the index {path} places it; save it again")
    return found


def _read(operation: str, path: Path, name: str) -> Tensor:
    """Return a tensor that maps the file: only the pages that are used are read, and freed with the tensor."""
    with _open(operation, path) as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _open(operation: str, path: Path) -> Any:
    package = _package(operation)
    try:
        return package.safe_open(str(path), "pt")
    except package.SafetensorError as error:
        raise ValueError(f"{operation}: {path} is not a complete safetensors file: {error}") from error
    except FileNotFoundError:
        raise FileNotFoundError(f"{operation}: {path}, which the index in its folder names, does not exist") from None
    except OSError as error:
        raise OSError(f"{operation}: {path} cannot be read: {error}") from error


def _in_folder(operation: str, folder: Path) -> Path:
    for pattern in (SINGLE, INDEX, "*.safetensors.index.json", "*.safetensors"):
        found = [file for file in sorted(folder.glob(pattern)) if not _SHARD_FILE.fullmatch(file.name)]
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise ValueError(f"{operation}: the folder {folder} has {names}; pass the path of one of them")
        if found:
            return found[0]
    pickled = next(folder.glob("*.bin"), None)
    remedy = f"; for {pickled.name}, pass the state dict that torch.load returns" if pickled else ""
    raise FileNotFoundError(
        f"{operation}: the folder {folder} has no complete .safetensors file and no .safetensors.index.json{remedy}"
    )


def _weight_map(operation: str, index: Path) -> dict[str, str]:
    """Return the weight_map of an index: name of a tensor -> name of its file in the same folder."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        files = json.loads(index.read_text())["weight_map"]
        if all(file == os.path.basename(file) and file.endswith(".safetensors") for file in files.values()):
            return dict(files)
    raise ValueError(
        f"{operation}: {index} is not an index: it needs a weight_map from tensor names to .safetensors files in its "
        "folder"
    )


# -------------------------------------------------------------------------------------------------------- writing


class Saving:
    """Writes a checkpoint to the file or folder `path`, in files of up to `max_bytes` or of one tensor each.

    It writes the files into a folder of its own, `model.saving-*`, and moves them into place when they are on disk. The
    names of several files are unique to this save, so the old index stays valid until the new one replaces it; then the
    old files are removed. Whenever the process is killed, the old or the new checkpoint is intact. If several processes
    save at the same time, the last checkpoint remains, and a later save removes the files of the others.

    A rank without which the others of an elastic `comm` have gone on, since it was stopped, changes nothing when it
    wakes up, unless it was stopped between a check and the very next call.
    """

    def __init__(self, operation: str, path: Path, max_bytes: float, comm: Communicator | None = None) -> None:
        one_file = path.suffix == ".safetensors"
        if path.suffix in (".json", ".bin", ".pt", ".pth") or (one_file and path.is_dir()):
            what = "is a folder" if path.is_dir() else "is neither"
            raise ValueError(f"{operation}: path is {path}, which {what}; expected a .safetensors file, or a folder")
        self.operation, self.max_bytes = operation, math.inf if one_file else max_bytes
        self.folder, stem = (path.parent, path.name) if one_file else (path, "model")
        self.single = path.name if one_file else SINGLE
        self.folder.mkdir(parents=True, exist_ok=True)
        there = set(os.listdir(self.folder))
        alone = not _is_other_save_running(self.folder, stem)
        self.old = [] if one_file else _old_files(operation, self.folder, there, alone)
        self.token = secrets.token_hex(4)
        self.new = self.folder / f"{stem}.saving-{self.token}-{os.getpid()}-{os.uname().nodename}"
        self.new.mkdir()
        elastic = None if comm is None or comm._generation is None else comm
        self.check: Callable[[], None] = elastic.check_generation if elastic else lambda: None
        self.metadata = {GENERATION: str(elastic.generation)} if elastic else {}
        self.total = 0  # bytes
        self.written: list[list[str]] = []  # names of the tensors in each file
        self.tensors: dict[str, Tensor] = {}  # of the next file
        self.ties: dict[str, str] = {}  # other names of tied tensors

    def add(self, names: list[str], tensor: Tensor) -> None:
        """Add a CPU tensor under its first name. Writes the current file first if it would become too large."""
        if self.tensors and sum(one.nbytes for one in self.tensors.values()) + tensor.nbytes > self.max_bytes:
            self._write()
        self.tensors[names[0]] = tensor.contiguous()
        self.ties.update(dict.fromkeys(names[1:], names[0]))
        self.total += tensor.nbytes

    def _write(self) -> None:
        path, package = self.new / str(len(self.written)), _package(self.operation)
        try:
            package.torch.save_file(self.tensors, path, {"format": "pt", **self.metadata, **self.ties})
        except package.SafetensorError as error:  # also raised for I/O errors
            raise OSError(f"{self.operation}: {path} cannot be written: {error}") from error
        path.chmod(self.new.stat().st_mode & 0o666)  # the permissions that open() gives; the package sets 600
        _fsync(path)
        self.written.append(list(self.tensors))
        self.tensors, self.ties = {}, {}

    def finish(self) -> None:
        """Write the last file, and move all files into place."""
        self._write()
        count = len(self.written)
        files = [f"model-{self.token}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        files = files if count > 1 else [self.single]
        for number, file in enumerate(files):
            self._move(str(number), file)
        _fsync(self.folder)
        if count > 1:
            weight_map = {name: file for file, names in zip(files, self.written, strict=True) for name in names}
            index = {"metadata": {"total_size": self.total, **self.metadata}, "weight_map": weight_map}
            (self.new / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            _fsync(self.new / INDEX)
            self._move(INDEX, INDEX)
            _fsync(self.folder)
        self.check()
        for file in self.old:
            if file not in (*files, INDEX if count > 1 else None):
                (self.folder / file).unlink(missing_ok=True)
        self.close()

    def _move(self, name: str, to: str) -> None:
        """Move a file into place."""
        self.check()
        os.replace(self.new / name, self.folder / to)

    def close(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self.new, ignore_errors=True)


def _old_files(operation: str, folder: Path, there: set[str], alone: bool) -> list[str]:
    """Return the files that the next checkpoint replaces: those of the current checkpoint and, unless another save is
    running, leftover files that no index names. Files that a load reads first come first, and are removed first:
    model.safetensors, then the index, then its files."""
    old = {file for file in there if alone and _SHARD_FILE.fullmatch(file)}
    with suppress(OSError, ValueError):
        old |= there & set(_weight_map(operation, folder / INDEX).values())
    return [file for file in (SINGLE, INDEX) if file in there] + sorted(old - {SINGLE})


def _is_other_save_running(folder: Path, stem: str) -> bool:
    """Return whether another save is in progress, and remove the folders of saves that were killed: on this node, if
    the process is gone; on other nodes, if it has written nothing for an hour."""
    found = False
    for one in [file for file in folder.iterdir() if file.name.startswith(f"{stem}.saving-")]:
        with suppress(OSError, ValueError):  # it was removed in the meantime, or the name is not that of a save
            _, pid, node = one.name.removeprefix(f"{stem}.saving-").split("-", 2)
            if node == os.uname().nodename:
                alive = Path("/proc", pid).exists()
            else:
                alive = time.time() - max(file.stat().st_mtime for file in (one, *one.iterdir())) < 3600
            found = found or alive
            if not alive:
                shutil.rmtree(one, ignore_errors=True)
    return found


def check_types(operation: str, names: Mapping[torch.dtype, str]) -> None:
    """Raise TypeError for a dtype that safetensors does not support. names: dtype -> name of a tensor that has it."""
    package = _package(operation)
    for dtype, name in names.items():
        try:
            package.torch.save({name: torch.empty(0, dtype=dtype)})
        except (KeyError, package.SafetensorError):
            raise TypeError(f"{operation}: {name} is {dtype}, which safetensors files cannot hold") from None


def _fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
