"""Creation of communicators: init, split, shrink, grow. The methods and their C calls, each with a deadline."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

from ..bindings.abi import CONFIG_SINCE, SPLIT_NOCOLOR, UNIQUE_ID_BYTES, Config, Result, UniqueId
from ..bindings.errors import NcclError, NcclRemoteError, NcclTimeout
from ..bindings.library import Library, chosen
from ..bindings.structs import CommConfig, struct_of
from ..bindings.values import INT_MAX, INT_MIN, counted, integer, listed, shown, type_of
from ..interop.devices import current_device, device_ordinal, on_device
from ..watch import watchdog
from ..watch.layout import CommEnd
from ..watch.track import Identity, Track, new_track, uid_of
from .argcheck import check_rank
from .base import Comm, Lineage, check_enabled, comm_name, explained
from .consistency import compare_texts
from .deadline import call_with_deadline, wait_nonblocking
from .finalize import abort_handle, install_exit_hooks

Self = TypeVar("Self", bound=Comm)

# Derived communicators


@overload
def split(self: Self, color: int, key: int = 0, config: CommConfig | None = None) -> Self: ...
@overload
def split(self: Self, color: None, key: int = 0, config: CommConfig | None = None) -> None: ...
@overload
def split(self: Self, color: int | None, key: int = 0, config: CommConfig | None = None) -> Self | None: ...
def split(self: Self, color: int | None, key: int = 0, config: CommConfig | None = None) -> Self | None:
    """Split the communicator: return a new one of all ranks that pass the same color.

    Collective: every rank must call it. New ranks are ordered by key, then by rank in this communicator.

    color   an integer >= 0; None (or NCCL_SPLIT_NOCOLOR, -1): this rank joins none and gets None
    config  a `CommConfig`; None: this communicator's configuration
    """
    colors = f"an integer >= 0, up to {INT_MAX}, or None for no communicator"
    number = SPLIT_NOCOLOR if color is None else integer(color, "split: color", SPLIT_NOCOLOR, INT_MAX, colors)
    key = integer(key, "split: key", INT_MIN, INT_MAX)
    if self.checking:
        compare_texts({self: "split()"})
    struct = make_struct(config, self.library, "split", parent=True)
    made = _derive(
        self,
        lambda new: self.library.ncclCommSplit(self.handle, number, key, new, struct),
        f"ncclCommSplit(color={number}, key={key}) on rank {self.rank} of {self.size}",
        config,
        "split",
        f"color={number}, key={key}",
        number,
    )
    if made is not None:
        made._lineage = Lineage(made.rank, made.size, self._lineage, self._splits, number)
    self._splits += 1
    return made


def shrink(self: Self, exclude: Sequence[int], *, abort: bool = False, config: CommConfig | None = None) -> Self:
    """Return a new communicator of all ranks except `exclude` (NCCL >= 2.27).

    Collective over the remaining ranks. The excluded ranks do not call it.

    exclude  a list of other ranks, without duplicates
    abort    first abort the operations in flight on this communicator; use it if an excluded rank has failed. Over
             sockets NCCL may raise NcclRemoteError nevertheless, on all ranks (seen with 2.28.9): use `survivors`,
             which works after any failure. With NCCL >= 2.31.2, whose ncclCommDestroy blocks forever afterwards,
             destroy() then aborts this communicator.
    config   a `CommConfig`; None: this communicator's configuration
    """
    excluded = listed(exclude, "shrink: exclude", "a list of ranks to exclude")
    ranks = [check_rank("shrink: exclude", rank, self.size) for rank in excluded]
    if not ranks or self.rank in ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"shrink: exclude is {ranks} on rank {self.rank}, expected other ranks, each once")
    struct = make_struct(config, self.library, "shrink", parent=True)
    self._stopped = self._stopped or abort
    if self._track is not None:
        self._track.exclude(ranks)
    array = (ctypes.c_int * len(ranks))(*ranks)
    try:
        made = _derive(
            self,
            lambda new: self.library.ncclCommShrink(self.handle, array, len(ranks), new, struct, int(abort)),
            f"ncclCommShrink(exclude={ranks}) on rank {self.rank} of {self.size}",
            config,
            "shrink",
            f"exclude={ranks}",
            sorted(ranks),
        )
    except NcclRemoteError as error:
        error.args = (f"{error}\n  {_CANNOT_SHRINK if abort else _SHRINK_WITH_ABORT}",)
        raise
    assert made is not None  # only split() returns None
    return made


_CANNOT_SHRINK = (
    "NCCL may need connections that it lost with the failed rank: make the communicator with pynccl.init(elastic=True) "
    "and call survivors() in place of shrink()"
)
_SHRINK_WITH_ABORT = "if an excluded rank has failed, pass abort=True; if that raises too, use survivors()"


def grow_id(self: Comm) -> UniqueId:
    """Return the id for one `grow` of this communicator (NCCL >= 2.29).

    Not collective: one member calls it, passes the id to grow(), and sends it to the new ranks for join_grown().
    Raises NcclVersionError with an older NCCL, NcclInvalidUsage on a closed communicator."""
    unique_id = UniqueId()
    with self._lock:
        self._status("ncclCommGetUniqueId", ctypes.byref(unique_id))
    return unique_id


def grow(
    self: Self, nranks: int, unique_id: UniqueId | bytes | None = None, *, config: CommConfig | None = None
) -> Self:
    """Return a new communicator with `nranks` ranks: those of this one and new ranks size..nranks-1 (NCCL >= 2.29).

    Collective: all members call it, and the new ranks call `join_grown` at the same time.

    unique_id  the id from grow_id(), on the rank that called it; None on the other members
    config     a `CommConfig`; None: this communicator's configuration
    """
    more = f"more than the {counted(self.size, 'existing rank')}, up to {INT_MAX}"
    nranks = integer(nranks, "grow: nranks", self.size + 1, INT_MAX, more)
    struct = make_struct(config, self.library, "grow", parent=True)
    identity = None if unique_id is None else as_unique_id(unique_id, "grow: unique_id")
    self.check_alive()
    with self._lock, self._recorded("grow", weight=0, detail=f"nranks={nranks}"):
        handle = comm_grow(self.library, self.handle, nranks, identity, -1, self._own_ordinal(), struct, self.timeout)
    made = type(self)(handle, self.library, self.timeout, config or self._config, self._child(config, "grow", nranks))
    return _joined(made, self)


def _derive(
    comm: Self,
    call: Callable[[Any], int],
    what: str,
    config: CommConfig | None,
    operation: str,
    detail: str,
    identity_key: Any,
) -> Self | None:
    """Make a communicator of some of the ranks.   identity_key: distinguishes those of one call, such as the color"""
    comm.check_alive()
    weight = 1 if operation == "split" else 0
    try:
        with comm._lock, comm._recorded(operation, weight=weight, detail=detail):
            handle = make(comm.library, call, what, comm._own_ordinal(), comm.timeout, comm.handle)
    except NcclError as error:
        comm._check_alive_after()
        raise explained(error, comm._track) from None
    track = comm._child(config, operation, identity_key)
    if not handle:
        return None
    return _joined(type(comm)(handle, comm.library, comm.timeout, config or comm._config, track), comm)


def _joined(made: Self, parent: Self) -> Self:
    """Return a communicator made from `parent`, which ends with its generation."""
    if parent._generation is not None:
        parent._generation.add(made)
    return made


# C calls that return handles


def make_struct(config: CommConfig | None, library: Library, operation: str, parent: bool = False) -> Any:
    """Return the ncclConfig_t of a new communicator; None: NCCL's defaults, or with `parent` the parent's config.

    Sets launch_order_implicit if the library has it: kernels of two communicators then start in the order of the calls.
    Otherwise ranks that start them in different orders could deadlock."""
    if not library.is_host and library.version >= CONFIG_SINCE["launchOrderImplicit"]:
        if config is None and not parent:
            config = CommConfig()
        if isinstance(config, CommConfig) and config.launch_order_implicit is None:
            config = config._replace(launch_order_implicit=1)
    return struct_of(config, CommConfig, library, operation)


def get_unique_id(library: Library | None = None) -> UniqueId:
    """Return a new id (ncclGetUniqueId) to pass to `Communicator.init` on all ranks of one communicator.

    Send bytes(id) to the other ranks; init accepts the id and its bytes."""
    library = chosen(library, "get_unique_id")
    unique_id = UniqueId()
    library.check(library.ncclGetUniqueId(ctypes.byref(unique_id)), "ncclGetUniqueId")
    return unique_id


def comm_init_rank(
    library: Library,
    nranks: int,
    ids: Sequence[UniqueId],
    rank: int,
    ordinal: int | None,
    config: CommConfig | None,
    timeout: float | None,
    check: Callable[[], object] | None = None,
) -> int:
    """Call ncclCommInitRank, or its variant for a config or for several ids.   check: as in `call_with_deadline`"""
    struct = make_struct(config, library, "Communicator.init")

    def call(handle: Any) -> int:
        if len(ids) > 1:
            array = (UniqueId * len(ids))(*ids)
            return int(library.ncclCommInitRankScalable(handle, nranks, rank, len(ids), array, struct))
        if struct is None:
            return int(library.ncclCommInitRank(handle, nranks, ids[0], rank))
        return int(library.ncclCommInitRankConfig(handle, nranks, ids[0], rank, struct))

    return make(library, call, f"ncclCommInitRank(rank={rank}, nranks={nranks})", ordinal, timeout, check=check)


@contextlib.contextmanager
def recorded_init(
    uid: str, rank: int, nranks: int, config: CommConfig | None, ranks: Sequence[int] = ()
) -> Iterator[Track | None]:
    """Record the init in the block, with all waits for other ranks, as the first call of a new track. Yield the track
    (None: no flight recorder).

    uid    "": known later, see `Track.write_uid`
    ranks  global rank of each rank; (): unknown"""
    track = new_track(Identity(uid or uid_of(), comm_name(config, "world"), ""), rank, nranks, ranks)
    if track is None:
        yield None
        return
    watchdog.prepare()
    install_exit_hooks()
    entry = track.enter("init", weight=1)
    try:
        yield track
    except BaseException as error:
        track.failed(entry, error)
        diagnosed = explained(error, track) if isinstance(error, NcclError) else error
        track.end(CommEnd.NEVER_MADE)
        raise diagnosed from None
    track.leave(entry)
    track.unnumbered(entry)  # its first collective is number 1


def make(
    library: Library,
    call: Callable[[Any], int],
    what: str,
    ordinal: int | None,
    timeout: float | None,
    parent: int = 0,
    check: Callable[[], object] | None = None,
) -> int:
    """Return the handle that `call(pointer to ncclComm_t)` fills in; 0 if it stays NULL.

    ordinal  CUDA device to make current during the call, in its thread
    parent   handle of the parent communicator; 0: none
    check    as in `call_with_deadline`
    """
    handle = ctypes.c_void_p()

    def run() -> int:
        with on_device(ordinal):
            return call(ctypes.byref(handle))

    def abort_new() -> None:  # so that its other ranks learn that this one does not have it
        if handle.value:
            library.ncclCommAbort(handle.value)

    code = call_with_deadline(timeout, run, library, what, abort_new, check)
    if code == Result.IN_PROGRESS:
        code = _wait_for_new(library, handle, parent, timeout, what)
    library.check(code, what, parent or None)
    return handle.value or 0


def _wait_for_new(library: Library, handle: Any, parent: int, timeout: float | None, what: str) -> int:
    """Wait for a nonblocking init. On timeout or failure abort the new handle; a blocking init does not allow that."""
    code: int = Result.IN_PROGRESS
    try:
        if parent:  # the child's handle is set once the parent is no longer in progress, and can stay NULL
            code = wait_nonblocking(library, parent, code, timeout, what)
        if handle.value and code in (Result.SUCCESS, Result.IN_PROGRESS):
            code = wait_nonblocking(library, handle.value, Result.IN_PROGRESS, timeout, what)
    except NcclTimeout:
        code = Result.TIMEOUT
        raise
    finally:
        if code and handle.value:
            abort_handle(library, handle.value)
    return code


def comm_split_all(
    library: Library, comms: Sequence[Comm], configs: Sequence[CommConfig], timeout: float | None
) -> list[int]:
    """Return, for each communicator, the handle of a new one of the same ranks, made with its config.

    The splits run as one group, since several of the ranks can be in this process and each waits for the others."""
    handles = [ctypes.c_void_p() for _ in comms]
    structs = [make_struct(config, library, "split") for config in configs]
    what = f"ncclCommSplit of {len(comms)} communicators"

    def run() -> int:
        library.check(library.ncclGroupStart(), "ncclGroupStart")
        codes = []
        try:
            for comm, handle, struct in zip(comms, handles, structs, strict=True):
                with on_device(comm._own_ordinal()):
                    codes.append(library.ncclCommSplit(comm.handle, 0, comm.rank, ctypes.byref(handle), struct))
        finally:
            end = int(library.ncclGroupEnd())
        codes.append(end)
        return next((code for code in codes if code not in (Result.SUCCESS, Result.IN_PROGRESS)), max(codes))

    def abort_new() -> None:
        for handle in handles:
            if handle.value:
                abort_handle(library, handle.value)

    code = call_with_deadline(timeout, run, library, what, abort_new)
    try:
        for comm in comms if code == Result.IN_PROGRESS else comms[:1]:
            library.check(wait_nonblocking(library, comm.handle, code, timeout, what), what, comm.handle)
    except BaseException:
        abort_new()
        raise
    return [handle.value or 0 for handle in handles]


def comm_init_all(library: Library, ordinals: list[int]) -> list[int]:
    """Call ncclCommInitAll: one communicator per device, all in this process."""
    n = len(ordinals)
    handles = (ctypes.c_void_p * n)()
    with on_device(None if library.is_host else ordinals[0]):
        code = library.ncclCommInitAll(handles, n, (ctypes.c_int * n)(*ordinals))
    library.check(code, f"ncclCommInitAll({n})")
    return [handle or 0 for handle in handles]


def comm_grow(
    library: Library,
    comm: int,
    nranks: int,
    unique_id: UniqueId | None,
    rank: int,
    ordinal: int | None,
    config: Config | None,
    timeout: float | None,
) -> int:
    """Call ncclCommGrow as a member (comm, rank=-1; one member passes the id) or as a new rank (comm=0)."""
    pointer = ctypes.byref(unique_id) if unique_id is not None else None

    def call(handle: Any) -> int:
        return int(library.ncclCommGrow(comm or None, nranks, pointer, rank, handle, config))

    return make(library, call, f"ncclCommGrow(nranks={nranks}, rank={rank})", ordinal, timeout, comm)


def as_unique_id(unique_id: Any, name: str) -> UniqueId:
    """Convert an id from get_unique_id(), or its bytes, to `UniqueId`."""
    if isinstance(unique_id, UniqueId):
        return unique_id
    if isinstance(unique_id, (bytes, bytearray)) and len(unique_id) == UNIQUE_ID_BYTES:
        return UniqueId.from_buffer_copy(unique_id)
    if isinstance(unique_id, (bytes, bytearray)):
        found = counted(len(unique_id), "byte")
        raise ValueError(f"{name} has {found}, expected {UNIQUE_ID_BYTES}, as returned by get_unique_id()")
    raise ValueError(
        f"{name} is {type_of(unique_id)}, expected an id from get_unique_id(), or its {UNIQUE_ID_BYTES} bytes"
    )


def check_rank_of(rank: Any, nranks: Any, operation: str) -> tuple[int, int]:
    """Return both as ints. ValueError unless 0 <= rank < nranks."""
    nranks = integer(nranks, f"{operation}: nranks", 1, INT_MAX, f"a number of ranks >= 1, up to {INT_MAX}")
    expected = f"0..{nranks - 1} for {nranks} ranks" if nranks > 1 else ""
    return check_rank(f"{operation}: rank", rank, nranks, expected), nranks


def check_device_kind(library: Library, device: Any, name: str) -> None:
    """Raise ValueError for a GPU with the host library, or for the CPU with another one."""
    check_enabled()  # raise for a bad PYNCCL_CHECK before a communicator exists
    cpu = shown(device, str).startswith("cpu")
    if library.is_host and device is not None and not isinstance(device, int) and not cpu:
        raise ValueError(
            f"{name} is {shown(device)}, but the host library works on the CPU; pass device=None, or unset "
            "PYNCCL_LIBRARY on a machine with a GPU"
        )
    if cpu and not library.is_host:
        raise ValueError(
            f"{name} is {shown(device)}, but {library.path} works on GPUs; set PYNCCL_LIBRARY=host for the CPU"
        )


def choose_device(library: Library, device: Any, name: str = "device") -> int | None:
    """Return the CUDA ordinal for a new communicator; None with the host library.

    The caller's current device does not change, as with ncclCommInitAll and torch's process groups."""
    check_device_kind(library, device, name)
    if library.is_host:
        return None
    ordinal = current_device() if device is None else device_ordinal(device, name)
    with on_device(ordinal):  # raise for a bad device here, not later in the worker thread
        return ordinal
