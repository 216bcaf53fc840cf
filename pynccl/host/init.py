"""Communicators are made: by unique id, all in one process, or from those there are: split, shrink, grow."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..bindings.abi import SPLIT_NOCOLOR, UNIQUE_ID_BYTES, Result
from . import group, rendezvous
from .algorithms import GROW, SPLIT, gather_rows
from .argcheck import check_config, check_devices, check_flags, check_rank, field
from .comm import Comm, find, seconds
from .connect import ENDPOINT_BYTES, Channels, Connecting, Listener, pairs_in_process, read_endpoint
from .exports import export
from .failure import HostFailure, TransportFailure, invalid_argument, invalid_usage, last_error, of_system
from .interfaces import on_one_machine
from .rendezvous import MeetingPlace, meeting_of
from .sharing import agree
from .store import Store

INIT_TIMEOUT_VARIABLE = "PYNCCL_HOST_INIT_TIMEOUT"
_SHRINK_ABORT = 0x01
_EXPLAIN_SECONDS = 0.4

_waiting: set[threading.Thread] = set()


def join_waiting(timeout: float) -> None:
    """At exit, after `exiting` was set: wait for threads that somebody left waiting for ranks."""
    for thread in _waiting - {threading.current_thread()}:
        thread.join(timeout)


def _create(newcomm: Any, comm: Comm, parent: Comm | None, connect: Callable[[int], None]) -> None:
    """Hand out the handle at once, as NCCL does inside a group, and take it back if `connect` fails.

    connect  gets a ticket of the parent, if there is one"""

    def job(ticket: int) -> None:
        try:
            connect(ticket)
        except BaseException as error:
            comm.forget()
            comm.fail(error if isinstance(error, HostFailure) else HostFailure(Result.INTERNAL_ERROR, repr(error)))
            raise

    newcomm[0] = comm.handle
    try:
        group.init(parent, job)
    except BaseException:
        newcomm[0] = None
        raise


def _configured(comm: Comm, config: Any, parent: Comm | None = None) -> Comm:
    """`comm` with what a checked ncclConfig_t*, else its parent's, says of the numbers of its signals."""
    if parent is not None:
        comm.rma_contexts, comm.rma_signals = parent.rma_contexts, parent.rma_signals
        comm.link = parent.link
    if config:
        comm.rma_contexts = field(config.contents, "numRmaCtx", 0) or comm.rma_contexts
        comm.rma_signals = field(config.contents, "numRmaSig", 0) or comm.rma_signals
    return comm


def _use(
    comm: Comm, channels: Mapping[int, Channels], what: str, names: Sequence[str], check: Callable[[], None]
) -> None:
    """Begin to use connections to all peers, and what memory the ranks share.

    what, names, check: as of `Connecting`"""
    comm.use(channels)
    try:
        _share(comm, what.partition(" ")[0])
    except TransportFailure as failure:
        if comm.failure is not None:
            raise comm.failure from failure
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        renamed = list(names) != [f"rank {rank}" for rank in range(comm.size)]
        while renamed and time.monotonic() < deadline:
            check()  # the parent's connections know the ranks by their names there, perhaps a moment later
            time.sleep(0.01)
        text = f"{what}: {failure}"
        if renamed and failure.culprit is not None:
            number = failure.culprit
            text += f" (numbers of the new communicator: its rank {number} is {names[number]} of this one)"
        raise HostFailure(Result.REMOTE_ERROR, text) from failure


def _share(comm: Comm, name: str) -> None:
    """Agree with the other ranks what they share, as part of the C function `name`."""
    comm.begin(agree(name, comm.rank, comm.transport, comm.activity, comm.local))


def _meet_and_connect(comm: Comm, meeting: MeetingPlace, timeout: float, name: str) -> None:
    """Wait for the other ranks of `comm` at `meeting`, saying for whom, and connect with them."""
    me = threading.current_thread()
    _waiting.add(me)
    started = time.monotonic()
    listener = Listener(on_one_machine() or isinstance(meeting.store, Store))
    try:
        endpoints = meeting.wait(timeout, name, comm.rank, comm.size, listener.endpoint)
        comm.meeting = meeting
        comm.local = len({read_endpoint(text).machine for text in endpoints}) == 1
        left = max(timeout - (time.monotonic() - started), 0.0)
        names = [f"rank {rank}" for rank in range(comm.size)]
        what = f"{name} on rank {comm.rank} of {comm.size}"
        channels = Connecting(listener, comm.rank, endpoints, what, names, lambda: None).run(left)
        _use(comm, channels, what, names, lambda: None)
        last_error.text = ""  # whom it waited for
    finally:
        _waiting.discard(me)
        listener.close()


# By unique id


@export
def ncclGetUniqueId(unique_id: Any) -> None:
    ctypes.memmove(unique_id, rendezvous.make_unique_id(), UNIQUE_ID_BYTES)


