"""Checkpoints in files: written by some ranks, read by others, whole whenever the process ends, read piece by piece."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as package
import torch
from checkpoints import NAMES, Model, loaded, loads, same_output, saves, whole_model
from ranks import Place, RankPool
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.checkpoint_files import INDEX


@pytest.mark.parametrize("several", [False, True])
def test_what_4_ranks_save_2_and_1_load(ranks: RankPool, tmp_path: Path, several: bool) -> None:
    ranks.run(4, saves, str(tmp_path), 2000 if several else 5e9)
    for n in (2, 3):
        ranks.run(n, loads, str(tmp_path))
    alone = Model()
    ad.load_full_state_dict(alone, tmp_path)
    same_output(alone)
    files = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}
    if not several:
        assert files == ["model.safetensors"]
        plain = Model()
        load_model(plain, tmp_path / "model.safetensors")  # the package's own
        same_output(plain)
        return
    assert [re.sub("-[0-9a-f]{8}-", "-", file) for file in files] == [
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        INDEX,
    ]
    index = json.loads((tmp_path / INDEX).read_text())
    tensors = {
        name: value for file in files if file.endswith("s") for name, value in load_file(tmp_path / file).items()
    }
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert set(index["weight_map"]) == set(tensors) == set(NAMES) - {"head.weight"}
    for name, value in whole_model().state_dict().items():
        assert name == "head.weight" or torch.equal(tensors[name], value)
    for file in files[:2]:
        assert (tmp_path / file).stat().st_size < 2000 + 1000


def fails_midway(comm: Communicator, path: str, after: int) -> None:
    """The disk is full after some files, on rank 0 alone."""
    from safetensors import SafetensorError

    written: list[Any] = []
    before = package.save_file

    def full(tensors: Any, file: Path, *rest: Any) -> None:
        written.append(file)
        before(tensors, file, *rest)
        if len(written) == after:
            os.truncate(file, 100)
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "save_file", full)
        with pytest.raises(RuntimeError if comm.rank else OSError, match="No space left on device"):
            ad.save_full_state_dict(loaded(comm, 2), path, 2000)


def test_a_disk_that_is_full_raises_on_every_rank_and_leaves_the_last_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, saves, str(tmp_path), 2000)
    for after in (1, 2, 3):
        before = sorted(tmp_path.iterdir())
        ranks.run(2, fails_midway, str(tmp_path), after)
        assert sorted(tmp_path.iterdir()) == before  # nothing is left of what failed
        ranks.run(2, loads, str(tmp_path))


def test_a_folder_is_of_the_last_checkpoint_alone(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.fp16-00001-of-00001.safetensors").write_bytes(b"")  # of another program's checkpoint
    index = {"weight_map": {"up.weight": "model.fp16-00001-of-00001.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    for seed, size in ((1, 2000), (2, 2000), (3, 5e9), (4, 1500), (5, 2000)):
        ranks.run(2, saves, str(tmp_path), size, seed)
        ranks.run(2, loads, str(tmp_path), seed)
        files = {path.name for path in tmp_path.iterdir()} - {"config.json"}
        if size == 5e9:
            assert files == {"model.safetensors"}
        else:
            index = json.loads((tmp_path / INDEX).read_text())
            assert files == {INDEX, *index["weight_map"].values()}


def filled(seed: float) -> nn.Module:
    made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))).requires_grad_(False)
    for parameter in made.parameters():
        parameter.fill_(seed)
    return made


def is_killed_at(step: int, folder: Path, size: float) -> bool:
    """Save in a child that is killed before its step-th call that changes the disk; whether it came so far."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    left = step

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            count()
            return function(*args, **options)

        return call

    def in_the_middle(tensors: Any, path: Path, metadata: Any) -> None:
        count()
        Path(path).with_name(".tmp").touch()  # as the package does, which then renames it
        Path(path).write_bytes(package.save(tensors, metadata)[:-8])
        count()
        Path(path).write_bytes(package.save(tensors, metadata))

    changes: tuple[tuple[Any, str], ...] = ((os, "replace"), (os, "fsync"), (Path, "unlink"))
    for owner, name in changes:
        setattr(owner, name, counted(getattr(owner, name)))
    setattr(package, "save_file", in_the_middle)  # noqa: B010
    ad.save_full_state_dict(filled(2), folder, size)
    os._exit(0)


def killed(_: Place, path: str) -> list[tuple[Any, ...]]:
    """Before each step, for each way in which one checkpoint replaces another: (sizes, step, what is there, ended)."""
    rows: list[tuple[Any, ...]] = []
    for before, after in ((90, 90), (1e9, 90), (90, 1e9), (None, 90)):
        ended, step = False, 0
        while not ended:
            folder, there = Path(path, f"{before}-{after}-{step}"), filled(0)
            if before is not None:
                ad.save_full_state_dict(filled(1), folder, before)
            ended = not is_killed_at(step, folder, after)
            try:
                ad.load_full_state_dict(there, folder)
            except FileNotFoundError:
                assert before is None
            rows.append(
                (before, after, step, sorted({float(v) for p in there.parameters() for v in p.flatten()}), ended)
            )
            ad.save_full_state_dict(filled(3), folder, 90)  # goes on after it
            ad.load_full_state_dict(there, folder)
            assert all((parameter == 3).all() for parameter in there.parameters())
            index = json.loads((folder / INDEX).read_text())
            assert {one.name for one in folder.iterdir()} == {INDEX, *index["weight_map"].values()}
            step += 1
    return rows


def test_killed_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    pool = RankPool(communicators=False)  # without threads of a library, so that it can fork
    try:
        (rows,) = pool.run(1, killed, str(tmp_path))
    finally:
        pool.close()
    for before, _, _, found, ended in rows:
        assert found in ([[2.0]] if ended else [[1.0 if before else 0.0], [2.0]])
    steps = {(before, after): step + 1 for before, after, step, *_ in rows}
    assert len(steps) == 4 and min(steps.values()) >= 6  # it was killed that often
    for before, after in steps:
        seen = {found[0] for *sizes, _, found, _ in rows if sizes == [before, after]}
        assert seen == {1.0 if before else 0.0, 2.0}


WIDE, LAYERS = (1024, 2048), 8  # of 8 MB each


def resident(key: str) -> int:
    """Bytes of this process, mapped pages of files included; VmHWM is their highest number."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def peak_of_loading(comm: Communicator, path: str) -> tuple[int, int]:
    small = nn.Linear(2, 2)
    ad.save_full_state_dict(small, f"{path}-{comm.rank}.safetensors")
    ad.load_full_state_dict(small, f"{path}-{comm.rank}.safetensors", comm=comm)  # what is imported and made once
    with torch.device("meta"):
        column, row = ad.ColumnParallelLinear, ad.RowParallelLinear
        layers = [column(*WIDE, comm, False) if i % 2 else row(*WIDE, comm, False) for i in range(LAYERS)]
    model = nn.Sequential(*layers)
    comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    ad.load_full_state_dict(model, path)
    return resident("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters())


def test_loading_a_file_takes_the_own_part_and_one_tensor(tmp_path: Path) -> None:
    """Resident memory, at most S/N and the largest tensor, of 64 MB on 2 ranks."""
    path = tmp_path / "model.safetensors"
    save_file({f"{i}.weight": torch.ones(WIDE[1], WIDE[0]) for i in range(LAYERS)}, path)
    pool = RankPool()  # whose memory nobody has used
    try:
        for peak, own in pool.run(2, peak_of_loading, str(path)):
            assert own == 32 << 20
            assert own <= peak <= own + (8 << 20) + (2 << 20)
    finally:
        pool.close()
