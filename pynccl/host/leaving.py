"""The end of the process: nothing of the host library may keep the interpreter from exiting, or crash it.

A thread that is inside gloo or a store while the interpreter is torn down is killed in the middle of C++ code, which is
std::terminate. So queued work is dropped, and what is under way is woken by closing its connections: as with a GPU, a
process that exits without synchronizing loses the work it has queued.
"""

from __future__ import annotations

import atexit

from . import birth, comm, farewell, puts, stall, stream
from .failure import exiting, invalid_usage

_JOIN_SECONDS = 2.0
_FAREWELL_SECONDS = 0.5


@atexit.register
def _leave() -> None:
    exiting.set()
    workers = stream.drop_queued_work()
    for communicator in comm.living():
        if not communicator.idle:
            communicator.fail(invalid_usage("the process exits with this operation under way"))
    for worker in workers:
        worker.join(_JOIN_SECONDS)
    stall.stop(_JOIN_SECONDS)
    birth.give_up(_JOIN_SECONDS)
    for communicator in comm.living():
        if communicator.idle:
            communicator.destroy()
    farewell.finish(_FAREWELL_SECONDS)
    puts.give_up(_JOIN_SECONDS)
