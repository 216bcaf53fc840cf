"""Which layer of the model a thread is in, forwards and backwards: spans of the lanes "compute".

Forwards, hooks of all modules tell. Backwards, the nodes of the graph do: those that a module's forward pass has made
are that module's, and a layer's backward pass lasts from its first node to its last one in a row. Nodes that add to
.grad, and what is computed outside of modules, are nobody's.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..torch_internals import (
    backward_pass,
    hooking_all_modules,
    is_made_since,
    next_node,
    queue_callback,
    tensors_in,
)
from .marks import Clock
from .spans import COMPUTE, Lane, Span, Spans

_OWNER = "pynccl.layer"  # in the metadata of a node
_NO_PASS = -1
Chain = tuple[str, ...]  # names of a module and of those around it, outermost first


class Place(NamedTuple):
    """Where a thread is. layer: "" outside of all; phase: "forward", "backward", "recompute" or "" """

    layer: str = ""
    phase: str = ""


class _Owner(NamedTuple):
    """Of a node: the names of its module, and the number of that module's call."""

    chain: Chain
    call: int


@dataclass
class _Call:
    """A module's forward pass under way. since: the number of the first node that it may make; stops: nodes that its
    inputs come from"""

    module: nn.Module
    root: nn.Module
    chain: Chain
    span: Span
    number: int
    since: int
    stops: set[Any]


@dataclass
class _Pass:
    """A backward pass in one thread: the spans that are open, and the last moment at which one of their nodes ended."""

    lane: Lane
    open: list[Span]
    chain: Chain = ()
    last: Any = None
    inside: bool = False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


@dataclass
class _Names:
    """Of the modules of one that was called from outside of all others."""

    by_id: dict[int, str] = field(default_factory=dict)


