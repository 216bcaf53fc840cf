"""Collectives under torch.compile: each call runs once, in the order of the program, on every rank alike.

NCCL matches the calls of the ranks by their order. torch.compile removes operators whose result is not used, merges
equal ones, moves them between forward and backward pass, and reorders them by the memory of the tensors around them,
which differs between ranks. Five properties of the operators prevent this:

    dead code elimination     the operators have a side effect                           `keep_calls`
    equal calls               the argument `call` is different for each call of a graph  `forward_call`
    partition of the passes   outputs are saved, in checkpoints too; calls of the
                              backward pass stay there                                   `_mark`
    reordering for locality   an operator returns a list, whose elements torch leaves
                              where they are (under no_grad)                             operators.py
    inductor's scheduler      an operator becomes inductor's own node of collectives,
                              which are chained                                          `lower_as_collective`
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from pynccl import Communicator
from pynccl.watch.frames import attribute_calls, called_from

from .state import state_of
from .torch_internals import (
    CheckpointMode,
    ProxyTorchDispatchMode,
    compiled_graph,
    has_side_effect,
    is_tracing,
    lower_as_collective,
    traced_line,
)


def keep_calls(name: str, definition: Any) -> None:
    """Make torch.compile keep every call of torch.ops.pynccl.<name>, in the order of the program.

    definition  what torch.library.custom_op returned"""
    has_side_effect(getattr(torch.ops.pynccl, name).default)
    definition.register_torch_dispatch(ProxyTorchDispatchMode, _trace)
    definition.register_torch_dispatch(CheckpointMode, _trace_in_checkpoint)


def _trace(mode: Any, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call of the operator, as torch does it, and mark its node in the graph."""
    lower_as_collective(operator)
    result = mode.__torch_dispatch__(operator, types, args, kwargs)
    node = next((node for node in reversed(mode.tracer.graph.nodes) if node.target is operator), None)
    if node is not None:  # None: torch traces an argument of another type first
        _mark(node)
    return result


def _trace_in_checkpoint(mode: Any, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Call the operator in a checkpoint. While torch.compile traces, the checkpoint must not mark it as recomputed."""
    return operator(*args, **kwargs) if is_tracing() else mode.__torch_dispatch__(operator, types, args, kwargs)


def _mark(node: Any) -> None:
    """Tell the partitioner of forward and backward pass that this node runs once, where the program runs it.

    Checkpoints too would recompute, on each rank, only what the rank's own backward pass needs."""
    if node.meta.get("partitioner_tag") == "is_backward":
        node.meta["partitioner_tag"] = "must_be_in_backward"
    else:
        for saved in (node, *node.users):  # the list, and its element
            saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE


# The argument `call` of an operator: "3 AllReduce.forward model.py:12", the third call on its communicator in a graph.
# Calls of the backward pass have negative numbers, and the line of their forward call. "" outside torch.compile.
_numbers: weakref.WeakKeyDictionary[Any, Counter[tuple[str, int]]] = weakref.WeakKeyDictionary()


@torch.compiler.assume_constant_result
def forward_call(key: str, name: str) -> str:
    """Return the argument `call` of the forward call that torch.compile is tracing."""
    return _next_call(key, name, traced_line(), 1)


def backward_call(key: str, name: str, call: str) -> str:
    """Return the argument `call` of a call in the backward pass of `call`."""
    return _next_call(key, name, call.split(" ", 2)[2], -1) if call else ""


def _next_call(key: str, name: str, line: str, sign: int) -> str:
    graph = compiled_graph()
    if graph is None:
        return ""
    numbers = _numbers.setdefault(graph, Counter())
    numbers[key, sign] += 1
    return f"{sign * numbers[key, sign]} {name} {line}"


def attribute_compiled(comm: Communicator, call: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the flight recorder and the comparison of PYNCCL_CHECK=1 know the calls as `call`."""
    if not call or not comm._is_recorded:
        return contextlib.nullcontext()
    number, name, line = call.split(" ", 2)
    order = _order(comm, int(number)) if comm.checking else ""
    if int(number) < 0:  # as in eager mode: the line is that of loss.backward()
        return attribute_calls(name, line, order)
    stack = contextlib.ExitStack()
    stack.enter_context(attribute_calls(name, "", order))
    stack.enter_context(called_from(line))
    return stack


class Seen(dict[bool, set[int]]):
    """Whether forward -> the numbers of the calls that the graph which runs on a communicator has made."""


def _order(comm: Communicator, number: int) -> str:
    """Return "" if the graph has run as many calls on comm as the program has before this one, else a text that the
    ranks compare: they may run their calls in another order, but all in the same.

    Graphs are not told apart: an exchange right after a graph with fewer calls is missed."""
    passes = state_of(comm, Seen)
    seen = passes.setdefault(number > 0, set())
    if number in seen:  # the graph, or another one, runs from its start
        seen = passes[number > 0] = set()
    seen.add(number)
    if abs(number) == len(seen):
        return ""
    return f", call {abs(number)} of the program, run as call {len(seen)} by torch.compile"
