"""The end of the process: nothing of the host library may keep the interpreter from exiting, or crash it.

A worker that is inside gloo while the interpreter is torn down would be killed in the middle of C++ code, which ends in
std::terminate. So queued work is dropped, and what is under way is woken by closing its connections: as with a GPU, a
process that exits without synchronizing loses the work it has queued.
"""

from __future__ import annotations

import atexit

from . import comm, farewell, stream
from .failure import invalid_usage

_JOIN_SECONDS = 2.0
_FAREWELL_SECONDS = 0.5


@atexit.register
def _leave() -> None:
    workers = stream.drop_queued_work()
    for communicator in comm.living():
        if not communicator.idle:
            communicator.fail(invalid_usage("the process exits with this operation under way"))
    for worker in workers:
        worker.join(_JOIN_SECONDS)
    for communicator in comm.living():
        if communicator.idle:
            communicator.destroy()
    farewell.finish(_FAREWELL_SECONDS)
