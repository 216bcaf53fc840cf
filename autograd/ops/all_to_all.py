"""all_to_all: every rank sends a slice to every other rank. Notation: see ops/__init__.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator

from ..agreement import check_on_all_ranks, gathered, run_on_all_ranks
from ..arguments import check_call, check_dim, check_divisible, check_own_split, check_splits, check_total
from ..collective import Collective, CollectiveCall, operation
from ..torch_internals import is_tracing
from ..wire import Prepared, Splits, counts, recv_buffer, resized_shape, slices_are_contiguous, to_wire, wire_elements


@operation
def all_to_all(
    x: Tensor,
    comm: Communicator,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    send_splits: Splits = None,
    recv_splits: Splits = None,
) -> Any:
    """Split x along `split_dim`, send slice q to rank q, and concatenate the received slices along `concat_dim`.

    forward    x [.., N*a, .., b, ..] -> y [.., a, .., N*b, ..]     y_r = concat_q x_q[slice r]
    backward   g [.., a, .., N*b, ..] -> [.., N*a, .., b, ..]       all_to_all(g), dimensions and splits swapped

    x            the tensor to split
    comm         communicator of the ranks that take part
    split_dim    dimension to split; its size must be divisible by N, unless `send_splits` is given
    concat_dim   dimension to concatenate along
    send_splits  size along `split_dim` of the slice for each rank; None: equal sizes
    recv_splits  size along `concat_dim` of the slice from each rank; None: equal sizes

    If one rank passes a list, every rank must pass it; PYNCCL_CHECK=1 checks that. If `split_dim` equals `concat_dim`
    and only one list is given, the ranks first exchange the sizes: each call then costs one more small collective that
    the CPU waits for, and raises ValueError under torch.compile.

    There is no grad=: the ranks' outputs differ, so the backward pass is always the exact adjoint (as grad="sum").

    ValueError or TypeError for wrong arguments of this rank, before the tensors are sent. Whether ranks pass different
    shapes or dtypes is checked only with PYNCCL_CHECK=1. Every rank must call it and run its backward pass. Notation:
    help(ad.ops).
    """
    check_call("all_to_all", x, comm)
    split_dim = check_dim("all_to_all", x, split_dim, "split_dim")
    concat_dim = check_dim("all_to_all", x, concat_dim, "concat_dim")
    exchange_first = split_dim == concat_dim and (send_splits is None) != (recv_splits is None)

    def options() -> str:
        passed = [name for name, splits in (("send", send_splits), ("recv", recv_splits)) if splits is not None]
        return f"all_to_all from dimension {split_dim} to {concat_dim}, splits given: {', '.join(passed) or 'none'}"

    def check() -> tuple[Splits, Splits]:
        if exchange_first:
            return None, None
        return check_split_lists(x, comm, split_dim, concat_dim, send_splits, recv_splits)

    splits = check_on_all_ranks(comm, options, check)
    if exchange_first:
        splits = exchange_splits(x, comm, split_dim, send_splits, recv_splits)
    return comm, CollectiveCall(AllToAll, x, (split_dim, concat_dim, *splits))


class AllToAll(Collective):
    """Send slice q along `split_dim` to rank q; concatenate what arrives along `concat_dim`. The Function behind
    `all_to_all`.

    forward    x [.., N*a, .., b, ..] -> y [.., a, .., N*b, ..]     y_r = concat_q x_q[slice r]
    backward   g [.., a, .., N*b, ..] -> [.., N*a, .., b, ..]       all_to_all(g), dimensions and splits swapped
    """

    name = "all_to_all"
    schema = "int split_dim, int concat_dim, SymInt[]? send_splits, SymInt[]? recv_splits"
    dim_indices = (0, 1)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, *params: Any) -> CollectiveCall:
        split_dim, concat_dim, send_splits, recv_splits = params
        return CollectiveCall(AllToAll, g, (concat_dim, split_dim, recv_splits, send_splits))

    @staticmethod
    def prepare(
        x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, send_splits: Splits, recv_splits: Splits
    ) -> Prepared:
        n = comm.size
        sizes = [x.shape[split_dim] // n] * n if send_splits is None else list(send_splits)
        parts = [x] if slices_are_contiguous(x.shape, split_dim) else x.split(sizes, split_dim)
        send = to_wire(x) if len(parts) == 1 else torch.cat([to_wire(part).reshape(-1) for part in parts])
        part = resized_shape(x, split_dim, sizes[comm.rank])
        rows = [part[concat_dim]] * n if recv_splits is None else list(recv_splits)
        shapes = [(*part[:concat_dim], size, *part[concat_dim + 1 :]) for size in rows]
        elements = [math.prod(shape) for shape in shapes]  # torch.Size would make symbolic sizes constant
        in_order = slices_are_contiguous(part, concat_dim)
        full_shape = (*part[:concat_dim], sum(rows), *part[concat_dim + 1 :])
        recv, result = recv_buffer(x, full_shape if in_order else (sum(elements),))

        def launch(stream: Any) -> None:
            if send_splits is None and recv_splits is None:  # not by sizes, which may be equal on some ranks only
                comm.all_to_all(send, recv, stream=stream)
                return
            sent, received = counts(x, split_dim, sizes), [count * wire_elements(x.dtype) for count in elements]
            comm.all_to_all_v(send, recv, send_counts=sent, recv_counts=received, stream=stream)

        def concatenated() -> Tensor:
            pieces = result().split(elements)
            return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], concat_dim)

        return Prepared(launch, result if in_order else concatenated)


def check_split_lists(
    x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, send_splits: Splits, recv_splits: Splits
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the checked (send_splits, recv_splits). Along one dimension, both must be given or neither."""
    sends = check_splits("all_to_all", send_splits, comm, "send_splits")
    recvs = check_splits("all_to_all", recv_splits, comm, "recv_splits")
    if sends is None:
        check_divisible("all_to_all", x, split_dim, comm, "pass send_splits=")
        if recvs is None:
            return None, None
        sends = (x.shape[split_dim] // comm.size,) * comm.size
    check_total("all_to_all", x, split_dim, sends, "send_splits")
    if split_dim != concat_dim:
        recvs = (x.shape[concat_dim],) * comm.size if recvs is None else recvs
        check_own_split("all_to_all", x, concat_dim, recvs, comm, "recv_splits")
    return sends, recvs


def exchange_splits(
    x: Tensor, comm: Communicator, dim: int, send_splits: Splits, recv_splits: Splits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (send_splits, recv_splits) of an all-to-all along one dimension, where every rank passes the same one of
    the two lists.

    Raises on every rank if the arguments of one rank are wrong. The CPU waits for the other ranks."""
    if is_tracing():
        raise ValueError(
            f"all_to_all: send_splits is {send_splits}, recv_splits is {recv_splits}; along one dimension ({dim}) both "
            "are needed under torch.compile and with fake tensors, where the ranks cannot exchange sizes; pass both"
        )

    def checked() -> tuple[int, ...]:
        if send_splits is None:
            return check_splits("all_to_all", recv_splits, comm, "recv_splits") or ()
        sends = check_splits("all_to_all", send_splits, comm, "send_splits") or ()
        check_total("all_to_all", x, dim, sends, "send_splits")
        return sends

    splits = run_on_all_ranks(comm, checked)
    from_peers = tuple(row[comm.rank] for row in gathered(comm, splits))
    if send_splits is not None:
        return splits, from_peers
    run_on_all_ranks(comm, lambda: check_total("all_to_all", x, dim, from_peers, "the other ranks' recv_splits"))
    return from_peers, splits
