"""What one rank records: a torch.profiler with the layers as ranges, and the calls of all communicators.

Operators, kernels and layers are the profiler's. Calls are slices of this rank's own: bounded by the CPU's time, by
events on a host stream, and on a GPU by the kernels that the call launched.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from pynccl import Communicator
from pynccl.bindings.library import host_module
from pynccl.comm.observing import Observed, Observer, Seldom, Told
from pynccl.interop.streams import Handle
from pynccl.watch.frames import call_site
from pynccl.watch.notes import notes

from ..streams import is_capturing
from ..torch_internals import backward_pass, hooking_all_modules, profiler_enabled
from .calls import Keys, arguments, described, name_of

now = time.perf_counter
STEP, COMM, EXPOSED = "step", "comm", "exposed"  # categories; EXPOSED: computation waits for communication
HOST = -1  # stream of calls that are the CPU's work, in a process with a GPU
_KERNELS, _LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
_KEPT = ("cpu_op", "user_annotation", "gpu_user_annotation", "fwdbwd", "ac2g", *_LAUNCHES, *_KERNELS)
_NO_PASS = -1
_TICKS = 10
_POLL_SECONDS = 0.0005


class Lane(NamedTuple):
    """kind    "steps", "thread", "gpu" (a stream of computation) or "comm"
    number  of the thread, or of the stream
    comm    uid of the communicator;  rank: this rank's number in it
    side    of "comm": the stream is not the one that computes"""

    kind: str
    number: int = 0
    comm: str = ""
    rank: int = 0
    side: bool = False


@dataclass
class Slice:
    """begin, end  seconds of perf_counter(); while recording also events of a host stream, None: has not ended
    keys        of communication: the same on all ranks that take part in it
    thread      that has launched it, and when
    blocks      the thread waits for it"""

    lane: Lane
    name: str
    category: str
    begin: Any
    end: Any = None
    args: dict[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    thread: int = field(default_factory=threading.get_native_id)
    launched: float = field(default_factory=lambda: now())  # noqa: PLW0108 - looked up when it is called
    blocks: bool = False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, str, Any]] = []  # module, name, range


class Recording(Observer):
    """model: its modules have the names that they have in it; modules of others, in the module that is called first"""

    def __init__(self, device: torch.device, model: nn.Module | None) -> None:
        self.device = device
        self.comms: dict[str, tuple[str, int, int]] = {}  # uid -> name, rank, size
        self._slices: list[Slice] = []
        self._profiler: profile | None = None
        self._ticks: list[tuple[float, float]] = []  # perf_counter() around the profiler's first operators
        self._thread = _Thread()
        self._keys = Keys()
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # keeps the modules, and so their ids, alive
        if model is not None:
            self._name_all(model)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Layers are recorded in the block; the profiler runs until `stop`."""
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        with hooking_all_modules():
            before = register_module_forward_pre_hook(self._enter)
            after = register_module_forward_hook(self._leave, always_call=True)
            try:
                self._profiler = profile(activities=activities)
                self._profiler.start()
                for _ in range(_TICKS):
                    began = now()
                    torch.empty(0)
                    self._ticks.append((began, now()))
                yield
            finally:
                before.remove()
                after.remove()

    def stop(self) -> None:
        """Stop the profiler, without which no other can start."""
        if self._profiler is not None and profiler_enabled():
            self._profiler.stop()
        elif self._profiler is not None:  # to export what another profiler has ended crashes the process
            self._profiler = None
            text = "trace: another torch.profiler has ended the trace's: operators and kernels are not in the file"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        one = Slice(Lane("steps"), name, STEP, now())
        self._slices.append(one)
        try:
            yield
        finally:
            one.end = now()

    # Layers

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._thread.modules
        if id(module) not in self._names and not stack:
            self._name_all(module)
        name = self._names.get(id(module)) or f"{stack[-1][1]}.{type(module).__name__}"
        shown = record_function(name if backward_pass() == _NO_PASS else f"{name} recompute")
        shown.__enter__()
        stack.append((module, name, shown))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._thread.modules
        if torch.compiler.is_compiling() or not any(one is module for one, *_ in stack):  # entered before the block
            return
        left = None
        while left is not module:  # an exception has left the modules within it
            left, _, shown = stack.pop()
            shown.__exit__(None, None, None)

    def _name_all(self, root: nn.Module) -> None:
        self._roots.append(root)
        self._names.setdefault(id(root), type(root).__name__)
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name)

    # Calls

    def launching(self, calls: Sequence[Observed]) -> Told:
        """See Observer. Calls of one communicator that are launched together on one stream are one slice."""
        together: dict[tuple[int, int], list[Observed]] = {}
        for call in calls:
            together.setdefault((id(call.comm), _stream_of(call)), []).append(call)
        begun: list[tuple[Slice, Communicator, int]] = []
        with contextlib.suppress(Exception):  # a trace must not break the program
            if self.device.type != "cuda" or not is_capturing(self.device):  # what is captured does not run
                marks: dict[int, Any] = {}
                for (_, stream), same in together.items():
                    comm = same[0].comm
                    begun.append((self._call(same, stream, _mark(comm, stream, marks)), comm, stream))

        def launched(error: BaseException | None) -> None:
            marks: dict[int, Any] = {}
            for one, comm, stream in begun:
                if error is not None:
                    one.args["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                with contextlib.suppress(Exception):
                    one.end = _mark(comm, stream, marks)

        return launched

    def _call(self, calls: list[Observed], stream: int, begin: Any) -> Slice:
        comm, ones = calls[0].comm, [described(call) for call in calls]
        keys = dict.fromkeys(key for call, one in zip(calls, ones, strict=True) for key in self._keys.of(call, one))
        function, forward_site = notes.get(threading.get_ident(), ("", ""))
        stack, in_backward = self._thread.modules, backward_pass() != _NO_PASS
        phase = ("recompute" if in_backward else "forward") if stack else "backward" if in_backward else ""
        args = {"comm": name_of(comm), **arguments(ones, function)}
        args |= {"layer": stack[-1][1]} if stack else {}
        args |= {"phase": phase} if phase else {}
        args |= {"function": function} if function else {}
        args["site"] = (forward_site if phase == "backward" else "") or calls[0].site or call_site()
        words = (args["operation"], args.get("layer", ""), phase if phase == "backward" else "")
        current = 0 if comm.library.is_host else torch.cuda.current_stream(torch.device(comm.device)).cuda_stream
        lane = Lane("comm", int(stream), comm.uid, comm.rank, stream not in (HOST, current))
        self.comms.setdefault(comm.uid, (name_of(comm), comm.rank, comm.size))
        blocks = comm.library.is_host and not stream
        one = Slice(lane, " ".join(filter(None, words)), COMM, begin, None, args, tuple(keys), blocks=blocks)
        self._slices.append(one)
        return one

    def waiting(self) -> Told | None:
        """See Observer. On a GPU it is the stream that waits: see `_kernels`."""
        if self.device.type == "cuda":
            return None
        one = Slice(Lane("thread", threading.get_native_id()), "waits for communication", EXPOSED, now())
        self._slices.append(one)

        def waited(error: BaseException | None) -> None:
            one.end = now()

        return waited

    # After the block

    def finish(self, begin: float, end: float, seconds: float) -> tuple[list[Slice], list[dict[str, Any]]]:
        """The slices of the block, and the profiler's events with `ts` in microseconds of perf_counter(); waits for
        streams, at most so many seconds."""
        until = now() + seconds
        for mark in [mark for one in self._slices for mark in (one.begin, one.end)]:
            while mark is not None and _time_of(mark) is None and now() < until:
                time.sleep(_POLL_SECONDS)
        if self.device.type == "cuda":  # the profiler waits for the GPU, which may wait for a rank that is gone
            waiting = threading.Thread(target=torch.cuda.synchronize, args=(self.device,), daemon=True)
            waiting.start()
            waiting.join(max(until - now(), 0.0))
            if waiting.is_alive():
                self._profiler = None
        self.stop()
        slices = [one for one in self._slices if _time_of(one.begin) is not None]
        for one in slices:
            one.begin, one.end = _time_of(one.begin), _time_of(one.end)
            if one.end is None:
                one.name, one.end = f"{one.name} (has not ended)", max(end, one.begin)
        waits = [one for one in slices if one.blocks]
        slices += [Slice(Lane("thread", one.thread), one.name, EXPOSED, one.begin, one.end) for one in waits]
        events = self._events(begin, end)
        return placed(slices, events), events

    def _events(self, begin: float, end: float) -> list[dict[str, Any]]:
        if self._profiler is None:
            return []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_bytes())["traceEvents"]
        operators = sorted((one for one in events if one.get("cat") == "cpu_op"), key=lambda one: one["ts"])
        ticks = list(zip(self._ticks, operators, strict=False))  # the first operators are those of the ticks
        lower = max((before * 1e6 - one["ts"] for (before, _), one in ticks), default=0.0)
        upper = min((after * 1e6 - one["ts"] - one["dur"] for (_, after), one in ticks), default=0.0)
        kept = []
        for one in events:
            one["ts"] = one.get("ts", 0.0) + (lower + upper) / 2
            if one.get("cat") in _KEPT and (one["pid"] != os.getpid() or begin * 1e6 <= one["ts"] <= end * 1e6):
                kept.append(one)
        return kept


