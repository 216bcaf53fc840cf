"""Prepared collectives: validate once, launch many times.

    plan = comm.plan.all_reduce(send, recv)      # all checks; keeps a reference to the buffers
    plan()                                       # one C call
    step = comm.plan.group([plan_a, plan_b])     # one NCCL group
    plan(stream)                                 # on another stream

Plans are fast because their arguments are converted to C once (`from_param`) and stored in the tuple that ctypes
passes, so a launch converts nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from ..bindings.library import without_argtypes
from ..bindings.resource import Shared
from ..bindings.values import attribute, did_you_mean, ordered, shown
from ..interop.streams import stream_handle
from ..watch import layout
from ..watch.frames import user_site
from ..watch.track import Track
from . import collectives, collectives_v, rma
from .base import Comm, locked
from .call import Call, after_launch, issue
from .groups import enqueue_calls, recording, records, replay
from .observers import observers
from .redop import free_unused

Prepared = tuple[Callable[..., int], tuple[Any, ...]]  # C function without argtypes, its arguments as C values


class Plan(ABC):
    """A prepared operation or group of operations, made by `comm.plan`.

    plan()        launch it on the stream that was passed, or was current, when the plan was made
    plan(stream)  launch it on another stream
    plan.recv     the buffer that each launch fills; None for a group

    A launch skips all checks of the buffers. The plan keeps a reference to them; do not resize or free their memory
    while you use the plan. Inside a `pynccl.group` the plan is recorded like any other call. Raises NcclInvalidUsage
    once the communicator was destroyed or aborted.
    """

    calls: tuple[Call, ...]
    prepared: tuple[Prepared, ...]  # the same calls, converted to C
    recv: Any

    @abstractmethod
    def __call__(self, stream: Any = None) -> None:
        """Launch it.   stream: None: the stream of the plan"""


def _plan_one(call: Call) -> Plan:
    comm, checks, finish_launch, (function, args) = call.comm, call.comm.checking, after_launch([call]), _to_c(call)

    def plan(stream: Any = None) -> None:
        site = user_site() if comm._is_recorded else ""
        if stream is not None or records or observers or checks:
            enqueue_calls(_copies([call], stream, site))
            return
        issue(comm, call.operation, function, args, call.inputs, call.stream, call.compared, site, layout.PLAN)
        finish_launch()

    return _with_attributes(plan, (call,), ((function, args),))


def _plan_group(calls: tuple[Call, ...], prepared: tuple[Prepared, ...]) -> Plan:
    comms = list({id(call.comm): call.comm for call in calls}.values())
    checks, end = any(comm.checking for comm in comms), comms[0].library.ncclGroupEnd
    finish_launch = after_launch(calls)
    rows = [_row(track, [call for call in calls if call.comm is comm]) for comm in comms if (track := comm._track)]

    def enter(site: str) -> None:
        for track, stream, text, weight in rows:
            track.enter("group plan", (), stream, text, 0, site, weight, layout.PLAN)

    def plan(stream: Any = None) -> None:
        site = user_site() if rows or observers else ""
        if stream is not None or records or observers or checks:
            enqueue_calls(_copies(calls, stream, site))
            return
        with locked(comms):
            for comm in comms:
                comm.check_alive()
            replay(calls, comms, prepared, end, partial(enter, site))
        finish_launch()

    return _with_attributes(plan, calls, prepared)


def _row(track: Track, calls: Sequence[Call]) -> tuple[Track, int, str, int]:
    """Return the flight recorder entry of a group launch: (track, stream, text, weight) of one communicator's calls."""
    weight = sum(call.operation not in layout.MESSAGES for call in calls)
    return track, calls[0].stream, f"{len(calls)} calls: {_call_list(calls)}", weight


def _copies(calls: Iterable[Call], stream: Any, site: str) -> list[Call]:
    """Return copies of the calls with this source line and, unless it is None, this stream."""
    calls = [call._replace(site=site, flags=layout.PLAN) for call in calls]
    if stream is None:
        return calls
    handle = stream_handle(stream, "plan: stream")
    return [call._replace(stream=handle) for call in calls]


