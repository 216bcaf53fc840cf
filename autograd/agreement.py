"""What the ranks tell each other about the arguments of a call before it, where that is needed or asked for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator, NcclInvalidUsage
from pynccl.comm.consistency import exchange
from pynccl.comm.frames import call_site

from .arguments import Splits, check_splits, check_total, is_tracing

T = TypeVar("T")

_MARK = 0x73706C697473  # "splits"


def gathered(comm: Communicator, row: Sequence[int]) -> list[list[int]]:
    """The row of every rank, equally long on all; the CPU waits for them."""
    with plainly():
        own = torch.tensor(row, device=comm.device, dtype=torch.int64)
        rows: list[list[int]] = comm.all_gather(own, own.new_empty(comm.size, len(row))).tolist()
    return rows


def plainly() -> Any:
    """A context in which torch.func does not wrap the tensors that are made; NCCL needs their memory."""
    return torch._C._DisableFuncTorch()


def checked_alike(comm: Communicator, options: Callable[[], str], check: Callable[[], T]) -> T:
    """The result of `check`, which raises ValueError or TypeError for wrong arguments of this rank.

    With PYNCCL_CHECK=1 every rank raises if one does, and NcclInvalidUsage if `options`, in which all ranks have to be
    equal, differ. For calls of sends and receives, which pynccl itself does not compare; every rank must come here."""
    if comm.size == 1 or not comm.checking or is_tracing():
        return check()
    problem: Exception | None = None
    try:
        found = check()
    except (ValueError, TypeError) as error:
        problem = error
    own = _short(options())
    rows = [row.split("\0") for row in exchange({comm: f"{own}\0{_short(str(problem or ''))}\0{call_site()}"})[comm]]
    if problem is not None:
        raise problem
    for rank, (_, wrong, *_) in enumerate(rows):
        if wrong:
            raise ValueError(f"{wrong} (on rank {rank})")
    for rank, (other, _, *line) in enumerate(rows):
        if other != own:
            raise NcclInvalidUsage(
                "the ranks of this communicator disagree (PYNCCL_CHECK=1):\n"
                f"  rank {comm.rank}: {own} at {call_site()}\n"
                f"  rank {rank}: {other} at {''.join(line)}\n"
                "  every rank must pass the same"
            )
    return found


def _short(text: str) -> str:
    """So that all of a row fits into a record of the check; what differs still does."""
    return text if len(text) <= 350 else f"{text[:320]}... ({zlib.crc32(text.encode()):08x})"


def learnt_splits(
    x: Tensor, comm: Communicator, dim: int, send_splits: Splits, recv_splits: Splits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(send_splits, recv_splits) of an all-to-all along one dimension, of which every rank gives the same one.

    ValueError on every rank if the arguments of one are wrong."""
    if is_tracing():
        raise ValueError(
            f"all_to_all: send_splits is {send_splits}, recv_splits is {recv_splits}; along one dimension ({dim}) both "
            "are needed where nothing can be asked of the other ranks: under torch.compile, and with fake tensors"
        )
    given, problem = _checked(x, comm, dim, send_splits, recv_splits)
    told = _told(comm, given, problem)
    if send_splits is not None:
        return given, told
    problem = None
    try:
        check_total("all_to_all", x, dim, told, "what the other ranks expect of it,")
    except ValueError as error:
        problem = error
    _told(comm, told, problem)  # that no rank has found one
    return told, given


def _checked(
    x: Tensor, comm: Communicator, dim: int, send_splits: Splits, recv_splits: Splits
) -> tuple[tuple[int, ...], Exception | None]:
    """The list that is given, and what is wrong with it."""
    name = "recv_splits" if send_splits is None else "send_splits"
    try:
        given = check_splits("all_to_all", recv_splits if send_splits is None else send_splits, comm, name) or ()
        if send_splits is not None:
            check_total("all_to_all", x, dim, given, name)
    except (ValueError, TypeError) as error:
        return (-1,) * comm.size, error
    return given, None


def _told(comm: Communicator, counts: tuple[int, ...], problem: Exception | None) -> tuple[int, ...]:
    """What rank q has as its count for this rank, for every q; the CPU waits for it. A rank with a problem says so.

    By sends and receives, of a size that no other message is likely to have and with a mark: a rank that was given both
    lists is sending its tensor now, and the two should fail instead of waiting for each other."""
    with plainly():
        own = torch.tensor([[_MARK, -1 if problem else count, _MARK] for count in counts], device=comm.device)
        told = torch.empty_like(own)
        with pynccl.group():
            for peer in range(comm.size):
                comm.send(own[peer], peer)
                comm.recv(told[peer], peer)
        rows = told.tolist()
    if problem is not None:
        raise problem
    strange = [rank for rank, (first, _, last) in enumerate(rows) if (first, last) != (_MARK, _MARK)]
    wrong = [rank for rank, (_, count, _) in enumerate(rows) if count < 0]
    if strange or wrong:
        raise ValueError(
            f"all_to_all: the arguments of ranks {wrong} are wrong, as the errors that they raise say"
            if not strange
            else f"all_to_all: ranks {strange} pass other lists of splits than this rank; all must pass the same ones"
        )
    return tuple(count for _, count, _ in rows)
