"""The collectives of a process group, as torch.distributed calls them: each is one call or group of a communicator.

The arguments are c10d's: lists of tensors, then options with the root, the operator and whether the caller waits
(asyncOp), or only the operator or root instead. Each method returns a Work. Errors are those of the communicator's
methods, raised before anything is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..comm.communicator import Communicator
from . import c10d
from .tensors import Copy, concatenated, operator, recv_buffer_of, source, target
from .work import Call, Work

SUM = c10d.ReduceOp.SUM
_LARGE_BYTES = 256 << 10


@c10d.not_compiled
class Collectives(c10d.Base):
    """Base class of PyncclBackend with the collective methods."""

    def allreduce(self, tensors: Any, opts: Any = SUM) -> Work:
        tensors, op = _listed(tensors), _operator_of(opts)
        calls: list[Call] = []
        copies: list[Copy] = []
        for x in tensors:
            if x.is_sparse:
                return self._allreduce_sparse(tensors, op)
            y = target(x, copies, reduces=True, keep=True)
            calls.append(_reduction("all_reduce", x, op, send=y, recv=y))
        return self._run(tensors, calls, opts, copies)

    allreduce_coalesced = allreduce

    def _allreduce_sparse(self, tensors: list[torch.Tensor], op: Any) -> Work:
        """Sum sparse tensors over all ranks, such as gradients of nn.Embedding(sparse=True).

        Blocks until the numbers of elements of all ranks are known."""
        if (name := c10d.OPERATOR_NAMES[hash(op)]) != "SUM":
            raise ValueError(f"ReduceOp.{name} of a sparse tensor: expected SUM")
        for x in tensors:
            comm, data = self._lane(x.device).comm, x.data.coalesce()
            counts = comm.all_gather(torch.tensor([data._nnz()], device=x.device)).tolist()
            found = []
            for part in (data.indices().t(), data.values()):  # one row per element
                width = part.shape[1:].numel()
                flat = comm.all_gather_v(part.contiguous().view(-1), counts=[count * width for count in counts])
                found.append(flat.view(sum(counts), *part.shape[1:]))
            total = torch.sparse_coo_tensor(found[0].t(), found[1], x.shape, check_invariants=False).coalesce()
            with torch.no_grad():  # not x.data, which would be a copy
                x.copy_(total)
        return Work(None, tensors)

    def broadcast(self, tensors: Any, opts: Any = 0) -> Work:
        tensors, root, copies = _listed(tensors), _root_of(opts), _no_copies()
        buffers = [target(x, copies, keep=True) for x in tensors]
        return self._run(tensors, [_movement("broadcast", send=y, recv=y, root=root) for y in buffers], opts, copies)

    def reduce(self, tensors: Any, opts: Any = 0, op: Any = SUM) -> Work:
        [x], root, copies = _listed(tensors), _root_of(opts), _no_copies()
        y = target(x, copies, reduces=True, keep=True)
        call = _reduction("reduce", x, getattr(opts, "reduceOp", op), send=y, recv=y, root=root)
        return self._run([x], [call], opts, copies if self.rank() == root else ())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        copies, calls, inputs = _no_copies(), [], _listed(inputs)
        lists = _lists(outputs, len(inputs))
        for outs, x in zip(lists, inputs, strict=True):
            self._check_list("all_gather", outs)
            if _one_by_one(outs):
                for root, y in enumerate([target(out, copies) for out in outs]):
                    send = source(x) if root == self.rank() else y
                    calls.append(_movement("broadcast", send=send, recv=y, root=root))
                continue
            send, recv = source(x), recv_buffer_of(outs, copies)
            counts = [out.numel() * x.element_size() // send.element_size() for out in outs]
            uneven = {"counts": counts} if len(set(counts)) > 1 else {}
            calls.append(_movement("all_gather_v" if uneven else "all_gather", send=send, recv=recv, **uneven))
        return self._run([out for outs in lists for out in outs], calls, opts, copies)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """`allgather` with outputs[rank][input] instead of outputs[input][rank]."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        copies = _no_copies()
        calls = [
            _movement("all_gather", send=source(x), recv=target(out, copies))
            for out, x in zip(outputs, inputs, strict=True)
        ]
        return self._run(outputs, calls, opts, copies)

    def all_gather_single(self, output: Any, x: Any, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [x], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = SUM) -> Work:
        copies, calls, outputs = _no_copies(), [], _listed(outputs)
        for out, blocks in zip(outputs, _lists(inputs, len(outputs)), strict=True):
            self._check_list("reduce_scatter", blocks)
            if _one_by_one(blocks):
                for root, block in enumerate(blocks):
                    y = target(out, copies, reduces=True) if root == self.rank() else None
                    send = source(block, reduces=True)
                    calls.append(_reduction("reduce", out, _operator_of(opts), send=send, recv=y, root=root))
                continue
            send, recv = concatenated(blocks, reduces=True), target(out, copies, reduces=True)
            counts = [x.numel() * send.numel() // max(sum(x.numel() for x in blocks), 1) for x in blocks]
            uneven = {"counts": counts} if len(set(counts)) > 1 else {}
            method = "reduce_scatter_v" if uneven else "reduce_scatter"
            calls.append(_reduction(method, out, _operator_of(opts), send=send, recv=recv, **uneven))
        return self._run(outputs, calls, opts, copies)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = SUM) -> Work:
        copies, op = _no_copies(), _operator_of(opts)
        calls = [
            _reduction("reduce_scatter", out, op, send=source(x, reduces=True), recv=target(out, copies, reduces=True))
            for out, x in zip(outputs, inputs, strict=True)
        ]
        return self._run(outputs, calls, opts, copies)

    def reduce_scatter_single(self, output: Any, x: Any, opts: Any = SUM) -> Work:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0) -> Work:
        [x], root, copies, recv = _listed(inputs), _root_of(opts), _no_copies(), None
        result = [x]
        if self.rank() == root:
            [result] = _lists(outputs, 1)
            self._check_list("gather", result, equal=True)
        if _one_by_one([x]):
            found = enumerate(result if self.rank() == root else ())
            calls = [_movement("recv", buf=target(out, copies), peer=peer) for peer, out in found]
            return self._run(result, [_movement("send", buf=source(x), peer=root), *calls], opts, copies)
        if self.rank() == root:
            recv = recv_buffer_of(result, copies)
        return self._run(result, [_movement("gather", send=source(x), recv=recv, root=root)], opts, copies)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0) -> Work:
        [out], root, copies, send = _listed(outputs), _root_of(opts), _no_copies(), None
        blocks: list[torch.Tensor] = []
        if self.rank() == root:
            [blocks] = _lists(inputs, 1)
            self._check_list("scatter", blocks, equal=True)
        if _one_by_one([out]):
            calls = [_movement("send", buf=source(block), peer=peer) for peer, block in enumerate(blocks)]
            return self._run([out], [*calls, _movement("recv", buf=target(out, copies), peer=root)], opts, copies)
        if self.rank() == root:
            send = concatenated(blocks)
        return self._run([out], [_movement("scatter", send=send, recv=target(out, copies), root=root)], opts, copies)

    def all_to_all_single(self, output: Any, x: Any, out_splits: Any = (), splits: Any = (), opts: Any = None) -> Work:
        copies = _no_copies()
        send, recv = source(x), target(output, copies)
        counts = {
            "send_counts": self._split_counts("input", x, splits, send.numel()),
            "recv_counts": self._split_counts("output", output, out_splits, recv.numel()),
        }
        return self._run([output], [_movement("all_to_all_v", send=send, recv=recv, **counts)], opts, copies)

    def _split_counts(self, role: str, x: torch.Tensor, splits: Sequence[int], numel: int) -> list[int]:
        """Convert split sizes in rows to element counts of the buffer; no splits: equal sizes."""
        ranks, rows = self.size(), x.size(0) if x.dim() else 1
        if not splits and rows % ranks:
            raise ValueError(
                f"all_to_all: {role} has {rows} rows, not divisible by {ranks} ranks; pass the split sizes"
            )
        splits = list(splits) or [rows // ranks] * ranks
        if len(splits) != ranks or sum(splits) != rows:
            raise ValueError(
                f"all_to_all: the {role} split sizes are {splits}, expected {ranks} numbers with sum {rows}, its rows"
            )
        return [split * (numel // rows) if rows else 0 for split in splits]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        copies, calls = _no_copies(), []
        self._check_list("all_to_all", outputs)
        self._check_list("all_to_all", inputs)
        for peer, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
            calls.append(_movement("send", buf=source(x), peer=peer))
            calls.append(_movement("recv", buf=target(out, copies), peer=peer))
        return self._run(outputs, calls, opts, copies)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _check_list(self, operation: str, tensors: Sequence[torch.Tensor], equal: bool = False) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"{operation}: a list of {len(tensors)} tensors, expected one for each of {self.size()} ranks"
            )
        counts = [x.numel() for x in tensors]
        if equal and len(set(counts)) > 1:
            raise ValueError(f"{operation}: the tensors have {counts} elements, expected equal numbers for all ranks")


def _one_by_one(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether to pass on each tensor of a list by itself, as all ranks do: on the CPU a temporary buffer for all
    of them costs more if they are large, since the system clears its pages.   tensors: of equal sizes on all ranks"""
    return not tensors[0].is_cuda and min(x.numel() * x.element_size() for x in tensors) >= _LARGE_BYTES


def _movement(method: str, **arguments: Any) -> Call:
    """Return a function that calls a method of a communicator."""
    return partial(getattr(Communicator, method), **arguments)


def _reduction(method: str, x: torch.Tensor, op: Any, **arguments: Any) -> Call:
    """`_movement` for a reduction with a ReduceOp, of tensors like x."""
    code = operator(op, x)
    if isinstance(code, str):
        return partial(getattr(Communicator, method), op=code, **arguments)

    def call(comm: Communicator, stream: Any) -> None:
        with code(comm) as premul_sum:
            getattr(comm, method)(op=premul_sum, stream=stream, **arguments)

    return call


def _no_copies() -> list[Copy]:
    return []


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _lists(tensors: Any, count: int) -> list[list[torch.Tensor]]:
    """Return `count` lists of tensors; a single list can be passed without an enclosing list."""
    return (
        [list(tensors)] if count == 1 and isinstance(tensors[0], torch.Tensor) else [list(inner) for inner in tensors]
    )


def _operator_of(opts: Any) -> Any:
    return getattr(opts, "reduceOp", opts)


def _root_of(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))
