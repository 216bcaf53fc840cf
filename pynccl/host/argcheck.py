"""Check arguments of C functions: ranges of numbers, and the size and version of structs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ..bindings.abi import (
    COLL_CONFIG_SINCE,
    CONFIG_MAGIC,
    CONFIG_SINCE,
    ITEMSIZE,
    SIM_INFO_MAGIC,
    UNDEF_INT,
    CollConfig,
    Config,
    EncryptionConfig,
    SimInfo,
    Version,
    struct_size,
    version_code,
)
from .failure import invalid_argument, invalid_usage
from .version import VERSION, dotted

# Struct type -> (its name in error messages, its magic number, the fields added in later versions).
_KINDS: dict[type[ctypes.Structure], tuple[str, int, dict[str, Version]]] = {
    Config: ("config", CONFIG_MAGIC, CONFIG_SINCE),
    CollConfig: ("collective config", CONFIG_MAGIC, COLL_CONFIG_SINCE),
    SimInfo: ("simInfo", SIM_INFO_MAGIC, {}),
    EncryptionConfig: ("encryption config", CONFIG_MAGIC, {}),
}


def check_range(name: str, label: str, value: int, low: int, high: int, why: str = "") -> None:
    """Raise ncclInvalidArgument for the call `name` unless low <= value <= high."""
    if not low <= value <= high:
        raise invalid_argument(f"{name}: {label} is {value}; expected {low} to {high}{why}")


def check_dtype(name: str, dtype: int) -> None:
    check_range(name, "datatype", dtype, 0, len(ITEMSIZE) - 1)


def check_rank(rank: int, size: int) -> None:
    if size < 1:
        raise invalid_argument(f"ncclCommInitRank: nranks is {size}; expected 1 or more")
    check_range("ncclCommInitRank", "rank", rank, 0, size - 1, f" for nranks={size}")


def check_peer(name: str, label: str, peer: int, size: int) -> None:
    if not 0 <= peer < size:
        raise invalid_argument(f"{name}: {label} is {peer}; expected a rank of the communicator, 0 to {size - 1}")


def check_devices(devices: Sequence[int]) -> None:
    if not devices:
        raise invalid_argument("ncclCommInitAll: ndev is 0; expected 1 or more")
    if len(set(devices)) < len(devices) or min(devices) < 0:
        raise invalid_usage(f"ncclCommInitAll: devlist is {list(devices)}; expected different devices, 0 or above")


def check_flags(name: str, label: str, flags: int, allowed: Sequence[int], expected: str) -> None:
    if flags not in allowed:
        raise invalid_argument(f"{name}: {label} is {flags:#x}; expected {expected}")


def check_struct(struct: Any) -> None:
    """Raise HostFailure unless `struct` was initialized by the macro of this or an older version's header."""
    kind = type(struct)
    name, magic, since = _KINDS[kind]
    first = min(since.values(), default=VERSION)
    smallest, largest = struct_size(kind, since, first), struct_size(kind, since, max(first, VERSION))
    if struct.magic != magic or not smallest <= struct.size <= largest:
        raise invalid_argument(
            f"{name} has magic {struct.magic:#x} and size {struct.size}; NCCL {dotted(VERSION)} expects {magic:#x} and "
            f"{smallest} to {largest}; initialize it with the macro of that version's nccl.h"
        )
    if struct.version > version_code(VERSION):
        raise invalid_argument(
            f"{name} has version {struct.version}; NCCL {dotted(VERSION)} expects {version_code(VERSION)} or less; "
            "initialize it with the macro of that version's nccl.h"
        )


def field(struct: Any, name: str, default: int) -> int:
    """Return an integer field; `default` if it is undefined, or beyond the end of an older version's struct."""
    member = getattr(type(struct), name)
    if member.offset + member.size > struct.size:
        return default
    value = int(getattr(struct, name) or 0)
    return default if value == UNDEF_INT else value


def check_config(config: Any) -> None:
    """Check an ncclConfig_t*, which may be NULL."""
    if not config:
        return
    struct = config.contents
    check_struct(struct)
    low, high = field(struct, "minCTAs", 0), field(struct, "maxCTAs", 0)
    if low and high and low > high:
        raise invalid_argument(f"config has minCTAs {low} and maxCTAs {high}; expected minCTAs <= maxCTAs")


def check_coll_config(name: str, config: Any) -> Any:
    """Check an ncclCollConfig_t*, which may be NULL, for the call `name`; return the handle of its event, or 0."""
    if not config:
        return 0
    struct = config.contents
    check_struct(struct)
    for limit, low, high in (
        ("minCTAs", 1, 2**31 - 1),
        ("maxCTAs", 1, 2**31 - 1),
        ("nvlsCTAs", 0, 2**31 - 1),
        ("cgaClusterSize", 0, 8),
        ("forceAlgSelection", 0, 1),
        ("CTAPolicy", 0, 2**31 - 1),
    ):
        value = field(struct, limit, low)
        if not low <= value <= high:
            expected = f"{low} to {high}, or NCCL_CONFIG_UNDEF_INT"
            raise invalid_argument(f"{name}: config has {limit} {value}; expected {expected}")
    min_ctas, max_ctas = field(struct, "minCTAs", 1), field(struct, "maxCTAs", 2**31 - 1)
    if min_ctas > max_ctas:
        raise invalid_argument(f"{name}: config has minCTAs {min_ctas}; expected at most maxCTAs, which is {max_ctas}")
    return field(struct, "launchCompletionEvent", 0)
