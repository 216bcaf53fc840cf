"""Communicators come to be: by unique id, all in one process, or by a split."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence

import torch

from ..bindings.abi import SPLIT_NOCOLOR, DataType
from . import algorithms
from .comm import Comm, Turn, seconds
from .connect import ENDPOINT_BYTES, Listener, pairs_in_process, read_endpoint
from .failure import HostFailure, invalid_argument, invalid_usage, last_error
from .interfaces import on_one_machine
from .operation import Operation
from .rendezvous import Place, Rendezvous, place_of
from .store import Store

_waiting: set[threading.Thread] = set()

INIT_TIMEOUT_VARIABLE = "PYNCCL_HOST_INIT_TIMEOUT"


def check_rank(rank: int, size: int) -> None:
    if size < 1:
        raise invalid_argument(f"ncclCommInitRank: nranks is {size}; expected 1 or more")
    if not 0 <= rank < size:
        raise invalid_argument(f"ncclCommInitRank: rank is {rank}; expected 0 to {size - 1} for nranks={size}")


def init_rank(comm: Comm, unique_id: bytes) -> None:
    """Connect `comm` with those of the other ranks that hold the same unique id."""
    if comm.size == 1:
        comm.born = True
        return
    timeout = seconds(INIT_TIMEOUT_VARIABLE, 600.0)
    meet_and_connect(comm, place_of(unique_id, timeout), timeout, "ncclCommInitRank")


def give_up(timeout: float) -> None:
    """At exit, after `exiting` was set: wait for threads that somebody left waiting for ranks."""
    for thread in _waiting - {threading.current_thread()}:
        thread.join(timeout)


def init_local(comms: Sequence[Comm]) -> None:
    """Connect the communicators of all devices of this process."""
    place = Place(Store(), "all")
    for comm, channels in zip(comms, pairs_in_process(len(comms)), strict=True):
        if comm.size == 1:
            comm.born = True
        else:
            comm.place = place
            comm.join(channels)


def check_devices(devices: Sequence[int]) -> None:
    if not devices:
        raise invalid_argument("ncclCommInitAll: ndev is 0; expected 1 or more")
    if len(set(devices)) < len(devices) or min(devices) < 0:
        raise invalid_usage(f"ncclCommInitAll: devlist is {list(devices)}; expected different devices, 0 or above")


class Split:
    """ncclCommSplit: ranks of one color form a communicator, ordered by key, then by their rank in the parent."""

    def __init__(self, parent: Comm, color: int, key: int) -> None:
        if color < 0 and color != SPLIT_NOCOLOR:
            raise invalid_argument(f"ncclCommSplit: color is {color}; expected 0 or above, or NCCL_SPLIT_NOCOLOR (-1)")
        parent.check_usable()
        self._parent, self._color, self._key = parent, color, key
        # The new communicator's ranks are known after talking to the others; its handle is needed before, in a group.
        self.comm = None if color == SPLIT_NOCOLOR else Comm(0, 1, parent.device)
        self.turn = Turn(parent)

    def run(self) -> None:
        """Talk to the parent's other ranks and connect the new communicator."""
        try:
            listener = Listener(self._parent.local)
        except BaseException as error:  # the others count on this rank's part
            why = f"it could not listen for its peers in a split: {error}"
            self._parent.fail(invalid_usage(f"ncclCommSplit: {error}"), self._parent.because(why))
            raise
        try:
            self._connect(listener)
        except HostFailure as failure:  # whose fault it was is worth telling, should this rank abort the parent now
            self._parent.trouble = failure.text
            raise
        finally:
            listener.close()

    def _connect(self, listener: Listener) -> None:
        parent = self._parent
        endpoint = listener.endpoint.encode().ljust(ENDPOINT_BYTES)
        row = struct.pack("<qq", self._color, self._key) + endpoint
        own = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        everybody = torch.empty(parent.size, len(row), dtype=torch.uint8)
        uint8 = int(DataType.UINT8)
        self.turn.run(
            Operation("ncclCommSplit", algorithms.SPLIT, parent, own.data_ptr(), everybody.data_ptr(), len(row), uint8)
        )
        if self.comm is None:
            return
        rows = [bytes(line) for line in everybody.tolist()]
        table = [struct.unpack_from("<qq", line) for line in rows]
        ordered = sorted((key, rank) for rank, (color, key) in enumerate(table) if color == self._color)
        members = [rank for _, rank in ordered]
        self.comm.set_rank(members.index(parent.rank), len(members))
        self.comm.link, self.comm.local = parent.link, parent.local
        if parent.place is not None:
            self.comm.place = parent.place.below(f"split/{parent.rounds}/{self._color}")
        if self.comm.size == 1:
            self.comm.born = True
            return
        endpoints = [rows[rank][16:].decode().rstrip() for rank in members]
        timeout = min(seconds(INIT_TIMEOUT_VARIABLE, 600.0), parent.timeout)  # all of them were there a moment ago
        self.comm.connect(listener, endpoints, timeout, "ncclCommSplit", parent, members)


class Shrink:
    """ncclCommShrink: the ranks that are not excluded form a communicator, in their order.

    They meet through the store alone: an excluded rank may be dead, and the parent's connections with it.
    """

    def __init__(self, parent: Comm, excluded: Sequence[int]) -> None:
        outside = [rank for rank in excluded if not 0 <= rank < parent.size]
        if outside or not excluded or len(set(excluded)) < len(excluded):
            raise invalid_argument(
                f"ncclCommShrink: exclude list is {list(excluded)}; expected different ranks, 0 to {parent.size - 1}"
            )
        if parent.rank in excluded:
            raise invalid_usage(f"ncclCommShrink: rank {parent.rank} excludes itself; excluded ranks do not call it")
        self._parent = parent
        self._name = ".".join(map(str, sorted(excluded)))
        survivors = [rank for rank in range(parent.size) if rank not in excluded]
        self.comm = Comm(survivors.index(parent.rank), len(survivors), parent.device)
        self.comm.link = parent.link

    def run(self) -> None:
        """Meet the other survivors and connect with them."""
        parent, comm = self._parent, self.comm
        parent.derived[self._name] += 1
        if comm.size == 1 or parent.place is None:
            comm.born = True
            return
        place = parent.place.below(f"shrink/{self._name}/{parent.derived[self._name]}")
        meet_and_connect(comm, place, seconds(INIT_TIMEOUT_VARIABLE, 600.0), "ncclCommShrink")


def meet_and_connect(comm: Comm, place: Place, timeout: float, name: str) -> None:
    """Wait for the other ranks of `comm` at `place`, saying for whom, and connect with them."""
    me = threading.current_thread()
    _waiting.add(me)
    started = time.monotonic()
    listener = Listener(on_one_machine() or place.in_process)
    try:
        with place.open(timeout) as store:
            endpoints = Rendezvous(store, timeout, name).meet(comm.rank, comm.size, listener.endpoint)
        comm.place = place
        comm.local = len({read_endpoint(text).machine for text in endpoints}) == 1
        left = max(timeout - (time.monotonic() - started), 0.0)
        comm.connect(listener, endpoints, left, name)
        last_error.text = ""  # whom it waited for
    finally:
        _waiting.discard(me)
        listener.close()
