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
from pynccl_autograd.layers import checkpoint, safetensors_files

SAVES = 4


def _replicas_save(comm: Communicator, shape: dict[str, int], folder: str, limit: float, meet: bool) -> int:
    written: list[Path] = []
    write_file, claim_of = safetensors_files._write_file, safetensors_files.claim_of

    def noted(path: Path, *rest: Any) -> None:
        written.append(path)
        write_file(path, *rest)

    def met(*args: Any) -> Any:
        claim = claim_of(*args)
        if meet:
            replicas.barrier()  # all have asked before the first one has written
        return claim

    with pytest.MonkeyPatch.context() as patch, ad.Mesh(comm, shape) as mesh:
        patch.setattr(safetensors_files, "_write_file", noted)
        patch.setattr(checkpoint, "claim_of", met)
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
    original = safetensors_files._write_file

    def write_file(path: Path, *rest: Any) -> None:
        if not met:
            comm.barrier()  # the winner is writing, and the loser has been told
            met.append(True)
        original(path, *rest)

    met: list[bool] = []
    safetensors_files._write_file = write_file  # type: ignore[assignment]
    try:
        ad.save_full_state_dict(model, folder, 500.0)
        return ""
    except RuntimeError as error:
        comm.barrier()
        return str(error)
    finally:
        safetensors_files._write_file = original
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
    rows = [safetensors_files.Row(f"stage {comm.rank}", (2,), torch.float32)]
    try:
        claim = safetensors_files.claim_of("save", Path(folder), rows)
        comm.barrier()
        claim.finish(saved=True)
        return ""
    except RuntimeError as error:
        comm.barrier()
        return str(error)


def test_ranks_of_one_job_with_other_tensors_are_no_replicas(ranks: RankPool, tmp_path: Path) -> None:
    said = ranks.run(2, _parts_save, str(tmp_path))
    assert sorted(bool(text) for text in said) == [False, True]
    assert "a rank that saves other tensors" in "".join(said)


def _one_fails(comm: Communicator, folder: str) -> str:
    rows: list[safetensors_files.Row] = []
    claim = None
    for turn in range(2):
        if turn == comm.rank:
            claim = safetensors_files.claim_of("save", Path(folder), rows)
        comm.barrier()
    assert claim is not None and claim.own == (comm.rank == 0)
    try:
        claim.finish(saved=False)
        return ""
    except OSError as error:
        return str(error)


def test_a_replica_hears_that_the_writer_could_not_finish(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, _one_fails, str(tmp_path))
    assert first == "" and "could not finish" in second
