"""Checkpoints of the unsharded model: written by some ranks, read by others, whole whenever the process ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch as package
import torch
from checkpoints import Model, loaded, loads, same_output, saves, whole_model
from ranks import Place, RankPool, each_size
from safetensors.torch import load_file, load_model
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.checkpoint_files import INDEX


def there_and_back(comm: Communicator, path: str) -> None:
    expected, model = whole_model().state_dict(), loaded(comm, 6)
    state = expected if comm.rank == 0 else None  # which may have it alone
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
        same_output(plain)
        found["norm.weight"].zero_()  # a copy
    same_output(model)
    ad.save_full_state_dict(model, path)
    again = loaded(comm, 7)
    ad.load_full_state_dict(again, path if comm.rank == 0 else None)
    same_output(again)
    few = loaded(comm, 1, words=2)  # some ranks have no row
    ad.load_full_state_dict(few, whole_model(2, words=2).state_dict())
    ids = torch.tensor([[0, 1]])
    torch.testing.assert_close(few(ids), whole_model(2, words=2)(ids))


@each_size
def test_the_full_state_dict_is_that_of_the_unsharded_model(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, there_and_back, str(tmp_path / "model.safetensors"))


def other_types(comm: Communicator, folder: str) -> None:
    """Values take the type of the parameter, as Module.load_state_dict has it."""
    state = whole_model().state_dict()
    ad.save_full_state_dict(loaded(comm).float(), folder)
    narrow = loaded(comm, 6).bfloat16()
    ad.load_full_state_dict(narrow, folder)
    wide = loaded(comm, 6)
    ad.load_full_state_dict(wide, ad.full_state_dict(narrow, rank0_only=False))
    for name, value in ad.full_state_dict(wide, comm, rank0_only=False).items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name].float().bfloat16().to(value.dtype))


def test_a_checkpoint_of_another_type_is_converted(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, other_types, str(tmp_path))


def is_one_checkpoint(folder: str | Path) -> bool:
    """Of what the last save wrote nothing is missing, and of others nothing is there."""
    there, index = {file.name for file in Path(folder).iterdir()}, Path(folder, INDEX)
    if not index.exists():
        return there == {"model.safetensors"}
    return there == {INDEX, *json.loads(index.read_text())["weight_map"].values()}


def test_what_4_ranks_save_others_one_and_the_package_load(ranks: RankPool, tmp_path: Path) -> None:
    for size in (5e9, 2000, 1500, 5e9):  # in one file, in several, and over what was there
        ranks.run(4, saves, str(tmp_path), size)
        for n in (2, 3):
            ranks.run(n, loads, str(tmp_path))
        alone = Model()
        ad.load_full_state_dict(alone, tmp_path)
        same_output(alone)
        assert is_one_checkpoint(tmp_path)
        if size == 2000:
            index = json.loads((tmp_path / INDEX).read_text())
            files = sorted(tmp_path.glob("model-*-of-00003.safetensors"))
            assert len(files) == 3 and all(file.stat().st_size < size + 1000 for file in files)
            tensors = {name: value for file in files for name, value in load_file(file).items()}
            assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
            expected = whole_model().state_dict()
            assert index["weight_map"].keys() == tensors.keys() == expected.keys() - {"head.weight"}
            assert all(torch.equal(value, expected[name]) for name, value in tensors.items())
    plain = Model()
    load_model(plain, tmp_path / "model.safetensors")
    same_output(plain)


def at_a_time(comm: Communicator, folder: str) -> None:
    """Several that save into one folder; then replicas, for which rank 0 of all writes."""
    alone = comm.split(comm.rank)
    assert alone is not None
    for limit in (5e9, 500.0):
        for _ in range(5):
            ad.save_full_state_dict(loaded(alone, comm.rank), folder, limit)
        comm.barrier()
        model = loaded(alone)
        ad.load_full_state_dict(model, folder)
        same_output(model, int(model.norm_scale))  # all of it is of one rank: the seed stands in there
        comm.barrier()
    alone.destroy()
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        ad.save_full_state_dict(loaded(mesh["tp"], 7), folder, 500.0, comm=comm)
        assert is_one_checkpoint(folder)
        loads(mesh["tp"], folder, 7)


def test_of_several_that_save_at_a_time_one_checkpoint_stays(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, at_a_time, str(tmp_path))


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
    ad.save_full_state_dict(filled(2), folder, size)
    os._exit(0)


def killed(_: Place, path: str) -> None:
    """Before each step, for each way in which one checkpoint replaces another."""
    for before, after in ((90, 90), (1e9, 90), (90, 1e9), (None, 90)):
        ended, step, seen = False, 0, set()
        while not ended:
            folder, there = Path(path, f"{before}-{after}-{step}"), filled(0)
            if before is not None:
                ad.save_full_state_dict(filled(1), folder, before)
            ended = not is_killed_at(step, folder, after)
            try:
                ad.load_full_state_dict(there, folder)
            except FileNotFoundError:
                assert before is None
            (value,) = {float(one) for parameter in there.parameters() for one in parameter.flatten()}
            assert value == 2 or (value == (1 if before else 0) and not ended)
            seen.add(value)
            ad.save_full_state_dict(filled(3), folder, 90)  # goes on after it
            ad.load_full_state_dict(there, folder)
            assert all((parameter == 3).all() for parameter in there.parameters()) and is_one_checkpoint(folder)
            step += 1
        assert step >= 6 and len(seen) == 2  # it was killed that often


def test_killed_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    pool = RankPool(communicators=False)  # without threads of a library, so that it can fork
    try:
        pool.run(1, killed, str(tmp_path))
    finally:
        pool.close()
