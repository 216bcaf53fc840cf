"""Checkpoints that are broken, of others, or on disks that fail: every rank raises, and says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import KINDS, Model, loaded, same_output, steps, whole_model
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
    def index(text: bytes) -> Callable[[Path], object]:
        return lambda path: Path(path, INDEX).write_bytes(text)

    def cut(size: int) -> Callable[[Path], object]:
        return lambda path: second(path).write_bytes(second(path).read_bytes()[:size])

    no_file = (
        r"load_full_state_dict: there is no .*model-\w+-00002-of-00003.safetensors, which the index beside it names"
    )
    not_whole = r"model-\w+-00002-of-00003.safetensors is no whole file of safetensors"
    no_index = r"index.json is no index: it needs a weight_map"
    lost = r"the index .* says that up.weight is in .*model-.*-00001.*: it is not"
    pickled = r"no file .safetensors that is whole.*of a.bin and the like pass what torch"
    outside = b'{"weight_map": {"x": "../one.safetensors"}}', b'{"weight_map": {"x": "pytorch_model-1.bin"}}'
    rows: list[tuple[Callable[[Path], object], type[Exception], str]] = [
        (lambda path: second(path).unlink(), FileNotFoundError, no_file),
        *((cut(size), ValueError, not_whole) for size in (0, 5, 60, 700, -1)),
        (put_folder, OSError, r"model-\w+-00002-of-00003.safetensors cannot be read"),
        *((index(text), ValueError, no_index) for text in (b"", b"\xff\xfe{}", b"[]", *outside)),
        (lose, ValueError, lost),
        (leave_pickle, FileNotFoundError, pickled),
        (empty, FileNotFoundError, "has no file .safetensors that is whole"),
        (two_more, ValueError, "has one.safetensors, two.safetensors; say which one to load"),
    ]
    model = loaded(comm)
    for number, (damage, error, match) in enumerate(rows):
        path = Path(folder, str(number))
        ad.save_full_state_dict(model, path, 2000)
        on_rank_0(comm, partial(damage, path))
        refused(comm, error, match, partial(ad.load_full_state_dict, model, path))
    refused(
        comm,
        FileNotFoundError,
        no_file,
        lambda: ad.load_full_state_dict(model, f"{folder}/0" if comm.rank == 0 else None),
        (0,),
    )
    ad.save_full_state_dict(model, f"{folder}/whole")
    elsewhere = f"{folder}/whole" if comm.rank else f"{folder}/elsewhere"
    refused(comm, FileNotFoundError, "there is no .*elsewhere", lambda: ad.load_full_state_dict(model, elsewhere), (0,))
    same_output(model)  # nothing was loaded


def second(path: Path) -> Path:
    return next(path.glob("model-*-00002*"))


def put_folder(path: Path) -> None:
    one = second(path)
    one.unlink()
    one.mkdir()


def empty(path: Path) -> None:
    for one in path.iterdir():
        one.unlink()


def leave_pickle(path: Path) -> None:
    empty(path)
    Path(path, "a.bin").touch()


def two_more(path: Path) -> None:
    empty(path)
    for name in ("one", "two"):
        Path(path, f"{name}.safetensors").touch()


def lose(path: Path) -> None:
    """The index names another file for one tensor."""
    index = json.loads(Path(path, INDEX).read_text())
    own = index["weight_map"]["up.weight"]
    index["weight_map"]["up.weight"] = next(file for file in sorted(index["weight_map"].values()) if file != own)
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


def others(comm: Communicator, folder: str) -> None:
    """States and paths of other kinds, on all ranks or on one: (error, words, state or path, where it is wrong)."""
    model, state = loaded(comm), whole_model().state_dict()
    up, first, both = state["up.weight"], comm.rank == 0, (0, 1)
    lacking = {name: value for name, value in state.items() if not name.startswith("up")}
    both_ways = r'Error.s. in loading state_dict for Model:\n\tUnexpected key.s. in state_dict: "other". \n\t'
    both_ways += r'Missing key.s. in state_dict: "up.weight", "up.bias"'
    empty = {name: value.to("meta") for name, value in state.items()}
    wrapped = {f"model.{name}": value for name, value in state.items()}
    on_meta = "is on the meta device: it has no values"
    rows: list[tuple[type[Exception], str, Any, tuple[int, ...]]] = [
        (RuntimeError, both_ways, {**lacking, "other": torch.ones(1)} if first else None, both),
        (RuntimeError, r'(?s)Unexpected key.*"model.up.weight".*Missing key.*"up.weight"', wrapped, both),
        (RuntimeError, r'(?s)Unexpected key.*"model".*Missing key', {"model": state}, both),
        (RuntimeError, r'Missing key.*"up.weight"', {**state, "up.weight": up if first else None}, both),
        (ValueError, f"norm_scale of the state {on_meta}", empty, both),
        (ValueError, on_meta, empty if first else None, (0,)),
        (ValueError, r"torch.sparse_coo.*expected a dense tensor", {**state, "up.weight": up.to_sparse()}, both),
        (TypeError, "state is 3, expected a state dict, a path", state if first else 3, (1,)),
        (
            ValueError,
            r"state is None on ranks \[0\]; expected it on none, or on all but",
            None if first else state,
            both,
        ),
        (ValueError, r"model.bin, expected a file .safetensors, an index", f"{folder}/model.bin", both),
        (ValueError, "one.safetensors is no whole file", f"{folder}/one.safetensors" if first else state, (0,)),
    ]
    for error, match, given, where in rows:
        refused(comm, error, match, partial(ad.load_full_state_dict, model, given), where)
    same_output(model)
    found = ad.load_full_state_dict(model, {**lacking, "other": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["up.weight", "up.bias"] and found.unexpected_keys == ["other"]
    ad.load_full_state_dict(model, {name: value for name, value in state.items() if name != "head.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for up.weight: found \[12, 8\], expected \[24, 8\]"):
        ad.load_full_state_dict(model, {**state, "up.weight": torch.ones(12, 8)}, strict=False)
    with pytest.raises(RuntimeError, match=r"(?s)up.weight is the whole parameter.*pynccl_autograd.load_full_state"):
        model.load_state_dict(state)
    model.load_state_dict(model.state_dict())


def places(comm: Communicator, folder: str) -> None:
    """Where it cannot be saved, and models that cannot be: (error, words, path, bytes of a file, where it is wrong)."""
    model, state = loaded(comm), whole_model().state_dict()
    on_rank_0(comm, lambda: Path(folder, "x.safetensors").mkdir())
    rows: list[tuple[type[Exception], str, Any, Any, tuple[int, ...]]] = [
        (TypeError, "path is None, expected a file .safetensors, or a folder", None, 5e9, (0, 1)),
        (TypeError, "path is 3, expected", folder if comm.rank else 3, 5e9, (0,)),
        (TypeError, "max_shard_bytes is '5GB', expected a number of bytes", folder, "5GB", (0, 1)),
        (ValueError, "max_shard_bytes is 0, expected a number above 0", folder, 1 - comm.rank, (1,)),
        (ValueError, "index.json, which is none of these", f"{folder}/{INDEX}", 5e9, (0,)),
        (ValueError, "x.safetensors, which is a folder; expected", f"{folder}/x.safetensors", 5e9, (0,)),
        (FileNotFoundError, "/proc/none", "/proc/none", 5e9, (0,)),
        (NotADirectoryError, "Not a directory", f"{folder}/model.bin/below", 5e9, (0,)),
    ]
    for error, match, path, size, where in rows:
        refused(comm, error, match, partial(ad.save_full_state_dict, model, path, size), where)
    with pytest.raises(TypeError, match=r"x is torch.complex128, which files of safetensors cannot hold"):
        wide = nn.Module()
        wide.x = nn.Parameter(torch.ones(2, dtype=torch.complex128))
        ad.save_full_state_dict(wide, folder)
    with pytest.raises(TypeError, match=r"full_state_dict: model is 3, expected a torch.nn.Module"):
        ad.full_state_dict(3)  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = Model(comm)
        empty.register_buffer("table", torch.ones(2), persistent=False)
    with pytest.raises(ValueError, match=r"norm_scale is on the meta device: it has no values"):
        ad.full_state_dict(empty)
    with pytest.raises(RuntimeError, match=r"since not persistent: table; compute them first"):
        ad.load_full_state_dict(empty, state)


def optimizers(comm: Communicator) -> None:
    model, other = loaded(comm), nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"a parameter of shape \[3, 2\] that is not the model's"):
        ad.full_optimizer_state_dict(model, torch.optim.SGD(other.parameters()))
    optimizer = steps(model, KINDS["adam"], 1)
    state = ad.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    plain = torch.optim.AdamW(whole_model().parameters()).state_dict()  # by numbers
    shape = {**state, "state": {**state["state"], "up.weight": {"exp_avg": torch.zeros(3, 8)}}}
    names = [name for name in state["param_groups"][0]["params"] if name != "up.bias"]
    rows: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "expected what full_optimizer_state_dict makes", {"params": []}),
        (RuntimeError, r"exp_avg of up.weight: found \[3, 8\], expected \[24, 8\]", shape),
        (ValueError, r"other parameters: without \['up.bias'\]", {**state, "param_groups": [{"params": names}]}),
        (ValueError, r"of other parameters: without \['down.bias', .*and with \['0', '1'", plain),
    ]
    for error, match, given in rows:
        refused(comm, error, match, partial(ad.load_full_optimizer_state_dict, model, optimizer, given))
    if comm.rank == 1:
        del optimizer.state[model.up.weight]
    told = r"the ranks have other state: rank 1 and rank 0 differ in that of up.weight: here \["
    refused(comm, ValueError, told, lambda: ad.full_optimizer_state_dict(model, optimizer))
    optimizer.state[model.up.weight] = {"row": torch.zeros(5)}
    told = r"row of up.weight has shape \[5\], expected that of this rank's part, \[12, 8\]"
    refused(comm, ValueError, told, lambda: ad.full_optimizer_state_dict(model, optimizer))


def test_what_is_no_checkpoint_of_this_model_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("one.safetensors", "model.bin"):
        (tmp_path / name).write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    ranks.run(2, others, str(tmp_path))
    ranks.run(2, places, str(tmp_path))
    ranks.run(2, optimizers)


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
