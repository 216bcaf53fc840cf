"""The end of the process, and forks: nothing of the host library may keep the interpreter from exiting, or crash it.

A thread that is inside torch while the interpreter is torn down is killed in the middle of C++ code, which is
std::terminate. So queued work is dropped, and what is under way is woken by closing its connections: as with a GPU, a
process that exits without synchronizing loses the work it has queued.
"""

from __future__ import annotations

import atexit
import os

from . import comm, init, rendezvous, rma, stream
from .failure import exiting, invalid_usage

_JOIN_SECONDS = 2.0
_PEERS_SECONDS = 0.5


@atexit.register
def _at_exit() -> None:
    exiting.set()
    workers = stream.drop_queued_work()
    for communicator in comm.all_of_process():
        if not communicator.idle:
            reason = communicator.because("its process exits with an operation under way")
            communicator.fail(invalid_usage("the process exits with this operation under way"), reason)
            communicator.rma.close()  # its threads have nothing more to send
    for worker in workers:
        worker.join(_JOIN_SECONDS)
    init.join_waiting(_JOIN_SECONDS)
    for communicator in comm.all_of_process():
        if communicator.idle:
            communicator.destroy()
    rma.join_threads(_PEERS_SECONDS, _JOIN_SECONDS)
    rendezvous.close()


def _after_fork_in_child() -> None:
    """Connections, threads and the store belong to the parent: close the copies of what it goes on using."""
    comm.after_fork()
    rendezvous.close()
    stream.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
