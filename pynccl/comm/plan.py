"""Prepared collectives: validate once, launch many times.

    plan = comm.plan.all_reduce(send, recv)      # all the checks, buffers held
    plan()                                       # one C call
    step = comm.plan.group([plan_a, plan_b])     # one NCCL group
    plan(stream)                                 # the same on another stream

What makes a plan fast: its arguments are converted to C once (`from_param`), so a launch does no conversion at all, and
they lie in a tuple, which ctypes takes as it is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol

from ..bindings.abi import Result
from ..bindings.library import without_argtypes
from ..bindings.resource import Shared
from ..bindings.values import attribute, listed, shown
from ..interop.buffers import TORCH, tensor_types
from ..interop.streams import Handle, hold, stream_handle
from ..watch.frames import call_site
from ..watch.rows import weight_of
from ..watch.track import Track
from .base import Comm, check_group_result
from .call import Call, call_text
from .collectives import Collectives
from .collectives_v import CollectivesV
from .groups import launch, leave, recorder, recording
from .redop import free_unused
from .rma import Rma

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


# Both are closures and not classes: a call of a Python object with __call__ costs a tenth of the C call more.


def _plan_one(call: Call) -> Plan:
    comm, prepared = call.comm, _prepare(call)
    function, args = prepared
    track, row = comm._track, _row_of((call,), comm._track)
    record = track.add if track is not None else None
    if track is not None and (track.careful or not row):
        function, record = track.around(function, call.operation, call.inputs, call.stream, row), None
    lock, alive, detours = comm.lock, comm._alive, comm._detours
    count_change, written, held = TORCH.count_change, _written((call,)), _held((call,))

    def plan(stream: Any = None) -> None:
        if stream is not None or detours:
            _launch_with_care([call], stream)
            return
        with lock:
            if not alive:
                comm.check_alive()
            if record is not None:
                record(row)
            code = function(*args)
        if code:
            comm._check_result(code, call_text(call.operation, call.inputs))
        if written:
            count_change(written)
        if held:
            _hold(held)

    return _finish(plan, (call,), (prepared,), [(track, row)])


def _plan_group(calls: tuple[Call, ...], prepared: tuple[Prepared, ...]) -> Plan:
    unique = {id(call.comm): call.comm for call in calls}
    comms = [unique[key] for key in sorted(unique)]  # the order in which `groups.launch` takes locks
    first = comms[0]
    start, end = first.library.ncclGroupStart, first.library.ncclGroupEnd
    detours = next((comm._detours for comm in comms if comm.checking), first._detours)
    count_change, written, held = TORCH.count_change, _written(calls), _held(calls)
    rows = [
        (comm._track, _row_of([call for call in calls if call.comm is comm], comm._track))
        for comm in comms
        if comm._track is not None
    ]
    described = [(track, row) for track, row in rows if row and not track.careful]
    slow = [(track, row) for track, row in rows if not row or track.careful]

    def launch_all() -> None:
        for comm in comms:
            comm.check_alive()
        for track, row in described:
            track.add(row)
        slots = [(track, track.enter("group plan", row=row)) for track, row in slow]
        first.library.check(start(), "ncclGroupStart")
        try:
            for function, args in prepared:
                if (code := function(*args)) and code != Result.IN_PROGRESS:
                    raise first.library.error(code, repr(plan), first._handle)
        except BaseException as error:  # Ctrl-C too: the group must not stay open
            end()
            leave(slots, error)
            raise
        code = end()
        leave(slots)
        if code:
            check_group_result(comms, code, repr(plan))
        if written:
            count_change(written)
        if held:
            _hold(held)

    def plan(stream: Any = None) -> None:
        if stream is not None or detours:
            _launch_with_care(list(calls), stream)
        elif len(comms) == 1:
            with first.lock:
                launch_all()
        else:
            with contextlib.ExitStack() as locks:
                for comm in comms:
                    comm.lock.acquire()
                    locks.callback(comm.lock.release)
                launch_all()

    return _finish(plan, calls, prepared, rows)


def _row_of(calls: Sequence[Call], track: Track | None) -> int:
    """The row that describes a launch of these calls, all of one communicator, in the flight recorder; 0: none."""
    if track is None:
        return 0
    if len(calls) == 1:
        (call,) = calls
        return track.rows.describe(
            call.operation, call.inputs, call.stream, detail=call.compared, site=call_site(), plan=True
        )
    texts = ", ".join(call.text() for call in calls[:4]) + (", ..." if len(calls) > 4 else "")
    detail = f"{len(calls)} calls: {texts}"
    weight = sum(weight_of(call.operation) for call in calls)
    return track.rows.describe(
        "group plan", (), calls[0].stream, weight=weight, detail=detail, site=call_site(), plan=True
    )


def _finish(
    plan: Any,
    calls: tuple[Call, ...],
    prepared: tuple[Prepared, ...],
    rows: list[tuple[Any, int]],
) -> Plan:
    texts = ", ".join(call.text() for call in calls[:4]) + (", ..." if len(calls) > 4 else "")
    plan.calls, plan.prepared, plan.recv = calls, prepared, None
    plan.__qualname__ = f"plan of {texts}" if len(calls) == 1 else f"group plan of {len(calls)}: {texts}"
    for track, row in rows:
        if row:
            weakref.finalize(plan, track.rows.give_back, row).atexit = False
    finished: Plan = plan
    return finished


def _written(calls: Iterable[Call]) -> tuple[Any, ...]:
    """The torch tensors that a launch of these calls writes to: one count of versions for all of them."""
    return tuple({id(x): x for call in calls if type(x := call.recv) in tensor_types}.values())


def _held(calls: Iterable[Call]) -> list[Call]:
    """Those whose stream has to keep something."""
    return [call for call in calls if call.stream or type(call.stream) is Handle]


def _hold(calls: list[Call]) -> None:
    for call in calls:
        hold(call.stream, call.comm.library, call.keep)


P = ParamSpec("P")


def _preparing(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Planner, P], Plan]:
    """For type checkers: a method with the arguments of that one, which returns a plan."""
    raise NotImplementedError


class Planner(Shared):
    """`comm.plan`: each operation of the communicator under its own name, returning a Plan instead of launching."""

    if TYPE_CHECKING:
        all_reduce = _preparing(Collectives.all_reduce)
        broadcast = _preparing(Collectives.broadcast)
        reduce = _preparing(Collectives.reduce)
        all_gather = _preparing(Collectives.all_gather)
        reduce_scatter = _preparing(Collectives.reduce_scatter)
        all_to_all = _preparing(Collectives.all_to_all)
        gather = _preparing(Collectives.gather)
        scatter = _preparing(Collectives.scatter)
        send = _preparing(Collectives.send)
        recv = _preparing(Collectives.recv)
        all_to_all_v = _preparing(CollectivesV.all_to_all_v)
        all_gather_v = _preparing(CollectivesV.all_gather_v)
        reduce_scatter_v = _preparing(CollectivesV.reduce_scatter_v)
        gather_v = _preparing(CollectivesV.gather_v)
        scatter_v = _preparing(CollectivesV.scatter_v)
        put_signal = _preparing(Rma.put_signal)
        signal = _preparing(Rma.signal)
        wait_signal = _preparing(Rma.wait_signal)

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __getattr__(self, operation: str) -> Callable[..., Plan]:
        # By name, since to record a call means to make it: a destroy() would be the end of the communicator.
        if operation.startswith("_") or not any(operation in vars(kind) for kind in (Collectives, CollectivesV, Rma)):
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


def _launch_with_care(calls: list[Call], stream: Any) -> None:
    """Launch by the general way: on another stream, into an open group, or compared across ranks first."""
    if stream is not None:
        handle = stream_handle(stream)
        calls = [call._replace(stream=handle) for call in calls]
    record = recorder()
    if record is not None:
        record.calls += calls
    else:
        launch(calls)


def _prepare(call: Call) -> Prepared:
    function: Any = call.function
    types, args = function.argtypes, call.args
    values = [ctype.from_param(value) for ctype, value in zip(types, args, strict=False)]
    return without_argtypes(function), (*values, *args[len(types) :])
