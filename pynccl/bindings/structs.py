"""NCCL's versioned structs, and the user-facing CommConfig and CollConfig that fill two of them.

A struct carries its size and version, and a library rejects or ignores fields that it does not know. Each struct gets
the size and version that the loaded library was compiled with, and setting a field that the library lacks raises.

The configs are named tuples because importing `dataclasses` would take an eighth of this package's import time.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple, TypeVar

from . import abi
from .errors import NcclVersionError
from .library import Library
from .values import INT_MAX, INT_MIN, attribute, did_you_mean, instance, integer, text

Struct = TypeVar("Struct", bound=ctypes.Structure)


class CommConfig(NamedTuple):
    """Configuration of one communicator: ncclConfig_t. None leaves a field at NCCL's default.

    field                    in NCCL              since  value
    blocking                 blocking             2.18   bool; False: calls return before they complete
    cga_cluster_size         cgaClusterSize       2.18   int
    min_ctas                 minCTAs              2.18   int
    max_ctas                 maxCTAs              2.18   int
    net_name                 netName              2.18   str: name of the network plugin
    split_share              splitShare           2.18   bool
    traffic_class            trafficClass         2.26   int
    comm_name                commName             2.27   str: name in messages and traces
    collnet_enable           collnetEnable        2.27   bool
    cta_policy               CTAPolicy            2.27   0 default, 1 efficiency, 2 zero CTAs
    shrink_share             shrinkShare          2.27   bool
    nvls_ctas                nvlsCTAs             2.27   int
    n_channels_per_net_peer  nChannelsPerNetPeer  2.28   int
    nvlink_centric_sched     nvlinkCentricSched   2.28   bool
    graph_usage_mode         graphUsageMode       2.29   int
    num_rma_ctx              numRmaCtx            2.29   int: contexts of put_signal and signal
    max_p2p_peers            maxP2pPeers          2.30   int
    graph_stream_ordering    graphStreamOrdering  2.30   int
    launch_order_implicit    launchOrderImplicit  2.31   0 or 1; None: 1 where the library has it
    num_rma_sig              numRmaSig            2.31   int: signals per context
    rma_eager_init           rmaEagerInit         2.31   int
    host_cft_mode            hostCftMode          2.31   1 enable, 2 disable, 3 fallback
    nvls_host_mode           nvlsHostMode         2.32   0 enable; bits 0, 1: disable parts (ncclNvlsHostMode_t)

    since: the oldest NCCL with the field (2.18: or an earlier one). See NCCL's documentation of ncclConfig_t for units
    and defaults.
    """

    blocking: bool | None = None
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: bool | None = None
    traffic_class: int | None = None
    comm_name: str | None = None
    collnet_enable: bool | None = None
    cta_policy: int | None = None
    shrink_share: bool | None = None
    nvls_ctas: int | None = None
    n_channels_per_net_peer: int | None = None
    nvlink_centric_sched: bool | None = None
    graph_usage_mode: int | None = None
    num_rma_ctx: int | None = None
    max_p2p_peers: int | None = None
    graph_stream_ordering: int | None = None
    launch_order_implicit: int | None = None
    num_rma_sig: int | None = None
    rma_eager_init: int | None = None
    host_cft_mode: int | None = None
    nvls_host_mode: int | None = None

    def to_struct(self, library: Library) -> abi.Config:
        """Return the ncclConfig_t for `library`. Raises NcclVersionError for a field that the library lacks."""
        struct = stamped(abi.Config, library, abi.CONFIG_SINCE)
        _fill(struct, self, abi.CONFIG_SINCE, library)
        return struct


class CollConfig(NamedTuple):
    """Configuration of one collective call: ncclCollConfig_t (NCCL >= 2.31). None leaves a field at NCCL's default.

    field                    in NCCL                since  value
    min_ctas                 minCTAs                2.31   int
    max_ctas                 maxCTAs                2.31   int
    nvls_ctas                nvlsCTAs               2.31   int
    cga_cluster_size         cgaClusterSize         2.31   int
    alg_selection            algSelection           2.31   str
    force_alg_selection      forceAlgSelection      2.31   bool; None: True
    cta_policy               CTAPolicy              2.31   0 default, 1 efficiency, 2 zero CTAs
    user_profiler_tag        userProfilerTag        2.31   int; None: 0
    launch_completion_event  launchCompletionEvent  2.32   a CUDA event (its handle, or an object with .handle)

    launch_completion_event is recorded when the kernel is resident. See NCCL's documentation of ncclCollConfig_t.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    nvls_ctas: int | None = None
    cga_cluster_size: int | None = None
    alg_selection: str | None = None
    force_alg_selection: bool | None = None
    cta_policy: int | None = None
    user_profiler_tag: int | None = None
    launch_completion_event: Any = None

    def to_struct(self, library: Library) -> abi.CollConfig:
        """Return the ncclCollConfig_t for `library`. Raises NcclVersionError for a field that the library lacks."""
        struct = stamped(abi.CollConfig, library, abi.COLL_CONFIG_SINCE)
        struct.forceAlgSelection = 1
        struct.userProfilerTag = 0
        _fill(struct, self, abi.COLL_CONFIG_SINCE, library)
        return struct


