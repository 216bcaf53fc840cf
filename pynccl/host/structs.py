"""The configuration structs that callers pass: are they of a header that this version knows, and what do they say."""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings.abi import (
    COLL_CONFIG_SINCE,
    CONFIG_MAGIC,
    CONFIG_SINCE,
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
from .failure import HostFailure, invalid_argument
from .registry import VERSION
from .version import dotted

# What tells a struct of each type: its name in messages, its magic number, and the fields that came later.
_KINDS: dict[type[ctypes.Structure], tuple[str, int, dict[str, Version]]] = {
    Config: ("config", CONFIG_MAGIC, CONFIG_SINCE),
    CollConfig: ("collective config", CONFIG_MAGIC, COLL_CONFIG_SINCE),
    SimInfo: ("simInfo", SIM_INFO_MAGIC, {}),
    EncryptionConfig: ("encryption config", CONFIG_MAGIC, {}),
}


def check(struct: Any) -> None:
    """Raise HostFailure unless `struct` starts as its initializer does, in a header of this version or an older one."""
    kind = type(struct)
    name, magic, since = _KINDS[kind]
    first = min(since.values(), default=VERSION)
    smallest, largest = struct_size(kind, since, first), struct_size(kind, since, max(first, VERSION))
    if struct.magic != magic or not smallest <= struct.size <= largest:
        raise invalid_argument(
            f"{name} has magic {struct.magic:#x} and size {struct.size}; NCCL {dotted(VERSION)} expects {magic:#x} and "
            f"{smallest} to {largest}: initialise it as the macro of that version's nccl.h does"
        )
    if struct.version > version_code(VERSION):
        raise invalid_argument(
            f"{name} has version {struct.version}; NCCL {dotted(VERSION)} expects {version_code(VERSION)} or less: "
            "initialise it as the macro of that version's nccl.h does"
        )


def field(struct: Any, name: str, default: int) -> int:
    """An integer of a struct; `default` if it is undefined, or beyond the end of an older header's struct."""
    place = getattr(type(struct), name)
    if place.offset + place.size > struct.size:
        return default
    value = int(getattr(struct, name) or 0)
    return default if value == UNDEF_INT else value


def check_config(config: Any) -> None:
    """ncclConfig_t*, which may be NULL."""
    if not config:
        return
    given = config.contents
    check(given)
    low, high = field(given, "minCTAs", 0), field(given, "maxCTAs", 0)
    if low and high and low > high:
        raise invalid_argument(f"config has minCTAs {low} and maxCTAs {high}; expected minCTAs <= maxCTAs")


def check_coll_config(name: str, config: Any) -> Any:
    """ncclCollConfig_t*, which may be NULL, for the call `name`; returns the handle of its event, 0 for none."""
    if not config:
        return 0
    given = config.contents
    check(given)
    for limit, low, high in (
        ("minCTAs", 1, 2**31 - 1),
        ("maxCTAs", 1, 2**31 - 1),
        ("nvlsCTAs", 0, 2**31 - 1),
        ("cgaClusterSize", 0, 8),
        ("forceAlgSelection", 0, 1),
        ("CTAPolicy", 0, 2**31 - 1),
    ):
        value = field(given, limit, low)
        if not low <= value <= high:
            raise _wrong(name, limit, value, f"{low} to {high}, or NCCL_CONFIG_UNDEF_INT")
    least, most = field(given, "minCTAs", 1), field(given, "maxCTAs", 2**31 - 1)
    if least > most:
        raise _wrong(name, "minCTAs", least, f"at most maxCTAs, which is {most}")
    return field(given, "launchCompletionEvent", 0)


def _wrong(name: str, member: str, value: int, expected: str) -> HostFailure:
    return invalid_argument(f"{name}: config has {member} {value}; expected {expected}")
