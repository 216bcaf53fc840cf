"""The methods that torch.distributed calls on a backend, each a call of the group's communicator.

Arguments are c10d's: lists of tensors, options with the root, the operator, and whether the caller waits (asyncOp). Each
returns a Work. Errors are those of the communicator's methods, raised before anything is launched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.distributed import PrefixStore

from ..bindings.errors import NcclError
from ..bindings.library import gpu_count, host_module, load
from ..bindings.structs import CommConfig
from ..comm.communicator import Communicator
from ..comm.groups import group
from . import c10d
from .messages import Channel
from .tensors import Copy, joined, operator, parts, source, target
from .work import Lane, Work

_SHUTDOWN_SECONDS = 10.0  # for ranks that come later to destroy_process_group, or never
_NAMED_SINCE = (2, 27)  # ncclConfig_t.commName
Tensors = Sequence[torch.Tensor]


class PyncclBackend(c10d.Base):  # type: ignore[misc]
    """A process group's ranks over pynccl: one communicator for CPU tensors, one for CUDA tensors, when first needed.

    communicator(kind)  that of "cpu" or "cuda"
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._title = rank, size, name
        self._store, self._timeout = store, timeout
        self._lanes: dict[str, Lane] = {}
        self._channels: dict[tuple[int, int, str], Channel] = {}
        self._making = threading.RLock()
        self._sequence = 0
        self._batch: list[tuple[Callable[[Lane, Any], object], list[torch.Tensor], list[Copy]]] | None = None
        if not gpu_count():
            self._lane(torch.device("cpu"))  # a rank that is missing is named here

    # The communicators

    def communicator(self, kind: str = "") -> Communicator:
        """That of the group for tensors on "cpu" or "cuda" (""): the GPU's where there is one). All ranks together."""
        return self._lane(torch.device(kind or ("cuda" if gpu_count() else "cpu"))).comm

    def _lane(self, device: torch.device) -> Lane:
        lane = self._lanes.get(device.type)
        if lane is None:
            with self._making:
                if device.type not in self._lanes:
                    comm = self._connect(device, PrefixStore(f"pynccl/{device.type}", self._store))
                    self._lanes[device.type] = Lane(comm)
                lane = self._lanes[device.type]
        return lane

    def _connect(self, device: torch.device, store: Any, ranks: tuple[int, int] | None = None, name: str = "") -> Any:
        """A communicator of the group, or (rank, size) of some of it, on this device."""
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"the tensor is on {device}, expected cpu or cuda")
        library = load("host") if device.type == "cpu" else load()
        rank, size = ranks or (self._rank, self._size)
        seconds = self._timeout.total_seconds()
        named = library.is_host or library.version >= _NAMED_SINCE
        config = CommConfig(comm_name=name or self._title) if named else None
        where = None if library.is_host else device
        comm = Communicator.from_store(store, rank, size, device=where, config=config, timeout=seconds, library=library)
        self._limit(comm)
        return comm

    def _limit(self, comm: Communicator) -> None:
        """Calls that are under way for longer than the group's timeout end, and say who is missing."""
        seconds = self._timeout.total_seconds()
        comm.call_timeout = seconds
        if comm.library.is_host:  # which has a limit of its own, and is the only one where there is no watchdog
            host_module().set_timeout(comm.handle, seconds + _SHUTDOWN_SECONDS * comm.recorded)

    def _run(
        self,
        result: Tensors,
        issue: Callable[[Lane, Any], object],
        options: Any,
        copies: Sequence[Copy] = (),
        device: torch.device | None = None,
    ) -> Work:
        self._sequence += 1
        if self._batch is not None:
            self._batch.append((issue, list(result), list(copies)))
            return Work(None, result)
        lane = self._lane(device or result[0].device)
        limit = getattr(options, "timeout", timedelta(-1)).total_seconds()
        here = getattr(options, "asyncOp", True) is False
        return lane.run(partial(issue, lane), result, here, copies, max(limit, 0.0))

    def start_coalescing(self) -> None:
        """The calls from now on are one group."""
        self._batch = []

    def end_coalescing(self) -> Work:
        batch, self._batch = self._batch or [], None
        results = [x for _, result, _ in batch for x in result]
        if not results:
            return Work(None, [])

        def issue(lane: Lane, stream: Any) -> None:
            with group():
                for one, _, _ in batch:
                    one(lane, stream)

        return self._run(results, issue, None, [copy for _, _, copies in batch for copy in copies])

    # Collectives

    def allreduce(self, tensors: Any, opts: Any = c10d.ReduceOp.SUM) -> Work:
        tensors, op = _listed(tensors), getattr(opts, "reduceOp", opts)
        if any(x.is_sparse for x in tensors):
            return self._allreduce_sparse(tensors, op)
        copies: list[Copy] = []
        buffers = [target(x, copies, reduces=True, keep=True) for x in tensors]

        def issue(lane: Lane, stream: Any) -> None:
            with _fused(buffers):
                for x, buffer in zip(tensors, buffers, strict=True):
                    with _operator(op, x, lane) as code:
                        lane.comm.all_reduce(buffer, buffer, code, stream=stream)

        return self._run(tensors, issue, opts, copies)

    def _allreduce_sparse(self, tensors: list[torch.Tensor], op: Any) -> Work:
        """Gradients of nn.Embedding(sparse=True): the sum of all ranks' elements. Waits: nobody knows how many come."""
        if c10d.operator_name(op) != "SUM":
            raise ValueError(f"ReduceOp.{c10d.operator_name(op)} of a sparse tensor: expected SUM")
        for x in tensors:
            comm, data = self._lane(x.device).comm, x.data.coalesce()
            counts = comm.all_gather(torch.tensor([data._nnz()], device=x.device)).tolist()
            found = []
            for part in (data.indices().t(), data.values()):  # a row for each element
                width = part.shape[1:].numel()
                flat = comm.all_gather_v(part.contiguous().view(-1), counts=[count * width for count in counts])
                found.append(flat.view(sum(counts), *part.shape[1:]))
            total = torch.sparse_coo_tensor(found[0].t(), found[1], x.shape, is_coalesced=False)
            x.data.copy_(total.coalesce())
        return Work(None, tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = c10d.ReduceOp.SUM) -> Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = 0) -> Work:
        tensors, root = _listed(tensors), getattr(opts, "rootRank", opts)
        copies: list[Copy] = []
        buffers = [target(x, copies, keep=True) for x in tensors]

        def issue(lane: Lane, stream: Any) -> None:
            with _fused(buffers):
                for buffer in buffers:
                    lane.comm.broadcast(buffer, buffer, root, stream=stream)

        return self._run(tensors, issue, opts, copies)

    def reduce(self, tensors: Any, opts: Any = 0, op: Any = c10d.ReduceOp.SUM) -> Work:
        [x], root, op = _listed(tensors), getattr(opts, "rootRank", opts), getattr(opts, "reduceOp", op)
        copies: list[Copy] = []
        buffer = target(x, copies, reduces=True, keep=True)

        def issue(lane: Lane, stream: Any) -> None:
            with _operator(op, x, lane) as code:
                lane.comm.reduce(buffer, buffer, code, root, stream=stream)

        return self._run([x], issue, opts, copies)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        inputs = _listed(inputs)
        lists = outputs if isinstance(outputs[0], (list, tuple)) else [outputs]
        works = [self._allgather(list(out), x, opts) for out, x in zip(lists, inputs, strict=True)]
        return works[0] if len(works) == 1 else _AllOf(works)

    allgather_coalesced = allgather

    def _allgather(self, outputs: list[torch.Tensor], x: torch.Tensor, opts: Any) -> Work:
        _check_list("all_gather", "output", outputs, self._size)
        copies: list[Copy] = []
        send, recv = source(x), parts(outputs, copies)
        unit = x.element_size() // send.element_size()
        counts = [out.numel() * unit for out in outputs]
        even = len(set(counts)) == 1

        def issue(lane: Lane, stream: Any) -> None:
            if even:
                lane.comm.all_gather(send, recv, stream=stream)
            else:
                lane.comm.all_gather_v(send, recv, counts=counts, stream=stream)

        return self._run(outputs, issue, opts, copies)

    def all_gather_single(self, output: Any, x: Any, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [x], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        copies: list[Copy] = []
        pairs = [(source(x), target(out, copies)) for out, x in zip(outputs, inputs, strict=True)]

        def issue(lane: Lane, stream: Any) -> None:
            with _fused(pairs):
                for send, recv in pairs:
                    lane.comm.all_gather(send, recv, stream=stream)

        return self._run(outputs, issue, opts, copies)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = c10d.ReduceOp.SUM) -> Work:
        outputs = _listed(outputs)
        lists = inputs if isinstance(inputs[0], (list, tuple)) else [inputs]
        works = [self._reduce_scatter(out, list(xs), opts) for out, xs in zip(outputs, lists, strict=True)]
        return works[0] if len(works) == 1 else _AllOf(works)

    def _reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], opts: Any) -> Work:
        _check_list("reduce_scatter", "input", inputs, self._size)
        op = getattr(opts, "reduceOp", opts)
        copies: list[Copy] = []
        send, recv = joined(inputs, reduces=True), target(output, copies, reduces=True)
        unit = 2 if output.is_complex() else 1
        counts = [x.numel() * unit for x in inputs]
        even = len(set(counts)) == 1

        def issue(lane: Lane, stream: Any) -> None:
            with _operator(op, output, lane) as code:
                if even:
                    lane.comm.reduce_scatter(send, recv, code, stream=stream)
                else:
                    lane.comm.reduce_scatter_v(send, recv, code, counts=counts, stream=stream)

        return self._run([output], issue, opts, copies)

    def reduce_scatter_single(self, output: Any, x: Any, opts: Any = c10d.ReduceOp.SUM) -> Work:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = c10d.ReduceOp.SUM) -> Work:
        op = getattr(opts, "reduceOp", opts)
        copies: list[Copy] = []
        pairs = [
            (source(x, reduces=True), target(out, copies, reduces=True), out)
            for out, x in zip(outputs, inputs, strict=True)
        ]

        def issue(lane: Lane, stream: Any) -> None:
            with _fused(pairs):
                for send, recv, out in pairs:
                    with _operator(op, out, lane) as code:
                        lane.comm.reduce_scatter(send, recv, code, stream=stream)

        return self._run(outputs, issue, opts, copies)

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0) -> Work:
        [x], root = _listed(inputs), getattr(opts, "rootRank", opts)
        copies: list[Copy] = []
        send, recv, result = source(x), None, [x]
        if self._rank == root:
            result = list(outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs)
            _check_list("gather", "output", result, self._size, equal=True)
            recv = parts(result, copies)
        return self._run(result, lambda lane, stream: lane.comm.gather(send, recv, root, stream=stream), opts, copies)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0) -> Work:
        [out], root = _listed(outputs), getattr(opts, "rootRank", opts)
        copies: list[Copy] = []
        recv, send = target(out, copies), None
        if self._rank == root:
            given = list(inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs)
            _check_list("scatter", "input", given, self._size, equal=True)
            send = joined(given)
        return self._run([out], lambda lane, stream: lane.comm.scatter(send, recv, root, stream=stream), opts, copies)

    def all_to_all_single(
        self, output: Any, x: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Work:
        copies: list[Copy] = []
        send, recv = source(x), target(output, copies)
        sent = self._counts("input", x, input_splits, send.numel())
        received = self._counts("output", output, output_splits, recv.numel())

        def issue(lane: Lane, stream: Any) -> None:
            lane.comm.all_to_all_v(send, recv, send_counts=sent, recv_counts=received, stream=stream)

        return self._run([output], issue, opts, copies)

    def _counts(self, role: str, x: torch.Tensor, splits: Sequence[int], numel: int) -> list[int]:
        """Elements of the buffer for each rank, of rows for each rank; none: as many for each."""
        rows = x.size(0) if x.dim() else 1
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"all_to_all: {role} has {rows} rows, not divisible by {self._size} ranks; pass the split sizes"
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise ValueError(
                f"all_to_all: the {role} split sizes are {list(splits)}, expected {self._size} numbers with sum {rows}, "
                f"the rows of the {role}"
            )
        return [split * (numel // rows) if rows else 0 for split in splits]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        _check_list("all_to_all", "output", outputs, self._size)
        _check_list("all_to_all", "input", inputs, self._size)
        copies: list[Copy] = []
        pairs = [(source(x), target(out, copies)) for out, x in zip(outputs, inputs, strict=True)]

        def issue(lane: Lane, stream: Any) -> None:
            with group():
                for peer, (send, recv) in enumerate(pairs):
                    lane.comm.send(send, peer, stream=stream)
                    lane.comm.recv(recv, peer, stream=stream)

        return self._run(outputs, issue, opts, copies)

    def barrier(self, opts: Any = None) -> Work:
        kind = "cuda" if gpu_count() and torch.cuda.is_initialized() else "cpu"
        device = getattr(opts, "device", None) or torch.device(kind)
        here = getattr(opts, "asyncOp", True) is False
        if here:
            self._sequence += 1
            self._lane(device).comm.barrier()
            return Work(None, [])
        one = torch.ones(1, dtype=torch.int32, device=device)
        return self._run([one], lambda lane, stream: lane.comm.all_reduce(one, one, stream=stream), opts)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """barrier(), for at most the timeout of the options: the error names who is missing."""
        one = torch.ones(1, dtype=torch.int32)
        self._run([one], lambda lane, stream: lane.comm.all_reduce(one, one, stream=stream), opts).wait()

    # Messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        [x] = _listed(tensors)
        if self._batch is not None:
            buffer = source(x)
            return self._run([x], lambda lane, stream: lane.comm.send(buffer, dst, stream=stream), None)
        return self._channel(self._rank, dst, x).post(x, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        [x] = _listed(tensors)
        if self._batch is not None:
            copies: list[Copy] = []
            buffer = target(x, copies)
            return self._run([x], lambda lane, stream: lane.comm.recv(buffer, src, stream=stream), None, copies)
        return self._channel(src, self._rank, x).post(x, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        raise NotImplementedError("recv from any rank: NCCL has no such call; pass src=, the rank that sends")

    def _channel(self, sender: int, receiver: int, x: torch.Tensor) -> Channel:
        kind = x.device.type
        with self._making:
            channel = self._channels.get((sender, receiver, kind))
            if channel is None:
                name = f"{self._title}: rank {sender} to rank {receiver}"
                store = PrefixStore(f"pynccl/{kind}/{sender}-{receiver}", self._store)
                connect = partial(self._connect_two, x.device, store, name)
                channel = self._channels[sender, receiver, kind] = Channel(self._rank, sender, receiver, connect)
        return channel

    def _connect_two(self, device: torch.device, store: Any, name: str, rank: int) -> Any:
        return self._connect(device, store, (rank, 2), name)

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
        """On a GPU batch_isend_irecv is one group of NCCL; on the CPU each message goes by itself, as over gloo."""
        return gpu_count() > 0

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Any:
        """The backend of some of the ranks, for a group of its own; None on the others."""
        if self._rank not in ranks:
            return None
        name = getattr(opts, "group_name", "") or f"{self._title}.split"
        return PyncclBackend(store, list(ranks).index(self._rank), len(ranks), self._timeout, name)

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        if device is not None:
            self._lane(torch.device(device))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for lane in self._lanes.values():
            self._limit(lane.comm)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def shutdown(self) -> None:
        """Finish what is in flight and end the communicators. Ranks that never do the same are left after 10 s."""
        channels, lanes = list(self._channels.values()), list(self._lanes.values())
        self._channels.clear()
        self._lanes.clear()
        for channel in channels:
            channel.begin_close()
        for lane in lanes:
            lane.comm.timeout = min(_SHUTDOWN_SECONDS, self._timeout.total_seconds())
            with contextlib.suppress(NcclError):
                lane.comm.destroy()
        for channel in channels:
            channel.end_close(_SHUTDOWN_SECONDS)

    def abort(self) -> None:
        """End the communicators at once: calls in flight raise, here and on the other ranks."""
        for lane in self._lanes.values():
            lane.comm.abort()
        for channel in self._channels.values():
            channel.abort()


class _AllOf(Work):
    """Several calls as one."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__(None, [x for work in works for x in work._result])
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(lambda _: self._result)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _check_list(operation: str, role: str, tensors: Tensors, size: int, equal: bool = False) -> None:
    if len(tensors) != size:
        raise ValueError(f"{operation}: {len(tensors)} {role} tensors, expected one for each of {size} ranks")
    counts = [x.numel() for x in tensors]
    if equal and len(set(counts)) > 1:
        raise ValueError(f"{operation}: the {role} tensors have {counts} elements, expected as many for each rank")


def _fused(calls: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """One launch for several calls."""
    return group() if len(calls) > 1 else contextlib.nullcontext()


@contextlib.contextmanager
def _operator(op: Any, x: torch.Tensor, lane: Lane) -> Any:
    """The operator for a call that is made within."""
    code = operator(op, x, lane.comm)
    try:
        yield code
    finally:
        if not isinstance(code, str):
            code.close()
