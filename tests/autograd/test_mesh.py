"""A grid of ranks with named axes: who is where, who talks to whom, what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process_groups import gloo
from ranks import RankPool
from torch.distributed.device_mesh import DeviceMesh

import pynccl_autograd as ad
from pynccl import Communicator, NcclInvalidUsage

SHAPES = [{"dp": 2, "tp": 2}, {"a": 1, "b": 4}, {"x": 4}, {"dp": -1, "tp": 2}, {"p": 2, "q": 1, "r": 2}]


def places(comm: Communicator, shape: dict[str, int]) -> dict[str, list[float]]:
    """For each axis, and each pair of them, the ranks of `comm` that are with this one."""
    mesh, found = ad.Mesh(comm, shape), {}
    pairs = [(a, b) for a in mesh for b in mesh if a != b]
    for axes in [*mesh, *pairs]:
        along = mesh[axes]
        assert along is mesh[axes]
        assert along.size == mesh.size(*([axes] if isinstance(axes, str) else axes))
        found[str(axes)] = along.all_gather(torch.tensor([float(comm.rank)])).tolist()
        assert found[str(axes)][along.rank] == comm.rank
    assert mesh.size() == comm.size and sorted(mesh.coordinate) == sorted(shape)
    mesh.close()
    mesh.close()
    return found


def all_places(comm: Communicator) -> list[dict[str, list[float]]]:
    return [places(comm, shape) for shape in SHAPES]


def test_axes_have_the_ranks_that_differ_there_alone(ranks: RankPool) -> None:
    for rank, of_shapes in enumerate(ranks.run(4, all_places)):
        for shape, found in zip(SHAPES, of_shapes, strict=True):
            grid = np.arange(4).reshape([abs(size) * (2 if size == -1 else 1) for size in shape.values()])
            place = dict(zip(shape, (int(index[0]) for index in np.where(grid == rank)), strict=True))
            for axes, members in found.items():
                named = re.findall(r"\w+", axes)
                at = tuple(slice(None) if name in named else place[name] for name in shape)
                assert members == grid[at].flatten().tolist()


def names(comm: Communicator) -> list[str]:
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        assert mesh["dp", "tp"] is comm and mesh["tp", "dp"] is comm
        assert (
            repr(mesh)
            == f"Mesh({{'dp': 2, 'tp': 2}}, rank {comm.rank} of 4 at dp {comm.rank // 2}, tp {comm.rank % 2})"
        )
        assert (len(mesh), "tp" in mesh, "pp" in mesh) == (2, True, False)
        assert mesh.coordinate_of(2) == {"dp": 1, "tp": 0}
        tp = mesh["tp"]
        assert tp._track is not None
        found = [tp._track.name]
    assert not tp.alive and comm.alive
    with pytest.raises(ZeroDivisionError), ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        tp = mesh["tp"]
        raise ZeroDivisionError
    assert not tp.alive and comm.alive
    return found


def test_communicators_are_called_like_their_axes_and_end_with_the_mesh(ranks: RankPool) -> None:
    assert ranks.run(4, names) == [["tp"]] * 4


def nonsense(comm: Communicator) -> None:
    for shape in ({"dp": 3}, {"dp": -1, "tp": -1}, {"dp": -1, "tp": 3}, {"dp": 0}, {"dp": 1.5}, {3: 2}, {}):
        with pytest.raises(
            ValueError, match=r"shape is \{.*\}, expected names and sizes from 1, whose product is 2, the"
        ):
            ad.Mesh(comm, shape)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"shape .*\[2\].* expected a dict"):
        ad.Mesh(comm, [2])  # type: ignore[arg-type]
    mesh = ad.Mesh(comm, {"dp": 2, "tp": 1})
    with pytest.raises(KeyError, match=r"the mesh has no axis 'pp'; it has 'dp', 'tp'"):
        mesh["pp"]
    with pytest.raises(KeyError, match=r"expected one axis, or several different ones"):
        mesh["dp", "dp"]
    with pytest.raises(ValueError, match=r"rank is 2, expected 0 to 1"):
        mesh.coordinate_of(2)
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialised"):
        mesh.to_device_mesh()
    child = comm.split(0, comm.rank)
    assert child is not None
    gone = ad.Mesh(child, {"dp": 2, "tp": 1})
    child.destroy()
    with pytest.raises(NcclInvalidUsage, match="was destroyed"):
        gone["dp"]
    assert repr(gone).endswith("ended)")


def test_bad_input_is_refused_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, nonsense)


def with_torch(comm: Communicator, path: str, order: list[list[int]]) -> list[list[float]]:
    with gloo(comm, path):
        torch_mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp"))
        with ad.Mesh.from_device_mesh(torch_mesh) as mesh:
            assert mesh.shape == {"dp": 2, "tp": 2}
            found = [mesh[name].all_gather(torch.tensor([float(comm.rank)])).tolist() for name in mesh]
        back = ad.Mesh(comm, {"dp": 2, "tp": 2}).to_device_mesh()
        assert back.mesh.tolist() == [[0, 1], [2, 3]] and back.mesh_dim_names == ("dp", "tp")
        expected = [torch.empty(1) for _ in range(2)]
        for name, ranks in zip(("dp", "tp"), found, strict=True):
            dist.all_gather(expected, torch.tensor([float(comm.rank)]), group=torch_mesh.get_group(name))
            assert sorted(ranks) == sorted(float(one) for one in expected)
        mesh.comm.destroy()
    return found


@pytest.mark.parametrize("order", [[[0, 1], [2, 3]], [[3, 1], [0, 2]]], ids=str)
def test_torchs_device_mesh_in_its_order(ranks: RankPool, tmp_path: Path, order: list[list[int]]) -> None:
    for rank, (dp, tp) in enumerate(ranks.run(4, with_torch, str(tmp_path / "store"), order)):
        row, column = (int(index[0]) for index in np.where(np.array(order) == rank))
        assert dp == [order[0][column], order[1][column]] and tp == order[row]
