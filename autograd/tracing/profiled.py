"""A rank's spans and the events of torch.profiler, put together: slices on lanes.

The profiler has the operators of torch, the nodes of the backward pass with the operators that made them, and what ran
on a GPU with the calls that launched it. So a node is of the layer whose forward pass made it; a layer, or a call, was
on the GPU from the first of the kernels that it launched to the last one.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .recording import Recording, Span, time_of
from .spans import BY_CPU, COMM, COMPUTE, CPU, EXPOSED, STEP, Lane, Slice

_NODE = "autograd::engine::evaluate_function: "
_LAUNCHES, _KERNELS = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


class Moment(NamedTuple):
    thread: int
    at: float


@dataclass
class Kernel:
    name: str
    begin: float
    end: float
    stream: int
    launched: Moment


@dataclass
class Profile:
    """Times are seconds of perf_counter().   links: of an operator and the node that it made, where each is"""

    operators: list[Span] = field(default_factory=list)
    links: list[tuple[Moment, Moment]] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)


def read(recording: Recording, begin: float, end: float) -> Profile:
    """What the profiler exports, of what was called in the block; nothing where it could not be stopped."""
    if recording.profiler is None:
        return Profile()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        recording.profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    operators = sorted((one for one in events if one.get("cat") == "cpu_op"), key=lambda one: one["ts"])
    ticks = list(zip(recording.ticks, operators, strict=False))  # the first operators are those
    lower = max((before - one["ts"] / 1e6 for (before, _), one in ticks), default=0.0)
    upper = min((after - (one["ts"] + one["dur"]) / 1e6 for (_, after), one in ticks), default=0.0)
    return parse(events, (lower + upper) / 2, begin, end)


def parse(events: Sequence[dict[str, Any]], shift: float, first: float, last: float) -> Profile:
    """Chrome's events, as torch.profiler exports them, of what was called between two times.

    shift  seconds from their times to those of perf_counter()"""
    found = Profile()
    launched: dict[Any, Moment] = {}
    kernels = []
    for one in events:
        category, at = one.get("cat", ""), one.get("ts", 0.0) / 1e6 + shift
        if category in _KERNELS:
            kernels.append(one)
        elif first <= at <= last and category in _LAUNCHES:
            launched[one["args"].get("correlation")] = Moment(int(one["tid"]), at)
        elif first <= at <= last and category == "cpu_op":
            found.operators.append(Span(CPU, one["name"], at, at + one["dur"] / 1e6, int(one["tid"])))
    for one in kernels:
        if (launch := launched.get(one["args"].get("correlation"))) is not None:
            at = one["ts"] / 1e6 + shift
            found.kernels.append(Kernel(one["name"], at, at + one["dur"] / 1e6, int(one["args"]["stream"]), launch))
    ends: dict[str, dict[int, Moment]] = {"s": {}, "f": {}}
    for one in events:
        if one.get("cat") == "fwdbwd":
            ends[one["ph"]][one["id"]] = Moment(int(one["tid"]), one["ts"] / 1e6 + shift)
    found.links = [(begin, ends["f"][number]) for number, begin in ends["s"].items() if number in ends["f"]]
    return found


def enclosing(spans: Sequence[Span], moments: Sequence[Moment]) -> list[tuple[Span, ...]]:
    """Of each moment, the spans of its thread that it lies in, outermost first; spans of a thread are nested."""
    rows = [(span.thread, span.begin, 0, -span.end, index) for index, span in enumerate(spans)]
    rows += [(moment.thread, moment.at, 1, 0.0, index) for index, moment in enumerate(moments)]
    found: list[tuple[Span, ...]] = [()] * len(moments)
    around: list[Span] = []
    for thread, at, is_moment, _, index in sorted(rows):
        while around and (around[-1].thread != thread or around[-1].end < at):
            around.pop()
        if is_moment:
            found[index] = tuple(around)
        else:
            around.append(spans[index])
    return found


class Timeline:
    """pieces  what the rank has recorded, and what its profiler has, on their lanes"""

    def __init__(self, recording: Recording, profile: Profile, end: float) -> None:
        self._gpu = recording.device.type == "cuda"
        self._threads: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        self._spans = [_resolved(span, end) for span in recording.spans if time_of(span.begin) is not None]
        self._profile = profile
        self._layers = self._of(COMPUTE)
        nodes = [one for one in profile.operators if one.name.startswith(_NODE)]
        chains = self._chains(nodes)
        self._place_calls(nodes, chains)
        self._backward = list(self._passes(nodes, chains))
        self.pieces = list(self._pieces())

    def _of(self, *kinds: str) -> list[Span]:
        return [span for span in self._spans if span.kind in kinds]

    # Backward passes

    def _chains(self, nodes: list[Span]) -> dict[int, tuple[str, ...]]:
        """By the id of a node: the layers within which it was made, outermost first; nothing of one made outside."""
        forwards = enclosing(self._layers, [made for made, _ in self._profile.links])
        runs = enclosing(nodes, [run for _, run in self._profile.links])
        return {
            id(within[-1]): tuple(dict.fromkeys(layer.args["layer"] for layer in layers if "module" in layer.args))
            for layers, within in zip(forwards, runs, strict=True)
            if layers and within
        }

    def _place_calls(self, nodes: list[Span], chains: dict[int, tuple[str, ...]]) -> None:
        """Calls and pieces of the backward pass are of the layer whose node made them."""
        calls = [span for span in self._of(COMM, COMPUTE) if span.args.get("phase") == "backward"]
        for span, within in zip(
            calls, enclosing(nodes, [Moment(span.thread, span.issued) for span in calls]), strict=True
        ):
            if within and (chain := chains.get(id(within[-1]))) and not span.args.get("layer"):
                span.args["layer"] = chain[-1]

    def _passes(self, nodes: list[Span], chains: dict[int, tuple[str, ...]]) -> Iterator[Span]:
        """Backward passes, and in them those of layers: each from its first node to its last one in a row.

        A pass goes on in a thread until a step or a layer's forward pass begins."""
        begun = sorted(span.begin for span in self._of(STEP, COMPUTE) if span.args.get("phase", "forward") == "forward")
        open_spans: list[Span] = []
        layers: tuple[str, ...] = ()
        for node in sorted(nodes, key=lambda node: (node.thread, node.begin)):
            last = open_spans[0] if open_spans else None
            if last is None or last.thread != node.thread or _any_between(begun, last.end, node.begin):
                open_spans, layers = [Span(COMPUTE, "backward", node.begin, node.end, node.thread)], ()
                yield open_spans[0]
            open_spans[0].end = max(open_spans[0].end, node.end)
            chain = chains.get(id(node))
            if not chain:
                continue
            same = next((at for at, (a, b) in enumerate(zip(layers, chain, strict=False)) if a != b), None)
            same = min(len(layers), len(chain)) if same is None else same
            del open_spans[1 + same :]
            for name in chain[same:]:
                args = {"layer": name, "phase": "backward"}
                open_spans.append(Span(COMPUTE, f"{name} backward", node.begin, node.end, node.thread, args))
                yield open_spans[-1]
            layers = chain
            for span in open_spans:
                span.end = max(span.end, node.end)

    # Lanes

    def _pieces(self) -> Iterator[Slice]:
        """On a GPU, layers and calls are where their kernels were, and what the CPU did is on a lane of its own."""
        thread_kind, thread_category = (CPU, "cpu") if self._gpu else (COMPUTE, COMPUTE)
        calls = self._of(COMM)
        computed, communicated = self._divided(calls)
        launched = _Launched(computed)
        for span in [*self._layers, *self._backward]:
            lane = Lane(thread_kind, number=self._thread(span.thread))
            yield Slice(lane, span.name, thread_category, span.begin, span.end, span.args)
            for stream, begin, end in launched.within(span):
                yield Slice(self._stream(stream), span.name, COMPUTE, begin, end, span.args)
        for span in self._profile.operators:
            yield Slice(
                Lane(thread_kind, number=self._thread(span.thread)), span.name, "cpu_op", span.begin, span.end, {}
            )
        for one in computed:
            yield Slice(self._stream(one.stream), one.name, "kernel", one.begin, one.end, {})
        for span in self._of(STEP):
            extents = launched.within(span, everywhere=True)
            begin = min((begin for _, begin, _ in extents), default=span.begin)
            end = max((end for _, _, end in extents), default=span.end)
            yield Slice(Lane(STEP), span.name, STEP, begin, end, {})
        for span in self._of(EXPOSED):
            lane = Lane(COMPUTE, number=self._thread(span.thread))
            yield Slice(lane, span.name, EXPOSED, span.begin, span.end, {})
        yield from self._calls(calls, communicated)
        yield from self._gaps(computed, communicated)

    def _calls(self, calls: list[Span], communicated: list[list[Kernel]]) -> Iterator[Slice]:
        for span, kernels in zip(calls, communicated, strict=True):
            assert span.lane is not None
            lane, begin, end = span.lane, span.begin, span.end
            if kernels:
                begin, end = kernels[0].begin, max(kernel.end for kernel in kernels)
            elif self._gpu:  # nothing was launched: one rank alone, or what the CPU does
                lane = lane._replace(number=BY_CPU, beside=False)
            layer, phase = span.args.get("layer", ""), span.args.get("phase", "")
            words = (span.name, layer, "backward" if phase == "backward" else "")
            yield Slice(lane, " ".join(filter(None, words)), COMM, begin, end, span.args, span.keys)
            if span.blocks:
                on = Lane(COMPUTE, number=self._thread(span.thread))
                yield Slice(on, f"{span.name} on {span.args['comm']}", EXPOSED, begin, end, {"layer": layer})

    def _divided(self, calls: list[Span]) -> tuple[list[Kernel], list[list[Kernel]]]:
        """Kernels that compute, and those that each call has launched, both in the order in which they began."""
        computed: list[Kernel] = []
        communicated: dict[int, list[Kernel]] = {id(span): [] for span in calls}
        kernels = sorted(self._profile.kernels, key=lambda kernel: kernel.begin)
        launches = [kernel.launched for kernel in kernels]
        for kernel, within in zip(kernels, enclosing(calls if kernels else [], launches), strict=True):
            (communicated[id(within[-1])] if within else computed).append(kernel)
        return computed, list(communicated.values())

    def _gaps(self, computed: list[Kernel], communicated: list[list[Kernel]]) -> Iterator[Slice]:
        """Where something travels on a GPU, and nothing is computed."""
        if not computed:
            return
        travels = [(one.begin, one.end) for kernels in communicated for one in kernels]
        works = [(one.begin, one.end) for one in computed]
        lane = self._stream(computed[0].stream)
        for begin, end in without(travels, works):
            yield Slice(lane, "waits for communication", EXPOSED, begin, end, {})

    def _thread(self, thread: int) -> int:
        return self._threads.setdefault(thread, len(self._threads))

    def _stream(self, stream: int) -> Lane:
        return Lane(COMPUTE, number=self._streams.setdefault(stream, len(self._streams)))


