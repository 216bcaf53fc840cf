"""Checkpoints that are broken, of others, or on disks that fail: every rank raises, and says why."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Model, loaded, same_output, steps, whole_model
from ranks import RankPool
from torch import Tensor, nn

import pynccl
import pynccl_autograd as ad
import pynccl_autograd.layers.checkpoint_files as checkpoint_files
from pynccl import Communicator

files: Any = checkpoint_files
INDEX = "model.safetensors.index.json"


def on_rank_0(comm: Communicator, function: Callable[[], Any]) -> None:
    if comm.rank == 0:
        function()
    comm.barrier()


def refused(
    comm: Communicator, kind: type[Exception], match: str, use: Callable[[], Any], ranks: tuple[int, ...] = (0, 1)
) -> None:
    """It raises on every rank: `kind` on those where it is wrong, elsewhere a RuntimeError that tells of it."""
    with pytest.raises(kind if comm.rank in ranks else RuntimeError, match=match):
        use()
    comm.barrier()  # and they go on together


def broken_files(comm: Communicator, folder: str) -> None:
    def damaged(name: str, damage: Callable[[Path], Any], size: float = 2000) -> Path:
        path = Path(folder, name)
        ad.save_full_state_dict(loaded(comm), path, size)
        on_rank_0(comm, lambda: damage(path))
        return path

    def second(path: Path) -> Path:
        return next(path.glob("model-*-00002*"))

    def load(path: Any) -> Callable[[], Any]:
        return lambda: ad.load_full_state_dict(model, path)

    model = loaded(comm)
    path = damaged("missing", lambda path: second(path).unlink())
    told = r"load_full_state_dict: there is no .*model-\w+-00002-of-00003.safetensors, which the index beside it names"
    refused(comm, FileNotFoundError, told, load(path))
    refused(comm, FileNotFoundError, told, load(path if comm.rank == 0 else None), (0,))
    for size in (0, 5, 60, 700, -1):
        path = damaged(f"cut{size}", lambda path, size=size: cut(second(path), size))  # type: ignore[misc]
        refused(comm, ValueError, r"model-\w+-00002-of-00003.safetensors is no whole file of safetensors", load(path))
    path = damaged("folder", lambda path: put_folder(second(path)))
    refused(comm, OSError, r"model-\w+-00002-of-00003.safetensors cannot be read", load(path))
    for number, text in enumerate((b"", b"\xff\xfe{}", b"[]", b'{"weight_map": {"x": "pytorch_model-1.bin"}}')):
        path = damaged(f"index{number}", lambda path, text=text: Path(path, INDEX).write_bytes(text))  # type: ignore[misc]
        refused(comm, ValueError, r"index.json is no index: it needs a weight_map", load(path))
    path = damaged("lost", lambda path: lose(path, "up.weight"))
    refused(comm, ValueError, r"the index .* says that up.weight is in .*model-.*-00001.*: it is not", load(path))
    path = damaged("bin", leave_pickle)
    refused(
        comm,
        FileNotFoundError,
        r"no file .safetensors that is whole.*of a.bin and the like pass what torch",
        load(path),
    )
    whole = damaged("whole", lambda path: None)
    refused(
        comm, FileNotFoundError, r"there is no .*elsewhere", load(whole if comm.rank else f"{folder}/elsewhere"), (0,)
    )
    same_output(model)  # nothing was loaded


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def leave_pickle(path: Path) -> None:
    for one in path.iterdir():
        one.unlink()
    Path(path, "a.bin").touch()


def lose(path: Path, name: str) -> None:
    """The index names another file for this tensor."""
    index = json.loads(Path(path, INDEX).read_text())
    index["weight_map"][name] = next(
        file for file in sorted(index["weight_map"].values()) if file != index["weight_map"][name]
    )
    Path(path, INDEX).write_text(json.dumps(index))


def test_broken_files_are_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, broken_files, str(tmp_path))


def fails_while_read(comm: Communicator, folder: str) -> None:
    """A disk that fails on one rank, once loading has begun."""
    ad.save_full_state_dict(loaded(comm), folder)
    before = files._read

    def read(operation: str, path: Path, name: str) -> Tensor:
        if name.startswith("down"):
            raise OSError(5, "Input/output error")
        return before(operation, path, name)  # type: ignore[no-any-return]

    model = loaded(comm, 2)
    for failing, path in ((0, folder), (1, folder), (0, folder if comm.rank == 0 else None)):
        if comm.rank == failing:
            files._read = read
        try:
            refused(comm, OSError, "Input/output error", partial(ad.load_full_state_dict, model, path), (failing,))
        finally:
            files._read = before
    ad.load_full_state_dict(model, folder)
    same_output(model)


def test_a_disk_that_fails_while_it_is_read_raises_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, fails_while_read, str(tmp_path))


def full_disk(comm: Communicator, folder: str) -> None:
    """More than a process may write into a file, on rank 0."""
    model = loaded(comm)
    ad.save_full_state_dict(model, folder, 2000)
    wide = nn.Sequential(*(ad.ColumnParallelLinear(512, 512, comm, bias=False) for _ in range(8)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    try:
        refused(comm, OSError, "File too large", lambda: ad.save_full_state_dict(wide, folder, comm=comm), (0,))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = Model(comm)
    ad.load_full_state_dict(again, folder)
    same_output(again)
    ad.save_full_state_dict(again, folder, 5e9)  # what was left over goes
    comm.barrier()
    assert [path.name for path in Path(folder).iterdir()] == ["model.safetensors"]


def test_no_more_room_raises_on_every_rank_and_leaves_the_last_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, full_disk, str(tmp_path))


def others(comm: Communicator, folder: str) -> None:
    """State dicts and paths of other kinds, on all ranks or on one."""
    model, state = loaded(comm), whole_model().state_dict()
    up = state["up.weight"]

    def load(given: Any) -> Callable[[], Any]:
        return lambda: ad.load_full_state_dict(model, given)

    told = r'(?s)Unexpected key.*"model.up.weight".*Missing key.*"up.weight"'
    refused(comm, RuntimeError, told, load({f"model.{name}": value for name, value in state.items()}))
    refused(comm, RuntimeError, r'(?s)Unexpected key.*"model".*Missing key', load({"model": state}))
    refused(comm, RuntimeError, r'Missing key.*"up.weight"', load({**state, "up.weight": None if comm.rank else up}))
    empty = {name: value.to("meta") for name, value in state.items()}
    refused(comm, ValueError, r"norm_scale of the state is on the meta device: it has no values", load(empty))
    refused(comm, ValueError, r"is on the meta device", load(empty if comm.rank == 0 else None), (0,))
    sparse = {**state, "up.weight": up.to_sparse()}
    refused(comm, ValueError, r"up.weight of the state is torch.sparse_coo.*expected a dense tensor", load(sparse))
    same_output(model)

    def save(path: Any, size: Any = 5e9) -> Callable[[], Any]:
        return lambda: ad.save_full_state_dict(model, path, size)

    refused(comm, TypeError, r"path is None, expected a file .safetensors, or a folder", save(None))
    refused(comm, TypeError, r"path is 3, expected", save(folder if comm.rank else 3), (0,))
    refused(comm, TypeError, r"max_shard_bytes is '5GB', expected a number of bytes", save(folder, "5GB"))
    refused(comm, ValueError, r"max_shard_bytes is 0, expected", save(folder, 1 - comm.rank), (1,))
    refused(comm, ValueError, r"index.json, which is none of these", save(f"{folder}/{INDEX}"), (0,))
    on_rank_0(comm, lambda: Path(folder, "x.safetensors").mkdir())
    refused(comm, ValueError, r"x.safetensors, which is a folder; expected", save(f"{folder}/x.safetensors"), (0,))
    refused(comm, FileNotFoundError, r"/proc/none", save("/proc/none"), (0,))
    optimizer = steps(model, torch.optim.AdamW, 1)
    plain = torch.optim.AdamW(whole_model().parameters()).state_dict()  # by numbers
    told = r"state is of other parameters: without \['down.bias', .*and with \['0', '1'"
    refused(comm, ValueError, told, lambda: ad.load_full_optimizer_state_dict(model, optimizer, plain))


def test_what_is_no_checkpoint_of_this_model_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, others, str(tmp_path))


def types(comm: Communicator, folder: str) -> None:
    """Values take the type of the parameter, as Module.load_state_dict has it."""
    state = whole_model().state_dict()
    ad.save_full_state_dict(loaded(comm).float(), folder)
    narrow: Any = Model(comm).bfloat16()
    ad.load_full_state_dict(narrow, folder)
    ad.save_full_state_dict(narrow, f"{folder}/narrow")
    wide: Any = Model(comm)
    ad.load_full_state_dict(wide, f"{folder}/narrow" if comm.rank == 0 else None)
    for name, value in ad.full_state_dict(wide, rank0_only=False).items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name].float().bfloat16().to(value.dtype))


def test_a_checkpoint_of_another_type_is_converted(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, types, str(tmp_path))


def test_a_save_that_is_interrupted_can_be_made_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (alone,) = pynccl.init_all(1, library=pynccl.load("host"))
    model = nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(files.Saving, "add", interrupted)
        try:
            ad.save_full_state_dict(model, tmp_path, comm=alone)
        except KeyboardInterrupt:  # whose traceback keeps the first save's objects
            patch.undo()
            ad.save_full_state_dict(model, tmp_path, comm=alone)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
