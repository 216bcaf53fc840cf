"""Broken checkpoints, checkpoints of other models and failing disks raise on every rank with the reason."""

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
from checkpoints import check_output, full_model, sharded_model, train
from ranks import RankPool
from safetensors import SafetensorError
from torch import Tensor, nn

import pynccl_autograd as ad
import pynccl_autograd.layers.checkpoint_files as checkpoint_files
from pynccl import Communicator

files: Any = checkpoint_files
INDEX = files.INDEX
BOTH = (0, 1)
Row = tuple[type[Exception], str, Any, tuple[int, ...]]  # error, message pattern, argument, ranks where it is wrong


def expect_error(
    comm: Communicator, kind: type[Exception], match: str, use: Callable[[], Any], ranks: tuple[int, ...] = BOTH
) -> None:
    """Check that the call raises `kind` on the wrong ranks, and a RuntimeError with the same reason on the others."""
    with pytest.raises(kind if comm.rank in ranks else RuntimeError, match=match):
        use()
    comm.barrier()  # the ranks are still in step


def second(path: Path) -> Path:
    return next(path.glob("model-*-00002*"))


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def misplace_tensor(path: Path) -> None:
    """Make the index name the wrong file for one tensor."""
    index = json.loads(Path(path, INDEX).read_text())
    correct = index["weight_map"]["up.weight"]
    index["weight_map"]["up.weight"] = next(file for file in sorted(index["weight_map"].values()) if file != correct)
    Path(path, INDEX).write_text(json.dumps(index))


def load_broken_files(comm: Communicator, folder: str) -> None:
    def index(text: bytes) -> Callable[[Path], object]:
        return lambda path: Path(path, INDEX).write_bytes(text)

    def cut(size: int) -> Callable[[Path], object]:
        return lambda path: second(path).write_bytes(second(path).read_bytes()[:size])

    no_file = r"model-\w+-00002-of-00003.safetensors, which the index in its folder names, does not exist"
    outside = b'{"weight_map": {"x": "../one.safetensors"}}'
    rows: list[tuple[Callable[[Path], object], type[Exception], str]] = [
        (lambda path: second(path).unlink(), FileNotFoundError, no_file),
        *((cut(size), ValueError, r"-00002-of-00003.safetensors is not a complete") for size in (0, 60, 700, -1)),
        *((index(text), ValueError, "is not an index: it needs a weight_map") for text in (b"", b"[]", outside)),
        (misplace_tensor, ValueError, r"up.weight is not in .*model-.*-00001.*, where the index .* places it"),
        (empty, FileNotFoundError, "has no complete .safetensors file"),
    ]
    model = sharded_model(comm)
    for number, (damage, error, match) in enumerate(rows):
        path = Path(folder, str(number))
        ad.save_full_state_dict(model, path, 2000)
        if comm.rank == 0:
            damage(path)
        comm.barrier()
        expect_error(comm, error, match, partial(ad.load_full_state_dict, model, path))
    only_0 = f"{folder}/0" if comm.rank == 0 else None
    expect_error(comm, FileNotFoundError, no_file, partial(ad.load_full_state_dict, model, only_0), (0,))
    check_output(model)  # nothing was loaded


def fail_while_loading(comm: Communicator, folder: str) -> None:
    """The disk of one rank fails after loading has begun."""
    ad.save_full_state_dict(sharded_model(comm), folder)
    before = files._read

    def read(operation: str, path: Path, name: str) -> Tensor:
        if name.startswith("down"):
            raise OSError(5, "Input/output error")
        return before(operation, path, name)  # type: ignore[no-any-return]

    model = sharded_model(comm, 2)
    for failing, path in ((0, folder), (1, folder), (0, folder if comm.rank == 0 else None)):
        files._read = read if comm.rank == failing else before
        try:
            expect_error(comm, OSError, "Input/output error", partial(ad.load_full_state_dict, model, path), (failing,))
        finally:
            files._read = before


def test_broken_files_and_failing_disks_raise_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, load_broken_files, str(tmp_path))
    ranks.run(2, fail_while_loading, str(tmp_path / "disk"))


def fill_disk_while_saving(comm: Communicator, folder: str) -> None:
    """The disk of rank 0 is full after one, two or three files."""
    ad.save_full_state_dict(sharded_model(comm), folder, 2000)
    saved_files, write = sorted(Path(folder).iterdir()), package.save_file
    for files_before in (1, 2, 3):
        written: list[Path] = []

        def fill_disk(tensors: Any, file: Path, *rest: Any, written: Any = written, last: int = files_before) -> None:
            written.append(file)
            write(tensors, file, *rest)
            if len(written) == last:
                os.truncate(file, 100)
                raise SafetensorError("I/O error: No space left on device (os error 28)")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(package, "save_file", fill_disk)
            save = partial(ad.save_full_state_dict, sharded_model(comm, 2), folder, 2000)
            expect_error(comm, OSError, "No space left on device", save, (0,))
        assert sorted(Path(folder).iterdir()) == saved_files  # the failed save leaves no files
        model = sharded_model(comm, 2)
        ad.load_full_state_dict(model, folder)
        check_output(model)


