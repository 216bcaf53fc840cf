"""send and recv: each pair of ranks and direction has its own communicator and thread.

Calls on one communicator match in order, but programs call isend on every rank first, then irecv, then wait. So each
direction has a separate communicator, made with the first message. On the CPU a header with tag and size precedes each
message; messages with another tag are buffered until they are received. NCCL has no tags: on CUDA, messages match in
order.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..bindings.errors import NcclError, NcclInvalidUsage, NcclTimeout, Outcome, with_outcome
from ..bindings.library import host_module
from ..bindings.workers import WorkerCall
from ..comm.communicator import Communicator
from ..watch import frames
from .tensors import source, target
from .work import Call, Lane, Work

_POLL_SECONDS = 0.2


class Channel:
    """Messages of a group from one rank to another; this process is one of them.

    sender, receiver  their global ranks
    connect()  make the communicator, in which the sender is rank 0 and the receiver rank 1
    check()    raise if the group has failed, since the peer may then be dead"""

    def __init__(
        self, sends: bool, sender: int, receiver: int, connect: Callable[[], Communicator], check: Callable[[], None]
    ) -> None:
        self.sends, self.peer = sends, receiver if sends else sender
        self._route = f"rank {sender} to rank {receiver}"
        self._connect, self._check_peer = connect, check
        self.lane: Lane | None = None
        self._error: BaseException | None = None
        self._early: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)  # by tag: received before its recv
        self._queue, self._closed = host_module().HostStream(), threading.Event()

    def post(self, x: torch.Tensor, tag: int) -> Work:
        """Send x or receive into it. Returns immediately."""
        if x.is_cuda and self.lane is not None and self._queue.query():  # connected, and nothing is before it
            return self._issue(self.lane, x)
        work = Work(None, [x]).begin(self._queue.handle)
        site = frames.user_site()
        before = None if not x.is_cuda else torch.cuda.current_stream(x.device).record_event()

        def run() -> None:
            with frames.called_from(site, self._queue.handle):
                try:
                    self._run(work, x, tag, before, site)
                except BaseException as error:
                    work.complete(error)
                else:
                    work.complete()

        self._queue.submit(run)
        return work

    def _run(self, work: Work, x: torch.Tensor, tag: int, before: Any, site: str) -> None:
        """Run a posted send or recv, in this channel's thread."""
        if self._error is not None:
            raise self._error
        if self.lane is None:
            try:
                self.lane = Lane(self._connected(site))
            except BaseException as error:  # the ranks cannot rendezvous there again
                self._error = error
                raise
        if before is not None:
            self._on_cuda(self.lane, work, x, before)
        elif self.sends:
            data = source(x)
            head = torch.tensor([tag, data.numel() * data.element_size()])
            self.lane.comm.send(head, 1)
            self.lane.comm.send(data, 1)
        else:
            self._receive(self.lane.comm, x, tag)

    def _connected(self, site: str) -> Communicator:
        def connect() -> Communicator:
            with frames.called_from(site, self._queue.handle):
                return self._connect()

        begun = WorkerCall(connect, "first message")
        while not begun.done.wait(_POLL_SECONDS):
            self._check_peer()
        try:
            return begun.result(0, NcclTimeout)
        except NcclTimeout as error:
            verb, other = ("send", "recv") if self.sends else ("recv", "send")
            text = f"{verb}: rank {self.peer} never called {other}, so no message passed from {self._route}"
            raise NcclTimeout(f"{text}\n  {error}") from None

    def _receive(self, comm: Communicator, x: torch.Tensor, tag: int) -> None:
        copies: list[Any] = []
        buffer = target(x, copies)
        expected = buffer.numel() * buffer.element_size()
        while not self._early[tag]:
            head = torch.empty(2, dtype=torch.int64)
            comm.recv(head, 0)
            found, nbytes = head.tolist()
            if found == tag and nbytes == expected:
                comm.recv(buffer, 0)
                break
            message = torch.empty(nbytes, dtype=torch.uint8)
            comm.recv(message, 0)
            self._early[found].append(message)
        else:
            message = self._early[tag].popleft()
            if message.numel() != expected:
                text = (
                    f"recv: the message from {self._route} (tag {tag}) has {message.numel()} bytes, but the tensor of "
                    f"shape {tuple(x.shape)}, {x.dtype} has {expected}; send and recv equal sizes and data types"
                )
                raise with_outcome(NcclInvalidUsage(text), Outcome.MISMATCH)
            buffer.view(-1).view(torch.uint8).copy_(message)
        for copy in copies:
            copy()

    def _issue(self, lane: Lane, x: torch.Tensor) -> Work:
        """Make the call on CUDA, after what was issued on the current stream."""
        copies: list[Any] = []
        if self.sends:
            call: Call = partial(Communicator.send, buf=source(x), peer=1)
        else:
            call = partial(Communicator.recv, buf=target(x, copies), peer=0)
        return lane.run([call], [x], False, copies, 0.0)

    def _on_cuda(self, lane: Lane, work: Work, x: torch.Tensor, before: Any) -> None:
        with lane.on_side():
            before.wait()
            issued = self._issue(lane, x)
        work.lane, work.event, work._kept = lane, issued.event, issued._kept

    def begin_close(self) -> None:
        """Queue the destroy of the communicator behind the posted messages. It waits for the peer."""
        self._queue.submit(self._destroy)

    def _destroy(self) -> None:
        with contextlib.suppress(NcclError):
            if self.lane is not None:
                self.lane.comm.destroy()
        self._closed.set()

    def end_close(self, seconds: float) -> None:
        """Wait for the destroy; abort the communicator if it takes longer than `seconds`."""
        if not self._closed.wait(seconds):
            self.abort()

    def abort(self) -> None:
        if self.lane is not None:
            self.lane.comm.abort()