class Layers:
    """model: whose modules have the names that they have in it; those of others, in the module that is called first"""

    def __init__(self, spans: Spans, clock: Clock, model: nn.Module | None) -> None:
        self._spans, self._clock, self._model = spans, clock, model
        self._names: weakref.WeakKeyDictionary[nn.Module, _Names] = weakref.WeakKeyDictionary()
        self._thread = _Thread()
        self._passes: dict[tuple[int, int], _Pass] = {}  # by the number of the pass, and the thread
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._lock = threading.Lock()
        self._numbers = count()
        self.active = True
        if model is not None:
            self._names[model] = _names_in(model)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Forward passes in the block, and the backward passes of what they make there, are recorded."""
        with hooking_all_modules(), _without_warning():
            before = register_module_forward_pre_hook(self._enter)
            after = register_module_forward_hook(self._leave, always_call=True)
            try:
                yield
            finally:
                self.active = False
                before.remove()
                after.remove()
                for key in list(self._passes):
                    self._close(key)

    def place(self) -> Place:
        """Where this thread is."""
        number, calls = backward_pass(), self._thread.calls
        if calls:
            return Place(calls[-1].chain[-1], "forward" if number == _NO_PASS else "recompute")
        if number == _NO_PASS:
            return Place()
        found = self._passes.get((number, threading.get_ident()))
        return Place(found.chain[-1] if found and found.inside and found.chain else "", "backward")

    def lane(self) -> Lane:
        """The lane of what this thread computes now: on a GPU that of the stream, else that of the thread."""
        stream = self._clock.lane()
        key = (0, stream) if self._clock.device.type == "cuda" else (threading.get_ident(), 0)
        with self._lock:
            return self._lanes.setdefault(key, Lane(COMPUTE, number=len(self._lanes)))

    def name_of(self, module: object) -> str:
        """That of a module which is being called, or was; of anything else, that of its type."""
        for names in list(self._names.values()):
            if id(module) in names.by_id:
                return names.by_id[id(module)]
        return type(module).__name__

    # Forwards

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._thread.calls
        outer = calls[-1] if calls else None
        root = outer.root if outer is not None else module
        name = self._name(module, root, outer)
        phase = "" if backward_pass() == _NO_PASS else " recompute"
        span = self._spans.add(Span(self.lane(), name + phase, self._clock.here()))
        span.args = {"layer": name, "module": type(module).__name__, "phase": phase.strip() or "forward"}
        chain = (*(outer.chain if outer is not None else ()), name)
        calls.append(_Call(module, root, chain, span, next(self._numbers), next_node(), _nodes_of(args)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """output: None where the forward pass has raised"""
        if torch.compiler.is_compiling():
            return
        calls = self._thread.calls
        if not any(call.module is module for call in calls):  # entered before the trace began
            return
        while (call := calls.pop()).module is not module:  # left by an exception
            call.span.end = self._clock.here()
        call.span.end = self._clock.here()
        if self.active:
            self._claim(call, _nodes_of(output))

    def _name(self, module: nn.Module, root: nn.Module, outer: _Call | None) -> str:
        given = self._names.get(self._model) if self._model is not None else None
        if given is not None and id(module) in given.by_id:
            return given.by_id[id(module)]
        names = self._names.get(root)
        if names is None or (id(module) not in names.by_id and outer is not None):
            names = self._names[root] = _names_in(root)
        if (found := names.by_id.get(id(module))) is not None:
            return found
        return (f"{outer.chain[-1]}." if outer is not None else "") + type(module).__name__

    # Backwards

    def _claim(self, call: _Call, nodes: set[Any]) -> None:
        """Nodes that were made since the call began are this module's, but for those of modules within it."""
        owner, waiting, seen = _Owner(call.chain, call.number), list(nodes), call.stops
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            found = node.metadata.get(_OWNER)
            if found is not None and found.call < call.number:  # of a module that was called before
                continue
            if found is None:
                if node.name().startswith("torch::autograd::AccumulateGrad"):  # it lives as long as the parameter
                    continue
                if not is_made_since(node, call.since):  # of what was computed before, outside of modules
                    continue
                node.metadata[_OWNER] = owner
                node.register_prehook(partial(self._begin, owner.chain))
                node.register_hook(self._end)
            waiting += [above for above, _ in node.next_functions]

    def _begin(self, chain: Chain, *_: Any) -> None:
        """A node of that module is about to run."""
        if not self.active or torch.compiler.is_compiling():
            return
        key = (backward_pass(), threading.get_ident())
        found = self._passes.get(key)
        if found is None:
            found = self._open(key)
        found.inside = True
        if found.chain == chain:
            return
        same = next((at for at, (a, b) in enumerate(zip(found.chain, chain, strict=False)) if a != b), None)
        same = min(len(found.chain), len(chain)) if same is None else same
        self._shut(found, 1 + same)
        mark = self._clock.here()
        for name in chain[same:]:
            args = {"layer": name, "phase": "backward"}
            found.open.append(self._spans.add(Span(found.lane, f"{name} backward", mark, mark, args)))
        found.chain = chain

    def _end(self, *_: Any) -> None:
        if not self.active or torch.compiler.is_compiling():
            return
        found = self._passes.get((backward_pass(), threading.get_ident()))
        if found is not None:
            found.inside, found.last = False, self._clock.here()

    def _open(self, key: tuple[int, int]) -> _Pass:
        lane, mark = self.lane(), self._clock.here()
        found = self._passes[key] = _Pass(lane, [self._spans.add(Span(lane, "backward", mark, mark))])
        found.last = mark
        # Once more from within the callback: those that others have queued since, as data parallelism does, come first.
        with contextlib.suppress(RuntimeError):
            queue_callback(partial(queue_callback, partial(self._finish, key[0])))
        return found

    def _finish(self, number: int) -> None:
        """A backward pass is over."""
        for key in [key for key in list(self._passes) if key[0] == number]:
            found = self._passes[key]
            self._close(key)
            if key[1] == threading.get_ident():
                found.open[0].end = self._clock.here()

    def _close(self, key: tuple[int, int]) -> None:
        found = self._passes.pop(key)
        self._shut(found, 1)
        found.open[0].end = found.last

    def _shut(self, found: _Pass, keep: int) -> None:
        """Spans from the `keep`-th on have ended, with the last of their nodes."""
        for span in found.open[keep:]:
            span.end = found.last
        del found.open[keep:]


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


def _names_in(root: nn.Module) -> _Names:
    names = {id(module): name for name, module in root.named_modules()}
    return _Names({**names, id(root): type(root).__name__})


def _nodes_of(value: Any) -> set[Any]:
    return {tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None}
