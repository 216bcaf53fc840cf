"""Where the tensors of a checkpoint come from, and files of safetensors, as Hugging Face lays them out.

A checkpoint is `model.safetensors`; or several files, of which `model.safetensors.index.json` says which tensor is in
which. The package safetensors reads and writes them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..agreement import alike, broadcast_object, caught, gathered

Path_ = str | os.PathLike[str]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_SEVERAL = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
_OURS = re.compile(r"model((-\d+)?-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class Source(NamedTuple):
    """The tensors of a checkpoint, each read when it is needed."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    ties: dict[str, str]  # names left out -> the name under which the tensor is there
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
    source = alike(comm, lambda: _own_source(operation, state))
    without = [] if comm is None else [rank for rank, (none,) in enumerate(gathered(comm, [state is None])) if none]
    if comm is not None and comm.size > 1 and without == list(range(1, comm.size)):
        return _source_of_rank_0(comm, source)
    if source is None or without:
        raise ValueError(
            f"{operation}: state is None on ranks {without or [0]}; expected it on none, or on all but rank 0"
        )
    return source


def _own_source(operation: str, state: Any) -> Source | None:
    """What this rank itself was passed."""
    if state is None:
        return None
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
    return Source(shapes, dtypes, {}, others, tensors.__getitem__)


def _source_of_rank_0(comm: Communicator, source: Source | None) -> Source:
    """What rank 0 has, broadcast when it is read; every rank must read the same."""
    shapes, dtypes, ties, others = broadcast_object(comm, None if source is None else source[:-1])

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

    return Source(shapes, dtypes, ties, others, read)


def _source_of_files(operation: str, path: Path) -> Source:
    """The tensors of a file, an index or a folder."""
    paths = _paths(operation, path)
    found = Source({}, {}, {}, {}, lambda name: _read(operation, paths[name], name))
    for file in dict.fromkeys(paths.values()):
        with _opened(operation, file) as opened:
            names = set(opened.keys())
            found.ties.update({tied: name for tied, name in (opened.metadata() or {}).items() if name in names})
            for name in names:
                if paths.setdefault(name, file) == file:
                    tensor = opened.get_tensor(name)
                    found.shapes[name], found.dtypes[name] = tuple(tensor.shape), tensor.dtype
    paths.pop("", None)
    lost = [name for name in paths if name not in found.shapes]
    if lost:
        raise ValueError(f"{operation}: the index {path} says that {lost[0]} is in {paths[lost[0]]}: it is not")
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


def _paths(operation: str, path: Path) -> dict[str, Path]:
    """name -> file; {"": file} where the file itself says the names."""
    if path.is_dir():
        path = _in_folder(operation, path)
    if not path.exists():
        raise FileNotFoundError(f"{operation}: there is no {path}")
    if path.suffix == ".safetensors":
        return {"": path}
    if not path.name.endswith(".safetensors.index.json"):
        raise ValueError(
            f"{operation}: state is {path}, expected a file .safetensors, an index .safetensors.index.json, or a "
            "folder with one of them"
        )
    return {name: path.parent / file for name, file in _weight_map(operation, path).items()}