def test_a_full_disk_raises_on_every_rank_and_keeps_the_previous_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, fill_disk_while_saving, str(tmp_path))


def load_other_models(comm: Communicator, folder: str) -> None:
    model, state = sharded_model(comm), full_model().state_dict()
    up, first = state["up.weight"], comm.rank == 0
    lacking = {name: value for name, value in state.items() if not name.startswith("up")}
    both_ways = r'(?s)Unexpected key.*"other".*Missing key.*"up.weight", "up.bias"'
    on_meta = "norm_scale of state is on the meta device, so it has no values"
    no_rank = r"state is None on ranks \[0\]; pass it on all ranks, or on rank 0 only"
    rows: list[Row] = [
        (RuntimeError, both_ways, {**lacking, "other": torch.ones(1)} if first else None, BOTH),
        (ValueError, on_meta, {name: value.to("meta") for name, value in state.items()}, BOTH),
        (ValueError, r"torch.sparse_coo.*expected a dense tensor", {**state, "up.weight": up.to_sparse()}, BOTH),
        (RuntimeError, r"size mismatch for up.weight: found \[2\]", {**state, "up.weight": torch.ones(2)}, BOTH),
        (TypeError, "state is 3, expected a state dict, a path", state if first else 3, (1,)),
        (ValueError, no_rank, None if first else state, BOTH),
        (ValueError, r"model.bin, expected a .safetensors file, an index", f"{folder}/model.bin", BOTH),
    ]
    for error, match, argument, wrong_ranks in rows:
        expect_error(comm, error, match, partial(ad.load_full_state_dict, model, argument), wrong_ranks)
    check_output(model)
    found = ad.load_full_state_dict(model, {**lacking, "other": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["up.weight", "up.bias"] and found.unexpected_keys == ["other"]
    with pytest.raises(RuntimeError, match=r"(?s)up.weight is the full parameter.*pynccl_autograd.load_full_state"):
        model.load_state_dict(state)


def save_to_bad_paths(comm: Communicator, folder: str) -> None:
    """Paths that cannot be written, and models that cannot be saved."""
    model = sharded_model(comm)
    rows: list[Row] = [
        (TypeError, "path is 3, expected a .safetensors file, or a folder", (folder if comm.rank else 3,), (0,)),
        (ValueError, "max_shard_bytes is 0, expected a number above 0", (folder, 1 - comm.rank), (1,)),
        (ValueError, "index.json, which is neither", (f"{folder}/{INDEX}",), (0,)),
        (FileNotFoundError, "/proc/none", ("/proc/none",), (0,)),
        (NotADirectoryError, "Not a directory", (f"{folder}/model.bin/below",), (0,)),
    ]
    for error, match, argument, wrong_ranks in rows:
        expect_error(comm, error, match, partial(ad.save_full_state_dict, model, *argument), wrong_ranks)
    wide = nn.ParameterDict({"x": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(TypeError, match=r"x is torch.complex128, which safetensors files cannot hold"):
        ad.save_full_state_dict(wide, folder)


def load_bad_optimizer_states(comm: Communicator) -> None:
    model = sharded_model(comm)
    with pytest.raises(ValueError, match=r"a parameter of shape \[3, 2\] that is not the model's"):
        ad.full_optimizer_state_dict(model, torch.optim.SGD(nn.Linear(2, 3).parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    state = ad.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    plain = torch.optim.AdamW(full_model().parameters()).state_dict()  # keyed by number
    shape = {**state, "state": {**state["state"], "up.weight": {"exp_avg": torch.zeros(3, 8)}}}
    rows: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "expected the return value of full_optimizer_state_dict", {"params": []}),
        (RuntimeError, r"exp_avg of up.weight: found \[3, 8\], expected \[24, 8\]", shape),
        (ValueError, r"has other parameters .*: missing \['down.bias', .*unexpected \['0', '1'", plain),
    ]
    for error, match, argument in rows:
        expect_error(comm, error, match, partial(ad.load_full_optimizer_state_dict, model, optimizer, argument))


def test_checkpoints_of_other_models_raise_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    ranks.run(2, load_other_models, str(tmp_path))
    ranks.run(2, save_to_bad_paths, str(tmp_path))
    ranks.run(2, load_bad_optimizer_states)
