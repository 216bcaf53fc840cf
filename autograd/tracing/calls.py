"""The calls of all communicators as spans: which, how large, on which stream, of which layer, by which line; the waits
for them, and the pieces of overlapped layers beside them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pynccl import Communicator
from pynccl.bindings.abi import ITEMSIZE, DataType, RedOp
from pynccl.comm.observing import Observed, Observer, Seldom, Told
from pynccl.watch.frames import call_site
from pynccl.watch.layout import ARGUMENTS, UNNUMBERED
from pynccl.watch.notes import notes

from ..overlap.lanes import Lane as LaneOfLayer
from ..overlap.lanes import Lanes
from ..overlap.trace import COMM as LAYERS_COMM
from ..overlap.trace import Interval, add_work, said_of, title
from ..streams import is_capturing
from .layers import Layers
from .marks import OF_CPU, Clock
from .spans import COMM, Lane, Span, Spans

_MOST_TEXTS = 8  # calls of a group that are named one by one
_MOST_KEYS = 64
# Operations whose buffer has a block per rank: `bytes` is of the whole, as in nccl-tests and `python -m pynccl perf`.
_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "alltoall", "gather", "scatter")
_MESSAGES = ("send", "recv")
_OPERATORS = frozenset(map(int, RedOp))  # others are a PreMulSum's


_SECOND_STREAM = "second"
_INPUTS_OF_MESSAGE = 4  # buffer, count, type, peer


class Said(NamedTuple):
    """What one call says."""

    text: str
    operation: str
    nbytes: int
    elements: int = -1
    dtype: str = ""
    op: str = ""
    root: int = -1
    peer: int = -1
    message: str = ""  # "send" or "recv", also of an operation that is made of such


class Calls(Observer):
    """The observer of a trace: see pynccl.comm.observing."""

    timing = True

    def __init__(self, spans: Spans, clock: Clock, layers: Layers) -> None:
        self._spans, self._clock, self._layers = spans, clock, layers
        self.comms: dict[str, tuple[str, int, int]] = {}
        self._collectives: Counter[tuple[str, int]] = Counter()
        self._messages: Counter[tuple[str, int, int, int, str]] = Counter()
        self._streams: dict[tuple[str, int, bool], list[int]] = {}
        self._work: weakref.WeakKeyDictionary[Lanes, list[Interval]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def launching(self, calls: Sequence[Observed]) -> Told:
        """See Observer. Calls of one communicator on one stream, issued together, are one span."""
        ends: list[tuple[Span, Communicator, int]] = []
        with contextlib.suppress(Exception):  # a program that is traced goes on without
            ends += self._begun(calls)

        def told(error: BaseException | None) -> None:
            with contextlib.suppress(Exception):
                marks = _Marks(self._clock)
                for span, comm, stream in ends:
                    if error is not None:
                        span.args["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                    span.end = marks.on(comm, stream)

        return told

    def waiting(self) -> Told:
        """See Observer."""
        span = Span(self._layers.lane(), "waits for communication", self._clock.here(), blocks=True)

        def told(error: BaseException | None) -> None:
            span.end = self._clock.here()
            self._spans.add(span)

        return told

    def ran(self, lane: LaneOfLayer, name: str, reads: Any, writes: Sequence[Any], begin: Any, end: Any) -> None:
        """See Observer."""
        with self._lock:
            work = self._work.setdefault(lane.lanes, [])
        add_work(work, lane, name, writes, begin, end)

    def closed(self, lanes: Lanes) -> None:
        """See Observer. Of an operation that was broken off there is nothing."""
        with self._lock:
            work = self._work.pop(lanes, [])
        device = self._clock.device
        if device.type == "cuda" and is_capturing(device):
            return  # the events of a graph have no times
        owner = "" if lanes.owner is None else self._layers.name_of(lanes.owner)
        on, place = self._layers.lane(), self._layers.place()
        for one in work:
            if one.lane == LAYERS_COMM:  # which is in the lanes of communicators
                continue
            args = said_of(owner, lanes.decision, one) | {"layer": place.layer, "phase": place.phase}
            lane = on._replace(beside=one.lane == _SECOND_STREAM)
            self._spans.add(Span(lane, title(one), one.begin, one.end, args))

    def _begun(self, calls: Sequence[Observed]) -> list[tuple[Span, Communicator, int]]:
        together: dict[tuple[int, int], list[Observed]] = {}
        for call in calls:
            together.setdefault((id(call.comm), _stream_of(call)), []).append(call)
        marks = _Marks(self._clock)
        return [self._span(found, stream, marks) for (_, stream), found in together.items()]

    def _span(self, calls: list[Observed], stream: int, marks: _Marks) -> tuple[Span, Communicator, int]:
        first = calls[0]
        comm = first.comm
        said = [_said(call) for call in calls]
        keys = [key for call, one in zip(calls, said, strict=True) for key in self._keys(call, one)]
        layer, phase = self._layers.place()
        function, forward_site = notes.get(threading.get_ident(), ("", ""))
        if not phase and function:
            phase = "backward" if function.endswith(".backward") else "forward"
        title = _title(said, function)
        args: dict[str, Any] = {
            "comm": name_of(comm),
            "operation": title,
            "bytes": sum(one.nbytes for one in said),
            "layer": layer,
            "phase": phase,
            "function": function,
            "site": forward_site if phase == "backward" and forward_site else first.site or call_site(),
        }
        if len(said) == 1:
            one = said[0]
            args |= {"count": one.elements, "dtype": one.dtype, "op": one.op, "root": one.root, "peer": one.peer}
        else:
            texts = [one.text for one in said[:_MOST_TEXTS]]
            args["calls"] = texts + ([f"... {len(said) - len(texts)} more"] if len(said) > len(texts) else [])
        args = {name: value for name, value in args.items() if value not in ("", -1)}
        name = " ".join(word for word in (title, layer, "backward" if phase == "backward" else "") if word)
        blocks = self._clock.blocks(comm, stream)
        lane = self._lane(comm, stream, not blocks)
        known = tuple(dict.fromkeys(keys))[:_MOST_KEYS]
        span = Span(lane, name, marks.on(comm, stream), None, args, known, blocks)
        if blocks:
            span.args["on"] = tuple(self._layers.lane())
        return self._spans.add(span), comm, stream

    def _lane(self, comm: Communicator, stream: int, beside: bool) -> Lane:
        """One a communicator and stream."""
        uid, rank = comm.uid, comm.rank
        with self._lock:
            self.comms.setdefault(uid, (name_of(comm), rank, comm.size))
            if stream == OF_CPU:
                return Lane(COMM, uid, rank, OF_CPU, beside)
            streams = self._streams.setdefault((uid, rank, beside), [])
            number = int(stream)
            if number not in streams:
                streams.append(number)
            return Lane(COMM, uid, rank, streams.index(number), beside)

    def _keys(self, call: Observed, said: Said) -> list[str]:
        """The same on all ranks that take part in it; none where it is one rank's alone."""
        uid, rank = call.comm.uid, call.comm.rank
        weight = getattr(call, "weight", None)
        keys = []
        with self._lock:
            if said.message:
                source, target = (rank, said.peer) if said.message == "send" else (said.peer, rank)
                pair = (uid, rank, source, target, said.message)
                self._messages[pair] += 1
                keys.append(f"{uid} {source}>{target} {self._messages[pair]}")
            if said.operation not in UNNUMBERED if weight is None else weight:
                self._collectives[uid, rank] += 1
                keys.append(f"{uid} #{self._collectives[uid, rank]} {said.operation}")
        return keys


