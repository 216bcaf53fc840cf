"""The recording of one rank: a torch.profiler with layers as ranges, and the calls of all communicators.

The profiler records operators, kernels and layers. Communication calls are recorded here. A call is timed by the clock
on the CPU, by events on a host stream, and by its kernels on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from pynccl import Communicator
from pynccl.bindings.abi import ITEMSIZE, DataType, RedOp
from pynccl.bindings.library import host_module
from pynccl.comm.observers import ControlCall, Observed, Observer, OnEnd
from pynccl.interop.handles import Handle
from pynccl.watch.frames import attributions, call_site
from pynccl.watch.layout import ARGUMENTS, MESSAGES

from ..streams import is_capturing
from ..torch_internals import backward_pass, hooking_all_modules, profiler_enabled

now = time.perf_counter
STEP, COMM, EXPOSED = "step", "comm", "exposed"  # categories; EXPOSED: computation waits for communication
HOST = -1  # stream of calls that run on the CPU, in a process with a GPU
KERNELS, LAUNCHES, FLOWS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver"), ("fwdbwd", "ac2g")
_KEPT = ("cpu_op", "user_annotation", "gpu_user_annotation", *FLOWS, *LAUNCHES, *KERNELS)
_NO_PASS = -1
_POLL_SECONDS = 0.0005

# Operations whose buffer has one block per rank: `bytes` counts all blocks, as in nccl-tests.
_BLOCKS = ("all_gather", "reduce_scatter", "all_to_all", "alltoall", "gather", "scatter")
_OPERATORS = frozenset(map(int, RedOp))  # other numbers are PreMulSum operators
_PEER = 3  # inputs of send and recv: buffer, count, type, peer
_MAX_CALLS = 8  # listed for a group


class Lane(NamedTuple):
    """A row of the trace.

    kind    "steps", "thread", "gpu" (a compute stream) or "comm"
    number  of the thread, or of the stream
    comm    uid of the communicator;  rank: this rank in it
    side    for "comm": whether the stream is not the compute stream"""

    kind: str
    number: int = 0
    comm: str = ""
    rank: int = 0
    side: bool = False


@dataclass
class Slice:
    """A time interval in a lane.

    begin, end        seconds of perf_counter(); while recording also events of a host stream. None: not ended
    keys              identify communication: equal on all participating ranks
    thread, launched  the thread that has launched it, and the time
    blocks            whether the thread waits for it"""

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
    """An observer that records this rank.

    model  names its modules; other modules are named relative to the outermost module that is called"""

    def __init__(self, device: torch.device, model: nn.Module | None) -> None:
        self.device = device
        self.comms: dict[str, tuple[str, int, int]] = {}  # uid -> name, rank, size
        self._slices: list[Slice] = []
        self._profiler: profile | None = None
        self._clock = 0.0  # perf_counter() minus the time of day, which the profiler uses
        self._thread = _Thread()
        self._count: Counter[tuple[Any, ...]] = Counter()  # calls per communicator, messages per pair of ranks
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # keeps the modules alive, so that their ids stay unique
        if model is not None:
            self._name_all(model)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Record layers in the block, and run the profiler until `stop`."""
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        with hooking_all_modules():
            before = register_module_forward_pre_hook(self._enter)
            after = register_module_forward_hook(self._leave, always_call=True)
            try:
                self._profiler = profile(activities=activities)
                self._profiler.start()
                self._clock = now() - time.time()
                yield
            finally:
                before.remove()
                after.remove()

    def stop(self) -> None:
        """Stop the profiler, so that another one can start."""
        if self._profiler is not None and profiler_enabled():
            self._profiler.stop()
        elif self._profiler is not None:  # exporting a profile that another profiler has ended crashes the process
            self._profiler = None
            text = (
                "trace: another torch.profiler has stopped the trace's profiler; the file has no operators and kernels"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        one = self._add(Slice(Lane("steps"), name, STEP, now()))
        try:
            yield
        finally:
            one.end = now()

    def _add(self, one: Slice) -> Slice:
        self._slices.append(one)
        return one

    # Layers

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._thread.modules
        if id(module) not in self._names and not stack:
            self._name_all(module)
        name = self._names.get(id(module)) or f"{stack[-1][1]}.{type(module).__name__}"
        span = record_function(name if backward_pass() == _NO_PASS else f"{name} recompute")
        span.__enter__()
        stack.append((module, name, span))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = self._thread.modules
        if torch.compiler.is_compiling() or not any(one is module for one, *_ in stack):  # entered before the block
            return
        left = None
        while left is not module:  # an exception has skipped the hooks of the inner modules
            left, _, span = stack.pop()
            span.__exit__(None, None, None)

    def _name_all(self, root: nn.Module) -> None:
        self._roots.append(root)
        self._names.setdefault(id(root), type(root).__name__)
        for name, module in root.named_modules():
            self._names.setdefault(id(module), name)

    # Calls

    def launching(self, calls: Sequence[Observed]) -> OnEnd:
        """See Observer. Calls of a group on one communicator and stream form one slice."""
        together: dict[tuple[int, int], list[Observed]] = {}
        for call in calls:
            together.setdefault((id(call.comm), _stream_of(call)), []).append(call)
        started: list[tuple[Slice, Communicator, int]] = []
        with contextlib.suppress(Exception):  # a trace must not break the program
            if self.device.type != "cuda" or not is_capturing(self.device):  # captured calls do not run
                marks: dict[int, Any] = {}
                for (_, stream), group in together.items():
                    comm = group[0].comm
                    started.append((self._call(group, stream, _mark(comm, stream, marks)), comm, stream))

        def launched(error: BaseException | None) -> None:
            marks: dict[int, Any] = {}
            for one, comm, stream in started:
                if error is not None:
                    one.args["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                with contextlib.suppress(Exception):
                    one.end = _mark(comm, stream, marks)

        return launched

    def _call(self, calls: list[Observed], stream: int, begin: Any) -> Slice:
        comm = calls[0].comm
        keys = dict.fromkeys(key for call in calls for key in self._keys(call))
        function, forward_site, _ = attributions.get(threading.get_ident(), ("", "", ""))
        stack, in_backward = self._thread.modules, backward_pass() != _NO_PASS
        phase = ("recompute" if in_backward else "forward") if stack else "backward" if in_backward else ""
        args = arguments(calls, function)
        args |= {"layer": stack[-1][1]} if stack else {}
        args |= {"phase": phase} if phase else {}
        args |= {"function": function} if function else {}
        args["site"] = (forward_site if phase == "backward" else "") or calls[0].site or call_site()
        words = (args["operation"], args.get("layer", ""), phase if phase == "backward" else "")
        current = 0 if comm.library.is_host else torch.cuda.current_stream(torch.device(comm.device)).cuda_stream
        lane = Lane("comm", int(stream), comm.uid, comm.rank, stream not in (HOST, current))
        self.comms.setdefault(comm.uid, (args["comm"], comm.rank, comm.size))
        blocks = comm.library.is_host and not stream
        one = Slice(lane, " ".join(filter(None, words)), COMM, begin, None, args, tuple(keys), blocks=blocks)
        return self._add(one)

    def _keys(self, call: Observed) -> Iterator[str]:
        """Yield the keys that match calls across ranks: "UID #3 all_reduce", "UID 0>1 2"; none for a local call."""
        uid, rank, message = call.comm.uid, call.comm.rank, _message(call)
        if message:
            peer = int(call.inputs[_PEER])
            source, target = (rank, peer) if message == "send" else (peer, rank)
            yield f"{uid} {source}>{target} {self._next(uid, rank, source, target, message)}"
        weight = getattr(call, "weight", None)
        if call.operation not in MESSAGES if weight is None else weight:
            yield f"{uid} #{self._next(uid, rank)} {call.operation}"

    def _next(self, *counter: Any) -> int:
        self._count[counter] += 1
        return self._count[counter]

    def waiting(self) -> OnEnd | None:
        """See Observer. On a GPU, the stream waits instead: see merge.py."""
        if self.device.type == "cuda":
            return None
        one = self._add(Slice(Lane("thread", threading.get_native_id()), "waits for communication", EXPOSED, now()))

        def waited(error: BaseException | None) -> None:
            one.end = now()

        return waited

    # After the block

    def finish(self, begin: float, end: float, seconds: float) -> tuple[list[Slice], list[dict[str, Any]]]:
        """Return the slices of the block and the profiler's events, with `ts` in microseconds of perf_counter().

        Wait up to `seconds` for streams."""
        until = now() + seconds
        for mark in [mark for one in self._slices for mark in (one.begin, one.end)]:
            while mark is not None and _time_of(mark) is None and now() < until:
                time.sleep(_POLL_SECONDS)
        if self.device.type == "cuda":  # the profiler waits for the GPU, which may wait for a dead rank
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
                one.name, one.end = f"{one.name} (not ended)", max(end, one.begin)
        waits = [one for one in slices if one.blocks]
        slices += [Slice(Lane("thread", one.thread), one.name, EXPOSED, one.begin, one.end) for one in waits]
        return slices, self._events(begin * 1e6, end * 1e6)

    def _events(self, begin: float, end: float) -> list[dict[str, Any]]:
        if self._profiler is None:
            return []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            self._profiler.export_chrome_trace(str(path))
            exported = json.loads(path.read_bytes())
        shift = exported.get("baseTimeNanoseconds", 0) / 1e3 + self._clock * 1e6
        kept = [one | {"ts": one["ts"] + shift} for one in exported["traceEvents"] if one.get("cat") in _KEPT]
        return [one for one in kept if one["pid"] != os.getpid() or begin <= one["ts"] <= end]


def arguments(calls: Sequence[Observed], function: str) -> dict[str, Any]:
    """Return the arguments of the slice of calls that are launched together."""
    comm, details = calls[0].comm, [_details(call) for call in calls]
    name = "x".join(comm._lineage.axes) or comm.name  # axes of a mesh
    args = {"comm": name, "operation": _operation(calls, function), "bytes": sum(nbytes for nbytes, _ in details)}
    if len(calls) == 1:
        return args | details[0][1]
    texts = [_text(call) for call in calls[:_MAX_CALLS]]
    more = len(calls) - len(texts)
    return args | {"calls": texts + ([f"... {more} more"] if more else [])}


def _message(call: Observed) -> str:
    """Return "send", "recv" or ""; also for operations that consist of them: gather_v, scatter_v."""
    if call.operation in ("send", "recv"):
        return call.operation if call.inputs else ""
    if call.operation in ARGUMENTS or len(call.inputs) != _PEER + 1:
        return ""
    return "send" if getattr(call, "recv", None) is None else "recv"


def _details(call: Observed) -> tuple[int, dict[str, Any]]:
    """Return the bytes, and those of {count, dtype, op, root, peer} that the operation has."""
    at, names = ARGUMENTS.get(_message(call) or call.operation, (0, ()))
    if not at or not call.inputs:
        return 0, {}
    count, dtype = int(call.inputs[at]), DataType(call.inputs[at + 1])
    rest: dict[str, Any] = dict(zip(names, map(int, call.inputs[at + 2 :]), strict=False))
    if "op" in rest:
        rest["op"] = RedOp(rest["op"]).name if rest["op"] in _OPERATORS else "PRE_MUL_SUM"
    nbytes = count * ITEMSIZE[dtype] * (call.comm.size if call.operation in _BLOCKS else 1)
    return nbytes, {"count": count, "dtype": dtype.name, **rest}


def _text(call: Observed) -> str:
    details = _details(call)[1]
    return call.compared or call.operation + ("({count} {dtype})".format(**details) if details else "")


def _operation(calls: Sequence[Observed], function: str) -> str:
    """Return "all_reduce", "2 all_gather + broadcast", or, for an autograd function, "HaloExchange: 2 send + recv"."""
    messages = [_message(call) for call in calls]
    if len(calls) == 1 and not messages[0]:
        return calls[0].operation
    names = [_text(call).partition("(")[0] for call in calls]
    if named := next((name for name in names if name.endswith("_v")), ""):
        return named
    counts = Counter(call.operation for call in calls)
    title = " + ".join(f"{number} {name}" if number > 1 else name for name, number in counts.items())
    return f"{function.partition('.')[0]}: {title}" if function and all(messages) else title


def _stream_of(call: Observed) -> int:
    """Return the stream of a call. On a GPU, calls that launch nothing (barrier, split, ...) run on the CPU."""
    return HOST if isinstance(call, ControlCall) and not call.comm.library.is_host else call.stream


def _mark(comm: Communicator, stream: int, marks: dict[int, Any]) -> Any:
    """Return a mark of a stream: an event of a host stream, else the time. Calls launched together share it."""
    key = int(stream) if comm.library.is_host else 0
    if key not in marks:
        found = None
        if key:
            found = stream.owner if type(stream) is Handle else host_module().stream_from_handle(stream)
        marks[key] = found.record() if found is not None and hasattr(found, "submit") else now()
    return marks[key]


def _time_of(mark: Any) -> float | None:
    """Return the time of a mark; None if it is pending."""
    if mark is None or isinstance(mark, float):
        return mark
    return float(mark.moment) if mark.query() else None
