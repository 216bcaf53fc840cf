"""Where the tensors of a checkpoint come from, and files of safetensors, as Hugging Face lays them out.

A checkpoint is `model.safetensors`; or several files, of which `model.safetensors.index.json` says which tensor is in
which. The package safetensors reads and writes them.
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
from pynccl.bindings.values import shown

from ..agreement import broadcast_object, caught, gathered, run_on_all_ranks

Path_ = str | os.PathLike[str]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_SEVERAL = re.compile(r"model(-[0-9a-f]+)?-\d{5}-of-\d{5}\.safetensors")


class Source(NamedTuple):
    """The tensors of a checkpoint, each read when it is needed."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    others: dict[str, Any]  # what is no tensor
    read: Callable[[str], Tensor]


def _package(operation: str) -> Any:
    """safetensors, with its submodule torch; ImportError that says how to install it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{operation}: files need the package safetensors: pip install safetensors") from error
    return safetensors


# -------------------------------------------------------------------------------------------------------- reading


def source_of(operation: str, comm: Communicator | None, state: Any) -> Source:
    """Where the tensors come from: a dict, files, or rank 0, which has one of them. What is wrong with `state` on some
    rank raises on all."""
    source = run_on_all_ranks(comm, lambda: None if state is None else _own_source(operation, state))
    without = [] if comm is None else [rank for rank, (none,) in enumerate(gathered(comm, [state is None])) if none]
    if comm is not None and comm.size > 1 and without == list(range(1, comm.size)):
        return _source_of_rank_0(comm, source)
    if source is None or without:
        raise ValueError(
            f"{operation}: state is None on ranks {without or [0]}; expected it on none, or on all but rank 0"
        )
    return source


def _own_source(operation: str, state: Any) -> Source:
    if isinstance(state, (str, os.PathLike)):
        return _source_of_files(operation, Path(state))
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{operation}: state is {shown(state)}, expected a state dict, a path, or None where rank 0 alone has it"
        )
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    for name, one in tensors.items():
        if one.is_meta or one.layout != torch.strided or one.is_quantized:
            what = "on the meta device: it has no values" if one.is_meta else f"{one.layout} of {one.dtype}"
            raise ValueError(f"{operation}: {name} of the state is {what}; expected a dense tensor")
    shapes = {name: tuple(one.shape) for name, one in tensors.items()}
    dtypes = {name: one.dtype for name, one in tensors.items()}
    others = {name: value for name, value in state.items() if name not in tensors}
    return Source(shapes, dtypes, others, tensors.__getitem__)


def _source_of_rank_0(comm: Communicator, source: Source | None) -> Source:
    """What rank 0 has, broadcast when it is read; every rank must read the same."""
    shapes, dtypes, others = broadcast_object(comm, None if source is None else source[:-1])

    def read(name: str) -> Tensor:
        wire, problem = torch.empty(shapes[name], dtype=dtypes[name], device=comm.device), None
        if source is not None:
            _, problem = caught(lambda: wire.copy_(source.read(name)))
        if wire.numel():  # the others wait for it, even if it could not be read
            sent = wire.reshape(-1).view(torch.uint8)
            comm.broadcast(sent, sent, 0)
        if problem is not None:
            raise problem
        return wire

    return Source(shapes, dtypes, others, read)


def _source_of_files(operation: str, path: Path) -> Source:
    """The tensors of a file, an index or a folder."""
    path = _in_folder(operation, path) if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"{operation}: there is no {path}")
    files: dict[str, Path] = {}  # as an index has it
    if path.name.endswith(".safetensors.index.json"):
        files = {name: path.parent / file for name, file in _weight_map(operation, path).items()}
    elif path.suffix != ".safetensors":
        raise ValueError(
            f"{operation}: state is {path}, expected a file .safetensors, an index .safetensors.index.json, or a "
            "folder with one of them"
        )
    stored: dict[str, tuple[Path, str]] = {}  # file, and the name in it, which is another one of a tied tensor
    found = Source({}, {}, {}, lambda name: _read(operation, *stored[name]))
    for file in dict.fromkeys(files.values()) if files else [path]:
        with _opened(operation, file) as opened:
            held, metadata = set(opened.keys()), opened.metadata() or {}
            ties = [(tied, name) for tied, name in metadata.items() if name in held and tied not in (*held, "format")]
            for name, of_file in (*zip(held, held, strict=True), *ties):
                if files.get(name, file) == file:
                    tensor = opened.get_tensor(of_file)
                    found.shapes[name], found.dtypes[name] = tuple(tensor.shape), tensor.dtype
                    stored[name] = file, of_file
    for name, file in files.items():
        if name not in stored:
            raise ValueError(f"{operation}: the index {path} says that {name} is in {file}: it is not")
    return found


def _read(operation: str, path: Path, name: str) -> Tensor:
    """A tensor that maps the file: only what is used of it comes into memory, and leaves with the tensor."""
    with _opened(operation, path) as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _opened(operation: str, path: Path) -> Any:
    package = _package(operation)
    try:
        return package.safe_open(str(path), "pt")
    except package.SafetensorError as error:
        raise ValueError(f"{operation}: {path} is no whole file of safetensors: {error}") from error
    except FileNotFoundError:
        raise FileNotFoundError(f"{operation}: there is no {path}, which the index beside it names") from None
    except OSError as error:
        raise OSError(f"{operation}: {path} cannot be read: {error}") from error


def _in_folder(operation: str, folder: Path) -> Path:
    for pattern in (SINGLE, INDEX, "*.safetensors.index.json", "*.safetensors"):
        found = [file for file in sorted(folder.glob(pattern)) if not _OF_SEVERAL.fullmatch(file.name)]
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise ValueError(f"{operation}: the folder {folder} has {names}; say which one to load")
        if found:
            return found[0]
    pickled = next(folder.glob("*.bin"), None)
    remedy = f"; of {pickled.name} and the like pass what torch.load returns" if pickled else ""
    raise FileNotFoundError(
        f"{operation}: the folder {folder} has no file .safetensors that is whole, and no .safetensors.index.json"
        f"{remedy}"
    )


def _weight_map(operation: str, index: Path) -> dict[str, str]:
    """Of an index: name of a tensor -> name of the file beside it."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        files = json.loads(index.read_text())["weight_map"]
        if all(file == os.path.basename(file) and file.endswith(".safetensors") for file in files.values()):
            return dict(files)
    raise ValueError(
        f"{operation}: {index} is no index: it needs a weight_map from names of tensors to files .safetensors beside it"
    )