def _in_folder(operation: str, folder: Path) -> Path:
    for name in (SINGLE, INDEX):
        if (folder / name).exists():
            return folder / name
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = [file for file in sorted(folder.glob(pattern)) if not _OF_SEVERAL.fullmatch(file.name)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(file.name for file in found)
            raise ValueError(f"{operation}: the folder {folder} has {names}; say which one to load")
    pickled = next(folder.glob("*.bin"), None)
    remedy = f"; of {pickled.name} and the like pass what torch.load returns" if pickled else ""
    raise FileNotFoundError(
        f"{operation}: the folder {folder} has no file .safetensors that is whole, and no .safetensors.index.json"
        f"{remedy}"
    )


def _weight_map(operation: str, index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
        if all(file == os.path.basename(file) and file.endswith(".safetensors") for file in files.values()):
            return dict(files)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(
        f"{operation}: {index} is no index: it needs a weight_map from names of tensors to files .safetensors beside it"
    )


# -------------------------------------------------------------------------------------------------------- writing


def _named_by(index: Path) -> set[str]:
    """The files of which an index says that they hold the checkpoint; none where it is no index."""
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


class Saving:
    """A checkpoint that is being written into the file or folder `path`: each group of tensors is a file.

    Files are written in a folder of their own first, `model.saving`. It goes when this ends or, if the process is
    killed, when the next save begins, with all that the package has left in it. Several files get names that nothing in
    the checkpoint's folder has, so the old index stays true until the new one replaces it: whenever the process ends,
    that folder has the old checkpoint or the new one. Of several processes that save the same, one writes (`writes`),
    see `Lock`.
    """

    def __init__(self, operation: str, path: Path, groups: Sequence[Mapping[str, Tensor]]) -> None:
        if path.suffix in (".json", ".bin", ".pt", ".pth") or (path.suffix == ".safetensors" and path.is_dir()):
            what = "is a folder" if path.is_dir() else "is none of these"
            raise ValueError(f"{operation}: path is {path}, which {what}; expected a file .safetensors, or a folder")
        self.operation, self.groups = operation, groups
        one_file = path.suffix == ".safetensors"
        self.folder = path.parent if one_file else path
        rows = [(name, tuple(one.shape), one.dtype) for group in groups for name, one in group.items()]
        _check_types(operation, {dtype: name for name, _, dtype in reversed(rows)})
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = Lock(operation, path.with_name(f"{path.name}.saver") if one_file else path / "model.saver", rows)
        self.writes = self.lock.own
        self.new = path.with_name(f"{path.name}.saving") if one_file else path / "model.saving"
        try:
            self._prepare(path, one_file)
        except BaseException:
            self.abandon()
            raise

    def _prepare(self, path: Path, one_file: bool) -> None:
        """The folder of new files, their names, and which old ones go."""
        groups = self.groups
        if self.writes:
            if self.new.is_file():
                raise FileExistsError(
                    f"{self.operation}: {self.new} is a file, expected none or the folder of a save that was broken "
                    "off: remove it"
                )
            shutil.rmtree(self.new, ignore_errors=True)
            self.new.mkdir()
        there = {file.name for file in self.folder.iterdir()}
        self.files = [path.name if one_file else SINGLE]
        if len(groups) > 1:
            self.files = next(new for number in count() if there.isdisjoint(new := _names(number, len(groups))))
        kept = {INDEX, *self.files} if len(groups) > 1 else {SINGLE}
        ours = {name for name in there if _OURS.fullmatch(name)} | (there & _named_by(self.folder / INDEX))
        self.old = [] if one_file else sorted(ours - kept)

    def write(self, number: int, tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
        """The tensors of a group, on the CPU. ties: names left out -> the name under which the tensor is there."""
        metadata = {"format": "pt", **{tied: name for tied, name in ties.items() if name in tensors}}
        path = self.new / self.files[number]
        package = _package(self.operation)
        try:
            package.torch.save_file({name: one.contiguous() for name, one in tensors.items()}, path, metadata)
        except package.SafetensorError as error:  # also where it could not write
            raise OSError(f"{self.operation}: {path} cannot be written: {error}") from error
        os.chmod(path, os.fstat(self.lock.file.fileno()).st_mode & 0o777)  # as of open(); the package gives 600
        _to_disk(path)

    def finish(self, problem: Exception | None) -> None:
        """Put the files in place, or raise `problem`. A process that does not write waits for the one that does."""
        try:
            if problem is not None:
                raise problem
            if self.writes:
                self._place()
        except BaseException:
            self._leave(saved=False)
            raise
        self._leave(saved=True)

    def abandon(self) -> None:
        """Give the lock up without a checkpoint, and wait for nobody."""
        if not self.lock.file.closed:
            if self.writes:
                self._leave(saved=False)
            else:
                self.lock.file.close()

    def _leave(self, saved: bool) -> None:
        if self.writes:
            shutil.rmtree(self.new, ignore_errors=True)
            self.lock.release(saved)
        else:
            self.lock.wait()

    def _place(self) -> None:
        self._replace(self.files)
        if len(self.files) > 1:
            weight_map = {name: file for file, group in zip(self.files, self.groups, strict=True) for name in group}
            total = sum(one.nbytes for group in self.groups for one in group.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
            (self.new / INDEX).write_text(text + "\n")
            _to_disk(self.new / INDEX)
            self._replace([INDEX])
        # What is read first is removed first: a folder with model.safetensors is that file, else what its index says.
        for name in sorted(self.old, key=lambda name: (name != SINGLE, name != INDEX)):
            (self.folder / name).unlink(missing_ok=True)

    def _replace(self, names: list[str]) -> None:
        for name in names:
            os.replace(self.new / name, self.folder / name)
        _to_disk(self.folder)


def _check_types(operation: str, names: Mapping[torch.dtype, str]) -> None:
    """TypeError for a type that the format does not have."""
    package = _package(operation)
    for dtype, name in names.items():
        try:
            package.torch.save({name: torch.empty(0, dtype=dtype)})
        except (KeyError, package.SafetensorError):
            raise TypeError(f"{operation}: {name} is {dtype}, which files of safetensors cannot hold") from None


def in_groups(tensors: Mapping[str, Tensor], most: float) -> list[dict[str, Tensor]]:
    """The tensors in order, in groups of up to `most` bytes, or of one tensor."""
    groups: list[dict[str, Tensor]] = [{}]
    for name, one in tensors.items():
        if groups[-1] and sum(other.nbytes for other in groups[-1].values()) + one.nbytes > most:
            groups.append({})
        groups[-1][name] = one
    return groups


def _names(number: int, files: int) -> list[str]:
    stem = f"model-{number}" if number else "model"
    return [f"{stem}-{file:05d}-of-{files:05d}.safetensors" for file in range(1, files + 1)]


def _to_disk(path: Path) -> None:
    """Return once the file, or the names in the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Lock:
    """The right to write a checkpoint, which one process has at a time: a lock of the system, gone with the process.

    Data-parallel replicas write the same checkpoint: the first one has the right (`own`), and the others wait until it
    is done. RuntimeError if another job has it, or a part of this one that saves other tensors. Where the file system
    has no locks, every process has the right.
    """

    def __init__(self, operation: str, path: Path, tensors: Sequence[object]) -> None:
        self.operation, self.path = operation, path
        self.who = {"job": _job(), "tensors": zlib.crc32(repr(tensors).encode())}
        self.own = self._acquired()
        if self.own:
            self._write({"by": f"process {os.getpid()} on {os.uname().nodename}", "thread": _thread()})
        else:
            self._check_replica()

    def _acquired(self) -> bool:
        while True:
            self.file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", 0)
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # no locks here
                return True
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.path)):
                    return True
            self.file.close()  # who had the lock before has removed the file: there is another now, or none

    def _check_replica(self) -> None:
        for _ in range(100):  # who has the lock is about to write who it is
            if found := self._read():
                break
            time.sleep(0.01)
        if found.get("thread") == _thread():  # it would wait for itself
            self.file.close()
            raise RuntimeError(
                f"{self.operation}: this thread is saving into {self.path.parent} already; end that save first"
            )
        if {name: found.get(name) for name in self.who} == self.who:
            return
        self.file.close()
        what = "another job" if found.get("job") != self.who["job"] else "a rank that saves other tensors"
        raise RuntimeError(
            f"{self.operation}: {what} ({found.get('by', 'unknown')}) is saving into {self.path.parent}; nothing of "
            "this checkpoint was written: save it elsewhere"
        )

    def release(self, saved: bool) -> None:
        """Give the right up, and tell who waits whether the checkpoint is there."""
        with self.file:
            self._write({"saved": saved})
            self.path.unlink(missing_ok=True)

    def wait(self) -> None:
        """Until who has the right has given it up; OSError if that one could not save."""
        with self.file:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            if not self._read().get("saved"):
                raise OSError(f"{self.operation}: another replica was writing {self.path.parent}, and could not finish")

    def _write(self, row: dict[str, Any]) -> None:
        self.file.seek(0)
        self.file.truncate(self.file.write(json.dumps({**self.who, **row}).encode()))

    def _read(self) -> dict[str, Any]:
        self.file.seek(0)
        with suppress(ValueError):
            return dict(json.loads(self.file.read()))
        return {}


def _thread() -> str:
    return f"{os.uname().nodename}/{os.getpid()}/{threading.get_ident()}"


def _job() -> str:
    """The same for all ranks of a job, and for no other that runs at the time."""
    of_launcher = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    known = [os.environ.get(name, "") for name in (*of_launcher, "PMI_JOBID", "MASTER_ADDR", "MASTER_PORT")]
    address = known[-2]
    if not any(known):
        known.append(str(os.getppid()))
    if not any(known[1:6]) and (address in ("", "localhost", "::1") or address.startswith("127.")):
        known.append(os.uname().nodename)  # another machine may have the same address and port
    return "/".join(known)