def _reject_unknown_fields(kind: Any) -> None:
    """Make `kind(maxCTAs=1)` name the closest field. A NamedTuple cannot define __new__ itself."""
    new = kind.__new__

    @functools.wraps(new)
    def checked(cls: Any, *args: Any, **fields: Any) -> Any:
        for name in fields:
            if name not in cls._fields:
                hint = did_you_mean(name, cls._fields) or f"expected one of {', '.join(cls._fields)}"
                raise TypeError(f"{cls.__name__} has no field {name!r}; {hint}")
        return new(cls, *args, **fields)

    kind.__new__ = checked


_reject_unknown_fields(CommConfig)
_reject_unknown_fields(CollConfig)


def struct_of(config: Any, kind: type[CommConfig] | type[CollConfig], library: Library, operation: str) -> Any:
    """Return the struct of `config` for `library`, or None for None. Raises TypeError if `config` is not a `kind`."""
    if config is None:
        return None
    instance(config, kind, f"{operation}: config", f"a pynccl.{kind.__name__}, or None")
    return config.to_struct(library)


def stamped(
    kind: type[Struct], library: Library, since: dict[str, abi.Version] | None = None, magic: int = abi.CONFIG_MAGIC
) -> Struct:
    """Return a struct with the size, magic number and version that `library` expects, and its ints set to UNDEF_INT.

    since  release in which each field appeared, for structs that have grown over time"""
    struct: Any = kind()
    # A library newer than our header accepts the header's struct and version; an older one needs its own.
    version = min(library.version, abi.HEADER_VERSION)
    struct.size = abi.struct_size(kind, since or {}, version)
    struct.magic = magic
    struct.version = abi.version_code(version)
    for name, ctype, *_ in kind._fields_:
        if name in (since or {}) and ctype is ctypes.c_int:
            setattr(struct, name, abi.UNDEF_INT)
    return struct


def _fill(struct: Any, config: Any, since: dict[str, abi.Version], library: Library) -> None:
    names, types = {_plain(name): name for name in since}, dict(struct._fields_)
    for field, value in zip(config._fields, config, strict=True):
        if value is None:
            continue
        name = names[_plain(field)]
        if library.version < since[name]:
            needed, loaded = (".".join(map(str, v)) for v in (since[name], library.version))
            raise NcclVersionError(
                f"{type(config).__name__}.{field} needs NCCL >= {needed}; loaded {loaded} from {library.path}; "
                "leave it None"
            )
        setattr(struct, name, _c_value(f"{type(config).__name__}.{field}", value, types[name]))


def _plain(name: str) -> str:
    """Map min_ctas and minCTAs to the same string."""
    return name.replace("_", "").lower()


def _c_value(what: str, value: Any, kind: Any) -> Any:
    """Convert `value` for a field of C type `kind`. Raises for an integer that ctypes would truncate."""
    if kind is ctypes.c_char_p:
        return text(value, what)
    number = attribute(value, "handle", value) if kind is ctypes.c_void_p else value
    if isinstance(number, bool):  # NCCL's flags are ints
        return int(number)
    signed, bits = kind is ctypes.c_int, 8 * ctypes.sizeof(kind)
    # INT_MIN means "not set" in NCCL.
    low, high = (INT_MIN + 1, INT_MAX) if signed else (0, (1 << bits) - 1)
    return integer(number, what, low, high)
