"""Create communicators: by unique id, all in one process, or from existing ones (split, shrink, grow)."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..bindings.abi import SPLIT_NOCOLOR, UNIQUE_ID_BYTES, Result
from . import group, rendezvous
from .algorithms import GROW, SPLIT, gather_rows
from .argcheck import check_config, check_devices, check_flags, check_rank, field
from .branch import Branch
from .comm import Comm, find, seconds
from .connect import ENDPOINT_BYTES, Channels, Connecting, Listener, pairs_in_process, read_endpoint
from .exports import export
from .failure import HostFailure, TransportFailure, invalid_argument, invalid_usage, last_error, system_error
from .interfaces import is_single_node
from .mailbox import Mailbox
from .rendezvous import Rendezvous, rendezvous_of
from .sharing import agree, requested_transport
from .store import Store
from .transport import Transport

INIT_TIMEOUT_VARIABLE = "PYNCCL_HOST_INIT_TIMEOUT"
_SHRINK_ABORT = 0x01
_REASON_SECONDS = 0.4


def _create(newcomm: Any, comm: Comm, parent: Comm | None, connect: Callable[[int], None]) -> None:
    """Return the handle at once, as NCCL does inside a group, and set it to NULL if `connect` fails.

    connect  receives a ticket of the parent, if there is one"""

    def job(ticket: int) -> None:
        try:
            connect(ticket)
        except BaseException as error:
            comm.forget()
            comm.fail(error) if isinstance(error, HostFailure) else comm.interrupt(error)
            raise

    newcomm[0] = comm.handle
    try:
        group.init(parent, job)
    except BaseException:
        newcomm[0] = None
        raise


def _apply_config(comm: Comm, config: Any, parent: Comm | None = None) -> Comm:
    """Set the numbers of signals and contexts of `comm` from a checked ncclConfig_t*, else from its parent."""
    if parent is not None:
        comm.rma_contexts, comm.rma_signals = parent.rma_contexts, parent.rma_signals
        comm.link = parent.link
    if config:
        comm.rma_contexts = field(config.contents, "numRmaCtx", 0) or comm.rma_contexts
        comm.rma_signals = field(config.contents, "numRmaSig", 0) or comm.rma_signals
    return comm


def _set_up(
    comm: Comm, channels: Mapping[int, Channels], call: str, names: Sequence[str], check: Callable[[], None]
) -> None:
    """Set the connections of `comm`, and its shared memory if the ranks have any.

    call, names, check: as for `Connecting`"""
    comm.set_channels(channels)
    try:
        _select_transport(comm, call.partition(" ")[0])
    except TransportFailure as failure:
        if comm.failure is not None:
            raise comm.failure from failure
        deadline = time.monotonic() + _REASON_SECONDS
        renamed = list(names) != [f"rank {rank}" for rank in range(comm.size)]
        while renamed and time.monotonic() < deadline:
            check()  # the parent may detect the same failure a moment later, with the parent's rank numbers
            time.sleep(0.01)
        text = f"{call}: {failure}"
        if renamed and failure.culprit is not None:
            rank = failure.culprit
            text += f" (rank {rank} of the new communicator is {names[rank]} of the parent)"
        raise HostFailure(Result.REMOTE_ERROR, text) from failure


def _select_transport(comm: Comm, name: str) -> None:
    """Agree with the other ranks on the transport, as part of the C function `name`."""
    comm.mark_initialized(agree(name, comm.rank, comm.transport, comm.activity, comm.local))


def _join_and_connect(
    comm: Comm,
    place: Rendezvous,
    timeout: float,
    name: str,
    check: Callable[[], None] = lambda: None,
    local: bool = False,
) -> None:
    """Wait until all ranks of `comm` have joined at `place`, and connect to them. Reports the missing ranks.

    check  raises HostFailure if waiting is pointless
    local  all ranks are known to be on this node"""
    channels, comm.local = _connections(comm, place, timeout, name, check, local)
    comm.rendezvous = place
    names = [f"rank {rank}" for rank in range(comm.size)]
    _set_up(comm, channels, f"{name} on rank {comm.rank} of {comm.size}", names, check)
    last_error.text = ""  # it named the missing ranks


def _connections(
    comm: Comm, place: Rendezvous, timeout: float, name: str, check: Callable[[], None], local: bool
) -> tuple[dict[int, Channels], bool]:
    """Return the connections to all ranks of `comm`, which join at `place`, and whether all are on this node."""
    started = time.monotonic()
    listener = Listener(local or is_single_node() or isinstance(place.store, Store))
    try:
        endpoints = place.wait(timeout, name, comm.rank, comm.size, listener.endpoint, check)
        local = len({read_endpoint(text).node_id for text in endpoints}) == 1
        left = max(timeout - (time.monotonic() - started), 0.0)
        names = [f"rank {rank}" for rank in range(comm.size)]
        call = f"{name} on rank {comm.rank} of {comm.size}"
        return Connecting(listener, comm.rank, endpoints, call, names, check).run(left), local
    finally:
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
    """Create a communicator of all ranks that pass the same unique id."""
    check_config(config)
    check_rank(rank, nranks)
    comm = _apply_config(Comm(rank, nranks, device=0), config)
    _create(newcomm, comm, None, lambda _: _init_rank(comm, unique_id))


def _init_rank(comm: Comm, unique_id: bytes) -> None:
    timeout = seconds(INIT_TIMEOUT_VARIABLE)
    if comm.size == 1:
        requested_transport()  # raise for an invalid value; with more ranks, `agree` raises on all of them
        comm.initialized = True
        return
    _join_and_connect(comm, rendezvous_of(unique_id, timeout), timeout, "ncclCommInitRank")


@export
def ncclCommInitRank(newcomm: Any, nranks: int, unique_id: Any, rank: int) -> None:
    _join(newcomm, nranks, _bytes_of(unique_id), rank, None)


@export
def ncclCommInitRankConfig(newcomm: Any, nranks: int, unique_id: Any, rank: int, config: Any) -> None:
    _join(newcomm, nranks, _bytes_of(unique_id), rank, config)


@export
def ncclCommInitRankScalable(newcomm: Any, nranks: int, rank: int, count: int, ids: Any, config: Any) -> None:
    """Use the first id, which is the same on all ranks: one store serves any number of ranks."""
    if not 1 <= count <= max(nranks, 1) or not ids:
        raise invalid_argument(
            f"ncclCommInitRankScalable: {count} ids at {'an address' if ids else 'NULL'}; expected 1 to {nranks} ids "
            f"for {nranks} ranks"
        )
    _join(newcomm, nranks, _bytes_of(ids[0]), rank, config)


# All ranks in one process


@export
def ncclCommInitAll(comms: Any, ndev: int, devlist: Any) -> None:
    devices = [devlist[i] for i in range(ndev)] if devlist else list(range(ndev))
    check_devices(devices)
    seconds(INIT_TIMEOUT_VARIABLE)  # raise for invalid values, although nothing here uses the timeout
    requested_transport()
    members = [Comm(rank, ndev, device) for rank, device in enumerate(devices)]
    try:
        place = Rendezvous(Store(), "all")
        if ndev == 1:
            members[0].initialized = True
        else:
            for comm, channels in zip(members, pairs_in_process(ndev), strict=True):
                comm.set_channels(channels)
                comm.rendezvous = place
            group.run_at_once([partial(_select_transport, comm, "ncclCommInitAll") for comm in members])
    except BaseException:
        for comm in members:
            comm.forget()
        raise
    for rank, comm in enumerate(members):
        comms[rank] = comm.handle


# From an existing communicator


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
        # The child's rank is known only after the exchange, but a group needs its handle before.
        child = _apply_config(Comm(0, 1, comm.device), config, comm)
        _create(newcomm, child, comm, partial(_split, comm, child, color, key))


def _split(parent: Comm, child: Comm | None, color: int, key: int, ticket: int) -> None:
    """Create a communicator of the ranks with the same color, ordered by key, then by parent rank."""
    try:
        listener = Listener(parent.local)
    except BaseException as error:  # the other ranks would wait for this one
        why = f"it could not open a listening socket in a split: {error}"
        usage = invalid_usage(f"ncclCommSplit: {error}")
        parent.fail(
            system_error("ncclCommSplit", error) if isinstance(error, OSError) else usage, parent.failure_notice(why)
        )
        raise
    try:
        endpoint = listener.endpoint.encode().ljust(ENDPOINT_BYTES)
        row = torch.frombuffer(bytearray(struct.pack("<qq", color, key) + endpoint), dtype=torch.uint8)
        rows = [bytes(line) for line in gather_rows(parent, ticket, SPLIT, row).tolist()]
        if child is not None:
            _connect_split(parent, child, color, rows, listener)
    except HostFailure as failure:  # named in the notice to the peers if this rank now aborts the parent
        parent.split_error = failure.text
        raise
    except OSError as error:  # out of descriptors
        why = f"it could not connect to its peers in a split: {error}"
        parent.fail(system_error("ncclCommSplit", error), parent.failure_notice(why))
        raise
    finally:
        listener.close()


def _connect_split(parent: Comm, child: Comm, color: int, rows: Sequence[bytes], listener: Listener) -> None:
    table = [struct.unpack_from("<qq", row) for row in rows]
    members = [rank for _, rank in sorted((key, rank) for rank, (c, key) in enumerate(table) if c == color)]
    child.set_rank(members.index(parent.rank), len(members))
    child.local = parent.local
    if parent.rendezvous is not None:
        child.rendezvous = parent.rendezvous.child(f"split/{parent.activity.rounds}/{color}")
    if child.size == 1:
        child.initialized = True
        return
    endpoints = [rows[rank][16:].decode().rstrip() for rank in members]
    timeout = min(seconds(INIT_TIMEOUT_VARIABLE), parent.timeout)  # all ranks were alive a moment ago
    names = [f"rank {rank}" for rank in members]  # in the parent, whose failure also ends the split
    call = f"ncclCommSplit on rank {parent.rank} of {parent.size}"
    check = partial(parent.poll, call)
    _set_up(child, Connecting(listener, child.rank, endpoints, call, names, check).run(timeout), call, names, check)


@export
def ncclCommShrink(comm: Comm, excluded: Any, count: int, newcomm: Any, config: Any, flags: int) -> None:
    check_config(config)
    if not comm.initialized:
        raise invalid_usage("ncclCommShrink: the communicator is still being initialized")
    check_flags("ncclCommShrink", "shrinkFlags", flags, [0, _SHRINK_ABORT], "0, or 1 (NCCL_SHRINK_ABORT)")
    removed = [excluded[i] for i in range(count)] if excluded else []
    if not removed or len(set(removed)) < len(removed) or not all(0 <= rank < comm.size for rank in removed):
        raise invalid_argument(
            f"ncclCommShrink: exclude list is {removed}; expected different ranks from 0 to {comm.size - 1}"
        )
    if comm.rank in removed:
        raise invalid_usage(f"ncclCommShrink: rank {comm.rank} excludes itself; excluded ranks must not call it")
    survivors = [rank for rank in range(comm.size) if rank not in removed]
    child = _apply_config(Comm(survivors.index(comm.rank), len(survivors), comm.device), config, comm)
    if flags & _SHRINK_ABORT and not comm.idle:
        stopped = "ncclCommShrink stopped the communicator's operations (NCCL_SHRINK_ABORT)"
        comm.fail(invalid_usage(stopped), comm.failure_notice("it shrank the communicator with NCCL_SHRINK_ABORT"))
    _create(newcomm, child, None, lambda _: _shrink(comm, child, ".".join(map(str, sorted(removed)))))


def _shrink(parent: Comm, child: Comm, excluded: str) -> None:
    """Create a communicator of the remaining ranks, in the order of their parent ranks.

    They use only the store to find each other, since the death of an excluded rank may have closed the parent's
    connections.
    """
    parent.shrinks[excluded] += 1
    if child.size == 1 or parent.rendezvous is None:
        child.initialized = True
        return
    place = parent.rendezvous.child(f"shrink/{excluded}/{parent.shrinks[excluded]}")
    _join_and_connect(child, place, seconds(INIT_TIMEOUT_VARIABLE), "ncclCommShrink")


# From an existing communicator, later


class Family:
    """What communicators and mailboxes of ranks of one communicator are made from, even once that has ended.

    Making one exchanges nothing: its ranks connect when they first use it, in the thread that does.

    members  ranks of the first communicator; members[i] is rank i of the new one
    name     used once, equal on all members"""

    def __init__(self, handle: int) -> None:
        self._parent = parent = find(handle)
        self._trunk = parent.transport if parent.shared is not None else None
        if self._trunk is not None:
            self._trunk.is_trunk = True

    def communicator(self, members: Sequence[int], name: str) -> int:
        """Return the handle of a new communicator."""
        parent = self._parent
        child = _apply_config(Comm(members.index(parent.rank), len(members), parent.device), None, parent)
        child.initialized, child.local = True, parent.local
        if child.size > 1:
            assert parent.rendezvous is not None
            child.rendezvous = parent.rendezvous.child(f"later/{name}")
            child.connect_later(partial(_connect_child, parent, self._trunk, child, members, name))
        return child.handle

    def mailbox(self, members: Sequence[int], name: str, tick: Callable[[], None]) -> Mailbox | None:
        """Return a mailbox of this rank; None: the ranks do not share memory, or simulate a link.

        Raises OSError if memory is lacking."""
        return (
            None if self._trunk is None or self._parent.link is not None else Mailbox(self._trunk, members, name, tick)
        )


def _connect_child(
    parent: Comm, trunk: Transport | None, child: Comm, members: Sequence[int], name: str, call: str
) -> None:
    def check() -> None:
        child.check_not_failed()
        if trunk is None:
            parent.check_ranks(members, call)

    assert child.rendezvous is not None
    if trunk is None:
        _join_and_connect(child, child.rendezvous, child.timeout, call, check, parent.local)
        return
    branch = Branch(trunk, members, name, child.activity, child.timeout, check)
    child.set_transport(branch)
    child.mark_initialized(agree(call, child.rank, branch, child.activity, True, True))


def connect_rma(comm: Comm) -> None:
    """Let a communicator without sockets open those for one-sided operations. Collective."""
    transport = comm.transport
    if isinstance(transport, Branch) and transport.needs_rma:
        assert comm.rendezvous is not None
        place, name = comm.rendezvous.child("rma"), "ncclCommWindowRegister"
        channels, _ = _connections(comm, place, comm.timeout, name, comm.check_not_failed, comm.local)
        transport.set_rma(channels)


# From an existing communicator and new ranks


@export
def ncclCommGrow(comm: int | None, nranks: int, unique_id: Any, rank: int, newcomm: Any, config: Any) -> None:
    """Existing ranks pass their communicator and rank -1, one of them also the id; new ranks pass NULL and the id."""
    check_config(config)
    raw = ctypes.string_at(unique_id, UNIQUE_ID_BYTES) if unique_id else None
    if not comm:
        if raw is None:
            raise invalid_argument(
                "ncclCommGrow: unique id is NULL on a new rank (comm is NULL); pass the id of ncclCommGetUniqueId"
            )
        _join(newcomm, nranks, raw, rank, config)
        return
    parent = find(comm)
    parent.check_usable()
    if nranks <= parent.size or rank != -1:
        raise invalid_argument(
            f"ncclCommGrow: nRanks is {nranks} and rank is {rank} on an existing rank; expected more than the "
            f"{parent.size} existing ranks, and rank -1"
        )
    grown = _apply_config(Comm(parent.rank, nranks, parent.device), config, parent)
    _create(newcomm, grown, parent, partial(_grow, parent, grown, raw))


def _grow(parent: Comm, grown: Comm, unique_id: bytes | None, ticket: int) -> None:
    """Gather the id from the existing rank that passed it, then join the new ranks."""
    # The first byte says whether an id follows.
    said = list(b"\1" + unique_id if unique_id else bytes(UNIQUE_ID_BYTES + 1))
    mine = torch.tensor(said, dtype=torch.uint8, device="cpu")
    table = gather_rows(parent, ticket, GROW, mine)
    found = {bytes(line[1:]) for line in table.tolist() if line[0]}
    if len(found) != 1:
        raise invalid_usage(
            f"ncclCommGrow: the existing ranks pass {len(found)} different ids; expected one, from one rank"
        )
    _init_rank(grown, found.pop())
