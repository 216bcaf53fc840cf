"""Process exit and fork: the host library must neither block interpreter exit nor crash it.

Interpreter shutdown kills a thread that is inside torch in the middle of C++ code, which calls std::terminate. So exit
drops queued work, and closes connections to wake running operations; bindings/workers.py waits for them. As on a GPU, a
process that exits without synchronizing loses its queued work.
"""

from __future__ import annotations

import atexit
import os

from . import alarm, comm, mailbox, rendezvous, rma, stream
from .failure import exiting, invalid_usage


@atexit.register
def _at_exit() -> None:
    exiting.set()
    for communicator in comm.all_communicators():
        if not communicator.idle:
            notice = communicator.failure_notice("its process exited while an operation was running")
            communicator.fail(invalid_usage("the process exited while this operation was running"), notice)
            communicator.rma.close()
    for communicator in reversed(comm.all_communicators()):  # those without sockets use those of others, made before
        if communicator.idle:
            communicator.destroy()
    rma.join_threads()
    rendezvous.close()


def _after_fork_in_child() -> None:
    """Close the copies of connections and of the store, which belong to the parent."""
    alarm.after_fork()
    comm.after_fork()
    mailbox.after_fork()
    rendezvous.close()
    stream.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
