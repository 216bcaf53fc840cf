"""A communicator that outlives its ranks: `survivors`, `commit`, `agree`. See generation.py.

After a death NCCL's shrink fails over sockets, so there is one way, always: abort all communicators of the generation,
meet at the store, init anew. Who arrives is in. Nobody waits for ranks that are known to be dead, and after a few
seconds for none whose thread has not noticed that the next generation is open: it is dead, stopped or cut off. One
compare_set closes the list; who comes later is out, whatever it was doing. If a rank dies while it meets, the others
open yet another generation.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..bindings.abi import UniqueId
from ..bindings.errors import (
    NcclError,
    NcclInvalidArgument,
    NcclInvalidUsage,
    NcclRemoteError,
    NcclTimeout,
    NcclUnhandledCudaError,
    NcclVersionError,
)
from ..bindings.library import host_module
from ..bindings.values import INT_MAX, INT_MIN, integer
from ..bindings.workers import GRACE_SECONDS, Clock, WorkerCall
from ..comm.base import explained
from ..comm.communicator import Communicator, bootstrap
from ..comm.consistency import all_gather_texts
from ..comm.finalize import ABORT_SECONDS
from ..comm.init import comm_init_rank, get_unique_id, recorded_init
from ..interop.devices import core_device, on_device
from ..watch.formatting import ranks_text
from ..watch.frames import call_site, called_from
from ..watch.store import Prefixed, lines, read
from ..watch.track import uid_of
from .generation import Generation, Launch, StoreLost
from .join import watch_at
from .rendezvous import first_line

T = TypeVar("T")

TORN = INT_MIN  # the step of a rank whose state sync_state has copied in part
_MISTAKES = (NcclInvalidUsage, NcclInvalidArgument)  # of the program: to meet again would not help
_OWN_FAULTS = (*_MISTAKES, NcclUnhandledCudaError, NcclVersionError)  # of this rank: the others go on without it
SILENT_SECONDS = 5.0  # then a rank that has not noticed the next generation is not waited for
_STREAMS_SECONDS = 1.0  # for the streams to end what was aborted
_PAUSE_SECONDS, _PAUSE_PER_RANK = 0.005, 0.0002  # between two looks at the store


class _Members(NamedTuple):
    """Who is in a generation, in order, and who is lost: rank -> how."""

    ranks: list[int]
    lost: dict[int, str]


class _NotMade(Exception):
    """A generation was not made: a rank was lost while they met. The next one is tried."""


def elastic(comm: Communicator, operation: str) -> Generation:
    """Return the generation of which `comm` is the communicator."""
    found: Generation | None = comm._generation
    if found is None:
        raise NcclInvalidUsage(
            f"{operation}: this communicator is not elastic; make it with pynccl.init(elastic=True), or with "
            "from_store(.., elastic=True)"
        )
    if found.comm() is not comm:
        raise NcclInvalidUsage(
            f"{operation}: {comm!r} was made from another communicator: call {operation}() on that one"
        )
    return found


@bootstrap
def survivors(comm: Communicator, timeout: float | None = 30.0) -> Communicator:
    generation, clock = elastic(comm, "survivors"), Clock(timeout, "survivors: timeout")
    launch = generation.launch
    with launch.meeting:
        newest = launch.newest
        made = newest.comm()
        if newest is not generation and made is not None and newest.ended is None and made.alive:
            with contextlib.suppress(NcclError):  # it has failed in turn: meet once more
                newest.check_calls()
                return made  # the other caller of this process has met them
        error = sys.exc_info()[1]  # survivors() is called where it is handled
        if isinstance(error, _MISTAKES) and newest.ended is None and not launch.gone(newest.members):
            raise error
        number, members = newest.number, _Members(list(newest.members), {})
        why = newest.ended.verdict if newest.ended is not None else _why(launch, newest, error)
        while True:
            number += 1
            try:
                members = _meet(newest, number, members, why, clock)
                return _make(launch, number, members, clock)
            except _NotMade as failure:
                why = str(failure)


def _why(launch: Launch, newest: Generation, error: BaseException | None) -> str:
    """Return why this rank opens the next generation: for messages."""
    known = getattr(error, "verdict", "") or next(iter(launch.gone(newest.members).values()), "")
    return known or f"rank {launch.rank} called survivors()" + (f" after {first_line(error)}" if error else "")


def _meet(newest: Generation, number: int, before: _Members, why: str, clock: Clock) -> _Members:
    """Arrive at this generation, and return its members once the list is closed."""
    launch = newest.launch
    why = launch.open(number, why, clock)
    launch.note(number, "alive", str(launch.rank), clock)  # the others wait, however long the abort takes
    newest.end(why)
    newest.wait_for_end(Clock(max(min(clock.left() / 3, ABORT_SECONDS), 1e-3)))
    if not launch.copying.acquire(timeout=min(max(clock.left(), 0.0), threading.TIMEOUT_MAX)):
        raise NcclTimeout(f"survivors: sync_state's load_state_dict() has not returned for {clock.seconds()}")
    launch.copying.release()
    with contextlib.suppress(NcclTimeout):  # of other communicators' operations
        settle = partial(_settle, launch.setup.ordinal)
        WorkerCall(settle, "streams").result(min(clock.left(), _STREAMS_SECONDS), NcclTimeout)
    launch.note(number, "came", str(launch.rank), clock)
    window, keys, began = clock.left() * 2 / 3, launch.prefix(number), Clock(None)

    def look(store: Any) -> tuple[str, list[set[int]], dict[int, str]]:
        closed = read(store, f"{keys}members") if store.check([f"{keys}members"]) else ""
        came, alive = ({int(line) for line in lines(store, keys + what)} for what in ("came", "alive"))
        gone = (line.partition(" ") for line in lines(store, f"{keys}gone"))
        return closed, [came, alive], {int(rank): how for rank, _, how in gone}

    while True:
        closed, (came, alive), gone = launch.ask(look, clock)
        if closed:
            return _admitted(launch.rank, number, before, closed)
        for rank, how in launch.gone(set(before.ranks) - gone.keys()).items():
            launch.note(number, "gone", f"{rank} {how}", clock)
            gone[rank] = how
        waiting = set(before.ranks) - came - gone.keys()
        if (waited := began.waited()) > min(SILENT_SECONDS, window / 2):
            waiting &= alive
        if not waiting or waited > window:
            absent = f"has not come within {began.seconds()}: it is stopped, dead, or cut off"
            here = (came - gone.keys()) & set(before.ranks)
            lost = {rank: gone.get(rank, f"rank {rank} {absent}") for rank in before.ranks if rank not in here}
            text = json.dumps([sorted(here), {**before.lost, **lost}])
            launch.ask(partial(_close, key=f"{keys}members", text=text), clock)
        elif clock.left() <= 0:
            raise NcclTimeout(f"survivors: {ranks_text(waiting)} did not come within {clock.seconds()}")
        time.sleep(_PAUSE_SECONDS + _PAUSE_PER_RANK * len(before.ranks))


def _settle(ordinal: int | None) -> None:
    """Wait for what was aborted. Raise if this rank's GPU has failed: it cannot go on. Forget the errors on the host
    library's streams, as on a GPU, where a stream goes on after an abort: commit would raise them later."""
    if ordinal is not None:
        with on_device(ordinal):
            core_device(ordinal).sync()
        return
    while True:
        try:
            host_module().synchronize()
            return
        except NcclError:
            continue