# -------------------------------------------------------------------------------------------------------- writing


class Saving:
    """A checkpoint on its way into the file or folder `path`, in files of up to `max_bytes` or of one tensor each.

    Files are written into a folder of this save alone, `model.saving-*`, and put in place when they are on the disk.
    Several have names that no other save gives, so the old index stays true until the new one replaces it; then go the
    files of the old one. Whenever the process ends, the old checkpoint or the new one is there, whole. So it is where
    several processes save at a time: the last one stays, and a later save removes what it replaced.
    """

    def __init__(self, operation: str, path: Path, max_bytes: float) -> None:
        one_file = path.suffix == ".safetensors"
        if path.suffix in (".json", ".bin", ".pt", ".pth") or (one_file and path.is_dir()):
            what = "is a folder" if path.is_dir() else "is none of these"
            raise ValueError(f"{operation}: path is {path}, which {what}; expected a file .safetensors, or a folder")
        self.operation, self.max_bytes = operation, math.inf if one_file else max_bytes
        self.folder, stem = (path.parent, path.name) if one_file else (path, "model")
        self.single = path.name if one_file else SINGLE
        self.folder.mkdir(parents=True, exist_ok=True)
        there = set(os.listdir(self.folder))
        alone = not _others_save(self.folder, stem)
        self.old = [] if one_file else _old_files(operation, self.folder, there, alone)
        self.token = secrets.token_hex(4)
        self.new = self.folder / f"{stem}.saving-{self.token}-{os.getpid()}-{os.uname().nodename}"
        self.new.mkdir()
        self.total = 0  # bytes
        self.written: list[list[str]] = []  # names of the tensors in each file
        self.tensors: dict[str, Tensor] = {}  # of the next file
        self.ties: dict[str, str] = {}  # other names of these

    def add(self, names: list[str], tensor: Tensor) -> None:
        """The next tensor, on the CPU, under its first name. The next file is written if it would be too large."""
        if self.tensors and sum(one.nbytes for one in self.tensors.values()) + tensor.nbytes > self.max_bytes:
            self._write()
        self.tensors[names[0]] = tensor.contiguous()
        self.ties.update(dict.fromkeys(names[1:], names[0]))
        self.total += tensor.nbytes

    def _write(self) -> None:
        path, package = self.new / str(len(self.written)), _package(self.operation)
        try:
            package.torch.save_file(self.tensors, path, {"format": "pt", **self.ties})
        except package.SafetensorError as error:  # also where it could not write
            raise OSError(f"{self.operation}: {path} cannot be written: {error}") from error
        path.chmod(self.new.stat().st_mode & 0o666)  # as of open(); the package gives 600
        _to_disk(path)
        self.written.append(list(self.tensors))
        self.tensors, self.ties = {}, {}

    def finish(self) -> None:
        """Put the files in place."""
        self._write()
        count = len(self.written)
        files = [f"model-{self.token}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        files = files if count > 1 else [self.single]
        for number, file in enumerate(files):
            os.replace(self.new / str(number), self.folder / file)
        _to_disk(self.folder)
        if count > 1:
            weight_map = {name: file for file, names in zip(files, self.written, strict=True) for name in names}
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self.new / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            _to_disk(self.new / INDEX)
            os.replace(self.new / INDEX, self.folder / INDEX)
            _to_disk(self.folder)
        for file in self.old:
            if file not in (*files, INDEX if count > 1 else None):
                (self.folder / file).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Remove what is left of it."""
        shutil.rmtree(self.new, ignore_errors=True)


def _old_files(operation: str, folder: Path, there: set[str], alone: bool) -> list[str]:
    """What the next checkpoint replaces: of the files there, those of the checkpoint and, unless another save may be
    putting them in place, those that no index names. What is read first comes, and so is removed, first: a folder with
    model.safetensors is that file, else what its index says."""
    old = {file for file in there if alone and _OF_SEVERAL.fullmatch(file)}
    with suppress(OSError, ValueError):
        old |= there & set(_weight_map(operation, folder / INDEX).values())
    return [file for file in (SINGLE, INDEX) if file in there] + sorted(old - {SINGLE})


def _others_save(folder: Path, stem: str) -> bool:
    """Whether another save is under way. The folders of killed ones are removed: of processes that are gone from this
    machine, and of those of other machines that have written nothing for an hour."""
    found = False
    for one in [file for file in folder.iterdir() if file.name.startswith(f"{stem}.saving-")]:
        with suppress(OSError, ValueError):  # it has ended just now, or is no save's
            _, pid, machine = one.name.removeprefix(f"{stem}.saving-").split("-", 2)
            if machine == os.uname().nodename:
                alive = Path("/proc", pid).exists()
            else:
                alive = time.time() - max(file.stat().st_mtime for file in (one, *one.iterdir())) < 3600
            found = found or alive
            if not alive:
                shutil.rmtree(one, ignore_errors=True)
    return found


def check_types(operation: str, names: Mapping[torch.dtype, str]) -> None:
    """TypeError for a type that the format does not have. names: type -> a tensor of that type."""
    package = _package(operation)
    for dtype, name in names.items():
        try:
            package.torch.save({name: torch.empty(0, dtype=dtype)})
        except (KeyError, package.SafetensorError):
            raise TypeError(f"{operation}: {name} is {dtype}, which files of safetensors cannot hold") from None


def _to_disk(path: Path) -> None:
    """Return once the file, or the names in the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