def placed(slices: list[Slice], events: list[dict[str, Any]]) -> list[Slice]:
    """The slices, where the profiler's events say that they belong."""
    _name_backward(slices, events)
    return slices + list(_kernels(slices, events))


def _name_backward(slices: list[Slice], events: list[dict[str, Any]]) -> None:
    """A call that an autograd function makes in the backward pass belongs to the layer whose forward pass made it: the
    profiler links the node that ran last in its thread to the operator that made the node."""
    flows = [one for one in events if one["cat"] == "fwdbwd"]
    made = {one["id"]: one for one in flows if one["ph"] == "s"}
    ran = sorted((one["tid"], one["ts"], one["id"]) for one in flows if one["ph"] == "f" and one["id"] in made)
    layers = [one for one in events if one["cat"] == "user_annotation"]
    for call in slices:
        if call.category != COMM or call.args.get("phase") != "backward" or "function" not in call.args:
            continue
        number = bisect_right(ran, (call.thread, call.launched * 1e6, float("inf"))) - 1
        if number < 0 or ran[number][0] != call.thread:
            continue
        at = made[ran[number][2]]
        around = [one for one in layers if one["tid"] == at["tid"] and one["ts"] <= at["ts"] <= one["ts"] + one["dur"]]
        if around:
            layer = max(around, key=lambda one: float(one["ts"]))["name"].removesuffix(" recompute")
            call.args["layer"], call.name = layer, f"{call.args['operation']} {layer} backward"


