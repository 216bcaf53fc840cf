"""send and recv of CPU tensors between ranks that share memory: a group's mailbox, and a route for each direction.

The routes record the messages for the watchdog and the hang tool, and fail those that cannot pass any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..bindings.abi import ITEMSIZE
from ..bindings.errors import (
    NcclError,
    NcclInvalidUsage,
    NcclRemoteError,
    NcclSystemError,
    NcclTimeout,
    Outcome,
    with_outcome,
)
from ..bindings.library import host_module, load
from ..bindings.workers import Flag
from ..bootstrap.join import Children
from ..comm.base import explained
from ..interop.buffers import adapter
from ..watch import layout, watchdog
from ..watch.frames import call_site
from ..watch.layout import ENDED_AS, CommEnd
from ..watch.track import Identity, new_track
from .tensors import Copy, copy_back, source, target
from .work import Work

_INHERITED = "the process group was inherited through a fork; make a new one in the child"


class Routes:
    """The messages of a group between ranks that share memory.

    children  of the default group's communicator; None: it has none for CPU tensors
    members   the ranks of the group in the default group
    name      of the group, used once, equal on all ranks
    ranks     global rank of each rank
    timeout   in seconds, of a message"""

    def __init__(
        self,
        children: Children | None,
        members: Sequence[int],
        name: str,
        rank: int,
        ranks: Sequence[int],
        title: str,
        timeout: float,
    ) -> None:
        self.rank, self.ranks, self.title, self.timeout = rank, ranks, title, timeout
        self.mailbox: Any = None
        self._children, self._members, self.name = children, members, f"{name}/messages"
        self._routes: dict[tuple[int, bool], Route] = {}  # by peer, and whether it sends
        self._ended = ""
        self._lock = threading.Lock()

    def find(self, peer: int, sends: bool) -> Route | None:
        """Return the route to (sends) or from a rank; None if the ranks do not share memory."""
        found = self._routes.get((peer, sends))
        if found is None and self._children is not None:
            with self._lock:
                if self._ended:
                    raise NcclInvalidUsage(f"{'send' if sends else 'recv'}: the process group was {self._ended}")
                if self.mailbox is None:
                    try:
                        self.mailbox = self._children.family.mailbox(self._members, self.name, self._check)
                    except OSError as error:
                        raise _as_nccl_error(f"messages of {self.title}", error) from error
                if self.mailbox is None:
                    self._children = None
                elif (peer, sends) not in self._routes:
                    self._routes[peer, sends] = Route(self, peer, sends, self._children.uid)
                found = self._routes.get((peer, sends))
        return found

    def _check(self) -> None:
        for route in list(self._routes.values()):
            route.check()

    def close(self, seconds: float) -> None:
        """Wait until no message is pending, at most for `seconds`, then fail the others and leave."""
        if self.mailbox is not None:
            self.mailbox.wait_pending(seconds)
            self.abort(CommEnd.DESTROYED)

    def abort(self, how: CommEnd = CommEnd.ABORTED) -> None:
        self._ended = ENDED_AS[how]
        if self.mailbox is not None:
            self.mailbox.close()
        for route in list(self._routes.values()):
            error = NcclInvalidUsage(f"{route.text}: the process group was {self._ended}")
            route.fail(with_outcome(error, Outcome.ABORTED_BY_PROGRAM), how)


def _as_nccl_error(what: str, error: BaseException) -> BaseException:
    """Return an NcclSystemError for an error of the system: no memory, no descriptors. Others as they are."""
    if isinstance(error, (host_module().HostFailure, OSError)):
        return NcclSystemError(f"{what}: {error}; free memory or descriptors, then make a new group")
    return error


class Route:
    """The messages of a group in one direction between two ranks. For the watchdog, a communicator of these ranks."""

    alive, ordinal, _call_timeout = False, -1, None

    def __init__(self, routes: Routes, peer: int, sends: bool, uid: Callable[..., str]) -> None:
        self._routes, self._mailbox, self._peer, self._sends = routes, routes.mailbox, peer, sends
        pair = (routes.rank, peer) if sends else (peer, routes.rank)
        sender, receiver = (routes.ranks[rank] for rank in pair)
        self._verb, self._other = ("send", "recv") if sends else ("recv", "send")
        self.text = f"{self._verb}: message from rank {sender} to rank {receiver}"
        self._handle = host_module().new_handle()
        self._error: NcclError | None = None
        self._pending: dict[Work, int] = {}  # with its entry in the flight recorder
        self._since = 0.0  # when the last message was done, or posted if none was pending
        self._lock = threading.Lock()
        self.library = load("host")
        title = f"rank {sender} to rank {receiver}, messages of {routes.title}"
        self._track = new_track(Identity(uid(routes.name, *pair), title, ""), 0 if sends else 1, 2, (sender, receiver))
        if self._track is not None:
            self._track.posts_on = self._handle
            self._track.made(self, "cpu", call_site())
            watchdog.prepare()

    def post(self, x: torch.Tensor, tag: int) -> Work:
        """Send x or receive into it. Returns immediately."""
        copies: list[Copy] = []
        data = source(x) if self._sends else target(x, copies)
        if self._mailbox.inherited:
            raise NcclInvalidUsage(_INHERITED)
        address, count, dtype, _ = adapter(data).describe(data)
        work, nbytes = Posted(self._mailbox, x, self._handle), count * ITEMSIZE[dtype]
        with self._lock:
            if self._error is not None:
                work.complete(self._error)
                return work
            entry, track = 0, self._track
            if track is not None:
                entry = track.enter(self._verb, (address, count, dtype, int(self._sends)))
            if not self._pending:
                self._since = time.monotonic()
            self._pending[work] = entry
        done = partial(self._done, work, data, copies, x, tag, nbytes)
        try:
            self._mailbox.post(self._peer, self._sends, host_module().Message(tag, address, nbytes, done))
        except BaseException as error:  # also of a signal handler
            if (entry := self._pending.pop(work, 0)) and self._track is not None:
                self._track.failed(entry, error)
            raise _as_nccl_error(self.text, error) from None
        return work

    def _done(
        self,
        work: Work,
        data: torch.Tensor,
        copies: list[Copy],
        x: torch.Tensor,
        tag: int,
        expected: int,
        outcome: int | Exception,
    ) -> None:
        """The message has passed, or failed. Called with the mailbox locked.   data: kept until now"""
        entry, self._since = self._pending.pop(work, 0), time.monotonic()
        if isinstance(outcome, int) and outcome != expected:
            text = (
                f"{self.text} (tag {tag}) has {outcome} bytes, but the tensor of shape {tuple(x.shape)}, {x.dtype} has "
                f"{expected}; send and recv equal sizes and data types"
            )
            outcome = with_outcome(NcclInvalidUsage(text), Outcome.MISMATCH)
        error = outcome if isinstance(outcome, Exception) else copy_back(copies)
        if self._track is not None and entry > self._track.head - layout.CALLS:  # else it is not in the ring any more
            self._track.leave(entry) if error is None else self._track.failed(entry, error)
        work.complete(error)

    def check(self) -> None:
        """Fail the pending messages if they cannot pass any more, or have taken too long."""
        if not self._pending:
            return
        if self._error is not None:  # posted at the same time
            self.fail(self._error)
        limit, peer, broken = self._routes.timeout, self._routes.ranks[self._peer], self._mailbox.broken
        why = self._mailbox.lost(self._peer, self._sends)
        if why:
            self._mailbox.progress()  # what the peer had sent before
        if not self._pending:
            return
        if broken is not None:
            reason = host_module().reason_of(broken)
            self.fail(NcclSystemError(f"{self.text}: this rank {reason} while it moved messages; make a new group"))
        elif why:
            error = NcclRemoteError(f"{self.text}: lost rank {peer}: {why}")
            self.fail(with_outcome(error, Outcome.PEER_LOST, int(self._sends)))
        elif time.monotonic() - self._since > limit:
            why = f"rank {peer} never called {self._other}, or has stopped"
            self.fail(NcclTimeout(f"{self._verb}: {why}: no message passed for {limit:g} s"))

    def fail(self, error: NcclError, end: CommEnd = CommEnd.LIVE) -> None:
        """Fail the pending messages and all later ones."""
        if self._error is None and self._pending:
            error = explained(error, self._track)
        with self._lock:
            self._error = self._error or error
        self._mailbox.fail(self._peer, self._sends, self._error)
        if end and self._track is not None:
            self._track.end(end)

    def _abort_late(self, text: str) -> None:
        """For the watchdog, with PYNCCL_WATCH_ACTION=raise."""
        self.fail(NcclTimeout(text))


class Posted(Work):
    """The handle of a message. Who waits for it moves the messages of the group."""

    def __init__(self, mailbox: Any, x: torch.Tensor, stream: int) -> None:
        super().__init__(None, [x])
        self._mailbox, self._done, self._stream = mailbox, Flag(), stream

    def _block(self, limit: float | None) -> bool:
        if self._mailbox.inherited:
            raise NcclInvalidUsage(_INHERITED)
        return bool(self._mailbox.wait(self._done.is_set, limit))