@export
def ncclCommGetUniqueId(comm: Comm, unique_id: Any) -> None:
    comm.check_usable()
    ctypes.memmove(unique_id, rendezvous.make_unique_id(), UNIQUE_ID_BYTES)


def _bytes_of(unique_id: Any) -> bytes:
    return ctypes.string_at(ctypes.addressof(unique_id), UNIQUE_ID_BYTES)


def _join(newcomm: Any, nranks: int, unique_id: bytes, rank: int, config: Any) -> None:
    """A communicator of all ranks that hold the same unique id."""
    check_config(config)
    check_rank(rank, nranks)
    comm = _configured(Comm(rank, nranks, device=0), config)
    _create(newcomm, comm, None, lambda _: _init_rank(comm, unique_id))


def _init_rank(comm: Comm, unique_id: bytes) -> None:
    if comm.size == 1:
        comm.initialized = True
        return
    timeout = seconds(INIT_TIMEOUT_VARIABLE)
    _meet_and_connect(comm, meeting_of(unique_id, timeout), timeout, "ncclCommInitRank")


@export
def ncclCommInitRank(newcomm: Any, nranks: int, unique_id: Any, rank: int) -> None:
    _join(newcomm, nranks, _bytes_of(unique_id), rank, None)


@export
def ncclCommInitRankConfig(newcomm: Any, nranks: int, unique_id: Any, rank: int, config: Any) -> None:
    _join(newcomm, nranks, _bytes_of(unique_id), rank, config)


@export
def ncclCommInitRankScalable(newcomm: Any, nranks: int, rank: int, count: int, ids: Any, config: Any) -> None:
    """One store serves as many ranks as there are: the first id is taken, which all ranks agree on."""
    if not 1 <= count <= max(nranks, 1) or not ids:
        raise invalid_argument(
            f"ncclCommInitRankScalable: {count} ids at {'an address' if ids else 'NULL'}; expected 1 to {nranks} of "
            "them, for so many ranks"
        )
    _join(newcomm, nranks, _bytes_of(ids[0]), rank, config)


# All in one process


@export
def ncclCommInitAll(comms: Any, ndev: int, devlist: Any) -> None:
    devices = [devlist[i] for i in range(ndev)] if devlist else list(range(ndev))
    check_devices(devices)
    made = [Comm(rank, ndev, device) for rank, device in enumerate(devices)]
    try:
        meeting = MeetingPlace(Store(), "all")
        if ndev == 1:
            made[0].initialized = True
        else:
            for comm, channels in zip(made, pairs_in_process(ndev), strict=True):
                comm.use(channels)
                comm.meeting = meeting
            group.run_at_once([partial(_share, comm, "ncclCommInitAll") for comm in made])
    except BaseException:
        for comm in made:
            comm.forget()
        raise
    for rank, comm in enumerate(made):
        comms[rank] = comm.handle


# From the ranks of another one


@export
def ncclCommSplit(comm: Comm, color: int, key: int, newcomm: Any, config: Any) -> None:
    check_config(config)
    if color < 0 and color != SPLIT_NOCOLOR:
        raise invalid_argument(f"ncclCommSplit: color is {color}; expected 0 or above, or NCCL_SPLIT_NOCOLOR (-1)")
    comm.check_usable()
    if color == SPLIT_NOCOLOR:
        newcomm[0] = None
        group.init(comm, partial(_split, comm, None, color, key))
    else:
        # Its rank is known after talking to the others; its handle is needed before, in a group.
        child = _configured(Comm(0, 1, comm.device), config, comm)
        _create(newcomm, child, comm, partial(_split, comm, child, color, key))


def _split(parent: Comm, child: Comm | None, color: int, key: int, ticket: int) -> None:
    """Ranks of one color form a communicator, ordered by key, then by their rank in the parent."""
    try:
        listener = Listener(parent.local)
    except BaseException as error:  # the others count on this rank's part
        why = f"it could not listen for its peers in a split: {error}"
        usage = invalid_usage(f"ncclCommSplit: {error}")
        parent.fail(of_system("ncclCommSplit", error) if isinstance(error, OSError) else usage, parent.because(why))
        raise
    try:
        endpoint = listener.endpoint.encode().ljust(ENDPOINT_BYTES)
        row = torch.frombuffer(bytearray(struct.pack("<qq", color, key) + endpoint), dtype=torch.uint8)
        rows = [bytes(line) for line in gather_rows(parent, ticket, SPLIT, row).tolist()]
        if child is not None:
            _connect_split(parent, child, color, rows, listener)
    except HostFailure as failure:  # whose fault it was is worth telling, should this rank abort the parent now
        parent.split_error = failure.text
        raise
    except OSError as error:  # no descriptor is left
        why = f"it could not connect to its peers in a split: {error}"
        parent.fail(of_system("ncclCommSplit", error), parent.because(why))
        raise
    finally:
        listener.close()


