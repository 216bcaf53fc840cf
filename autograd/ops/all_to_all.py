"""all_to_all: every rank has a part for every other one. Notation: see ops/__init__.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator

from ..agreement import checked_on_all_ranks, gathered, run_on_all_ranks
from ..arguments import check_call, check_dim, check_divisible, check_own, check_splits, check_total
from ..collective import Call, Collective, operation
from ..torch_internals import is_tracing
from ..wire import Prepared, Splits, counts, recv_buffer, resized, slices_are_contiguous, to_wire, units


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
    """Part q of x along `split_dim` goes to rank q; what arrives is concatenated along `concat_dim`.  See `AllToAll`.

    send_splits  size along `split_dim` of the part for each rank
    recv_splits  size along `concat_dim` of the part from each rank

    Both None: equal parts. Otherwise all ranks pass them, the same ones of the two. Where both dimensions are the same
    and one list is missing, the ranks tell each other the sizes first: each call then costs one more, small exchange,
    which the CPU waits for, and torch.compile refuses it. PYNCCL_CHECK=1 finds ranks that pass others than the rest.
    """
    check_call("all_to_all", x, comm)
    split_dim = check_dim("all_to_all", x, split_dim, "split_dim")
    concat_dim = check_dim("all_to_all", x, concat_dim, "concat_dim")
    learn = split_dim == concat_dim and (send_splits is None) != (recv_splits is None)

    def options() -> str:
        given = [name for name, splits in (("send", send_splits), ("recv", recv_splits)) if splits is not None]
        return f"all_to_all from dimension {split_dim} to {concat_dim}, splits given: {', '.join(given) or 'none'}"

    def check() -> tuple[Splits, Splits]:
        return (None, None) if learn else check_exchange(x, comm, split_dim, concat_dim, send_splits, recv_splits)

    splits = checked_on_all_ranks(comm, options, check)
    if learn:
        splits = learnt_splits(x, comm, split_dim, send_splits, recv_splits)
    return comm, Call(AllToAll, x, (split_dim, concat_dim, *splits))


class AllToAll(Collective):
    """Cut along `split_dim`, part q goes to rank q; what arrives is concatenated along `concat_dim`.

    forward    x [.., N*a, .., b, ..] -> y [.., a, .., N*b, ..]     y_r = concat_q x_q[part r]
    backward   g [.., a, .., N*b, ..] -> [.., N*a, .., b, ..]       all_to_all(g), dimensions and splits swapped
    """

    name = "all_to_all"
    schema = "int split_dim, int concat_dim, SymInt[]? send_splits, SymInt[]? recv_splits"
    dims_at = (0, 1)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, *params: Any) -> Call:
        split_dim, concat_dim, send_splits, recv_splits = params
        return Call(AllToAll, g, (concat_dim, split_dim, recv_splits, send_splits))

    @staticmethod
    def prepare(
        x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, send_splits: Splits, recv_splits: Splits
    ) -> Prepared:
        n = comm.size
        sizes = [x.shape[split_dim] // n] * n if send_splits is None else list(send_splits)
        parts = [x] if slices_are_contiguous(x.shape, split_dim) else x.split(sizes, split_dim)
        send = to_wire(x) if len(parts) == 1 else torch.cat([to_wire(part).reshape(-1) for part in parts])
        part = resized(x, split_dim, sizes[comm.rank])
        rows = [part[concat_dim]] * n if recv_splits is None else list(recv_splits)
        shapes = [(*part[:concat_dim], size, *part[concat_dim + 1 :]) for size in rows]
        elements = [torch.Size(shape).numel() for shape in shapes]
        in_order = slices_are_contiguous(part, concat_dim)
        whole = (*part[:concat_dim], sum(rows), *part[concat_dim + 1 :])
        recv, result = recv_buffer(x, whole if in_order else (sum(elements),))

        def launch(stream: Any) -> None:
            if send_splits is None and recv_splits is None:  # on all ranks alike: one's sizes may look equal by chance
                comm.all_to_all(send, recv, stream=stream)
                return
            sent, received = counts(x, split_dim, sizes), [count * units(x.dtype) for count in elements]
            comm.all_to_all_v(send, recv, send_counts=sent, recv_counts=received, stream=stream)

        def concatenated() -> Tensor:
            pieces = result().split(elements)
            return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], concat_dim)

        return Prepared(launch, result if in_order else concatenated)


def check_exchange(
    x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, send_splits: Splits, recv_splits: Splits
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """(send_splits, recv_splits) of an all-to-all; along one dimension both are given, or none."""
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
        check_own("all_to_all", x, concat_dim, recvs, comm, "recv_splits")
    return sends, recvs


def learnt_splits(
    x: Tensor, comm: Communicator, dim: int, send_splits: Splits, recv_splits: Splits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(send_splits, recv_splits) of an all-to-all along one dimension, of which every rank gives the same one.

    An error on every rank if the arguments of one are wrong. The CPU waits for the other ranks."""
    if is_tracing():
        raise ValueError(
            f"all_to_all: send_splits is {send_splits}, recv_splits is {recv_splits}; along one dimension ({dim}) both "
            "are needed where nothing can be asked of the other ranks: under torch.compile, and with fake tensors"
        )

    def checked() -> tuple[int, ...]:
        if send_splits is None:
            return check_splits("all_to_all", recv_splits, comm, "recv_splits") or ()
        given = check_splits("all_to_all", send_splits, comm, "send_splits") or ()
        check_total("all_to_all", x, dim, given, "send_splits")
        return given

    given = run_on_all_ranks(comm, checked)
    told = tuple(row[comm.rank] for row in gathered(comm, given))
    if send_splits is not None:
        return given, told
    run_on_all_ranks(comm, lambda: check_total("all_to_all", x, dim, told, "what the other ranks expect of it,"))
    return told, given
