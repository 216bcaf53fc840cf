"""StatelessProcessGroup: ranks that exchange Python objects through a store, beside torch.distributed's own groups.

vLLM's names of what its programs use before they have a communicator. All ranks of a group use this class, or all use
vLLM's: the keys in the store differ (vLLM's send_obj mixes up two senders to one rank).
"""

from __future__ import annotations

import functools
import pickle
import socket
import time
from collections import deque
from datetime import timedelta
from typing import Any

from ..bindings.abi import RedOp
from ..bindings.errors import NcclSystemError, NcclTimeout
from .wrapper import ncclRedOpTypeEnum


class StatelessProcessGroup:
    """Rank `rank` of `world_size` that share `store` (a torch.distributed.Store, and nobody else's).

    For a few small objects at the start. Objects are pickled: use it among processes that trust each other.
    data_expiration_seconds  after which what this rank has set may be deleted from the store
    """

    def __init__(self, rank: int, world_size: int, store: Any, data_expiration_seconds: int = 3600) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"StatelessProcessGroup: rank is {rank}, expected 0..{world_size - 1}")
        self.rank, self.world_size, self.store = rank, world_size, store
        self.data_expiration_seconds = data_expiration_seconds
        self.send_dst_counter = dict.fromkeys(range(world_size), 0)
        self.recv_src_counter = dict.fromkeys(range(world_size), 0)
        self.broadcast_send_counter = 0
        self.broadcast_recv_src_counter = dict.fromkeys(range(world_size), 0)
        self.entries: deque[tuple[str, float]] = deque()
        self._barriers = 0

    @staticmethod
    def create(
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: int = 300,
        listen_socket: socket.socket | None = None,
    ) -> StatelessProcessGroup:
        """The group of `world_size` processes that meet at host:port, where rank 0 listens.

        store_timeout  seconds to wait for rank 0, and in every exchange for what another rank has to say
        listen_socket  rank 0's, bound and listening; the store takes it over. None: one at that address
        """
        from torch.distributed import TCPStore

        options: dict[str, Any] = {}
        if rank == 0:
            options["master_listen_fd"] = (listen_socket or _listen(host, port)).detach()
        store = TCPStore(
            host, port, world_size, rank == 0, timedelta(seconds=store_timeout), use_libuv=False, **options
        )
        return StatelessProcessGroup(rank, world_size, store, data_expiration_seconds)

    def _set(self, key: str, value: Any) -> None:
        self.expire_data()
        self.store.set(key, pickle.dumps(value))
        self.entries.append((key, time.time()))

    def expire_data(self) -> None:
        """Delete what this rank set longer ago than data_expiration_seconds."""
        while self.entries and time.time() - self.entries[0][1] > self.data_expiration_seconds:
            self.store.delete_key(self.entries.popleft()[0])

    def send_obj(self, obj: Any, dst: int) -> None:
        self._set(f"send/{self.rank}/{dst}/{self.send_dst_counter[dst]}", obj)
        self.send_dst_counter[dst] += 1

    def recv_obj(self, src: int) -> Any:
        found = pickle.loads(self.store.get(f"send/{src}/{self.rank}/{self.recv_src_counter[src]}"))
        self.recv_src_counter[src] += 1
        return found

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """src's obj, on every rank."""
        if self.rank == src:
            self._set(f"broadcast/{src}/{self.broadcast_send_counter}", obj)
            self.broadcast_send_counter += 1
            return obj
        found = pickle.loads(self.store.get(f"broadcast/{src}/{self.broadcast_recv_src_counter[src]}"))
        self.broadcast_recv_src_counter[src] += 1
        return found

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """All ranks' obj, by rank."""
        return [self.broadcast_obj(obj if rank == self.rank else None, rank) for rank in range(self.world_size)]

    # Small tensors, on the CPU

    def broadcast(self, tensor: Any, src: int) -> Any:
        """src's tensor, on every rank; the others' is not written."""
        return self.broadcast_obj(tensor, src)

    def send(self, tensor: Any, dst: int) -> None:
        self.send_obj(tensor, dst)

    def recv(self, tensor: Any, src: int) -> Any:
        """Into tensor, which is returned."""
        return tensor.copy_(self.recv_obj(src))

    def all_reduce(self, tensor: Any, op: Any = RedOp.SUM) -> Any:
        """A new tensor: the reduction of all ranks', by rank. op is SUM, PRODUCT, MAX or MIN."""
        import torch

        combine: dict[RedOp, Any] = {
            RedOp.SUM: torch.add,
            RedOp.PROD: torch.mul,
            RedOp.MAX: torch.maximum,
            RedOp.MIN: torch.minimum,
        }
        kind = RedOp(ncclRedOpTypeEnum.from_torch(op))
        if kind not in combine:
            raise ValueError(f"all_reduce: op is {op!r}, expected SUM, PRODUCT, MAX or MIN")
        total: Any = functools.reduce(combine[kind], self.all_gather_obj(tensor))
        return total.clone()

    def barrier(self, timeout: float = 30.0) -> None:
        """Wait for all ranks, `timeout` seconds at most. Rank 0, which serves the store, leaves last."""
        self._barriers += 1
        keys = [f"barrier/{self._barriers}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], b"1")
        self._await(keys, timeout)
        gone = [f"{key}/left" for key in keys]
        self.store.set(gone[self.rank], b"1")
        if self.rank == 0:
            self._await(gone, timeout)

    def _await(self, keys: list[str], timeout: float) -> None:
        try:
            self.store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise NcclTimeout(f"barrier: no sign of rank(s) {missing} of {self.world_size} in {timeout:g} s") from None


def _listen(host: str, port: int) -> socket.socket:
    """At this address alone: what arrives there is unpickled."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()
    except OSError as error:
        made.close()
        raise NcclSystemError(
            f"StatelessProcessGroup: rank 0 cannot listen at {host}:{port}: {error}; pass an address of its machine, "
            "and a free port"
        ) from None
    return made
