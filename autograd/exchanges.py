"""all_to_all, permute, halo_exchange: every rank has its own to give. Notation: see functions.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pynccl import Communicator

from . import raw
from .collective import Call, Collective
from .raw import Exchange, Splits


class AllToAll(Collective):
    """Cut along `split_dim`, part q goes to rank q; what arrives is concatenated along `concat_dim`.

    forward    x [.., N*a, .., b, ..] -> y [.., a, .., N*b, ..]     y_r = concat_q x_q[part r]
    backward   g [.., a, .., N*b, ..] -> [.., N*a, .., b, ..]       all_to_all(g), dimensions and splits swapped
    """

    name = "all_to_all"
    schema = "int split_dim, int concat_dim, SymInt[]? send_splits, SymInt[]? recv_splits"

    @staticmethod
    def exchange(
        x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, send_splits: Splits, recv_splits: Splits
    ) -> Exchange:
        return raw.all_to_all(x, comm, split_dim, concat_dim, send_splits, recv_splits)

    @staticmethod
    def adjoint(
        g: Tensor,
        comm: Communicator,
        shape: torch.Size,
        split_dim: int,
        concat_dim: int,
        send_splits: Splits,
        recv_splits: Splits,
    ) -> Call:
        return Call(AllToAll, g, (concat_dim, split_dim, recv_splits, send_splits))

    @staticmethod
    def batched(
        split_dim: int, concat_dim: int, send_splits: Splits, recv_splits: Splits
    ) -> tuple[int, int, Splits, Splits]:
        return split_dim + 1, concat_dim + 1, send_splits, recv_splits


class Permute(Collective):
    """Tensors travel along directed edges between ranks; this rank's are given by its targets and its sources.

    forward    x [..] -> y [..]     y = sum of x_q over the sources q; 0 without a source
    backward   g [..] -> [..]       the edges reversed: sum of g_q over the targets q; 0 without a target
    """

    name = "permute"
    schema = "int[] targets, int[] sources"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, targets: Sequence[int], sources: Sequence[int]) -> Exchange:
        return raw.permute(x, comm, targets, sources)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, targets: Sequence[int], sources: Sequence[int]
    ) -> Call:
        return Call(Permute, g, (sources, targets))

    @staticmethod
    def alone(x: Tensor, targets: Sequence[int], sources: Sequence[int]) -> Tensor:
        return x * len(sources) if len(sources) > 1 else x.clone() if sources else torch.zeros_like(x)


class HaloExchange(Collective):
    """Ranks in a line; the neighbours' borders overwrite the halos of x along `dim`. The outer halos are left alone.

    borders  widths that the left neighbour and the right one need of this rank; None: right and left, as everywhere

    forward    x [.., left + interior + right, ..] -> y, same shape     halo of y_r = border of the neighbour's interior
    backward   g, same shape -> same shape                              halo_reduce(g)
    """

    name = "halo_exchange"
    schema = "int dim, int left, int right, int[]? borders=None"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, dim: int, left: int, right: int, borders: Splits = None) -> Exchange:
        return raw.halo_exchange(x, comm, dim, left, right, borders)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, dim: int, left: int, right: int, borders: Splits = None
    ) -> Call:
        return Call(HaloReduce, g, (dim, left, right, borders))

    @staticmethod
    def batched(dim: int, left: int, right: int, borders: Splits = None) -> tuple[int, int, int, Splits]:
        return dim + 1, left, right, borders


class HaloReduce(Collective):
    """The halos go back to the neighbours they belong to, are added to their borders, and become 0 here.

    forward    x [.., left + interior + right, ..] -> y, same shape     border of y_r += halo of the neighbour
    backward   g, same shape -> same shape                              halo_exchange(g)
    """

    name = "halo_reduce"
    schema = "int dim, int left, int right, int[]? borders=None"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, dim: int, left: int, right: int, borders: Splits = None) -> Exchange:
        return raw.halo_reduce(x, comm, dim, left, right, borders)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, dim: int, left: int, right: int, borders: Splits = None
    ) -> Call:
        return Call(HaloExchange, g, (dim, left, right, borders))

    @staticmethod
    def batched(dim: int, left: int, right: int, borders: Splits = None) -> tuple[int, int, int, Splits]:
        return dim + 1, left, right, borders