def _resolved(span: Span, end: float) -> Span:
    """With its times; what has not ended goes on to the end of the block."""
    begun, ended = time_of(span.begin), time_of(span.end)
    assert begun is not None
    name = span.name if ended is not None else f"{span.name} (has not ended)"
    last = ended if ended is not None else max(end, begun)
    return Span(
        span.kind, name, begun, last, span.thread, dict(span.args), span.lane, span.keys, span.blocks, span.issued
    )


def _any_between(times: list[float], begin: float, end: float) -> bool:
    at = bisect_left(times, begin)
    return at < len(times) and times[at] < end


class _Launched:
    """Kernels in the order in which they were launched."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self._found = sorted(kernels, key=lambda kernel: kernel.launched.at)
        self._times = [kernel.launched.at for kernel in self._found]

    def within(self, span: Span, everywhere: bool = False) -> list[tuple[int, float, float]]:
        """(stream, begin, end) of the kernels that a span has launched, in its thread or everywhere."""
        streams: dict[int, list[Kernel]] = defaultdict(list)
        for kernel in self._found[bisect_left(self._times, span.begin) : bisect_right(self._times, span.end)]:
            if everywhere or kernel.launched.thread == span.thread:
                streams[kernel.stream].append(kernel)
        return [(stream, min(k.begin for k in ran), max(k.end for k in ran)) for stream, ran in streams.items()]


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
) -> list[tuple[float, float]]:
    """The times that lie in one of the intervals and in none of the others."""
    found, taken = [], covered(others)
    ends = [end for _, end in taken]
    for begin, end in covered(intervals):
        at, index = begin, bisect_left(ends, begin)
        while index < len(taken) and taken[index][0] < end:
            if taken[index][0] > at:
                found.append((at, taken[index][0]))
            at = max(at, taken[index][1])
            index += 1
        if at < end:
            found.append((at, end))
    return found
