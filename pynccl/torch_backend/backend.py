"""PyncclBackend: a process group with its communicators, send and recv, and shutdown."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore

from ..bindings.errors import NcclError
from ..bindings.library import host_module, load
from ..bindings.structs import CommConfig
from ..bindings.workers import Clock
from ..bootstrap.join import Children, init_at, meet
from ..bootstrap.rendezvous import Rendezvous
from ..comm.base import explained
from ..comm.communicator import Communicator
from ..watch.store import Prefixed
from ..watch.track import uid_of
from . import c10d
from .collectives import Collectives
from .messages import Channel
from .routes import Routes
from .tensors import Copy, source, target
from .work import Call, Lane, Work

_SHUTDOWN_SECONDS = 10.0  # to wait for ranks that call destroy_process_group later or never
_SERVER = "the process that serves the store of torch.distributed"
_DUPLICATE_HINT = "every process needs a unique rank"
_NO_LIMIT = timedelta(0)  # or less: the call has no timeout of its own
_NAMED_SINCE = (2, 27)  # ncclConfig_t.commName
_open: set[PyncclBackend] = set()  # torch's wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL) keeps only their C++ half alive


@c10d.not_compiled
class PyncclBackend(Collectives):
    """A process group over pynccl, with one communicator for CPU tensors and one for CUDA tensors, made on first use.

    communicator(kind)  the communicator for "cpu" or "cuda"; the first call for each is collective
    ranks               global rank of each rank; (): all ranks of the launch
    serves              whether this process serves the store
    default             the group of all ranks that this one is made from without meeting; None: the ranks meet
    """

    stays_connected = False  # after shutdown: later groups are made from it

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        ranks: Sequence[int] = (),
        serves: bool = False,
        default: PyncclBackend | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._serves, self._ranks = serves, list(ranks or range(size))
        self._title, self._store, self._timeout = name, store, timeout
        self._lanes: dict[str, Lane] = {}
        self._channels: dict[tuple[int, int, str], Channel] = {}
        self._making = threading.RLock()
        self._sequence = 0
        on_gpu = torch.cuda.is_available() and os.environ.get("PYNCCL_LIBRARY") != "host"
        self._kind = "cuda" if on_gpu else "cpu"  # of tensors, unless they are there to tell
        self._batch: tuple[list[torch.Tensor], list[Call], list[Copy]] | None = None
        self._children: Children | None = None
        self._made: Counter[str] = Counter()  # groups made from this one, by name and ranks
        self._default, members = default or self, list(range(size))
        # A name and a store for this group alone: after destroy_process_group torch uses the names of its groups again,
        # when a send or recv of the destroyed group may still wait for its peer.
        self._path = ""
        if default is not None:
            members = [default._ranks.index(each) for each in self._ranks]
            key = uid_of(name, *map(str, self._ranks))
            default._made[key] += 1
            self._path = f"{key}-{default._made[key]}"
            self._own_store: Any = Prefixed(default._own_store, f"{self._path}/")
        else:
            self._own_store = self._meet(store)
        self._members, children = members, self._default._children
        self._routes = Routes(children, members, self._path, rank, self._ranks, name, timeout.total_seconds())
        _open.add(self)

    def _meet(self, store: Any) -> Any:
        """Wait for the ranks of the group, and connect those for CPU tensors. Return the store of the group."""
        if self.size() == 1:  # torch can make several such groups on different ranks, with the same store prefix
            store = HashStore()
        rendezvous = self._rendezvous(PrefixStore("pynccl/group", store), range(self.size()))
        if self._kind == "cuda":
            return meet(rendezvous, CommConfig(comm_name=self._title))
        self._lanes["cpu"] = Lane(self._connect(torch.device("cpu"), rendezvous, self._title))
        self._children = Children(self._lanes["cpu"].comm)
        return rendezvous.store

    def communicator(self, kind: str = "") -> Communicator:
        """Return the group's communicator for tensors on "cpu" or "cuda"; "": the GPU's if torch can use one."""
        return self._lane(torch.device(kind or self._kind)).comm

    def _lane(self, device: torch.device) -> Lane:
        if (found := self._lanes.get(device.type)) is not None:
            return found
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"the tensor is on {device}, expected cpu or cuda")
        with self._making:
            if device.type not in self._lanes:
                self._lanes[device.type] = Lane(self._communicator(device))
            return self._lanes[device.type]

    def _communicator(self, device: torch.device) -> Communicator:
        children = self._default._children
        if device.type == "cuda" or children is None:
            rendezvous = self._rendezvous(Prefixed(self._own_store, f"{device.type}/"), range(self.size()))
            return self._connect(device, rendezvous, self._title)
        comm = children.make(self._members, self._path, CommConfig(comm_name=self._title))
        self._limit(comm)
        return comm

    def _rendezvous(self, store: Any, members: Sequence[int]) -> Rendezvous:
        rank, clock = members.index(self.rank()), Clock(self._timeout.total_seconds())
        ranks = [self._ranks[member] for member in members]
        return Rendezvous(store, rank, len(members), clock, _SERVER, _DUPLICATE_HINT, ranks=ranks)

    def _connect(self, device: torch.device, rendezvous: Rendezvous, title: str) -> Communicator:
        """Make a communicator with the ranks that meet there."""
        library = load("host") if device.type == "cpu" else load()
        config = CommConfig(comm_name=title) if library.is_host or library.version >= _NAMED_SINCE else None
        comm = init_at("init", rendezvous, library, None if library.is_host else device, None, config, self._serves)
        self._limit(comm)
        return comm

    def _limit(self, comm: Communicator) -> None:
        """Make calls that run longer than the group's timeout fail with an error that names the missing ranks."""
        comm._call_timeout = seconds = self._timeout.total_seconds()
        if comm.library.is_host:  # the only limit if there is no watchdog
            host_module().set_timeout(comm.handle, seconds + _SHUTDOWN_SECONDS * comm._is_recorded)

    def _run(self, result: Sequence[torch.Tensor], calls: list[Call], opts: Any, copies: Sequence[Copy] = ()) -> Work:
        """Make the calls together, then the copies. While coalescing, only collect them."""
        if not result:
            raise ValueError("an empty list of tensors, expected at least one")
        if c10d.has_no_values(result[0]):
            return Work(None, result)
        if self._batch is not None:
            self._batch[0].extend(result)
            self._batch[1].extend(calls)
            self._batch[2].extend(copies)
            return Work(None, result)
        self._sequence += 1
        here, limit = getattr(opts, "asyncOp", True) is False, getattr(opts, "timeout", _NO_LIMIT)
        seconds = limit.total_seconds() if limit > _NO_LIMIT else 0.0
        kind = "cuda" if result[0].is_cuda else "cpu" if result[0].is_cpu else ""  # device.type takes far longer
        lane = self._lanes.get(kind) or self._lane(result[0].device)
        return lane.run(calls, result, here, copies, seconds)

    def start_coalescing(self) -> None:
        """Collect the following calls into one group."""
        self._batch = ([], [], [])

    def end_coalescing(self) -> Work:
        batch, self._batch = self._batch, None
        if batch is None or not batch[0]:
            return Work(None, [])
        return self._run(batch[0], batch[1], None, batch[2])

    def barrier(self, opts: Any = None) -> Work:
        kind = self._kind if torch.cuda.is_initialized() else "cpu"
        device = getattr(opts, "device", None) or torch.device(kind)
        one = torch.empty(1, dtype=torch.int32, device=device)
        if getattr(opts, "asyncOp", True) is False and not c10d.has_no_values(one):
            self._sequence += 1
            self._lane(device).comm.barrier()
            return Work(None, [])
        return self._run([one], [partial(Communicator.all_reduce, send=one, recv=one)], opts)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """barrier() with its own timeout. Before torch 2.14 dist.monitored_barrier works with gloo only."""
        one, limit = torch.ones(1, dtype=torch.int32), getattr(opts, "timeout", opts) or self._timeout
        self._run([one], [lambda comm, stream: comm.all_reduce(one, one, stream=stream)], None).wait(limit)

    # Point-to-point

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        [x] = tensors
        if self._batch is None:
            return self._post(x, dst, tag, True)
        buffer = source(x)
        return self._run([x], [lambda comm, stream: comm.send(buffer, dst, stream=stream)], None)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        [x] = tensors
        if self._batch is None:
            work = self._post(x, src, tag, False)
            work.source = src
            return work
        copies: list[Copy] = []
        buffer = target(x, copies)
        return self._run([x], [lambda comm, stream: comm.recv(buffer, src, stream=stream)], None, copies)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        raise NotImplementedError("recv from any rank: NCCL does not support it; pass src=, the sending rank")

    def _post(self, x: torch.Tensor, peer: int, tag: int, sends: bool) -> Work:
        if c10d.has_no_values(x):
            return Work(None, [x])
        if peer == self.rank():
            raise ValueError(f"{'send' if sends else 'recv'}: rank {self._ranks[peer]} is this rank itself")
        route = None if x.is_cuda else self._routes.find(peer, sends)
        return (route or self._channel(peer, sends, x.device)).post(x, tag)

    def _channel(self, peer: int, sends: bool, device: torch.device) -> Channel:
        sender, receiver = (self.rank(), peer) if sends else (peer, self.rank())
        key = (sender, receiver, device.type)
        with self._making:
            if key not in self._channels:
                source, target = self._ranks[sender], self._ranks[receiver]
                name = f"rank {source} to rank {target}, messages of {self._title}"
                store = Prefixed(self._own_store, f"{device.type}/{sender}-{receiver}/")

                def connect() -> Communicator:
                    return self._connect(device, self._rendezvous(store, (sender, receiver)), name)

                self._channels[key] = Channel(sends, source, target, connect, self._check)
            return self._channels[key]

    def _check(self) -> None:
        """Raise the error of a communicator of the group or of the default group, if one has failed."""
        for lane in [*self._lanes.values(), *self._default._lanes.values()]:
            try:
                lane.comm.check_async_error()
            except NcclError as error:
                raise explained(error, lane.comm._track) from None

    # The group

    def getBackendName(self) -> str:
        return "pynccl"

    @property
    def options(self) -> Any:
        return c10d.options(self._timeout)

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        """On a GPU batch_isend_irecv is one NCCL group; on the CPU each message is separate, as with gloo."""
        return self._kind == "cuda"

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> PyncclBackend | None:
        """Return the backend of a new group of these ranks; None on the other ranks."""
        if self.rank() not in ranks:
            return None
        name = getattr(opts, "group_name", "") or f"{self._title}.split"
        members = [self._ranks[rank] for rank in ranks]
        rank, default = list(ranks).index(self.rank()), self._default
        return PyncclBackend(store, rank, len(ranks), self._timeout, name, members, False, default)

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        if device is not None:
            self._lane(torch.device(device))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._routes.timeout = timeout.total_seconds()
        for lane in (*self._lanes.values(), *(channel.lane for channel in self._channels.values())):
            if lane is not None:
                self._limit(lane.comm)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def shutdown(self) -> None:
        """Wait for the calls in flight and destroy the communicators. Waits at most 10 s for the other ranks."""
        _open.discard(self)
        channels, lanes = list(self._channels.values()), list(self._lanes.values())
        self._channels.clear()
        self._lanes.clear()
        clock = Clock(min(_SHUTDOWN_SECONDS, self._timeout.total_seconds()))
        for channel in channels:
            channel.begin_close()
        self._routes.close(max(clock.left(), 0.0))  # before the default group's communicator, which they meet over
        for lane in lanes:
            if lane.is_host and self.stays_connected:
                continue
            lane.comm.timeout = max(clock.left(), 0.0)
            with contextlib.suppress(NcclError):
                lane.comm.destroy()
        for channel in channels:
            channel.end_close(max(clock.left(), 0.0))

    def abort(self) -> None:
        """Abort the communicators: calls in flight raise, here and on the other ranks."""
        _open.discard(self)
        for lane in self._lanes.values():
            lane.comm.abort()
        for channel in self._channels.values():
            channel.abort()
        self._routes.abort()
