"""A mesh, and what is trained on it, go on with the ranks that are left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic import SECONDS, ElasticRanks, elastic_ranks, join, kill_self
from ranks import Place
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator, NcclError, NcclRemoteError


@pytest.fixture(scope="module")
def elastic() -> Iterator[ElasticRanks]:
    with elastic_ranks() as found:
        yield found


def until_it_raises(comm: Communicator) -> NcclError:
    """Use the communicator until a rank of its generation has died."""
    with pytest.raises(NcclError) as caught:
        while True:
            comm.all_reduce(torch.ones(3))
            time.sleep(0.01)  # leaves the cores to the others
    return caught.value


# ---------------------------------------------------------------------------------------------------------- Mesh

GRID = np.arange(6).reshape(1, 3, 2)
SHORTER = [GRID[:, [0, 2]], GRID[:, [0, 2], 1:]]  # without dp 1, then without tp 0


def shorten(place: Place, port: int) -> None:
    mesh = ad.Mesh(join(place, port), {"pp": 1, "dp": 3, "tp": 2})
    for number, left in enumerate(SHORTER):
        old, kept = mesh, mesh["tp"]  # some of these lose no rank
        old["dp"].barrier()
        if place.rank not in left:
            kill_self()
        until_it_raises(kept)
        began = time.monotonic()
        closed = place.rank in (1, 4)
        if closed:  # also before the new generation is made
            old.close()
        mesh = old.survivors(timeout=SECONDS)
        assert mesh.comm is old.comm.survivors() and mesh.comm.generation == number + 1
        assert tuple(mesh.shape.items()) == tuple(zip(("pp", "dp", "tp"), left.shape, strict=True))
        assert tuple(mesh.coordinate.values()) == tuple(int(index[0]) for index in np.where(left == place.rank))
        for at, axis in enumerate(mesh):
            index: list[Any] = list(mesh.coordinate.values())
            index[at] = slice(None)
            members = mesh[axis].all_gather(torch.tensor([place.rank])).tolist()
            assert members == left[tuple(index)].tolist()
        for use in (partial(old.__getitem__, "dp"), old.comm.barrier, kept.barrier)[: 2 if closed else 3]:
            with pytest.raises(NcclRemoteError, match=rf"generation {number} has ended: (.|\n)* call survivors\(\)"):
                use()
        with old:
            old.close()
        with pytest.raises(ArithmeticError), old:
            raise ArithmeticError
        assert time.monotonic() - began < SECONDS


def test_a_mesh_without_whole_slices_is_shorter(elastic: ElasticRanks) -> None:
    left = {int(rank) for rank in SHORTER[-1].flatten()}
    elastic.run(6, set(range(6)) - left, shorten)


def break_slice(place: Place, port: int) -> str:
    old = ad.Mesh(join(place, port), {"pp": 1, "dp": 2, "tp": 2})
    if place.rank == 3:
        kill_self()
    until_it_raises(old.comm)
    with pytest.raises(NcclRemoteError) as caught:
        old.survivors(timeout=SECONDS)
    comm = old.comm.survivors(timeout=SECONDS)  # it stays usable
    assert comm.size == 3 and comm.all_reduce(torch.ones(1)).item() == 3
    assert comm.verdict and caught.value.verdict == comm.verdict and comm.verdict in str(caught.value)
    assert ad.Mesh(comm, {"dp": 3, "tp": 1})["dp"].size == 3
    if place.rank == 2:  # the rest of the slice
        kill_self()
    until_it_raises(comm)
    mesh = old.survivors(timeout=SECONDS)
    assert mesh.shape == {"pp": 1, "dp": 1, "tp": 2} and mesh.comm.generation == 2
    assert mesh["tp"].all_gather(torch.tensor([place.rank])).tolist() == [0, 1]
    return str(caught.value)


def test_a_mesh_that_lost_part_of_a_slice_names_it_on_all_ranks(elastic: ElasticRanks) -> None:
    (text,) = set(elastic.run(4, {2, 3}, break_slice).values())
    assert text.startswith("Mesh.survivors: tp of dp 1 lost rank 3. No axis can be shortened")
    assert "mesh.comm.survivors() returns the communicator of the 3 that are left" in text


# ------------------------------------------------------------------------------------------- a mesh of two replicas

SLICES = ad.OverlapConfig("slices", chunks=2)
W1, W2 = torch.arange(32.0).view(8, 4).double() % 5 - 2, torch.arange(32.0).view(4, 8).double() % 7 - 3
ROWS = 8


class Overlapped(nn.Module):
    """Two tensor-parallel matmuls on shards of the sequence, on any communicator `tp`."""

    def __init__(self, tp: Communicator) -> None:
        super().__init__()
        self.tp = tp
        self.w1 = nn.Parameter(W1.chunk(2)[tp.rank].clone())
        self.w2 = nn.Parameter(W2.chunk(2, 1)[tp.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = ad.all_gather_matmul(x, self.w1, self.tp, overlap=SLICES)
        return ad.matmul_reduce_scatter(hidden.relu(), self.w2, self.tp, overlap=SLICES)


def batch(replica: int, step: int) -> Tensor:
    return torch.randint(-3, 4, (ROWS, 4), generator=torch.Generator().manual_seed(10 * step + replica)).double()


def train_overlapped(place: Place, port: int, point: str) -> list[list[Any]]:
    """Train on a 2x2 mesh; replica 1 dies in step 1. Return this rank's shards after each step."""
    mesh = ad.Mesh(join(place, port), {"dp": 2, "tp": 2})
    model, replica, part = Overlapped(mesh["tp"]), place.rank // 2, place.rank % 2
    found: list[list[Any]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
    data_parallel = ad.DataParallelGradients(model, mesh["dp"], 64)

    def at(here: str) -> None:
        if replica == 1 and len(found) == 1 and here == point:
            kill_self()

    ready = True
    while len(found) < 3:
        try:
            if not ready:
                mesh = mesh.survivors(timeout=SECONDS)
                assert mesh.shape == {"dp": 1, "tp": 2} and mesh.comm.agree(len(found)) == len(found)
                model.tp = mesh["tp"]
                data_parallel.use(mesh["dp"])
                ready = True
            y = model(batch(replica, len(found)).chunk(2)[part])
            at("forward")
            y.register_hook(lambda _: at("backward"))
            model.w2.register_hook(lambda _: at("between"))
            y.sum().backward()
            mesh.comm.commit(timeout=SECONDS)
            optimizer.step()
            optimizer.zero_grad()
            found.append([model.w1.tolist(), model.w2.tolist()])
        except NcclError:
            at(point)  # all of the replica
            ready = False
    return found


@pytest.mark.parametrize("point", ["backward", "between"])
def test_overlapped_training_on_a_mesh_goes_on_without_a_replica(elastic: ElasticRanks, point: str) -> None:
    found = elastic.run(4, {2, 3}, train_overlapped, point)
    w1, w2 = nn.Parameter(W1.clone()), nn.Parameter(W2.clone())
    optimizer = torch.optim.SGD([w1, w2], lr=2.0**-8)
    for step, replicas in enumerate([(0, 1), (0,), (0,)]):
        optimizer.zero_grad()
        for replica in replicas:
            loss = ((batch(replica, step) @ w1.T).relu() @ w2.T).sum()
            (loss / len(replicas)).backward()
        optimizer.step()
        for rank, steps in found.items():
            assert steps[step] == [w1.chunk(2)[rank].tolist(), w2.chunk(2, 1)[rank].tolist()], (rank, step)


def parallel_net(comm: Communicator) -> nn.Module:
    torch.manual_seed(0)
    return ad.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), comm, {"0": "column", "1": "row"}, False)


