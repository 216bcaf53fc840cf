"""Files of safetensors and folders of them: read where needed, written tensor by tensor, replaced as a whole.

The format: 8 bytes with the header's length, the header (JSON: name -> dtype, shape, first and last byte), the data.
Several files have an index, `*.safetensors.index.json`, that says which tensor is in which: Hugging Face's layout.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TEMPORARY = ".saving"
_CHUNK = 1 << 24
_OF_SEVERAL = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class Row(NamedTuple):
    """A tensor, before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def check_rows(operation: str, rows: Iterable[Row]) -> None:
    """TypeError for a type that the format does not have."""
    for row in rows:
        if row.dtype not in _NAMES:
            raise TypeError(f"{operation}: {row.name} is {row.dtype}, which files of safetensors cannot hold")


# -------------------------------------------------------------------------------------------------------- reading


class Files:
    """The tensors of a file, an index or a folder: name -> shape, and each mapped when it is asked for."""

    def __init__(self, operation: str, path: str | os.PathLike[str]) -> None:
        self.paths = _paths(operation, Path(path))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.others: dict[str, Any] = {}  # which are no tensors: none
        self.ties: dict[str, str] = {}  # names left out -> name under which the tensor is there
        for file in dict.fromkeys(self.paths.values()):
            with _opened(operation, file) as opened:
                names = set(opened.keys())
                self.ties.update({tied: name for tied, name in (opened.metadata() or {}).items() if name in names})
                for name in names:
                    if self.paths.setdefault(name, file) == file:
                        tensor = opened.get_tensor(name)
                        self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype
        self.paths.pop("", None)
        lost = [name for name in self.paths if name not in self.shapes]
        if lost:
            raise ValueError(
                f"{operation}: the index {path} says that {lost[0]} is in {self.paths[lost[0]]}: it is not"
            )
        self.operation = operation

    def whole(self, name: str) -> Tensor:
        """Mapped: only what is read of it comes into memory, and it goes with the tensor."""
        with _opened(self.operation, self.paths[name]) as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor


def _opened(operation: str, path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"{operation}: files need the package safetensors: pip install safetensors") from error
    try:
        return safe_open(str(path), "pt")
    except SafetensorError as error:
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
    files = _weight_map(operation, path)
    return {name: path.parent / file for name, file in files.items()}


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


