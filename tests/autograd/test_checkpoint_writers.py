"""Several that save into one folder at a time: each writes a whole checkpoint, and one of them stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoints import Model, loaded, loads, same_output
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.checkpoint_files import INDEX


def each_saves_its_own(comm: Communicator, folder: str, limit: float) -> None:
    alone = comm.split(comm.rank)
    assert alone is not None
    for round_ in range(10):
        ad.save_full_state_dict(loaded(alone, comm.rank), folder, limit)
        if round_ % 3 == 0:
            comm.barrier()  # else they come at any time
    comm.barrier()
    model = Model(alone)
    ad.load_full_state_dict(model, folder)
    same_output(model, int(model.norm_scale))  # all of it is of one rank: the seed stands in there
    comm.barrier()
    if comm.rank == 0:
        ad.save_full_state_dict(loaded(alone, 7), folder, limit)
        assert files_of_one_checkpoint(folder)
    comm.barrier()
    loads(alone, folder, 7)
    alone.destroy()


def files_of_one_checkpoint(folder: str) -> bool:
    there, index = {file.name for file in Path(folder).iterdir()}, Path(folder, INDEX)
    if not index.exists():
        return there == {"model.safetensors"}
    return there == {INDEX, *json.loads(index.read_text())["weight_map"].values()}


@pytest.mark.parametrize("limit", [5e9, 500.0])
def test_of_several_that_save_at_any_time_one_checkpoint_stays(ranks: RankPool, tmp_path: Path, limit: float) -> None:
    ranks.run(3, each_saves_its_own, str(tmp_path), limit)


def replicas_save(comm: Communicator, folder: str) -> None:
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        for seed in range(3):
            ad.save_full_state_dict(loaded(mesh["tp"], seed), folder, 500.0, comm=comm)
            assert files_of_one_checkpoint(folder)
            loads(mesh["tp"], folder, seed)
            comm.barrier()


def test_rank_0_of_all_replicas_writes_for_them(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, replicas_save, str(tmp_path))


def test_what_killed_saves_left_goes_with_the_next_one(ranks: RankPool, tmp_path: Path) -> None:
    """Of a process that is gone, but not of one that is there, nor of another machine that has just written."""
    machine = os.uname().nodename
    gone = tmp_path / f"model.saving-01234567-{2**22 + 1}-{machine}"
    there = tmp_path / f"model.saving-01234567-{os.getpid()}-{machine}"
    elsewhere = tmp_path / "model.saving-01234567-1-another-machine.org"
    stale = tmp_path / "model.saving-01234568-1-another-machine.org"
    for folder in (gone, there, elsewhere, stale):
        folder.mkdir()
        (folder / "0").write_bytes(b"1")
    for path in (stale / "0", stale):
        os.utime(path, (1e9, 1e9))
    in_place = tmp_path / "model-01234567-00001-of-00002.safetensors"  # that one of them is about to name in an index
    in_place.touch()
    ranks.run(2, saves_and_loads, str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {
        there.name,
        elsewhere.name,
        in_place.name,
        "model.safetensors",
    }
    for folder in (there, elsewhere):
        (folder / "0").unlink()
        folder.rmdir()
    ranks.run(2, saves_and_loads, str(tmp_path))
    assert files_of_one_checkpoint(str(tmp_path))


def saves_and_loads(comm: Communicator, folder: str) -> None:
    ad.save_full_state_dict(loaded(comm), folder)
    loads(comm, folder)
