"""What one rank records in the block: torch.profiler's events, and its own spans of steps, layers, calls and waits.

Hooks of all modules tell the layers, an observer (pynccl.comm.observing) the calls of all communicators and the waits
for them. The times of spans are those of the CPU, but for calls on streams of the host library, which are events; what
a GPU did meanwhile is in the profiler's events (`profiled.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

from pynccl import Communicator
from pynccl.bindings.library import host_module
from pynccl.comm.observing import Observed, Observer, Seldom, Told
from pynccl.interop.streams import Handle
from pynccl.watch.frames import call_site
from pynccl.watch.layout import UNNUMBERED
from pynccl.watch.notes import notes

from ..overlap.lanes import Lane as LaneOfLayer, Lanes
from ..overlap.trace import COMM as LAYERS_COMM, Interval, add_work, said_of, title
from ..streams import is_capturing
from ..torch_internals import backward_pass, hooking_all_modules, profiler_enabled
from .calls import Said, name_of, operation_of, said
from .spans import BY_CPU, COMM, COMPUTE, EXPOSED, STEP, Lane

now = time.perf_counter
_MOST_TEXTS = 8  # calls of a group that are named one by one
_MOST_KEYS = 64
_NO_PASS = -1
_TICKS = 10
_POLL_SECONDS = 0.0005


@dataclass
class Span:
    """kind        STEP, COMPUTE (a module's forward pass, a piece of an overlapped matmul), EXPOSED or COMM
    begin, end  seconds of perf_counter(), or events of a stream of the host library; end is None while it is under way
    thread      the system's number of the thread
    lane        of COMM
    blocks      of COMM: whether the CPU waits for it
    issued      when the CPU came to it"""

    kind: str
    name: str
    begin: Any
    end: Any = None
    thread: int = field(default_factory=threading.get_native_id)
    args: dict[str, Any] = field(default_factory=dict)
    lane: Lane | None = None
    keys: tuple[str, ...] = ()
    blocks: bool = False
    issued: float = 0.0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, Span]] = []


class Recording(Observer):
    """model: whose modules have the names that they have in it; those of others, in the module that is called first"""

    def __init__(self, device: torch.device, model: nn.Module | None, limit: int) -> None:
        self.device, self.limit = device, limit
        self.timing = device.type != "cuda"  # of the pieces of overlapped matmuls; on a GPU their kernels are there
        self.spans: list[Span] = []
        self.dropped = self.captured = 0
        self.comms: dict[str, tuple[str, int, int]] = {}
        self.profiler: profile | None = None
        self.ticks: list[tuple[float, float]] = []
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._roots: list[nn.Module] = []  # which keep the ids of their modules
        self._names: dict[int, str] = {}
        self._collectives: Counter[tuple[str, int]] = Counter()
        self._messages: Counter[tuple[str, int, int, int, str]] = Counter()
        self._streams: dict[tuple[str, int, bool], list[int]] = {}
        self._work: weakref.WeakKeyDictionary[Lanes, list[Interval]] = weakref.WeakKeyDictionary()
        if model is not None:
            self._name_all(model)

    def add(self, span: Span) -> Span:
        """The first `limit` spans are kept; with the next one the profiler stops, too, whose memory has no limit."""
        span.issued = now()
        with self._lock:
            if len(self.spans) < self.limit:
                self.spans.append(span)
                return span
            self.dropped += 1
        if self.dropped == 1:
            self._stop_profiler()
        return span

    # The block

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Everything in the block is recorded but the calls, for which the recording is an observer.

        ticks: times around the first operators that the profiler hears of, which tell its clock from perf_counter()"""
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        self.profiler = profile(activities=activities)
        self._started_by, self._profiling = threading.get_ident(), True
        with hooking_all_modules(), _without_warning():
            before = register_module_forward_pre_hook(self._enter)
            after = register_module_forward_hook(self._leave, always_call=True)
            try:
                self.profiler.start()
                self.ticks = [_tick() for _ in range(_TICKS)]
                yield
            finally:
                before.remove()
                after.remove()

    def finish(self, seconds: float) -> None:
        """After the block: wait for streams, for so many seconds at most, and stop the profiler."""
        end = now() + seconds
        for span in self.spans:
            _wait(span.begin, end)
            _wait(span.end, end)
        if self.device.type == "cuda":  # the profiler waits for the GPU, which may wait for a rank that has gone
            waiting = threading.Thread(target=torch.cuda.synchronize, args=(self.device,), daemon=True)
            waiting.start()
            waiting.join(max(end - now(), 0.0))
            if waiting.is_alive():
                self.profiler = None  # it goes on, and what it has is not in the trace
                return
        self._stop_profiler()

    def abandon(self) -> None:
        """End the profiler of a trace that could not begin: it would stand in the way of every later one."""
        profiler, self.profiler = self.profiler, None
        if self._profiling and profiler is not None and profiler_enabled():
            self._profiling = False
            profiler.stop()

    def _stop_profiler(self) -> None:
        """By the thread that has started it; torch lets no other."""
        if self._profiling and self.profiler is not None and threading.get_ident() == self._started_by:
            self._profiling = False
            if profiler_enabled():
                self.profiler.stop()
                return
            self.profiler = None  # to export what another one has ended crashes the process
            text = "trace: another torch.profiler has ended the trace's: operators and kernels are not in the file"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        span = self.add(Span(STEP, name, now()))
        try:
            yield
        finally:
            span.end = now()

    # Layers

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._thread.modules
        name = self._name(module, stack)
        phase = "forward" if backward_pass() == _NO_PASS else "recompute"
        told = {"layer": name, "module": type(module).__name__, "phase": phase}
        shown = name if phase == "forward" else f"{name} recompute"
        stack.append((module, self.add(Span(COMPUTE, shown, now(), args=told))))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._thread.modules
        if torch.compiler.is_compiling() or not any(one is module for one, _ in stack):  # entered before the trace
            return
        left = None
        while left is not module:  # what lies within it was left by an exception
            left, span = stack.pop()
            span.end = now()

    def _name(self, module: nn.Module, stack: list[tuple[nn.Module, Span]]) -> str:
        if id(module) not in self._names:
            if stack:
                return f"{stack[-1][1].args['layer']}.{type(module).__name__}"
            self._name_all(module)
        return self._names[id(module)]

    def _name_all(self, root: nn.Module) -> None:
        self._roots.append(root)
        self._names.setdefault(id(root), type(root).__name__)
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name)

    def _place(self) -> dict[str, str]:
        """Which layer this thread is in, and its phase; of a backward pass the profiler's events tell the layer."""
        backward, stack = backward_pass() != _NO_PASS, self._thread.modules
        if stack:
            return {"layer": stack[-1][1].args["layer"], "phase": "recompute" if backward else "forward"}
        return {"layer": "", "phase": "backward" if backward else ""}

    # Calls

    def launching(self, calls: Sequence[Observed]) -> Told:
        """See Observer. Calls of one communicator on one stream, issued together, are one span."""
        open_spans: list[tuple[Span, Communicator, int]] = []
        together: dict[tuple[int, int], list[Observed]] = {}
        for call in calls:
            together.setdefault((id(call.comm), _stream_of(call)), []).append(call)
        with contextlib.suppress(Exception):  # a program that is traced goes on without
            marks: dict[int, Any] = {}
            for (_, stream), found in together.items():
                comm = found[0].comm
                if self.device.type == "cuda" and is_capturing(self.device):
                    self.captured += 1
                    continue
                open_spans.append((self._call(found, stream, _mark(comm, stream, marks)), comm, stream))

        def told(error: BaseException | None) -> None:
            marks: dict[int, Any] = {}
            for span, comm, stream in open_spans:
                if error is not None:
                    span.args["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                with contextlib.suppress(Exception):
                    span.end = _mark(comm, stream, marks)

        return told

    def _call(self, calls: list[Observed], stream: int, begin: Any) -> Span:
        comm, described = calls[0].comm, [said(call) for call in calls]
        keys = [key for call, one in zip(calls, described, strict=True) for key in self._keys(call, one)]
        function, forward_site = notes.get(threading.get_ident(), ("", ""))
        place = self._place()
        if not place["phase"] and function:
            place["phase"] = "backward" if function.endswith(".backward") else "forward"
        site = forward_site if place["phase"] == "backward" else ""
        args: dict[str, Any] = {
            "comm": name_of(comm),
            "operation": operation_of(described, function),
            "bytes": sum(one.nbytes for one in described),
            **place,
            "function": function,
            "site": site or calls[0].site or call_site(),
        }
        if len(described) == 1:
            one = described[0]
            args |= {"count": one.elements, "dtype": one.dtype, "op": one.op, "root": one.root, "peer": one.peer}
        else:
            texts = [one.text for one in described[:_MOST_TEXTS]]
            more = len(described) - len(texts)
            args["calls"] = texts + ([f"... {more} more"] if more else [])
        args = {name: value for name, value in args.items() if value not in ("", -1)}
        known = tuple(dict.fromkeys(keys))[:_MOST_KEYS]
        blocks = comm.library.is_host and not stream
        lane = self._lane(comm, stream)
        return self.add(Span(COMM, args["operation"], begin, args=args, lane=lane, keys=known, blocks=blocks))

    def _lane(self, comm: Communicator, stream: int) -> Lane:
        """One a communicator and stream."""
        uid, rank, beside = comm.uid, comm.rank, stream != BY_CPU and not self._is_callers(comm, stream)
        with self._lock:
            self.comms.setdefault(uid, (name_of(comm), rank, comm.size))
            if stream == BY_CPU:
                return Lane(COMM, uid, rank, BY_CPU)
            streams = self._streams.setdefault((uid, rank, beside), [])
            if int(stream) not in streams:
                streams.append(int(stream))
            return Lane(COMM, uid, rank, streams.index(int(stream)), beside)

    def _is_callers(self, comm: Communicator, stream: int) -> bool:
        """Whether what this thread computes waits for that stream, by its order."""
        if comm.library.is_host:
            return not stream
        return int(torch.cuda.current_stream(torch.device(comm.device)).cuda_stream) == int(stream)

    def _keys(self, call: Observed, one: Said) -> list[str]:
        """The same on all ranks that take part in it; none where it is one rank's alone."""
        uid, rank = call.comm.uid, call.comm.rank
        weight = getattr(call, "weight", None)
        keys = []
        with self._lock:
            if one.message:
                source, target = (rank, one.peer) if one.message == "send" else (one.peer, rank)
                pair = (uid, rank, source, target, one.message)
                self._messages[pair] += 1
                keys.append(f"{uid} {source}>{target} {self._messages[pair]}")
            if one.operation not in UNNUMBERED if weight is None else weight:
                self._collectives[uid, rank] += 1
                keys.append(f"{uid} #{self._collectives[uid, rank]} {one.operation}")
        return keys

    def waiting(self) -> Told | None:
        """See Observer."""
        if self.device.type == "cuda":  # a stream waits: the profiler tells where nothing is computed
            return None
        span = Span(EXPOSED, "waits for communication", now())

        def told(error: BaseException | None) -> None:
            span.end = now()
            self.add(span)

        return told

    # Overlapped layers

    def ran(self, lane: LaneOfLayer, name: str, reads: Any, writes: Sequence[Any], begin: Any, end: Any) -> None:
        """See Observer."""
        if self.timing:
            with self._lock:
                work = self._work.setdefault(lane.lanes, [])
            add_work(work, lane, name, writes, begin, end)

    def closed(self, lanes: Lanes) -> None:
        """See Observer. Of an operation that was broken off there is nothing."""
        with self._lock:
            work = self._work.pop(lanes, [])
        owner = "" if lanes.owner is None else self._names.get(id(lanes.owner), type(lanes.owner).__name__)
        for one in work:
            if one.lane != LAYERS_COMM:  # which is in the lanes of communicators
                args = said_of(owner, lanes.decision, one) | self._place()
                self.add(Span(COMPUTE, title(one), one.begin, one.end, args=args))


def _stream_of(call: Observed) -> int:
    """On a GPU, what is made seldom is the CPU's work."""
    seldom = isinstance(call, Seldom) and not call.comm.library.is_host
    return BY_CPU if seldom else call.stream


def _mark(comm: Communicator, stream: int, marks: dict[int, Any]) -> Any:
    """A moment of a stream; calls that are made together share it, so that their spans nest."""
    key = int(stream) if comm.library.is_host else 0
    if key not in marks:
        found = None
        if key:
            found = stream.owner if type(stream) is Handle else host_module().made_here(stream)
        marks[key] = found.record() if found is not None and hasattr(found, "submit") else now()
    return marks[key]


def time_of(mark: Any) -> float | None:
    """When it was; None if it has not happened."""
    if mark is None or isinstance(mark, float):
        return mark
    return float(mark.moment) if mark.query() else None


def _tick() -> tuple[float, float]:
    before = now()
    torch.empty(0)
    return before, now()


def _wait(mark: Any, end: float) -> None:
    while mark is not None and time_of(mark) is None and now() < end:
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    """That modules compiled by torch.compile are called twice: `OptimizedModule`, and what it is of, which is true."""
    warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
    filters: Any = warnings.filters
    own = filters[0]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            filters.remove(own)
