"""What calls would cost, by NCCL's own cost model.

NCCL is asked on communicators that are made for it and thrown away: after ncclGroupSimulateEnd it keeps the work lists
of the simulated calls, which the next collective of that communicator would run into (2.22 to 2.28).
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
from ..watch.layout import UNNUMBERED
from . import consistency
from .base import Comm, locked
from .call import Call
from .communicator import Communicator
from .groups import enter, recording, replay
from .init import comm_split_all
from .redop import OpHandle, PreMulSum

_ONE_SIDED = ("put_signal", "signal", "wait_signal")


class Simulation:
    """What `simulate` found out."""

    estimated_time: float = 0.0  # by NCCL's cost model, in its unit: microseconds; nan where it has no estimate


@contextlib.contextmanager
def simulate() -> Iterator[Simulation]:
    """Like `group`, but nothing is launched: NCCL estimates the time that the calls would take (NCCL >= 2.22).

    with pynccl.simulate() as estimate: comm.all_reduce(x, x)
    print(estimate.estimated_time)

    A collective call: every rank of each communicator in the block makes it, since NCCL is asked on new communicators,
    which takes as long as a split. Where a rank does not come that is an NcclTimeout, and with PYNCCL_CHECK=1 an error
    where ranks simulate different calls. The estimate is for buffers that are not registered. On one rank it is 0. NCCL
    (2.28) reports that of a single collective, so ask for one at a time, and none (nan) for sends and receives alone.

    NcclInvalidUsage for nonblocking communicators, on which NCCL would launch the calls, for those that share resources
    with their children (split_share), and for one-sided calls.
    """
    found = Simulation()
    with recording() as record:
        yield found
    if record.calls:
        found.estimated_time = _estimate(record.calls)


def _estimate(calls: list[Call]) -> float:
    library = calls[0].comm.library
    end = library.ncclGroupSimulateEnd  # what an old library lacks has to be found out before anything is done
    comms = list(dict.fromkeys(call.comm for call in calls))  # as every rank has them
    for call in calls:
        _refuse(call)
    comms = [comm for comm in comms if comm.size > 1]  # NCCL runs the calls of a single rank at once
    if not comms:
        return 0.0
    consistency.refuse_capture(library, "simulate()", "Simulate before the capture", {call.stream for call in calls})
    _compare(comms, calls)
    info = stamped(SimInfo, library, magic=SIM_INFO_MAGIC)
    info.estimatedTime = UNDEF_FLOAT
    with contextlib.ExitStack() as made:
        children = {comm: made.enter_context(child) for comm, child in _children(comms).items()}
        again = [_on(children[call.comm], call, made) for call in calls if call.comm in children]
        prepared = [(call.function, call.args) for call in again]
        replay(again, list(children.values()), prepared, partial(end, ctypes.byref(info)), partial(enter, again))
    time: float = info.estimatedTime
    return time if time >= 0 else math.nan


def _refuse(call: Call) -> None:
    comm = call.comm
    comm.check_alive()
    if call.operation in _ONE_SIDED:
        raise NcclInvalidUsage(
            f"simulate: {call.operation} is one-sided, and NCCL has no estimate for it; leave it out"
        )
    config = comm._config or CommConfig()
    if _setting("NCCL_COMM_BLOCKING", config.blocking) is False:
        raise NcclInvalidUsage(
            f"simulate: {comm!r} is nonblocking, and NCCL would launch the calls; use a communicator of the same ranks "
            "that was made with blocking=True"
        )
    if _setting("NCCL_COMM_SPLIT_SHARE_RESOURCES", config.split_share):
        raise NcclInvalidUsage(
            f"simulate: {comm!r} shares its resources with its children, and a simulation on a child would spoil its "
            "connections; use a communicator of the same ranks that was made without split_share"
        )


def _setting(variable: str, configured: bool | None) -> bool | None:
    """A switch as NCCL has it: the variable goes over the configuration, also one that NCCL has from nccl.conf."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    value = getenv(variable.encode())
    return value == b"1" if value in (b"0", b"1") else configured


def _compare(comms: list[Comm], calls: list[Call]) -> None:
    """With PYNCCL_CHECK=1: that every rank simulates, and what."""
    texts = {}
    for comm in comms:
        if comm.checking:
            own = [call.text() for call in calls if call.comm is comm and call.operation not in UNNUMBERED]
            texts[comm] = f"simulate({'; '.join(own)})"
    consistency.compare_texts(texts)


def _children(comms: list[Comm]) -> dict[Comm, Communicator]:
    """For each a communicator of the same ranks: destroyed on a clean exit, aborted on another."""
    library, timeout = comms[0].library, comms[0].timeout
    configs = [(comm._config or CommConfig())._replace(blocking=True) for comm in comms]
    with locked(comms):
        handles = comm_split_all(library, comms, configs, timeout)
    return {
        comm: Communicator(handle, library, comm.timeout, config, comm._child(None, "simulate", 0))
        for comm, handle, config in zip(comms, handles, configs, strict=True)
    }


def _on(child: Communicator, call: Call, made: contextlib.ExitStack) -> Call:
    """The same call of another communicator."""
    inputs, operator = call.inputs, call.keep[2]
    if isinstance(operator, OpHandle):  # its number is one of its own communicator
        again = made.enter_context(PreMulSum(child, operator.scalar, None))
        inputs = (*inputs[:4], again.code, *inputs[5:])
    return call._replace(comm=child, inputs=inputs)
