"""Prepared collectives: validate once, launch many times.

    plan = comm.plan.all_reduce(send, recv)      # all the checks, buffers held
    plan()                                       # one C call
    step = comm.plan.group([plan_a, plan_b])     # one NCCL group
    plan(stream)                                 # the same on another stream

What makes a plan fast: its arguments are converted to C once (`from_param`), so a launch does no conversion at all, and
they lie in a tuple, which ctypes takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol

from ..bindings.library import without_argtypes
from ..bindings.resource import Shared
from ..bindings.values import attribute, listed, shown
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

Prepared = tuple[Callable[..., int], tuple[Any, ...]]  # C function without argtypes, its arguments as finished C values


class Plan(Protocol):
    """A prepared call, or group of calls. Holds its buffers: they must keep their memory for as long as it is used.

    plan()        launch on the stream that was given or current when the plan was made
    plan(stream)  launch on another one
    Inside a `pynccl.group` it is recorded like any other call. NcclInvalidUsage once the communicator has ended.
    """

    calls: tuple[Call, ...]
    prepared: tuple[Prepared, ...]  # the same calls
    recv: Any  # what the call returns: the buffer that each launch fills; None for a group

    def __call__(self, stream: Any = None) -> None: ...


def _plan_one(call: Call) -> Plan:
    comm, checks, tell, (function, args) = call.comm, call.comm.checking, after_launch([call]), _prepare(call)

    def plan(stream: Any = None) -> None:
        site = user_site() if comm.recorded else ""
        if stream is not None or records or observers or checks:
            enqueue_calls(_again([call], stream, site))
            return
        issue(comm, call.operation, function, args, call.inputs, call.stream, call.compared, site, layout.PLAN)
        tell()

    return _finish(plan, (call,), ((function, args),))


def _plan_group(calls: tuple[Call, ...], prepared: tuple[Prepared, ...]) -> Plan:
    comms = list({id(call.comm): call.comm for call in calls}.values())
    checks, end = any(comm.checking for comm in comms), comms[0].library.ncclGroupEnd
    tell = after_launch(calls)
    rows = [_row(track, [call for call in calls if call.comm is comm]) for comm in comms if (track := comm._track)]

    def enter(site: str) -> None:
        for track, stream, text, weight in rows:
            track.enter("group plan", (), stream, text, 0, site, weight, layout.PLAN)

    def plan(stream: Any = None) -> None:
        site = user_site() if rows or observers else ""
        if stream is not None or records or observers or checks:
            enqueue_calls(_again(calls, stream, site))
            return
        with locked(comms):
            for comm in comms:
                comm.check_alive()
            replay(calls, comms, prepared, end, partial(enter, site))
        tell()

    return _finish(plan, calls, prepared)


def _row(track: Track, calls: Sequence[Call]) -> tuple[Track, int, str, int]:
    """What a launch of these calls, all those of one communicator in a group, is in its record."""
    weight = sum(call.operation not in layout.UNNUMBERED for call in calls)
    return track, calls[0].stream, f"{len(calls)} calls: {_names(calls)}", weight


def _again(calls: Iterable[Call], stream: Any, site: str) -> list[Call]:
    """The calls, launched from this line, on this stream if there is one."""
    calls = [call._replace(site=site, flags=layout.PLAN) for call in calls]
    if stream is None:
        return calls
    handle = stream_handle(stream)
    return [call._replace(stream=handle) for call in calls]


def _finish(plan: Any, calls: tuple[Call, ...], prepared: tuple[Prepared, ...]) -> Plan:
    plan.calls, plan.prepared, plan.recv = calls, prepared, None
    plan.__qualname__ = (
        f"plan of {_names(calls)}" if len(calls) == 1 else f"group plan of {len(calls)}: {_names(calls)}"
    )
    finished: Plan = plan
    return finished


def _names(calls: Sequence[Call]) -> str:
    return ", ".join(call.text() for call in calls[:4]) + (", ..." if len(calls) > 4 else "")


P = ParamSpec("P")


def _preparing(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Planner, P], Plan]:
    """For type checkers: a method with the arguments of that one, which returns a plan."""
    raise NotImplementedError


class Planner(Shared):
    """`comm.plan`: each operation of the communicator under its own name, returning a Plan instead of launching."""

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
        # By name, since to record a call means to make it: a destroy() would be the end of the communicator.
        if operation not in _OPERATIONS:
            raise AttributeError(f"{operation!r} is no operation of a communicator that can be prepared")
        return partial(_record, getattr(self._comm, operation))

    def group(self, plans: Iterable[Plan]) -> Plan:
        """The given plans as one NCCL group; they may belong to several communicators."""
        plans = tuple(listed(plans, "plan.group: plans", "a list of what comm.plan.all_reduce(...) returns"))
        for plan in plans:
            if attribute(plan, "prepared") is None:
                raise TypeError(f"plan.group: {shown(plan)} is no plan; pass what comm.plan.all_reduce(...) returns")
        if not plans:
            raise ValueError("plan.group: no plans were passed; expected at least one")
        calls = tuple(call for plan in plans for call in plan.calls)
        return _plan_group(calls, tuple(prepared for plan in plans for prepared in plan.prepared))


_OPERATIONS = {
    name
    for module in (collectives, collectives_v, rma)
    for name, function in vars(module).items()
    if getattr(function, "__module__", "") == module.__name__ and not name.startswith("_")
}


def _record(method: Callable[..., Any], *args: Any, **options: Any) -> Plan:
    """Run the method in a group that is not launched, and keep the calls that it recorded."""
    with recording() as record:
        recv = method(*args, **options)
    calls = record.calls
    for comm in {id(call.comm): call.comm for call in calls}.values():
        free_unused(comm)  # of plans that have gone
    if len(calls) == 1:
        plan = _plan_one(calls[0])
    else:  # where a library lacks the function
        plan = _plan_group(tuple(calls), tuple(map(_prepare, calls)))
    plan.recv = recv
    return plan


def _prepare(call: Call) -> Prepared:
    function: Any = call.function
    types, args = function.argtypes, call.args
    values = [ctype.from_param(value) for ctype, value in zip(types, args, strict=False)]
    return without_argtypes(function), (*values, *args[len(types) :])
