"""Checkpoints that are broken, of others, or on disks that fail: every rank raises, and says why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as package
import torch
from checkpoints import loaded, same_output, steps, whole_model
from ranks import RankPool
from safetensors import SafetensorError
from torch import Tensor, nn

import pynccl_autograd as ad
import pynccl_autograd.layers.checkpoint_files as checkpoint_files
from pynccl import Communicator

files: Any = checkpoint_files
INDEX = files.INDEX
BOTH = (0, 1)
Row = tuple[type[Exception], str, Any, tuple[int, ...]]  # error, words, what is given, the ranks where it is wrong


def refused(
    comm: Communicator, kind: type[Exception], match: str, use: Callable[[], Any], ranks: tuple[int, ...] = BOTH
) -> None:
    """It raises on every rank: `kind` on those where it is wrong, elsewhere a RuntimeError that tells of it."""
    with pytest.raises(kind if comm.rank in ranks else RuntimeError, match=match):
        use()
    comm.barrier()  # and they go on together


def second(path: Path) -> Path:
    return next(path.glob("model-*-00002*"))


def empty(path: Path) -> None:
    for one in path.iterdir():
        one.unlink()


def lose(path: Path) -> None:
    """The index names another file for one tensor."""
    index = json.loads(Path(path, INDEX).read_text())
    own = index["weight_map"]["up.weight"]
    index["weight_map"]["up.weight"] = next(file for file in sorted(index["weight_map"].values()) if file != own)
    Path(path, INDEX).write_text(json.dumps(index))


def broken_files(comm: Communicator, folder: str) -> None:
    def index(text: bytes) -> Callable[[Path], object]:
        return lambda path: Path(path, INDEX).write_bytes(text)

    def cut(size: int) -> Callable[[Path], object]:
        return lambda path: second(path).write_bytes(second(path).read_bytes()[:size])

    no_file = r"there is no .*model-\w+-00002-of-00003.safetensors, which the index beside it names"
    outside = b'{"weight_map": {"x": "../one.safetensors"}}'
    rows: list[tuple[Callable[[Path], object], type[Exception], str]] = [
        (lambda path: second(path).unlink(), FileNotFoundError, no_file),
        *((cut(size), ValueError, r"-00002-of-00003.safetensors is no whole file") for size in (0, 60, 700, -1)),
        *((index(text), ValueError, "is no index: it needs a weight_map") for text in (b"", b"[]", outside)),
        (lose, ValueError, r"the index .* says that up.weight is in .*model-.*-00001.*: it is not"),
        (empty, FileNotFoundError, "has no file .safetensors that is whole"),
    ]
    model = loaded(comm)
    for number, (damage, error, match) in enumerate(rows):
        path = Path(folder, str(number))
        ad.save_full_state_dict(model, path, 2000)
        if comm.rank == 0:
            damage(path)
        comm.barrier()
        refused(comm, error, match, partial(ad.load_full_state_dict, model, path))
    only_0 = f"{folder}/0" if comm.rank == 0 else None
    refused(comm, FileNotFoundError, no_file, partial(ad.load_full_state_dict, model, only_0), (0,))
    same_output(model)  # nothing was loaded


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
        files._read = read if comm.rank == failing else before
        try:
            refused(comm, OSError, "Input/output error", partial(ad.load_full_state_dict, model, path), (failing,))
        finally:
            files._read = before


def test_broken_files_and_disks_are_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, broken_files, str(tmp_path))
    ranks.run(2, fails_while_read, str(tmp_path / "disk"))


def full_midway(comm: Communicator, folder: str) -> None:
    """The disk of rank 0 is full after one file, two, or three."""
    ad.save_full_state_dict(loaded(comm), folder, 2000)
    there, write = sorted(Path(folder).iterdir()), package.save_file
    for files_before in (1, 2, 3):
        written: list[Path] = []

        def full(tensors: Any, file: Path, *rest: Any, written: Any = written, last: int = files_before) -> None:
            written.append(file)
            write(tensors, file, *rest)
            if len(written) == last:
                os.truncate(file, 100)
                raise SafetensorError("I/O error: No space left on device (os error 28)")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(package, "save_file", full)
            save = partial(ad.save_full_state_dict, loaded(comm, 2), folder, 2000)
            refused(comm, OSError, "No space left on device", save, (0,))
        assert sorted(Path(folder).iterdir()) == there  # nothing is left of what failed
        model = loaded(comm, 2)
        ad.load_full_state_dict(model, folder)
        same_output(model)


def test_a_disk_that_is_full_raises_on_every_rank_and_leaves_the_last_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, full_midway, str(tmp_path))


def others(comm: Communicator, folder: str) -> None:
    model, state = loaded(comm), whole_model().state_dict()
    up, first = state["up.weight"], comm.rank == 0
    lacking = {name: value for name, value in state.items() if not name.startswith("up")}
    both_ways = r'(?s)Unexpected key.*"other".*Missing key.*"up.weight", "up.bias"'
    on_meta = "norm_scale of the state is on the meta device: it has no values"
    no_rank = r"state is None on ranks \[0\]; expected it on none, or on all but"
    rows: list[Row] = [
        (RuntimeError, both_ways, {**lacking, "other": torch.ones(1)} if first else None, BOTH),
        (ValueError, on_meta, {name: value.to("meta") for name, value in state.items()}, BOTH),
        (ValueError, r"torch.sparse_coo.*expected a dense tensor", {**state, "up.weight": up.to_sparse()}, BOTH),
        (RuntimeError, r"size mismatch for up.weight: found \[2\]", {**state, "up.weight": torch.ones(2)}, BOTH),
        (TypeError, "state is 3, expected a state dict, a path", state if first else 3, (1,)),
        (ValueError, no_rank, None if first else state, BOTH),
        (ValueError, r"model.bin, expected a file .safetensors, an index", f"{folder}/model.bin", BOTH),
    ]
    for error, match, given, where in rows:
        refused(comm, error, match, partial(ad.load_full_state_dict, model, given), where)
    same_output(model)
    found = ad.load_full_state_dict(model, {**lacking, "other": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["up.weight", "up.bias"] and found.unexpected_keys == ["other"]
    with pytest.raises(RuntimeError, match=r"(?s)up.weight is the whole parameter.*pynccl_autograd.load_full_state"):
        model.load_state_dict(state)


def places(comm: Communicator, folder: str) -> None:
    """Where it cannot be saved, and models that cannot be."""
    model = loaded(comm)
    rows: list[Row] = [
        (TypeError, "path is 3, expected a file .safetensors, or a folder", (folder if comm.rank else 3,), (0,)),
        (ValueError, "max_shard_bytes is 0, expected a number above 0", (folder, 1 - comm.rank), (1,)),
        (ValueError, "index.json, which is none of these", (f"{folder}/{INDEX}",), (0,)),
        (FileNotFoundError, "/proc/none", ("/proc/none",), (0,)),
        (NotADirectoryError, "Not a directory", (f"{folder}/model.bin/below",), (0,)),
    ]
    for error, match, given, where in rows:
        refused(comm, error, match, partial(ad.save_full_state_dict, model, *given), where)
    wide = nn.ParameterDict({"x": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(TypeError, match=r"x is torch.complex128, which files of safetensors cannot hold"):
        ad.save_full_state_dict(wide, folder)


def optimizers(comm: Communicator) -> None:
    model = loaded(comm)
    with pytest.raises(ValueError, match=r"a parameter of shape \[3, 2\] that is not the model's"):
        ad.full_optimizer_state_dict(model, torch.optim.SGD(nn.Linear(2, 3).parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, 1)
    state = ad.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    plain = torch.optim.AdamW(whole_model().parameters()).state_dict()  # by numbers
    shape = {**state, "state": {**state["state"], "up.weight": {"exp_avg": torch.zeros(3, 8)}}}
    rows: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "expected what full_optimizer_state_dict makes", {"params": []}),
        (RuntimeError, r"exp_avg of up.weight: found \[3, 8\], expected \[24, 8\]", shape),
        (ValueError, r"of other parameters: without \['down.bias', .*and with \['0', '1'", plain),
    ]
    for error, match, given in rows:
        refused(comm, error, match, partial(ad.load_full_optimizer_state_dict, model, optimizer, given))


def test_what_is_no_checkpoint_of_this_model_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    ranks.run(2, others, str(tmp_path))
    ranks.run(2, places, str(tmp_path))
    ranks.run(2, optimizers)