def _kernels(slices: list[Slice], events: list[dict[str, Any]]) -> Iterator[Slice]:
    """On a GPU calls are moved to where their kernels ran. Yields where communication ran and nothing was computed."""
    launches = {one["args"].get("correlation"): one for one in events if one["cat"] in _LAUNCHES}
    if not launches:
        return
    calls = sorted((one for one in slices if one.category == COMM), key=lambda one: (one.thread, one.launched))
    began = [(one.thread, one.launched) for one in calls]
    own: list[list[tuple[float, float]]] = [[] for _ in calls]
    computing, stream = [], 0
    for kernel in (one for one in events if one["cat"] in _KERNELS):
        interval = kernel["ts"] / 1e6, (kernel["ts"] + kernel["dur"]) / 1e6
        launch = launches.get(kernel["args"].get("correlation"), {"tid": 0, "ts": 0.0})
        thread, at = int(launch["tid"]), launch["ts"] / 1e6
        number = bisect_right(began, (thread, at)) - 1
        if number >= 0 and calls[number].thread == thread and at <= calls[number].end:
            own[number].append(interval)
        else:
            computing.append(interval)
            stream = int(kernel["tid"])
    for call, ran in zip(calls, own, strict=True):
        if ran:
            call.begin, call.end = min(ran)[0], max(end for _, end in ran)
        else:
            call.lane = call.lane._replace(number=HOST, side=False)
    for begin, end in without([interval for ran in own for interval in ran], computing):
        yield Slice(Lane("gpu", stream), "waits for communication", EXPOSED, begin, end)


def covered(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that lie in at least one of the intervals, as intervals that do not touch."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def without(
    intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """The times that lie in one of the intervals and in none of the others."""
    marks = [(at, change) for begin, end in covered(intervals) for at, change in ((begin, 1), (end, -1))]
    marks += [(at, change) for begin, end in covered(others) for at, change in ((begin, 2), (end, -2))]
    state, since = 0, 0.0
    for at, change in sorted(marks):
        if state == 1 and at > since:
            yield since, at
        state, since = state + change, at


def _stream_of(call: Observed) -> int:
    """On a GPU, calls that launch nothing (barrier, split, ...) are the CPU's work."""
    return HOST if isinstance(call, Seldom) and not call.comm.library.is_host else call.stream


def _mark(comm: Communicator, stream: int, marks: dict[int, Any]) -> Any:
    """This moment of a stream: an event of a host stream, else the time. Calls launched together share it."""
    key = int(stream) if comm.library.is_host else 0
    if key not in marks:
        found = None
        if key:
            found = stream.owner if type(stream) is Handle else host_module().made_here(stream)
        marks[key] = found.record() if found is not None and hasattr(found, "submit") else now()
    return marks[key]


def _time_of(mark: Any) -> float | None:
    """When it was; None if it has not happened."""
    if mark is None or isinstance(mark, float):
        return mark
    return float(mark.moment) if mark.query() else None