def _with_attributes(plan: Any, calls: tuple[Call, ...], prepared: tuple[Prepared, ...]) -> Plan:
    plan.calls, plan.prepared, plan.recv = calls, prepared, None
    plan.__qualname__ = (
        f"plan of {_call_list(calls)}" if len(calls) == 1 else f"group plan of {len(calls)}: {_call_list(calls)}"
    )
    typed: Plan = plan
    return typed


def _call_list(calls: Sequence[Call]) -> str:
    return ", ".join(call.text() for call in calls[:4]) + (", ..." if len(calls) > 4 else "")


P = ParamSpec("P")


def _preparing(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Planner, P], Plan]:
    """For type checkers: a method with the same arguments that returns a plan."""
    raise NotImplementedError


class Planner(Shared):
    """`comm.plan`: the operations of the communicator, with the same arguments; each returns a `Plan` and launches
    nothing."""

    if TYPE_CHECKING:
        all_reduce = _preparing(collectives.all_reduce)
        broadcast = _preparing(collectives.broadcast)
        reduce = _preparing(collectives.reduce)
        all_gather = _preparing(collectives.all_gather)
        reduce_scatter = _preparing(collectives.reduce_scatter)
        all_to_all = _preparing(collectives.all_to_all)
        gather = _preparing(collectives.gather)
        scatter = _preparing(collectives.scatter)
        send = _preparing(collectives.send)
        recv = _preparing(collectives.recv)
        all_to_all_v = _preparing(collectives_v.all_to_all_v)
        all_gather_v = _preparing(collectives_v.all_gather_v)
        reduce_scatter_v = _preparing(collectives_v.reduce_scatter_v)
        gather_v = _preparing(collectives_v.gather_v)
        scatter_v = _preparing(collectives_v.scatter_v)
        put_signal = _preparing(rma.put_signal)
        signal = _preparing(rma.signal)
        wait_signal = _preparing(rma.wait_signal)

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __getattr__(self, operation: str) -> Callable[..., Plan]:
        # Only these names: to record a method means to run it, and comm.plan.destroy() would destroy the communicator.
        if operation not in _OPERATIONS:
            hint = did_you_mean(operation, _OPERATIONS) or "use all_reduce, send, ..."
            raise AttributeError(f"comm.plan has no operation {operation!r}; {hint}", name=operation, obj=None)
        return partial(_record, getattr(self._comm, operation))

    def __dir__(self) -> list[str]:
        return [*_OPERATIONS, "group"]

    def group(self, plans: Iterable[Plan]) -> Plan:
        """Combine plans into one plan that launches them as one NCCL group. They can be of several communicators.

        Raises TypeError if an element is not a plan, ValueError if the list is empty."""
        plans = tuple(ordered(plans, "plan.group: plans", "a list of plans, as comm.plan.all_reduce(...) returns"))
        for plan in plans:
            if attribute(plan, "prepared") is None:
                raise TypeError(f"plan.group: {shown(plan)} is not a plan; pass plans, as of comm.plan.all_reduce(...)")
        if not plans:
            raise ValueError("plan.group: plans is empty, expected at least one")
        calls = tuple(call for plan in plans for call in plan.calls)
        return _plan_group(calls, tuple(prepared for plan in plans for prepared in plan.prepared))


_OPERATIONS = {
    name
    for module in (collectives, collectives_v, rma)
    for name, function in vars(module).items()
    if getattr(function, "__module__", "") == module.__name__ and not name.startswith("_")
}


def _record(method: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    """Run the method in a group that is never launched, and make a plan of the calls that it recorded."""
    with recording() as record:
        recv = method(*args, **options)
    calls = record.calls
    for comm in {id(call.comm): call.comm for call in calls}.values():
        free_unused(comm)  # operators of deleted plans
    if len(calls) == 1:
        plan = _plan_one(calls[0])
    else:  # a library that lacks the function: a group of sends and receives
        plan = _plan_group(tuple(calls), tuple(map(_to_c, calls)))
    plan.recv = recv
    return plan


def _to_c(call: Call) -> Prepared:
    """Convert the arguments of a call to C values."""
    function: Any = call.function
    types, args = function.argtypes, call.args
    values = [ctype.from_param(value) for ctype, value in zip(types, args, strict=False)]
    return without_argtypes(function), (*values, *args[len(types) :])
