"""The fast path of a call that was made before: for torch tensors like those of then, one check does for ten.

A training loop makes the same calls in every step. When one comes a second time, its finished C arguments are kept,
with a guard of what they depend on. The guard is torch's own, as torch.compile uses it: it compares type, device,
sizes, strides, requires_grad, data type and dispatch keys, which tell sparse, negated, conjugated, inference and
functorch's tensors apart. argcheck.py has accepted such tensors; all others go there, to be accepted or explained. No
tensor is held, and they need not be the same: only addresses are read anew.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..bindings.abi import RedOp
from ..bindings.library import to_pointer, without_argtypes
from ..interop.buffers import TORCH, tensor_types
from ..interop.streams import hold, stream_handle
from ..watch.frames import call_site
from .base import Comm
from .call import call_text

# The operations, and how many times as large as send recv is: 1, 0 and -1 stand for N, 1 and 1/N.
GROWTH = {
    "all_reduce": 0,
    "broadcast": 0,
    "reduce": 0,
    "all_gather": 1,
    "reduce_scatter": -1,
    "all_to_all": 0,
    "gather": 1,
    "scatter": -1,
    "send": 0,
    "recv": 0,
}
MOST_SIZES = 2048  # sizes of which one operation keeps calls
MOST_ALIKE = 8  # calls of one size

Launch = Callable[[Any, Any, Any, Any, Any], Any]


class FastPath:
    """The calls of one operation of a communicator that were made on torch tensors.

    launch(send, recv, op, root, stream) makes the call if one like it is kept, and returns recv, allocated if it is
    None. A single tensor, whatever is done with it, is passed twice. None: take the general way, then `remember`.
    """

    def __init__(self, comm: Comm, operation: str) -> None:
        self._comm = weakref.ref(comm)  # which holds this
        self._operation = operation
        self._function: Any = None
        self._seen: set[tuple[Any, ...]] = set()  # calls that were made once
        # By the number of elements of send: guards of send alone, and chains of calls. Those are plain tuples, since it
        # takes three times as long to unpack a NamedTuple: guard, operator, root, address of send, of recv, bytes of
        # both, device, stream, what counts the version of recv, C function, its finished arguments, (those behind the
        # addresses, all as integers), its row in the flight recorder, the next call. Of a single tensor the address of
        # recv is 0 where C takes no second one, and there are no bytes where C takes no first one.
        self._sent: dict[int, list[Callable[..., bool]]] = {}
        self._single: dict[int, Any] = {}
        self._paired: dict[int, Any] = {}
        self.launch = self._launcher(comm)

    def _launcher(self, comm: Comm) -> Launch:
        # A closure: attributes would be a tenth of its time.
        single, paired, new_recv = self._single.get, self._paired.get, self._new_recv
        track = comm._track
        if track is not None and not track.careful:
            record, row_on = track.add, track.rows.on_stream
        else:  # the function that is called writes into the flight recorder, or nobody does
            record, row_on = _nothing, _same
        lock, detours, alive, library, fail = comm.lock, comm._detours, comm._alive, comm.library, self._fail

        def launch(send: Any, recv: Any, op: Any, root: Any, given: Any) -> Any:
            try:
                if detours or (recv is None and (recv := new_recv(send)) is None):
                    return None
                kept = single(send.numel()) if send is recv else paired(send.numel())
            except Exception:  # of what is no tensor: the general way knows what it is
                return None
            while kept is not None:
                (
                    accepts,
                    its_op,
                    its_root,
                    source,
                    target,
                    sizes,
                    device,
                    stream,
                    counts,
                    call,
                    args,
                    more,
                    row,
                    kept,
                ) = kept
                if (op is not its_op and (type(op) is not str or op != its_op)) or root != its_root:
                    continue
                if send is recv:
                    if not accepts(send):
                        continue
                    if (here := send.data_ptr()) != source:
                        args = _with_one(here, target, sizes, more[0])
                elif not accepts(send, recv):
                    continue
                elif (here := send.data_ptr()) != source or recv.data_ptr() != target:
                    args = _with_two(here, recv.data_ptr(), sizes, more[0])
                at = _handle_of(given) if given is not None else TORCH.raw_stream(device) if device >= 0 else 0
                if at is None or args is None:
                    return None
                if at != stream:
                    args = (*args[:-1], to_pointer(at))
                    row = row_on(row, at)
                with lock:
                    if not alive:  # ended by another thread: the general way says so
                        return None
                    record(row)
                    code = call(*args)
                if code:
                    fail(code, more[1])
                if counts is not None:
                    counts((recv,))
                if at or given is not None:
                    hold(at, library, (send, recv))
                return recv
            return None

        return launch

    def _new_recv(self, send: Any) -> Any:
        """What the general way would allocate as recv, if it has accepted such a tensor before."""
        if not any(accepts(send) for accepts in self._sent.get(send.numel(), ())):
            return None
        grows = GROWTH[self._operation]
        if not grows:
            return TORCH.empty_like(send)
        comm = self._comm()
        rows, *others = send.shape
        size = comm.size if comm is not None else 1
        if grows < 0 and rows % size:
            return None
        return send.new_empty((rows * size if grows > 0 else rows // size, *others))

    def remember(
        self,
        function: Any,
        inputs: tuple[int, ...],
        tail: tuple[Any, ...],
        stream: int,
        send: Any,
        recv: Any,
        op: Any,
        root: Any,
    ) -> None:
        """Take note of a call that was just launched the general way; keep it if one like it was seen before.

        inputs      the addresses of send and recv, the count, ...
        tail        the communicator and the stream, finished
        stream      its number alone: a handle may hold whoever keeps the buffers, and so those
        send, recv  what was read and written, None where nothing was"""
        writes = recv is not None
        send, recv = recv if send is None else send, send if recv is None else recv
        if type(send) not in tensor_types or type(recv) not in tensor_types or send.requires_grad or recv.requires_grad:
            return
        if op is not None and type(op) not in (str, RedOp):  # a PreMulSum, which may be destroyed
            return
        like = (inputs[2:], op, root)
        if like not in self._seen:
            if len(self._seen) >= MOST_SIZES:
                self._seen.clear()
            self._seen.add(like)
            return
        kept, size = self._single if send is recv else self._paired, send.numel()
        tensors = [send] if send is recv else [send, recv]
        found = [x.data_ptr() for x in tensors]
        if not all(found) or _length(kept.get(size)) >= MOST_ALIKE or (accepts := guard(tensors)) is None:
            return
        if len(kept) >= MOST_SIZES:
            self._forget(kept)
            self._sent.clear()
        if send is not recv and (alone := guard([send])) is not None:
            self._sent.setdefault(size, []).append(alone)
        self._function = self._function or without_argtypes(function)
        wide = len(function.argtypes)  # addresses and the count
        args = (*map(to_pointer, inputs[:wide]), *inputs[wide:], *tail)
        target = inputs[1] if wide == 3 else 0
        sizes = (send.nbytes, recv.nbytes) if inputs[0] else ()
        rest = args[2:] if target else args[1:]
        counts = TORCH.count_change if writes else None
        where = (found[0], target, sizes, send.get_device(), stream)
        call, row = self._recorded(inputs, stream)
        if call is None:
            return
        kept[size] = (accepts, op, root, *where, counts, call, args, (rest, inputs), row, kept.get(size))

    def _recorded(self, inputs: tuple[int, ...], stream: int) -> tuple[Any, int]:
        """The C function, and the row that `launch` writes into the flight recorder: 0 where the function does so, or
        nobody. (None, 0): there is no room for another row."""
        comm, function = self._comm(), self._function
        track = None if comm is None else comm._track
        if track is None:
            return function, 0
        row = track.rows.describe(self._operation, inputs, stream, site=call_site())
        if track.careful:
            return track.around(function, self._operation, inputs, stream, row), 0
        return (function, row) if row else (None, 0)

    def _forget(self, kept: dict[int, Any]) -> None:
        comm = self._comm()
        track = None if comm is None else comm._track
        chains = [] if track is None else list(kept.values())
        kept.clear()
        for chain in chains:
            while chain is not None:
                *_, row, chain = chain
                track.rows.give_back(row)  # type: ignore[union-attr]

    def _fail(self, code: int, inputs: tuple[int, ...]) -> None:
        comm = self._comm()
        assert comm is not None  # it is in the middle of a call
        comm._check_result(code, call_text(self._operation, inputs))


def _same(row: int, stream: int) -> int:
    return row


def _nothing(row: int) -> None:
    pass


def _with_one(address: int, target: int, sizes: tuple[int, ...], rest: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments of a call on a tensor at this address; None where that takes a closer look."""
    if not address or not sizes:
        return None
    return (to_pointer(address),) * (2 if target else 1) + rest


def _with_two(send: int, recv: int, sizes: tuple[int, ...], rest: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The same for two, of so many bytes, which must not overlap."""
    if (send < recv + sizes[1] and recv < send + sizes[0]) or not send or not recv:
        return None
    return to_pointer(send), to_pointer(recv), *rest


def _handle_of(stream: Any) -> int | None:
    try:
        return stream_handle(stream)
    except Exception:  # it is none: the general way says so
        return None


def _length(kept: Any) -> int:
    return 0 if kept is None else 1 + _length(kept[-1])


def guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """What says whether other tensors are like these in all but address and contents; None where torch has no such.

    torch has no public name for it. Without it all calls go the general way, which takes twice as long."""
    torch = sys.modules["torch"]
    try:
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        kind = torch._C._dynamo.guards.TensorGuards
        accepts: Callable[..., bool] = kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return accepts if accepts(*tensors) is True else None
    except Exception:  # whatever a private name says in another release
        return None
