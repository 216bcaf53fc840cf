"""Mesh: the ranks of a communicator as a grid with named axes, and a communicator along each axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pynccl import CommConfig, Communicator, NcclRemoteError
from pynccl.bindings.resource import Shared
from pynccl.bindings.values import instance, shown
from pynccl.comm.base import DEFAULT_TIMEOUT
from pynccl.watch.formatting import ranks_text

from .arguments import as_int, check_comm


class Mesh(Shared):
    """A grid of all ranks with named axes, e.g. {"dp": 2, "tp": 4}.

    comm   communicator of all N ranks. Ranks are placed in row-major order: the last axis varies fastest. Use the last
           axis for the parallelism that communicates most, so that its ranks are on one node
    shape  {name: size}; the product of the sizes is N. One size may be -1: it is inferred

    mesh["tp"]         communicator of the ranks whose coordinates differ from this rank's in "tp" only; errors and
                       `python -m pynccl hang` show it by this name
    mesh["dp", "cp"]   communicator along several axes, in the order of the mesh; all axes: `comm` itself
    mesh.coordinate    {name: coordinate of this rank}

    A communicator is split from `comm` at its first use. Every rank must therefore use new ones in the same order.
    `close()`, or the end of a with block, destroys the split communicators, but not `comm`.

    ValueError if the product of the sizes is not N.
    """

    def __init__(self, comm: Communicator, shape: Mapping[str, int]) -> None:
        check_comm("Mesh", comm, shape=shape)
        self.comm = comm
        self.shape = _shape(shape, comm.size)
        self._made: dict[tuple[str, ...], Communicator] = {}

    @classmethod
    def from_device_mesh(cls, mesh: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Mesh:
        """Create a Mesh from a torch DeviceMesh, with the same axis names and order of ranks. Unnamed axes are called
        "0", "1", ... Every rank of the mesh must call it.

        timeout  seconds, as in Communicator.from_process_group
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        instance(mesh, DeviceMesh, "from_device_mesh: mesh", "a DeviceMesh of torch")
        ranks, sizes = mesh.mesh.flatten().tolist(), mesh.mesh.shape
        if dist.get_rank() not in ranks:
            raise ValueError(f"from_device_mesh: rank {dist.get_rank()} is not in the mesh, whose ranks are {ranks}")
        group = None
        if sorted(ranks) != list(range(dist.get_world_size())):
            group = mesh.get_group() if len(sizes) == 1 else dist.new_group(ranks, use_local_synchronization=True)
        comm = Communicator.from_process_group(group, timeout=timeout)
        if ranks != sorted(ranks):  # from_process_group sorts the ranks
            comm = comm.split(0, ranks.index(dist.get_rank()), comm.config)
        names = mesh.mesh_dim_names or [str(dim) for dim in range(len(sizes))]
        return cls(comm, dict(zip(names, sizes, strict=True)))

    def to_device_mesh(self, device_type: str | None = None) -> Any:
        """Create a torch DeviceMesh of the same grid. Every rank must call it.

        device_type  e.g. "cuda"; None: the device type of `comm`

        RuntimeError if torch.distributed is not initialised with the same ranks.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        instance(device_type, (str, type(None)), "to_device_mesh: device_type", "a string such as 'cuda', or None")
        if not dist.is_initialized() or (dist.get_world_size(), dist.get_rank()) != (self.comm.size, self.comm.rank):
            state = f"has {dist.get_world_size()} ranks" if dist.is_initialized() else "is not initialised"
            raise RuntimeError(
                f"to_device_mesh: torch.distributed {state}; call init_process_group with world_size={self.comm.size} "
                f"and rank={self.comm.rank}, as in the mesh"
            )
        kind = device_type or self.comm.device.partition(":")[0]
        grid = torch.arange(self.comm.size).reshape(tuple(self.shape.values()))
        return DeviceMesh(kind, grid, mesh_dim_names=tuple(self.shape))

    @property
    def coordinate(self) -> dict[str, int]:
        """{axis name: coordinate of this rank}."""
        return self.coordinate_of(self.comm.rank)

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """Return {axis name: coordinate} of a rank of `comm`."""
        places, index = {}, as_int(rank)
        if index is None or not 0 <= index < self.comm.size:
            raise ValueError(f"coordinate_of: rank is {shown(rank)}, expected 0 to {self.comm.size - 1}")
        for name, size in reversed(self.shape.items()):
            index, places[name] = divmod(index, size)
        return {name: places[name] for name in self.shape}

    def size(self, *axes: str) -> int:
        """Return the number of ranks along these axes; without arguments, of the mesh."""
        return math.prod(self.shape[name] for name in (self._axes(axes) if axes else self.shape))

    def __getitem__(self, axes: str | Sequence[str]) -> Communicator:
        instance(axes, (str, Sequence), "mesh[axes]: axes", f"names, some of {', '.join(map(repr, self.shape))}")
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
        if self.comm.library.version >= (2, 27):  # which added comm_name
            config = config._replace(comm_name="x".join(names))
        made = self.comm.split(color, key, config)
        made._lineage = made._lineage._replace(axes=names)
        return made

    def _axes(self, axes: tuple[Any, ...]) -> tuple[str, ...]:
        """Return these names in the order of the mesh."""
        for name in axes:
            if not isinstance(name, str) or name not in self.shape:
                raise KeyError(f"the mesh has no axis {shown(name)}; it has {', '.join(map(repr, self.shape))}")
        if not axes or len(set(axes)) < len(axes):
            raise KeyError(f"mesh[{', '.join(map(repr, axes))}]: expected one axis, or several distinct ones")
        return tuple(name for name in self.shape if name in axes)

    def survivors(self, timeout: float | None = 30.0) -> Mesh:
        """Return the mesh of the ranks that are left, in the old order, after a call raised because a rank died. It
        calls `Communicator.survivors` of `comm`, which must be elastic.

        One axis becomes shorter: the ranks that died must be all ranks of one or more coordinates along it. So a mesh
        {"dp": 3, "tp": 2} without ranks 2 and 3, which are dp 1, becomes {"dp": 2, "tp": 2}.

        All communicators of the old mesh have ended, also those that lost no rank. Make layers that hold one again on
        the new mesh, and load the old ones' state_dict(): the shards are the same.

        timeout  seconds; None: no limit

        Raises NcclRemoteError, on all ranks, if no axis fits; `mesh.comm.survivors()` then returns the communicator of
        the ranks that are left. Otherwise raises as `Communicator.survivors` does."""
        comm = self.comm.survivors(timeout)
        left = set(comm._generation.members)
        lost = [rank for rank, member in enumerate(self.comm._generation.members) if member not in left]
        places = [self.coordinate_of(rank) for rank in lost]
        for name, size in self.shape.items():
            cut = {place[name] for place in places}
            if len(cut) * (self.comm.size // size) == len(lost):
                return Mesh(comm, {**self.shape, name: size - len(cut)})
        *outer, last = (name for name, size in self.shape.items() if size > 1)
        groups: dict[str, list[int]] = {}
        for rank, place in zip(lost, places, strict=True):
            member = self.comm._generation.members[rank]  # of the launch, as all messages name ranks
            groups.setdefault(", ".join(f"{name} {place[name]}" for name in outer), []).append(member)
        found = "; ".join(f"{last} of {at} lost {ranks_text(ranks)}" for at, ranks in groups.items())
        verdict = comm.verdict.replace("\n", "\n  ")
        error = NcclRemoteError(
            f"Mesh.survivors: {found}. No axis can be shortened: the ranks lost are not all those of a coordinate\n"
            f"  {verdict}\n"
            f"  mesh.comm.survivors() returns the communicator of the {comm.size} that are left: make a mesh of it in "
            "another\n  shape, and load a checkpoint; or end the rest of the slice, and call Mesh.survivors() again"
        )
        error.verdict = comm.verdict
        raise error

    def close(self) -> None:
        """Destroy the communicators along the axes. Every rank must call it; a second call has no effect."""
        while self._made:
            _, made = self._made.popitem()
            made.destroy()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # abort: destroy could hang, since other ranks may never call it
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
            f"Mesh: shape is {dict(shape)}, expected named sizes >= 1 whose product is {ranks}, the number of ranks; "
            "one size may be -1 (inferred)"
        )
    return {name: int(size) for name, size in sizes.items()}