class _Marks:
    """Moments at which calls that are made together begin, or end: one for each stream, so that their spans nest."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._found: dict[tuple[str, int], Any] = {}

    def on(self, comm: Communicator, stream: int) -> Any:
        key = (comm.device, int(stream))
        if key not in self._found:
            self._found[key] = self._clock.on(comm, stream)
        return self._found[key]


def _stream_of(call: Observed) -> int:
    """On a GPU, what is made seldom is the CPU's work."""
    seldom = isinstance(call, Seldom) and not call.comm.library.is_host
    return OF_CPU if seldom else call.stream


def name_of(comm: Communicator) -> str:
    """What its lanes are called: the axes of a mesh, else its own name."""
    return "x".join(comm.origin.axes) or comm.name


def _said(call: Observed) -> Said:
    operation, inputs = call.operation, call.inputs
    message = operation if operation in _MESSAGES else ""
    if operation not in ARGUMENTS and len(inputs) == _INPUTS_OF_MESSAGE:  # of what is made of them: gather_v, scatter_v
        message = "send" if getattr(call, "recv", None) is None else "recv"
    at, names = ARGUMENTS.get(message or operation, (0, ()))
    if not at or not inputs:
        return Said(call.compared or operation, operation, 0)
    return _described(operation, inputs[at : at + 2 + len(names)], call.compared, message, call.comm.size)


@functools.lru_cache(4096)
def _described(operation: str, inputs: tuple[int, ...], compared: str, message: str, ranks: int) -> Said:
    """inputs: the count, the data type and what ARGUMENTS names"""
    count, kind = int(inputs[0]), DataType(inputs[1])
    rest = dict(zip(ARGUMENTS[message or operation][1], inputs[2:], strict=True))
    nbytes = count * ITEMSIZE[kind] * (ranks if operation in _BLOCKS else 1)
    op, root, peer = rest.get("op"), int(rest.get("root", -1)), int(rest.get("peer", -1))
    reduction = "" if op is None else RedOp(op).name if op in _OPERATORS else "PRE_MUL_SUM"
    other = max(root, peer)
    text = compared or f"{operation}({count} {kind.name}{f', rank {other}' if other >= 0 else ''})"
    return Said(text, operation, nbytes, count, kind.name, reduction, root, peer, message)


def _title(said: list[Said], function: str) -> str:
    """ "all_reduce", "2 all_gather + broadcast"; of an autograd function that sends, "HaloExchange: 2 send + recv"."""
    if len(said) == 1 and not said[0].message:
        return said[0].operation
    named = next((one.text.partition("(")[0] for one in said if one.text.partition("(")[0].endswith("_v")), "")
    if named:
        return named
    counts = Counter(one.operation for one in said)
    title = " + ".join(f"{number} {name}" if number > 1 else name for name, number in counts.items())
    made_of_messages = function and all(one.message for one in said)
    return f"{function.partition('.')[0]}: {title}" if made_of_messages else title
