"""The C calls that make communicators, each with its deadline; they return handles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from ..bindings.abi import UNIQUE_ID_BYTES, Config, Result, UniqueId
from ..bindings.errors import NcclTimeout
from ..bindings.library import Library, chosen
from ..bindings.structs import CommConfig, struct_of
from ..bindings.values import INT_MAX, integer
from ..interop.devices import current_device, device_ordinal, on_device
from .lifecycle import abort_handle, settle, within


def get_unique_id(library: Library | None = None) -> UniqueId:
    """A new id, to be given to all ranks of one communicator. `bytes(id)` travels; `Communicator.init` takes both."""
    library = chosen(library)
    unique_id = UniqueId()
    library.check(library.ncclGetUniqueId(ctypes.byref(unique_id)), "ncclGetUniqueId")
    return unique_id


def join(
    library: Library,
    nranks: int,
    ids: Sequence[UniqueId],
    rank: int,
    ordinal: int | None,
    config: CommConfig | None,
    timeout: float | None,
) -> int:
    """ncclCommInitRank and its variants: with a config, with several ids."""
    struct = struct_of(config, CommConfig, library)

    def call(handle: Any) -> int:
        if len(ids) > 1:
            array = (UniqueId * len(ids))(*ids)
            return int(library.ncclCommInitRankScalable(handle, nranks, rank, len(ids), array, struct))
        if struct is None:
            return int(library.ncclCommInitRank(handle, nranks, ids[0], rank))
        return int(library.ncclCommInitRankConfig(handle, nranks, ids[0], rank, struct))

    return make(library, call, f"ncclCommInitRank(rank={rank}, nranks={nranks})", ordinal, timeout)


def make(
    library: Library, call: Callable[[Any], int], what: str, ordinal: int | None, timeout: float | None, on: int = 0
) -> int:
    """The handle that `call(pointer to ncclComm_t)` fills in: 0 if it leaves NULL.

    ordinal  CUDA device that is current during the call, in its thread; `on` is the parent communicator.
    """
    handle = ctypes.c_void_p()

    def run() -> int:
        with on_device(ordinal):
            return call(ctypes.byref(handle))

    code = within(timeout, run, library, what)
    if code == Result.IN_PROGRESS:
        code = _settle_birth(library, handle, on, timeout, what)
    library.check(code, what, on or None)
    return handle.value or 0


def _settle_birth(library: Library, handle: Any, on: int, timeout: float | None, what: str) -> int:
    """Wait for a nonblocking birth. Unlike a blocking one it can be given up, and what has failed has to be."""
    code: int = Result.IN_PROGRESS
    try:
        if on:  # the child's handle is filled in when the parent is out of progress, and may stay null
            code = settle(library, on, code, timeout, what)
        if handle.value and code in (Result.SUCCESS, Result.IN_PROGRESS):
            code = settle(library, handle.value, Result.IN_PROGRESS, timeout, what)
    except NcclTimeout:
        code = Result.TIMEOUT
        raise
    finally:
        if code and handle.value:
            abort_handle(library, handle.value)
    return code


def twins(library: Library, comms: Sequence[Any], configs: Sequence[CommConfig], timeout: float | None) -> list[int]:
    """For each communicator the handle of a new one of the same ranks, made with its config.

    One group, since they may be several ranks of this process, each of which waits for the others."""
    handles = [ctypes.c_void_p() for _ in comms]
    structs = [struct_of(config, CommConfig, library) for config in configs]
    what = f"ncclCommSplit of {len(comms)} communicators"

    def run() -> int:
        library.check(library.ncclGroupStart(), "ncclGroupStart")
        codes = []
        try:
            for comm, handle, struct in zip(comms, handles, structs, strict=True):
                with on_device(None if library.is_host else comm.device_index):
                    codes.append(library.ncclCommSplit(comm.handle, 0, comm.rank, ctypes.byref(handle), struct))
        finally:
            end = int(library.ncclGroupEnd())
        codes.append(end)
        return next((code for code in codes if code not in (Result.SUCCESS, Result.IN_PROGRESS)), max(codes))

    code = within(timeout, run, library, what)
    try:
        for comm in comms if code == Result.IN_PROGRESS else comms[:1]:
            library.check(settle(library, comm.handle, code, timeout, what), what, comm.handle)
    except BaseException:
        for handle in handles:
            if handle.value:
                abort_handle(library, handle.value)
        raise
    return [handle.value or 0 for handle in handles]


def init_all(library: Library, ordinals: list[int]) -> list[int]:
    """ncclCommInitAll: one communicator per device, all in this process."""
    n = len(ordinals)
    handles = (ctypes.c_void_p * n)()
    with on_device(None if library.is_host else ordinals[0]):
        code = library.ncclCommInitAll(handles, n, (ctypes.c_int * n)(*ordinals))
    library.check(code, f"ncclCommInitAll({n})")
    return [handle or 0 for handle in handles]


def grow(
    library: Library,
    comm: int,
    nranks: int,
    unique_id: UniqueId | None,
    rank: int,
    ordinal: int | None,
    config: Config | None,
    timeout: float | None,
) -> int:
    """ncclCommGrow, called by members (comm given, rank -1; the id on one of them) and by new ranks (comm 0)."""
    pointer = ctypes.byref(unique_id) if unique_id is not None else None

    def call(handle: Any) -> int:
        return int(library.ncclCommGrow(comm or None, nranks, pointer, rank, handle, config))

    return make(library, call, f"ncclCommGrow(nranks={nranks}, rank={rank})", ordinal, timeout, comm)


def as_unique_id(unique_id: Any) -> UniqueId:
    """`UniqueId` of what get_unique_id() returned or of its bytes."""
    if isinstance(unique_id, UniqueId):
        return unique_id
    if isinstance(unique_id, (bytes, bytearray)) and len(unique_id) == UNIQUE_ID_BYTES:
        return UniqueId.from_buffer_copy(unique_id)
    raise ValueError(
        f"unique_id is {type(unique_id).__name__}"
        + (f" of {len(unique_id)} bytes" if isinstance(unique_id, (bytes, bytearray)) else "")
        + f", expected what get_unique_id() returned, or its {UNIQUE_ID_BYTES} bytes"
    )


def check_rank(rank: Any, nranks: Any) -> tuple[int, int]:
    """Both as ints; ValueError unless 0 <= rank < nranks."""
    nranks = integer(nranks, "nranks", 1, INT_MAX, f"a number of ranks >= 1, up to {INT_MAX}")
    return integer(rank, "rank", 0, nranks - 1, f"0..{nranks - 1} for {nranks} ranks"), nranks


def choose_device(library: Library, device: Any) -> int | None:
    """CUDA ordinal for a new communicator; None with the host library, which has nothing to choose.

    The caller's current device stays what it is, as with ncclCommInitAll and with torch's process groups."""
    if library.is_host:
        if device is not None and not isinstance(device, int) and not str(device).startswith("cpu"):
            raise ValueError(
                f"device is {device!r}, but the host library works on the CPU; pass device=None, or unset "
                "PYNCCL_LIBRARY on a machine with a GPU"
            )
        return None
    if device is not None and str(device).startswith("cpu"):
        raise ValueError(f"device is {device!r}, but {library.path} works on GPUs; set PYNCCL_LIBRARY=host for the CPU")
    ordinal = current_device() if device is None else device_ordinal(device)
    with on_device(ordinal):  # an error about the device should not wait for the thread of the birth
        return ordinal