def _connect_split(parent: Comm, child: Comm, color: int, rows: Sequence[bytes], listener: Listener) -> None:
    table = [struct.unpack_from("<qq", row) for row in rows]
    members = [rank for _, rank in sorted((key, rank) for rank, (c, key) in enumerate(table) if c == color)]
    child.set_rank(members.index(parent.rank), len(members))
    child.local = parent.local
    if parent.meeting is not None:
        child.meeting = parent.meeting.below(f"split/{parent.activity.rounds}/{color}")
    if child.size == 1:
        child.initialized = True
        return
    endpoints = [rows[rank][16:].decode().rstrip() for rank in members]
    timeout = min(seconds(INIT_TIMEOUT_VARIABLE), parent.timeout)  # all of them were there a moment ago
    names = [f"rank {rank}" for rank in members]  # of the parent, whose failures end this too
    what = f"ncclCommSplit on rank {parent.rank} of {parent.size}"
    check = partial(parent.poll, what)
    _use(child, Connecting(listener, child.rank, endpoints, what, names, check).run(timeout), what, names, check)


@export
def ncclCommShrink(comm: Comm, excluded: Any, count: int, newcomm: Any, config: Any, flags: int) -> None:
    check_config(config)
    if not comm.initialized:
        raise invalid_usage("ncclCommShrink: the communicator is still being initialised")
    check_flags("ncclCommShrink", "shrinkFlags", flags, [0, _SHRINK_ABORT], "0, or 1 (NCCL_SHRINK_ABORT)")
    gone = [excluded[i] for i in range(count)] if excluded else []
    if not gone or len(set(gone)) < len(gone) or not all(0 <= rank < comm.size for rank in gone):
        raise invalid_argument(
            f"ncclCommShrink: exclude list is {gone}; expected different ranks, 0 to {comm.size - 1}"
        )
    if comm.rank in gone:
        raise invalid_usage(f"ncclCommShrink: rank {comm.rank} excludes itself; excluded ranks do not call it")
    survivors = [rank for rank in range(comm.size) if rank not in gone]
    child = _configured(Comm(survivors.index(comm.rank), len(survivors), comm.device), config, comm)
    if flags & _SHRINK_ABORT and not comm.idle:
        stopped = "ncclCommShrink stopped the communicator's operations (NCCL_SHRINK_ABORT)"
        comm.fail(invalid_usage(stopped), comm.because("it shrank the communicator with NCCL_SHRINK_ABORT"))
    _create(newcomm, child, None, lambda _: _shrink(comm, child, ".".join(map(str, sorted(gone)))))


def _shrink(parent: Comm, child: Comm, excluded: str) -> None:
    """The ranks that are not excluded form a communicator, in their order.

    They meet through the store alone: an excluded rank may be dead, and the parent's connections with it.
    """
    parent.shrinks[excluded] += 1
    if child.size == 1 or parent.meeting is None:
        child.initialized = True
        return
    meeting = parent.meeting.below(f"shrink/{excluded}/{parent.shrinks[excluded]}")
    _meet_and_connect(child, meeting, seconds(INIT_TIMEOUT_VARIABLE), "ncclCommShrink")


# From them and new ones


@export
def ncclCommGrow(comm: int | None, nranks: int, unique_id: Any, rank: int, newcomm: Any, config: Any) -> None:
    """Members pass their communicator, rank -1, and one of them the id; new ranks pass no communicator and the id."""
    check_config(config)
    raw = ctypes.string_at(unique_id, UNIQUE_ID_BYTES) if unique_id else None
    if not comm:
        if raw is None:
            raise invalid_argument("ncclCommGrow: a new rank (comm is NULL) has to pass the id of ncclCommGetUniqueId")
        _join(newcomm, nranks, raw, rank, config)
        return
    parent = find(comm)
    parent.check_usable()
    if nranks <= parent.size or rank != -1:
        raise invalid_argument(
            f"ncclCommGrow: nRanks is {nranks} and rank {rank} on a member; expected more than the {parent.size} ranks "
            "that there are, and -1"
        )
    grown = _configured(Comm(parent.rank, nranks, parent.device), config, parent)
    _create(newcomm, grown, parent, partial(_grow, parent, grown, raw))


def _grow(parent: Comm, grown: Comm, unique_id: bytes | None, ticket: int) -> None:
    """Learn the id from the member that has it, then meet the new ranks."""
    # The first byte says whether an id follows.
    mine = torch.tensor(list(b"\1" + unique_id if unique_id else bytes(UNIQUE_ID_BYTES + 1)), dtype=torch.uint8)
    table = gather_rows(parent, ticket, GROW, mine)
    found = {bytes(line[1:]) for line in table.tolist() if line[0]}
    if len(found) != 1:
        raise invalid_usage(
            f"ncclCommGrow: the members pass {len(found)} ids; expected one, from the member that made it"
        )
    _init_rank(grown, found.pop())