def _close(store: Any, key: str, text: str) -> None:
    store.compare_set(key, "", text)


def _admitted(rank: int, number: int, before: _Members, closed: str) -> _Members:
    """Return the members of a closed list; raise NcclRemoteError if this rank is not among them."""
    ranks, lost = json.loads(closed)
    found = _Members(ranks, {int(one): how for one, how in lost.items()})
    if rank not in ranks:
        raise NcclRemoteError(
            f"rank {rank} is out of generation {number}: {ranks_text(ranks)} went on without it\n"
            f"  they said: {found.lost.get(rank, 'it was not a member')}\n  end this process"
        )
    return found


def _make(launch: Launch, number: int, members: _Members, clock: Clock) -> Communicator:
    """Make the communicator of this generation. Raise _NotMade if one of its ranks is lost meanwhile."""
    setup, ranks = launch.setup, members.ranks
    rank, limit, keys = ranks.index(launch.rank), Clock(max(clock.left() / 2, 1.0)), launch.prefix(number)

    def check() -> None:
        if why := launch.is_open(number + 1, limit):
            raise _NotMade(why)
        if gone := launch.gone(ranks):
            raise _NotMade(next(iter(gone.values())))
        if limit.left() <= 0:
            raise _NotMade(f"generation {number} was not made within {limit.seconds()}")

    try:
        if rank == 0:
            own = bytes(get_unique_id(setup.library))
            launch.ask(lambda store: store.set(f"{keys}id", own), limit)
        with recorded_init(uid_of(launch.uid, number), rank, len(ranks), setup.config, ranks) as track:
            while not launch.ask(lambda store: store.check([f"{keys}id"]), limit):
                check()
                time.sleep(_PAUSE_SECONDS)
            ids = [UniqueId.from_buffer_copy(launch.ask(lambda store: store.get(f"{keys}id"), limit))]
            handle = comm_init_rank(
                setup.library, len(ranks), ids, rank, setup.ordinal, setup.config, limit.left(), check
            )
        comm = Communicator(handle, setup.library, setup.timeout, setup.config, track)
    except _OWN_FAULTS:
        raise
    except NcclError as error:
        raise _failed(number, error, clock) from error
    watch_at(comm, Prefixed(launch.store, keys), setup.serves)
    lost = [members.lost[one] for one in sorted(members.lost)]
    made = launch.begin(comm, number, ranks, "\n".join(lost))
    try:
        in_time(made, comm.barrier, "survivors", limit)
    except NcclError as error:
        made.end(first_line(error))
        made.wait_for_end(limit)
        raise _failed(number, error, clock) from error
    return comm


