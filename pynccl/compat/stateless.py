"""StatelessProcessGroup: exchange Python objects between ranks through a store, without torch.distributed's groups.

It has the names of vLLM's class, which programs use before they have a communicator. All ranks of a group must use this
class, or all vLLM's: the keys and values in the store differ (vLLM's send_obj confuses two senders to one rank).

Objects are pickled, so anyone who can write to the store can run code on the other ranks. Therefore each object is
signed with PYNCCL_JOB_KEY and unpickled only if the signature is valid. Without that variable anyone can sign, so every
process that can reach the store's port is trusted. torch's store itself has no authentication.
"""

from __future__ import annotations

import functools
import hmac
import pickle
import socket
import time
from collections import deque
from datetime import timedelta
from typing import Any

from ..admission import KEY_VARIABLE, job_key, sign
from ..bindings.abi import RedOp
from ..bindings.errors import NcclRemoteError, NcclSystemError, NcclTimeout
from .wrapper import ncclRedOpTypeEnum

_SIGNATURE_BYTES = 32


class StatelessProcessGroup:
    """Rank `rank` of `world_size` ranks that share `store`, a torch.distributed.Store used by this group only.

    Meant for a few small objects at startup. Objects are pickled. Set PYNCCL_JOB_KEY (16 characters or more) on all
    ranks to reject objects written by others; without it, anyone who reaches the store can run code here.

    data_expiration_seconds  age after which objects set by this rank may be deleted from the store
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
        """Create the group of `world_size` processes that connect to rank 0 at host:port.

        Rank 0 listens at that address only: "127.0.0.1" is not reachable from other nodes.

        store_timeout  seconds to wait for rank 0, and in each exchange for the other rank
        listen_socket  rank 0's bound and listening socket, which the store takes over. None: create one at host:port
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
        data = pickle.dumps(value)
        self.store.set(key, _signature(key, data) + data)
        self.entries.append((key, time.time()))

    def _get(self, key: str) -> Any:
        found = self.store.get(key)
        signature, data = found[:_SIGNATURE_BYTES], found[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, _signature(key, data)):
            raise NcclRemoteError(
                f"StatelessProcessGroup: the signature of {key} in the store is invalid; it was not unpickled. Set the "
                f"same {KEY_VARIABLE} on all ranks, or find out who else writes to the store"
            )
        return pickle.loads(data)

    def expire_data(self) -> None:
        """Delete objects that this rank set more than data_expiration_seconds ago."""
        while self.entries and time.time() - self.entries[0][1] > self.data_expiration_seconds:
            self.store.delete_key(self.entries.popleft()[0])

    def send_obj(self, obj: Any, dst: int) -> None:
        self._set(f"send/{self.rank}/{dst}/{self.send_dst_counter[dst]}", obj)
        self.send_dst_counter[dst] += 1

    def recv_obj(self, src: int) -> Any:
        found = self._get(f"send/{src}/{self.rank}/{self.recv_src_counter[src]}")
        self.recv_src_counter[src] += 1
        return found

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Return the obj of rank src on every rank."""
        if self.rank == src:
            self._set(f"broadcast/{src}/{self.broadcast_send_counter}", obj)
            self.broadcast_send_counter += 1
            return obj
        found = self._get(f"broadcast/{src}/{self.broadcast_recv_src_counter[src]}")
        self.broadcast_recv_src_counter[src] += 1
        return found

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return the obj of all ranks, in rank order."""
        return [self.broadcast_obj(obj if rank == self.rank else None, rank) for rank in range(self.world_size)]

    # Small tensors, on the CPU

    def broadcast(self, tensor: Any, src: int) -> Any:
        """Return the tensor of rank src on every rank. The other ranks' tensor is not modified."""
        return self.broadcast_obj(tensor, src)

    def send(self, tensor: Any, dst: int) -> None:
        self.send_obj(tensor, dst)

    def recv(self, tensor: Any, src: int) -> Any:
        """Receive into tensor and return it."""
        return tensor.copy_(self.recv_obj(src))

    def all_reduce(self, tensor: Any, op: Any = RedOp.SUM) -> Any:
        """Reduce over all ranks, in rank order, and return a new tensor. op is SUM, PRODUCT, MAX or MIN."""
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
        """Wait for all ranks, at most `timeout` seconds. Rank 0, which serves the store, leaves last."""
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
            raise NcclTimeout(
                f"barrier: ranks {missing} of {self.world_size} did not arrive within {timeout:g} s"
            ) from None


def _signature(key: str, data: bytes) -> bytes:
    return sign(job_key(), key.encode(), b"\0", data)


def _listen(host: str, port: int) -> socket.socket:
    """Listen at this address only, since received objects are unpickled."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise NcclSystemError(
            f"StatelessProcessGroup: rank 0 cannot listen at {host}:{port}: {error}; pass an address of its node "
            "and a free port"
        ) from None