def use_what_has_ended(place: Place, port: int, folder: str) -> None:
    mesh = ad.Mesh(join(place, port), {"dp": 2, "tp": 2})
    comm, tp, x = mesh.comm, mesh["tp"], torch.ones(3, 4, requires_grad=True)
    model, plain = parallel_net(tp), nn.Linear(4, 4)
    data_parallel, scaler = ad.DataParallelGradients(plain, comm), ad.GradScaler(comm, init_scale=4.0)
    optimizer, partition = torch.optim.Adam(model.parameters()), ad.CartesianPartition(comm, (2, 2))
    ad.set_shard(plain.weight, ad.Shard(tp, None, plain.weight.shape, partial=True))
    along = partition.axes_comm(0)
    scaler.scale(model(x).square().sum()).backward()
    optimizer.step()
    expected = model(x)  # its backward pass is still to come
    plain(x).sum().backward()
    if place.rank > 1:
        kill_self()
    until_it_raises(comm)
    new = mesh.survivors(timeout=SECONDS)
    began = time.monotonic()
    uses: list[Callable[[], Any]] = [
        *(expected.sum().backward, lambda: model(x), lambda: plain(x).sum().backward(), data_parallel.finish),
        *(lambda: ad.finish_gradients(plain), lambda: ad.clip_grad_norm_(model, 1.0)),
        *(lambda: scaler.unscale_(optimizer), lambda: partition.axes_comm(1), lambda: ad.full_state_dict(model)),
        *(lambda: ad.save_full_state_dict(model, folder), lambda: ad.AllSumReduce(partition, (0,))(x)),
        lambda: ad.all_gather_matmul(x, x, along, overlap=SLICES),  # type: ignore[arg-type]
    ]
    for use in uses:
        with pytest.raises(NcclRemoteError, match="generation 0 has ended"):
            use()
    partition.destroy()
    assert time.monotonic() - began < SECONDS / 2
    # All of it is made again.
    data_parallel.use(new.comm)
    assert plain(x).sum().backward() is None
    again = parallel_net(new["tp"])
    again.load_state_dict(model.state_dict())
    optimizer_again = torch.optim.Adam(again.parameters())
    optimizer_again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again(x), expected)
    scaler_again = ad.GradScaler(new.comm)
    scaler_again.load_state_dict(scaler.state_dict())
    scaler_again.scale(again(x).sum()).backward()
    scaler_again.step(optimizer_again)
    scaler_again.update()
    assert scaler_again.get_scale() == 4.0 and not torch.equal(again(x), expected)
    ad.clip_grad_norm_(again, 1.0)
    assert ad.CartesianPartition(new.comm, (1, 2)).axes_comm(1).size == 2  # type: ignore[union-attr]


def test_what_is_kept_of_an_ended_generation_raises_and_can_be_made_again(
    elastic: ElasticRanks, tmp_path: Path
) -> None:
    elastic.run(4, {2, 3}, use_what_has_ended, str(tmp_path))
