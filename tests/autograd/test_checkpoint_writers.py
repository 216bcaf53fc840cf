"""Replicas and jobs that save into one folder at a time: one writes, and what is there is one checkpoint, whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import loaded, loads
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers import checkpoint, checkpoint_files

SAVES = 4


def _replicas_save(comm: Communicator, shape: dict[str, int], folder: str, limit: float, meet: bool) -> int:
    written: list[int] = []

    class Noted(checkpoint_files.Saving):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if meet:
                replicas.barrier()  # all have asked before the first one has written

        def write(self, number: int, *rest: Any) -> None:
            written.append(number)
            super().write(number, *rest)

    with pytest.MonkeyPatch.context() as patch, ad.Mesh(comm, shape) as mesh:
        patch.setattr(checkpoint, "Saving", Noted)
        model, replicas = loaded(mesh["tp"]), mesh["dp"]
        for _ in range(SAVES if meet else 10 * SAVES):
            ad.save_full_state_dict(model, folder, limit)
            if meet:  # else a replica that is late may be replacing it
                loads(mesh["tp"], folder)
    return len(written)


@pytest.mark.parametrize("limit", [5e9, 500.0])
@pytest.mark.parametrize(
    "shape",
    [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "tp": 1}, {"pp": 1, "dp": 2, "tp": 2}, {"dp": 3, "tp": 1}],
)
def test_data_parallel_replicas_save_one_checkpoint(
    ranks: RankPool, tmp_path: Path, shape: dict[str, int], limit: float
) -> None:
    n = 1
    for size in shape.values():
        n *= size
    folder = tmp_path / "checkpoint"
    written = ranks.run(n, _replicas_save, shape, str(folder), limit, True)
    files = sorted(file.name for file in folder.iterdir())
    expected = sum(name.endswith(".safetensors") for name in files)
    assert sum(written) == SAVES * expected, (written, files)  # one writer each time
    assert not [name for name in files if "sav" in name.replace("safetensors", "")], files


@pytest.mark.parametrize("limit", [5e9, 500.0])
def test_replicas_that_save_at_any_time(ranks: RankPool, tmp_path: Path, limit: float) -> None:
    ranks.run(3, _replicas_save, {"dp": 3, "tp": 1}, str(tmp_path), limit, False)
    ranks.run(2, loads, str(tmp_path))
    assert not list(tmp_path.glob("*.sav*"))


def _jobs_save(comm: Communicator, folder: str) -> str:
    """Each rank is a job of its own; both save at once, other values into one folder."""
    alone = comm.split(comm.rank)
    assert alone is not None
    model = loaded(alone, comm.rank)
    os.environ["TORCHELASTIC_RUN_ID"] = f"job {comm.rank}"
    original = checkpoint_files.Saving.write

    def write(self: Any, number: int, *rest: Any) -> None:
        if number == 0:
            comm.barrier()  # the winner is writing, and the loser has been told
        original(self, number, *rest)

    checkpoint_files.Saving.write = write  # type: ignore[method-assign, assignment]
    try:
        ad.save_full_state_dict(model, folder, 500.0)
        return ""
    except RuntimeError as error:
        comm.barrier()
        return str(error)
    finally:
        checkpoint_files.Saving.write = original  # type: ignore[method-assign]
        del os.environ["TORCHELASTIC_RUN_ID"]
        alone.destroy()


def test_of_two_jobs_the_second_is_told_and_the_folder_is_of_the_first(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(2, _jobs_save, str(tmp_path))
    (loser,) = [rank for rank, text in enumerate(said) if text]
    assert "another job (process " in said[loser] and "nothing of this checkpoint was written" in said[loser]
    ranks.run(1, loads, str(tmp_path), 1 - loser)
    assert not list(tmp_path.glob("*.sav*"))


def _parts_save(comm: Communicator, folder: str) -> str:
    """Stages of a pipeline that were given one folder by mistake."""
    try:
        lock = checkpoint_files.Lock("save", Path(folder, "model.saver"), [f"stage {comm.rank}"])
        comm.barrier()
        lock.release(saved=True)
        return ""
    except RuntimeError as error:
        comm.barrier()
        return str(error)


def test_ranks_of_one_job_with_other_tensors_are_no_replicas(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(2, _parts_save, str(tmp_path))
    assert sorted(bool(text) for text in said) == [False, True]
    assert "a rank that saves other tensors" in "".join(said)


def _one_fails(comm: Communicator, folder: str) -> str:
    saving = None
    for turn in range(2):
        if turn == comm.rank:
            saving = checkpoint_files.Saving("save", Path(folder), [{"x": torch.ones(2)}])
        comm.barrier()
    assert saving is not None and saving.writes == (comm.rank == 0)
    try:
        saving.finish(OSError("the disk is full") if comm.rank == 0 else None)
        return ""
    except OSError as error:
        return str(error)


def test_a_replica_hears_that_the_writer_could_not_finish(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, _one_fails, str(tmp_path))
    assert first == "the disk is full" and "could not finish" in second
