"""Mesh: the ranks of a communicator as a grid with named axes, and the communicators along its axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pynccl import CommConfig, Communicator
from pynccl.bindings.resource import Shared
from pynccl.bindings.values import instance, shown
from pynccl.comm.base import DEFAULT_TIMEOUT

from .arguments import as_int, check_comm


class Mesh(Shared):
    """N ranks as a grid, e.g. {"dp": 2, "tp": 4}: `mesh["tp"]` has the ranks that differ from this one in "tp" alone.

    comm   all ranks; rank r is at the r-th place in row-major order: the last axis varies fastest, so give it to what
           communicates most, whose ranks are then on one node
    shape  {name: size}, whose product is N; one size may be -1: what is left

    mesh["tp"]         the communicator along an axis, named so in errors and in `python -m pynccl hang`
    mesh["dp", "cp"]   along several at once, ordered as in the mesh
    mesh.coordinate    {name: this rank's place}

    A communicator is split off when it is first asked for, so every rank must ask for the same ones, in the same order.
    All axes at once are `comm` itself. `close()`, or the end of a with block, destroys what was split off, not `comm`.
    """

    def __init__(self, comm: Communicator, shape: Mapping[str, int]) -> None:
        check_comm("Mesh", comm, shape=shape)
        self.comm = comm
        self.shape = _shape(shape, comm.size)
        self._made: dict[tuple[str, ...], Communicator] = {}

    @classmethod
    def from_device_mesh(cls, mesh: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Mesh:
        """Of a torch DeviceMesh, with its names ("0", "1", .. where it has none) and its order of ranks. Every rank of
        the mesh must call it. timeout: seconds, as of Communicator.from_process_group."""
        import torch.distributed as dist

        ranks, sizes = mesh.mesh.flatten().tolist(), mesh.mesh.shape
        if dist.get_rank() not in ranks:
            raise ValueError(f"from_device_mesh: rank {dist.get_rank()} is not in the mesh, whose ranks are {ranks}")
        group = None
        if sorted(ranks) != list(range(dist.get_world_size())):
            group = mesh.get_group() if len(sizes) == 1 else dist.new_group(ranks, use_local_synchronization=True)
        comm = Communicator.from_process_group(group, timeout=timeout)
        if ranks != sorted(ranks):  # the order of groups
            comm = cast(Communicator, comm.split(0, ranks.index(dist.get_rank()), comm.config))
        names = mesh.mesh_dim_names or [str(dim) for dim in range(len(sizes))]
        return cls(comm, dict(zip(names, sizes, strict=True)))

    def to_device_mesh(self, device_type: str | None = None) -> Any:
        """A torch DeviceMesh of the same grid. torch.distributed must have been initialised with the same ranks; every
        rank must call it. device_type: None: that of `comm`."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        if not dist.is_initialized() or (dist.get_world_size(), dist.get_rank()) != (self.comm.size, self.comm.rank):
            have = f"has {dist.get_world_size()} ranks" if dist.is_initialized() else "is not initialised"
            raise RuntimeError(
                f"to_device_mesh: torch.distributed {have}; expected init_process_group with the {self.comm.size} "
                f"ranks of the mesh, of which this one is rank {self.comm.rank}"
            )
        kind = device_type or self.comm.device.partition(":")[0]
        grid = torch.arange(self.comm.size).reshape(tuple(self.shape.values()))
        return DeviceMesh(kind, grid, mesh_dim_names=tuple(self.shape))

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's place along each axis."""
        return self.coordinate_of(self.comm.rank)

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """That of a rank of `comm`."""
        places, index = {}, as_int(rank)
        if index is None or not 0 <= index < self.comm.size:
            raise ValueError(f"coordinate_of: rank is {shown(rank)}, expected 0 to {self.comm.size - 1}")
        for name, size in reversed(self.shape.items()):
            index, places[name] = divmod(index, size)
        return {name: places[name] for name in self.shape}

    def size(self, *axes: str) -> int:
        """Ranks along these axes; of all of them, if none is named."""
        return math.prod(self.shape[name] for name in (self._axes(axes) if axes else self.shape))

    def __getitem__(self, axes: str | Sequence[str]) -> Communicator:
        names = self._axes((axes,) if isinstance(axes, str) else tuple(axes))
        if not self.comm.alive:
            self.comm.check_alive()
        if names == tuple(self.shape):
            return self.comm
        made = self._made.get(names)
        if made is None or not made.alive:
            made = self._made[names] = self._split(names)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.shape

    def __len__(self) -> int:
        return len(self.shape)

    def _split(self, names: tuple[str, ...]) -> Communicator:
        place = self.coordinate
        color = key = 0
        for name, size in self.shape.items():
            if name in names:
                key = key * size + place[name]
            else:
                color = color * size + place[name]
        config = self.comm.config or CommConfig()
        if self.comm.library.version >= (2, 27):  # which knows names
            config = config._replace(comm_name="x".join(names))
        made = cast(Communicator, self.comm.split(color, key, config))
        made.origin = made.origin._replace(axes=names)
        return made

    def _axes(self, axes: tuple[Any, ...]) -> tuple[str, ...]:
        """These names in the order of the mesh."""
        for name in axes:
            if name not in self.shape:
                raise KeyError(f"the mesh has no axis {shown(name)}; it has {', '.join(map(repr, self.shape))}")
        if not axes or len(set(axes)) < len(axes):
            raise KeyError(f"mesh[{', '.join(map(repr, axes))}]: expected one axis, or several different ones")
        return tuple(name for name in self.shape if name in axes)

    def close(self) -> None:
        """Destroy the communicators along the axes, on every rank. Twice is harmless."""
        while self._made:
            _, made = self._made.popitem()
            made.destroy()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the others may not come to a destroy
            for made in self._made.values():
                made.abort()
            self._made.clear()

    def __repr__(self) -> str:
        place = self.coordinate if self.comm.alive else {}
        axes = ", ".join(f"{name!r}: {size}" for name, size in self.shape.items())
        at = ", ".join(f"{name} {index}" for name, index in place.items())
        return f"Mesh({{{axes}}}, rank {self.comm.rank} of {self.comm.size}" + (f" at {at})" if at else ", ended)")


def _shape(shape: Any, ranks: int) -> dict[str, int]:
    instance(shape, Mapping, "Mesh: shape", 'a dict such as {"dp": 2, "tp": 4}')
    sizes = {name: as_int(size) or 0 for name, size in shape.items()}
    free = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(free) == 1 and known > 0:
        sizes[free[0]] = ranks // known
    named = sizes and all(isinstance(name, str) and name for name in sizes)
    if not named or min(sizes.values()) < 1 or math.prod(sizes.values()) != ranks:
        raise ValueError(
            f"Mesh: shape is {dict(shape)}, expected names and sizes from 1, whose product is {ranks}, the number of "
            "ranks; one size may be -1: what is left"
        )
    return {name: int(size) for name, size in sizes.items()}
