"""Checkpoints of an elastic communicator: a rank that was stopped and wakes up leaves that of the next generation."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic import SECONDS, ElasticRanks, elastic_ranks, join
from ranks import Place
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed import HashStore

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator, NcclError
from pynccl.bootstrap import survivors
from pynccl_autograd.layers.checkpoint_files import INDEX, Saving


@pytest.fixture(scope="module")
def elastic() -> Iterator[ElasticRanks]:
    with elastic_ranks() as found:
        yield found


def net(value: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for one in model.parameters():
        nn.init.constant_(one, value)
    return model


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop_when(point: str, patch: pytest.MonkeyPatch) -> None:
    """Stop this process when it has written all files, has moved one into place, or has moved the index."""
    write, replace = Saving._write, os.replace

    def write_and_stop(self: Saving) -> None:
        write(self)
        stop()

    def replace_and_stop(source: Path, target: Path) -> None:
        replace(source, target)
        if (target.name == INDEX) == (point == "index"):
            stop()

    if point == "written":
        patch.setattr(Saving, "_write", write_and_stop)
    else:
        patch.setattr(os, "replace", replace_and_stop)


def save_and_wake(place: Place, port: int, folder: str, point: str) -> str:
    """Rank 0 stops while it saves ones; the others go on, save twos, and wake it. Return the error."""
    survivors.SILENT_SECONDS = 0.5
    comm = join(place, port)
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()
    tp = comm.split(0, comm.rank)  # the save knows only this one
    model = ad.parallelize(net(1.0), tp, {"0": "column", "1": "row"}, False)

    made: list[Communicator] = []

    def go_on() -> None:
        while not is_stopped(pids[0]):
            time.sleep(0.01)
        made.append(comm.survivors(timeout=SECONDS))

    thread = threading.Thread(target=go_on)
    with pytest.raises(NcclError) as caught, pytest.MonkeyPatch.context() as patch:
        if place.rank:
            thread.start()
        else:
            stop_when(point, patch)
        ad.save_full_state_dict(model, folder, 1e9 if point == "written" else 100)
    if place.rank:
        thread.join()
        (new,) = made
        assert (new.generation, new.size) == (1, 2)
        again = ad.parallelize(net(2.0), new, {"0": "column", "1": "row"}, False)
        ad.save_full_state_dict(again, folder)
        if place.rank == 1:
            os.kill(pids[0], signal.SIGCONT)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("point", ["written", "moved", "index"])
def test_a_rank_that_wakes_up_leaves_the_checkpoint_of_the_next_generation(
    elastic: ElasticRanks, tmp_path: Path, point: str
) -> None:
    ad.save_full_state_dict(net(0.0), tmp_path)
    found = elastic.run(3, set(), save_and_wake, str(tmp_path), point)
    assert found[0].startswith("NcclRemoteError: ") and "generation 0 has ended" in found[0]
    assert [file.name for file in tmp_path.iterdir() if "saving" in file.name or file.name == INDEX] == []
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "pynccl_generation": "1"}
    model = net(0.0)
    ad.load_full_state_dict(model, tmp_path)
    assert all(torch.equal(one, torch.full_like(one, 2.0)) for one in model.parameters())


class Numbered(nn.Module):
    """Its tensors are called "0", "1" and "tied"."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("0", "1"):
            self.register_parameter(name, nn.Parameter(torch.ones(3)))
        self.register_parameter("tied", self.get_parameter("1"))


def metadata_of(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Save into a file, and into several; return the metadata of the file and of the index."""
    model = Numbered()
    ad.save_full_state_dict(model, folder / "one.safetensors", **options)
    ad.save_full_state_dict(model, folder / "many", 8, **options)
    for path in (folder / "one.safetensors", folder / "many"):
        assert ad.load_full_state_dict(Numbered(), path) == ([], [])
    assert set(load_file(folder / "one.safetensors")) == {"0", "1"}
    with safe_open(folder / "one.safetensors", "pt") as file:
        return file.metadata(), json.loads((folder / "many" / INDEX).read_text())["metadata"]


def test_the_metadata_has_the_generation_of_an_elastic_communicator(tmp_path: Path) -> None:
    one, many = {"format": "pt", "tied": "1"}, {"total_size": 24}
    assert metadata_of(tmp_path) == (one, many)
    with pynccl.Communicator.init_all(1)[0] as plain:
        assert metadata_of(tmp_path, comm=plain) == (one, many)
    with pynccl.from_store(HashStore(), 0, 1, elastic=True) as comm:
        number = {"pynccl_generation": "0"}
        assert metadata_of(tmp_path, comm=comm) == ({**one, **number}, {**many, **number})
