"""Estimate the run time of calls with NCCL's own cost model.

Each simulation runs on temporary communicators: after ncclGroupSimulateEnd, NCCL 2.22 to 2.28 keeps the work lists of
the simulated calls, which would break the next collective of that communicator.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator
from functools import partial

from ..bindings.abi import SIM_INFO_MAGIC, UNDEF_FLOAT, SimInfo
from ..bindings.errors import NcclInvalidUsage
from ..bindings.structs import CommConfig, stamped
from ..watch.layout import MESSAGES
from . import consistency
from .base import Comm, locked
from .call import Call
from .communicator import Communicator
from .groups import enter, recording, replay
from .init import comm_split_all
from .redop import OpHandle, PreMulSum

_ONE_SIDED = ("put_signal", "signal", "wait_signal")


class Simulation:
    """Result of `simulate`.

    estimated_time  estimate of NCCL's cost model in microseconds, set at the end of the block; nan: no estimate
    """

    estimated_time: float = 0.0


@contextlib.contextmanager
def simulate() -> Iterator[Simulation]:
    """Estimate the run time of the calls in the block with NCCL's cost model, without launching them (NCCL >= 2.22).

        with pynccl.simulate() as simulation:
            comm.all_reduce(x, x)
        print(simulation.estimated_time)  # microseconds

    Collective: every rank of each communicator in the block must call it. It runs on temporary communicators and takes
    about as long as a split. Raises NcclTimeout if a rank does not take part, and with PYNCCL_CHECK=1 NcclInvalidUsage
    if ranks simulate different calls.

    Simulate one collective at a time: NCCL (2.28) reports the time of a single one. It has no estimate (nan) for sends
    and receives alone. The estimate is for unregistered buffers; with one rank it is 0.

    Raises NcclInvalidUsage for nonblocking communicators (NCCL would launch the calls), for communicators that share
    resources with their children (split_share), and for one-sided calls.
    """
    simulation = Simulation()
    with recording() as record:
        yield simulation
    if record.calls:
        simulation.estimated_time = _estimate(record.calls)


def _estimate(calls: list[Call]) -> float:
    library = calls[0].comm.library
    end = library.ncclGroupSimulateEnd  # raises first if the library is too old
    comms = list(dict.fromkeys(call.comm for call in calls))  # in the order of the calls, equal on all ranks
    for call in calls:
        _check_call(call)
    comms = [comm for comm in comms if comm.size > 1]  # with one rank NCCL would run the calls immediately
    if not comms:
        return 0.0
    consistency.check_not_capturing(
        library, "simulate()", "Simulate before the capture", {call.stream for call in calls}
    )
    _compare(comms, calls)
    info = stamped(SimInfo, library, magic=SIM_INFO_MAGIC)
    info.estimatedTime = UNDEF_FLOAT
    with contextlib.ExitStack() as stack:
        children = {comm: stack.enter_context(child) for comm, child in _children(comms).items()}
        copies = [_on_child(children[call.comm], call, stack) for call in calls if call.comm in children]
        prepared = [(call.function, call.args) for call in copies]
        replay(copies, list(children.values()), prepared, partial(end, ctypes.byref(info)), partial(enter, copies))
    time: float = info.estimatedTime
    return time if time >= 0 else math.nan


def _check_call(call: Call) -> None:
    """NcclInvalidUsage for a call that cannot be simulated."""
    comm = call.comm
    comm.check_alive()
    if call.operation in _ONE_SIDED:
        raise NcclInvalidUsage(
            f"simulate: {call.operation} is one-sided, for which NCCL has no estimate; remove the call"
        )
    config = comm._config or CommConfig()
    if _setting("NCCL_COMM_BLOCKING", config.blocking) is False:
        raise NcclInvalidUsage(
            f"simulate: {comm!r} is nonblocking, so NCCL would launch the calls; use a communicator of the same ranks "
            "made with blocking=True"
        )
    if _setting("NCCL_COMM_SPLIT_SHARE_RESOURCES", config.split_share):
        raise NcclInvalidUsage(
            f"simulate: {comm!r} shares its resources with its children, so simulating on a child would corrupt its "
            "connections; use a communicator of the same ranks made without split_share"
        )


def _setting(variable: str, configured: bool | None) -> bool | None:
    """Return a switch as NCCL sees it: the variable (which NCCL may have set from nccl.conf) overrides the config."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    value = getenv(variable.encode())
    return value == b"1" if value in (b"0", b"1") else configured


def _compare(comms: list[Comm], calls: list[Call]) -> None:
    """With PYNCCL_CHECK=1, check that all ranks simulate the same calls."""
    texts = {}
    for comm in comms:
        if comm.checking:
            own = [call.text() for call in calls if call.comm is comm and call.operation not in MESSAGES]
            texts[comm] = f"simulate({'; '.join(own)})"
    consistency.compare_texts(texts)


def _children(comms: list[Comm]) -> dict[Comm, Communicator]:
    """Return, for each communicator, a temporary one of the same ranks, to be used as a context manager."""
    library, timeout = comms[0].library, comms[0].timeout
    configs = [(comm._config or CommConfig())._replace(blocking=True) for comm in comms]
    with locked(comms):
        handles = comm_split_all(library, comms, configs, timeout)
    return {
        comm: Communicator(handle, library, comm.timeout, config, comm._child(None, "simulate", 0))
        for comm, handle, config in zip(comms, handles, configs, strict=True)
    }


def _on_child(child: Communicator, call: Call, stack: contextlib.ExitStack) -> Call:
    """Return the same call on another communicator."""
    inputs, operator = call.inputs, call.keep[2]
    if isinstance(operator, OpHandle):  # an operator is valid on its own communicator only
        copy = stack.enter_context(PreMulSum(child, operator.scalar, None))
        inputs = (*inputs[:4], copy.code, *inputs[5:])
    return call._replace(comm=child, inputs=inputs)