def _failed(number: int, error: NcclError, clock: Clock) -> Exception:
    if clock.left() <= 0:
        return NcclTimeout(f"survivors: generation {number} was not made within {clock.seconds()}: {error}")
    return _NotMade(f"generation {number} was not made: {first_line(error)}")


# ---------------------------------------------------------------------------------------------------- in a generation


def in_time(generation: Generation, call: Callable[[], T], operation: str, clock: Clock) -> T:
    """Return `call()`, in which this rank waits for the others. NcclTimeout at the deadline; the call ends when the
    generation does. All work issued before has run then."""
    generation.check_calls()
    comm, site, began = generation.comm(), call_site(), Clock(None)
    assert comm is not None  # the caller has it

    def check() -> None:
        if began.waited() > GRACE_SECONDS:  # a rank may have left after its part, which this one is about to complete
            generation.check_calls()
        generation.check()

    def late() -> NcclError:
        text = f"{operation}: not all ranks came within {clock.seconds()}\n  call survivors() to go on without them"
        return explained(NcclTimeout(text), comm._track)

    def run() -> T:
        with called_from(site), comm._on_own_device():
            synchronize(comm)
            generation.check_calls()  # a stream goes on after an abort
            return call()

    return WorkerCall(run, operation).result(clock.left(), late, check)


def synchronize(comm: Communicator) -> None:
    """Block until everything issued so far on the device has run. Raise its first error."""
    if comm.library.is_host:
        host_module().synchronize()
    else:
        core_device(comm.ordinal).sync()


@bootstrap
def commit(comm: Communicator, timeout: float | None = 30.0) -> None:
    in_time(elastic(comm, "commit"), comm.barrier, "commit", Clock(timeout, "commit: timeout"))


@bootstrap
def agree(comm: Communicator, step: int, timeout: float | None = 30.0) -> int:
    generation, clock = elastic(comm, "agree"), Clock(timeout, "agree: timeout")
    number, launch = integer(step, "agree: step", TORN + 1, INT_MAX), generation.launch
    if launch.behind is not None and (launch.behind[1] == TORN or number == launch.behind[0]):
        # sync_state has not brought it there
        number = launch.behind[1]
    rows = in_time(generation, lambda: all_gather_texts({comm: f"agree\0{number}"})[comm], "agree", clock)
    steps = [int(row.partition("\0")[2]) for row in rows]
    newest = max(steps)
    if newest == TORN:
        launch.behind = None
        raise RuntimeError(  # no NcclError, after which the program would call survivors() and go on
            "agree: no rank has a whole state: the last one that had the newest died in sync_state\n"
            "  load a checkpoint on all ranks, and call agree() with its step"
        )
    behind = tuple(rank for rank, other in enumerate(steps) if other < newest)
    generation.agreed = steps.index(newest), behind
    launch.behind = (newest, number) if number < newest else None
    return newest


@bootstrap
def check_generation(comm: Communicator) -> None:
    generation: Generation | None = comm._generation
    if generation is None:
        return
    with contextlib.suppress(StoreLost):
        if generation.ended is None:
            generation.look(Clock(generation.launch.setup.timeout))
    generation.check()
