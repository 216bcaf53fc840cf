"""Checkpoints of the unsharded model: saved and loaded by different numbers of ranks, complete even after a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch as package
import torch
from checkpoints import Model, check_load, check_output, full_model, save, sharded_model
from ranks import Place, RankPool, each_size
from safetensors.torch import load_file, load_model
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.checkpoint_files import INDEX


def save_and_load(comm: Communicator, path: str) -> None:
    expected, model = full_model().state_dict(), sharded_model(comm, 6)
    state = expected if comm.rank == 0 else None  # rank 0 alone may pass it
    assert ad.load_full_state_dict(model, state) == ([], [])
    for rank0_only in (True, False):
        found = ad.full_state_dict(model, rank0_only=rank0_only)
        if rank0_only and comm.rank:
            assert found == {}
            continue
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
        assert found["head.weight"] is found["embedding.weight"]
        plain = Model()
        plain.load_state_dict(found)
        check_output(plain)
        found["norm.weight"].zero_()  # a copy
    check_output(model)
    ad.save_full_state_dict(model, path)
    again = sharded_model(comm, 7)
    ad.load_full_state_dict(again, path if comm.rank == 0 else None)
    check_output(again)
    small = sharded_model(comm, 1, words=2)  # some ranks have no row
    ad.load_full_state_dict(small, full_model(2, words=2).state_dict())
    ids = torch.tensor([[0, 1]])
    torch.testing.assert_close(small(ids), full_model(2, words=2)(ids))


@each_size
def test_the_full_state_dict_equals_that_of_the_unsharded_model(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, save_and_load, str(tmp_path / "model.safetensors"))


def load_other_dtypes(comm: Communicator, folder: str) -> None:
    """Values are converted to the parameter's dtype, as in Module.load_state_dict."""
    state = full_model().state_dict()
    ad.save_full_state_dict(sharded_model(comm).float(), folder)
    narrow = sharded_model(comm, 6).bfloat16()
    ad.load_full_state_dict(narrow, folder)
    wide = sharded_model(comm, 6)
    ad.load_full_state_dict(wide, ad.full_state_dict(narrow, rank0_only=False))
    for name, value in ad.full_state_dict(wide, comm, rank0_only=False).items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name].float().bfloat16().to(value.dtype))


def test_loading_converts_the_dtype(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, load_other_dtypes, str(tmp_path))


def has_one_checkpoint(folder: str | Path) -> bool:
    """Return whether the folder has all files of the last save, and no others."""
    current, index = {file.name for file in Path(folder).iterdir()}, Path(folder, INDEX)
    if not index.exists():
        return current == {"model.safetensors"}
    return current == {INDEX, *json.loads(index.read_text())["weight_map"].values()}


def test_a_checkpoint_of_4_ranks_loads_on_any_number_and_with_safetensors(ranks: RankPool, tmp_path: Path) -> None:
    for size in (5e9, 2000, 1500, 5e9):  # one file, several files, and then overwriting them
        ranks.run(4, save, str(tmp_path), size)
        for n in (2, 3):
            ranks.run(n, check_load, str(tmp_path))
        single_rank = Model()
        ad.load_full_state_dict(single_rank, tmp_path)
        check_output(single_rank)
        assert has_one_checkpoint(tmp_path)
        if size == 2000:
            index = json.loads((tmp_path / INDEX).read_text())
            files = sorted(tmp_path.glob("model-*-of-00003.safetensors"))
            assert len(files) == 3 and all(file.stat().st_size < size + 1000 for file in files)
            tensors = {name: value for file in files for name, value in load_file(file).items()}
            assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
            expected = full_model().state_dict()
            assert index["weight_map"].keys() == tensors.keys() == expected.keys() - {"head.weight"}
            assert all(torch.equal(value, expected[name]) for name, value in tensors.items())
    plain = Model()
    load_model(plain, tmp_path / "model.safetensors")
    check_output(plain)


def save_concurrently(comm: Communicator, folder: str) -> None:
    """Several communicators save into one folder; then rank 0 saves for all replicas."""
    single_rank = comm.split(comm.rank)
    assert single_rank is not None
    for limit in (5e9, 500.0):
        for _ in range(5):
            ad.save_full_state_dict(sharded_model(single_rank, comm.rank), folder, limit)
        comm.barrier()
        model = sharded_model(single_rank)
        ad.load_full_state_dict(model, folder)
        check_output(model, int(model.norm_scale))  # all values come from one rank: norm_scale is its seed
        comm.barrier()
    single_rank.destroy()
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        ad.save_full_state_dict(sharded_model(mesh["tp"], 7), folder, 500.0, comm=comm)
        assert has_one_checkpoint(folder)
        check_load(mesh["tp"], folder, 7)


def test_concurrent_saves_leave_one_complete_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, save_concurrently, str(tmp_path))


def filled_model(seed: float) -> nn.Module:
    made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))).requires_grad_(False)
    for parameter in made.parameters():
        parameter.fill_(seed)
    return made


def is_killed_at(step: int, folder: Path, size: float) -> bool:
    """Save in a child process that is killed at disk change number `step`; return whether it was killed."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    left = step

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), 9)
            return function(*args, **options)

        return call

    def write(tensors: Any, path: Path, metadata: Any, end: int | None = None) -> None:
        Path(path).write_bytes(package.save(tensors, metadata)[:end])

    def in_two_steps(tensors: Any, path: Path, metadata: Any) -> None:
        counted(write)(tensors, path, metadata, -8)
        counted(write)(tensors, path, metadata)

    changes: tuple[tuple[Any, str], ...] = ((os, "replace"), (os, "fsync"), (Path, "unlink"))
    for owner, name in changes:
        setattr(owner, name, counted(getattr(owner, name)))
    setattr(package, "save_file", in_two_steps)  # noqa: B010
    ad.save_full_state_dict(filled_model(2), folder, size)
    os._exit(0)


def kill_while_saving(_: Place, path: str) -> None:
    """Kill a save before each of its steps, for every combination of old and new checkpoint formats."""
    for before, after in ((90, 90), (1e9, 90), (90, 1e9), (None, 90)):
        finished, step, seen = False, 0, set()
        while not finished:
            folder, current = Path(path, f"{before}-{after}-{step}"), filled_model(0)
            if before is not None:
                ad.save_full_state_dict(filled_model(1), folder, before)
            finished = not is_killed_at(step, folder, after)
            try:
                ad.load_full_state_dict(current, folder)
            except FileNotFoundError:
                assert before is None
            (value,) = {float(value_) for parameter in current.parameters() for value_ in parameter.flatten()}
            assert value == 2 or (value == (1 if before else 0) and not finished)
            seen.add(value)
            ad.save_full_state_dict(filled_model(3), folder, 90)  # saving works afterwards
            ad.load_full_state_dict(current, folder)
            assert all((parameter == 3).all() for parameter in current.parameters()) and has_one_checkpoint(folder)
            step += 1
        assert step >= 6 and len(seen) == 2  # it was killed in several steps


def test_a_save_that_is_killed_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    pool = RankPool(communicators=False)  # without library threads, so that it can fork
    try:
        pool.run(1, kill_while_saving, str(tmp_path))
    finally:
        pool.close()