class Claim:
    """The right to write a checkpoint, which one process has at a time: a lock of the system, gone with the process.

    Data-parallel replicas write the same checkpoint: the first one does, and the others wait until it has. RuntimeError
    if another job has it, or a part of this one that saves other tensors. Where the file system has no locks, the
    right is everybody's.
    """

    def __init__(self, operation: str, path: Path, rows: list[Row]) -> None:
        self.operation = operation
        self.path = path.with_name(f"{path.name}.saver") if path.suffix == ".safetensors" else path / "model.saver"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.who = {"job": _job(), "tensors": zlib.crc32(repr(rows).encode())}
        while True:
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            self.own = self._locked()
            if not self.own or self._is_there():
                break
            if self._is_of_replica(found := self._read()) and found.get("saved"):  # while this one was about to
                self.own = False
                return
            os.close(self.file)
        if self.own:
            self._write({"by": f"process {os.getpid()} on {os.uname().nodename}"})
        else:
            self._check()

    def _locked(self, wait: bool = False) -> bool:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        return True

    def _is_there(self) -> bool:
        """Whether the file is that of its name: who had it before has removed it."""
        try:
            return os.path.samestat(os.fstat(self.file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _write(self, row: dict[str, Any]) -> None:
        text = json.dumps({**self.who, **row}).encode()
        os.pwrite(self.file, text, 0)
        os.ftruncate(self.file, len(text))

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(os.pread(self.file, 1 << 16, 0)))
        except ValueError:
            return {}

    def _is_of_replica(self, row: dict[str, Any]) -> bool:
        return {name: row.get(name) for name in self.who} == self.who

    def _check(self) -> None:
        for _ in range(100):  # it has the lock, and is about to say who it is
            if found := self._read():
                break
            time.sleep(0.01)
        if self._is_of_replica(found):
            return
        os.close(self.file)
        what = "another job" if found.get("job") != self.who["job"] else "a rank that saves other tensors"
        raise RuntimeError(
            f"{self.operation}: {what} ({found.get('by', 'unknown')}) is saving into {self.path.parent}; nothing of "
            "this checkpoint was written: save it elsewhere"
        )

    def finish(self, saved: bool) -> None:
        """Give it up; `saved`: the checkpoint is there. Without the right: wait until it is, else OSError."""
        try:
            if self.own:
                self._write({"saved": saved})
                self.path.unlink(missing_ok=True)
                return
            self._locked(wait=True)
            if not self._read().get("saved"):
                raise OSError(f"{self.operation}: another replica was writing {self.path.parent}, and could not finish")
        finally:
            os.close(self.file)


def claim_of(operation: str, path: Path, rows: list[Row]) -> Claim:
    """Claim the file or folder."""
    if path.suffix in (".json", ".bin", ".pt", ".pth") or (path.suffix == ".safetensors" and path.is_dir()):
        what = "is a folder" if path.is_dir() else "is none of these"
        raise ValueError(f"{operation}: path is {path}, which {what}; expected a file .safetensors, or a folder")
    return Claim(operation, path, rows)


def _job() -> str:
    """The same for all ranks of a job, and for no other that runs at the time."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    known = [os.environ.get(name, "") for name in (*names, "PMI_JOBID", "MASTER_ADDR", "MASTER_PORT")]
    on_one = known[-2] in ("", "localhost", "::1") or known[-2].startswith("127.")
    if on_one and not any(known[1:6]):
        known.append(os.uname().nodename)
    return "/".join(known if any(known[:-1]) else [*known, str(os.getppid())])


class Plan(NamedTuple):
    """What is to be written."""

    folder: Path
    files: dict[str, list[Row]]  # by their final names, in the order in which the tensors come
    indexed: bool
    old: list[str]  # files of the checkpoint that is there, or of a save that was cut off, and not of this one


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Wide elements first: so all of them lie where a reader can map them."""
    return sorted(rows, key=lambda row: -row.dtype.itemsize)


def plan_of(operation: str, path: Path, rows: list[Row], max_shard_bytes: float) -> Plan:
    """A file, if the path says .safetensors; else a folder with a file, or with several and an index.

    Several get names that nothing in the folder has: so the index that is there stays true until it is replaced.
    """
    if path.suffix == ".safetensors":
        return Plan(path.parent, {path.name: rows}, False, [])
    groups: list[list[Row]] = [[]]
    for row in rows:
        if groups[-1] and sum(one.nbytes for one in groups[-1]) + row.nbytes > max_shard_bytes:
            groups.append([])
        groups[-1].append(row)
    there = {file.name for file in path.iterdir()} if path.is_dir() else set()
    own = {name for name in there if _OF_SEVERAL.fullmatch(name.removesuffix(_TEMPORARY))}
    old = own | ({SINGLE, INDEX, SINGLE + _TEMPORARY, INDEX + _TEMPORARY} & there)
    if INDEX in there:
        old |= set(_weight_map(operation, path / INDEX).values())
    if len(groups) == 1:
        return Plan(path, {SINGLE: rows}, False, sorted(old - {SINGLE}))
    for generation in count():
        stem = f"model-{generation}" if generation else "model"
        names = [f"{stem}-{one + 1:05d}-of-{len(groups):05d}.safetensors" for one in range(len(groups))]
        if there.isdisjoint(names):
            break
    return Plan(path, dict(zip(names, groups, strict=True)), True, sorted(old - {INDEX}))


def write(plan: Plan, tensors: Iterator[Tensor], ties: Mapping[str, str]) -> None:
    """Take the tensors one by one, in the order of the rows; then put the files in place, the index last.

    Whenever the process ends, what is read from the folder is the checkpoint that was there, or the new one.
    ties: names that are left out -> the name under which the tensor is there.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in plan.files.items():
        _write_file(plan.folder / (name + _TEMPORARY), rows, tensors, ties)
    _replace(plan.folder, plan.files)
    if plan.indexed:
        weight_map = {row.name: name for name, rows in plan.files.items() for row in rows}
        total = sum(row.nbytes for rows in plan.files.values() for row in rows)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        with open(plan.folder / (INDEX + _TEMPORARY), "w") as file:
            file.write(text + "\n")
            _flush(file)
        _replace(plan.folder, [INDEX])
    # What is read first goes first: a folder with model.safetensors is that file, else its index, whatever else it has.
    for name in sorted(plan.old, key=lambda name: (name != SINGLE, name != INDEX)):
        (plan.folder / name).unlink(missing_ok=True)
        _replace(plan.folder, [])


def _write_file(path: Path, rows: list[Row], tensors: Iterator[Tensor], ties: Mapping[str, str]) -> None:
    names = {row.name for row in rows}
    metadata = {"format": "pt", **{tied: name for tied, name in ties.items() if name in names}}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for row in rows:
        first, end = end, end + row.nbytes
        header[row.name] = {"dtype": _NAMES[row.dtype], "shape": list(row.shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for row in rows:
            _write_tensor(file, row, next(tensors))
        _flush(file)


def _write_tensor(file: Any, row: Row, tensor: Tensor) -> None:
    assert (tuple(tensor.shape), tensor.dtype) == (row.shape, row.dtype), row
    if not tensor.numel():
        return
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for piece in flat.split(_CHUNK):
        file.write(_bytes(piece))


def _bytes(flat: Tensor) -> Any:
    """Of uint8 on the CPU: its memory, without NumPy."""
    return (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _replace(folder: Path, names: Iterable[str]) -> None:
    """Put the files in place, and see to it that the folder is on the disk."""
    for name in names:
        os.replace(folder / (name + _TEMPORARY), folder / name)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
