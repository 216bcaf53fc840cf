"""Mesh: coordinates, the communicators of its axes, bad input and conversion from and to DeviceMesh."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_groups import gloo_group
from ranks import RankPool
from torch.distributed.device_mesh import DeviceMesh

import pynccl_autograd as ad
from pynccl import Communicator

SHAPES = [{"dp": 2, "tp": 2}, {"a": 1, "b": 4}, {"dp": -1, "tp": 2}, {"p": 2, "q": 1, "r": 2}]


def check_axes(comm: Communicator) -> None:
    """Check the members of the communicator of each axis, and of each pair of axes."""
    for shape in SHAPES:
        grid = np.arange(4).reshape([abs(size) * (2 if size == -1 else 1) for size in shape.values()])
        place = dict(zip(shape, (int(index[0]) for index in np.where(grid == comm.rank)), strict=True))
        with ad.Mesh(comm, shape) as mesh:
            for axes in [*mesh, *((a, b) for a in mesh for b in mesh if a != b)]:
                named = re.findall(r"\w+", str(axes))
                at = tuple(slice(None) if name in named else place[name] for name in shape)
                along = mesh[axes]
                assert along is mesh[axes] and along.size == mesh.size(*named)
                members = along.all_gather(torch.tensor([float(comm.rank)])).tolist()
                assert members == grid[at].flatten().tolist() and members[along.rank] == comm.rank
            assert mesh.size() == 4 and mesh.coordinate == mesh.coordinate_of(comm.rank) == place
        assert comm.alive and (along is comm or not along.alive)


def test_axes_contain_the_ranks_that_differ_only_there(ranks: RankPool) -> None:
    ranks.run(4, check_axes)


def check_bad_input(comm: Communicator) -> None:
    any_of: Any = ad
    sizes = r"shape is \{.*\}, expected named sizes >= 1 whose product is 2, the"
    for shape in ({"dp": 3}, {"dp": -1, "tp": -1}, {"dp": -1, "tp": 3}, {"dp": 0}, {"dp": 1.5}, {3: 2}, {}):
        with pytest.raises(ValueError, match=sizes):
            any_of.Mesh(comm, shape)
    mesh = ad.Mesh(comm, {"dp": 2, "tp": 1})
    with pytest.raises(KeyError, match="the mesh has no axis 'pp'; it has 'dp', 'tp'"):
        mesh["pp"]
    with pytest.raises(KeyError, match="expected one axis, or several distinct ones"):
        mesh["dp", "dp"]


def test_bad_input_raises_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, check_bad_input)


def convert_device_mesh(comm: Communicator, path: str, order: list[list[int]]) -> None:
    row, column = (int(index[0]) for index in np.where(np.array(order) == comm.rank))
    with gloo_group(comm, path):
        torch_mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp"))
        with ad.Mesh.from_device_mesh(torch_mesh) as mesh:
            assert mesh.shape == {"dp": 2, "tp": 2}
            dp, tp = (mesh[name].all_gather(torch.tensor([float(comm.rank)])).tolist() for name in mesh)
            assert dp == [order[0][column], order[1][column]] and tp == order[row]
        back = ad.Mesh(comm, {"dp": 2, "tp": 2}).to_device_mesh()
        assert back.mesh.tolist() == [[0, 1], [2, 3]] and back.mesh_dim_names == ("dp", "tp")
        mesh.comm.destroy()


def test_conversion_keeps_the_order_of_a_device_mesh(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, convert_device_mesh, str(tmp_path / "store"), [[3, 1], [0, 2]])
