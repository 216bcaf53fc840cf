"""nccl.h in Python: enums, structs, and one row per C function with the version it appeared in.

Written from NCCL 2.32.3's nccl.h. `since` of functions and struct fields is the first minor release, of those
from 2.18 on, whose wheel exports the symbol or declares the field; (2, 18) therefore means "2.18 or earlier".
No other module spells a C function's signature.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int16,
    c_int32,
    c_int64,
    c_size_t,
    c_uint,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from typing import Any, NamedTuple

Version = tuple[int, ...]

MIN_VERSION: Version = (2, 18)
HEADER_VERSION: Version = (2, 32, 3)

UNIQUE_ID_BYTES = 128
UNDEF_INT = -(2**31)  # NCCL_CONFIG_UNDEF_INT is INT_MIN
UNDEF_FLOAT = -1.0
CONFIG_MAGIC = 0xCAFEBEEF
SIM_INFO_MAGIC = 0x74685283
SPLIT_NOCOLOR = -1
WINDOW_ALIGNMENT = 4096


class Result(IntEnum):
    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


class DataType(IntEnum):
    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8_E4M3 = 10
    FLOAT8_E5M2 = 11

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return ITEMSIZE[self]


class Element(NamedTuple):
    """One data type in every notation in which memory comes."""

    dtype: DataType
    itemsize: int  # in bytes
    name: str  # of torch's dtype, and of NumPy's where it has one
    typestr: str  # of __array_interface__, without the byte order; "" where it has none
    dlpack: tuple[int, int]  # type code and bits of dlpack.h
    bits_as: str  # torch's dtype of the same bits that computes: torch has hardly any arithmetic for wide unsigned ones


ELEMENTS: tuple[Element, ...] = (
    Element(DataType.INT8, 1, "int8", "i1", (0, 8), "int8"),
    Element(DataType.UINT8, 1, "uint8", "u1", (1, 8), "uint8"),
    Element(DataType.INT32, 4, "int32", "i4", (0, 32), "int32"),
    Element(DataType.UINT32, 4, "uint32", "u4", (1, 32), "int32"),
    Element(DataType.INT64, 8, "int64", "i8", (0, 64), "int64"),
    Element(DataType.UINT64, 8, "uint64", "u8", (1, 64), "int64"),
    Element(DataType.FLOAT16, 2, "float16", "f2", (2, 16), "float16"),
    Element(DataType.FLOAT32, 4, "float32", "f4", (2, 32), "float32"),
    Element(DataType.FLOAT64, 8, "float64", "f8", (2, 64), "float64"),
    Element(DataType.BFLOAT16, 2, "bfloat16", "", (4, 16), "bfloat16"),
    Element(DataType.FLOAT8_E4M3, 1, "float8_e4m3fn", "", (10, 8), "float8_e4m3fn"),
    Element(DataType.FLOAT8_E5M2, 1, "float8_e5m2", "", (12, 8), "float8_e5m2"),
)
ITEMSIZE: tuple[int, ...] = tuple(element.itemsize for element in ELEMENTS)


class RedOp(IntEnum):
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class ScalarResidence(IntEnum):
    DEVICE = 0
    HOST_IMMEDIATE = 1


class MemStat(IntEnum):
    GPU_MEM_SUSPEND = 0
    GPU_MEM_SUSPENDED = 1
    GPU_MEM_PERSIST = 2
    GPU_MEM_TOTAL = 3


class EncryptionMode(IntEnum):
    NONE = 0
    PSK = 1


class UniqueId(Structure):
    """128 opaque bytes, passed to C by value."""

    _fields_ = [("internal", c_char * UNIQUE_ID_BYTES)]


class Config(Structure):
    """ncclConfig_t. Older libraries know a prefix of it: see CONFIG_SINCE."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
        ("trafficClass", c_int),
        ("commName", c_char_p),
        ("collnetEnable", c_int),
        ("CTAPolicy", c_int),
        ("shrinkShare", c_int),
        ("nvlsCTAs", c_int),
        ("nChannelsPerNetPeer", c_int),
        ("nvlinkCentricSched", c_int),
        ("graphUsageMode", c_int),
        ("numRmaCtx", c_int),
        ("maxP2pPeers", c_int),
        ("graphStreamOrdering", c_int),
        ("launchOrderImplicit", c_int),
        ("numRmaSig", c_int),
        ("rmaEagerInit", c_int),
        ("hostCftMode", c_int),
        ("nvlsHostMode", c_int),
    ]


CONFIG_SINCE: dict[str, Version] = {
    "blocking": (2, 18),
    "cgaClusterSize": (2, 18),
    "minCTAs": (2, 18),
    "maxCTAs": (2, 18),
    "netName": (2, 18),
    "splitShare": (2, 18),
    "trafficClass": (2, 26),
    "commName": (2, 27),
    "collnetEnable": (2, 27),
    "CTAPolicy": (2, 27),
    "shrinkShare": (2, 27),
    "nvlsCTAs": (2, 27),
    "nChannelsPerNetPeer": (2, 28),
    "nvlinkCentricSched": (2, 28),
    "graphUsageMode": (2, 29),
    "numRmaCtx": (2, 29),
    "maxP2pPeers": (2, 30),
    "graphStreamOrdering": (2, 30),
    "launchOrderImplicit": (2, 31),
    "numRmaSig": (2, 31),
    "rmaEagerInit": (2, 31),
    "hostCftMode": (2, 31),
    "nvlsHostMode": (2, 32),
}


class CollConfig(Structure):
    """ncclCollConfig_t: the trailing argument of the nccl*Config collectives."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("ext", c_void_p),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("nvlsCTAs", c_int),
        ("cgaClusterSize", c_int),
        ("algSelection", c_char_p),
        ("forceAlgSelection", c_int),
        ("CTAPolicy", c_int),
        ("userProfilerTag", c_uint64),
        ("launchCompletionEvent", c_void_p),
    ]


COLL_CONFIG_SINCE: dict[str, Version] = {
    "ext": (2, 31),
    "minCTAs": (2, 31),
    "maxCTAs": (2, 31),
    "nvlsCTAs": (2, 31),
    "cgaClusterSize": (2, 31),
    "algSelection": (2, 31),
    "forceAlgSelection": (2, 31),
    "CTAPolicy": (2, 31),
    "userProfilerTag": (2, 31),
    "launchCompletionEvent": (2, 32),
}


class SimInfo(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("estimatedTime", c_float),
    ]


class EncryptionConfig(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("mode", c_int),
        ("psk", c_char_p),
    ]


class WaitSignalDesc(Structure):
    _fields_ = [("opCnt", c_int), ("peer", c_int), ("sigIdx", c_int), ("ctx", c_int)]


class Team(Structure):
    """ncclTeam_t: every stride-th rank, nRanks of them; passed and returned by value."""

    _fields_ = [("nRanks", c_int), ("rank", c_int), ("stride", c_int)]


class MultimemHandle(Structure):
    """ncclMultimemHandle_t, passed by value."""

    _fields_ = [("mcBasePtr", c_void_p)]


class Function(NamedTuple):
    restype: Any
    argtypes: tuple[Any, ...]
    since: Version


def _status(*argtypes: Any, since: Version = MIN_VERSION) -> Function:
    """A row for a function that returns ncclResult_t."""
    return Function(c_int, argtypes, since)


_comm, _stream, _buf, _window, _param = c_void_p, c_void_p, c_void_p, c_void_p, c_void_p
_dtype = _op = _peer = c_int
_coll = POINTER(CollConfig)

FUNCTIONS: dict[str, Function] = {
    # Library
    "ncclGetVersion": _status(POINTER(c_int)),
    "ncclGetErrorString": Function(c_char_p, (c_int,), MIN_VERSION),
    "ncclGetLastError": Function(c_char_p, (_comm,), MIN_VERSION),
    "ncclResetDebugInit": Function(None, (), (2, 24)),
    "ncclSetEncryption": _status(POINTER(EncryptionConfig), since=(2, 32)),
    # Birth of a communicator
    "ncclGetUniqueId": _status(POINTER(UniqueId)),
    "ncclCommInitRank": _status(POINTER(_comm), c_int, UniqueId, c_int),
    "ncclCommInitRankConfig": _status(POINTER(_comm), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommInitRankScalable": _status(
        POINTER(_comm), c_int, c_int, c_int, POINTER(UniqueId), POINTER(Config), since=(2, 23)
    ),
    "ncclCommInitAll": _status(POINTER(_comm), c_int, POINTER(c_int)),
    "ncclCommSplit": _status(_comm, c_int, c_int, POINTER(_comm), POINTER(Config)),
    "ncclCommShrink": _status(
        _comm, POINTER(c_int), c_int, POINTER(_comm), POINTER(Config), c_int, since=(2, 27)
    ),
    "ncclCommGetUniqueId": _status(_comm, POINTER(UniqueId), since=(2, 29)),
    "ncclCommGrow": _status(
        _comm, c_int, POINTER(UniqueId), c_int, POINTER(_comm), POINTER(Config), since=(2, 29)
    ),
    # Life and end of a communicator
    "ncclCommFinalize": _status(_comm),
    "ncclCommDestroy": _status(_comm),
    "ncclCommAbort": _status(_comm),
    "ncclCommRevoke": _status(_comm, c_int, since=(2, 28)),
    "ncclCommSuspend": _status(_comm, c_int, since=(2, 29)),
    "ncclCommResume": _status(_comm, since=(2, 29)),
    "ncclCommGetAsyncError": _status(_comm, POINTER(c_int)),
    "ncclCommCount": _status(_comm, POINTER(c_int)),
    "ncclCommCuDevice": _status(_comm, POINTER(c_int)),
    "ncclCommUserRank": _status(_comm, POINTER(c_int)),
    "ncclCommMemStats": _status(_comm, c_int, POINTER(c_uint64), since=(2, 29)),
    # Memory
    "ncclMemAlloc": _status(POINTER(c_void_p), c_size_t, since=(2, 19)),
    "ncclMemFree": _status(c_void_p, since=(2, 19)),
    "ncclCommRegister": _status(_comm, _buf, c_size_t, POINTER(c_void_p), since=(2, 19)),
    "ncclCommDeregister": _status(_comm, c_void_p, since=(2, 19)),
    "ncclCommWindowRegister": _status(
        _comm, _buf, c_size_t, POINTER(_window), c_int, since=(2, 27)
    ),
    "ncclCommWindowDeregister": _status(_comm, _window, since=(2, 27)),
    "ncclWinGetUserPtr": _status(_comm, _window, POINTER(c_void_p), since=(2, 29)),
    # Reduction operators
    "ncclRedOpCreatePreMulSum": _status(POINTER(c_int), c_void_p, _dtype, c_int, _comm),
    "ncclRedOpDestroy": _status(_op, _comm),
    # Collectives: buffers, count in elements, data type, then operator or root
    "ncclReduce": _status(_buf, _buf, c_size_t, _dtype, _op, _peer, _comm, _stream),
    "ncclBcast": _status(_buf, c_size_t, _dtype, _peer, _comm, _stream),
    "ncclBroadcast": _status(_buf, _buf, c_size_t, _dtype, _peer, _comm, _stream),
    "ncclAllReduce": _status(_buf, _buf, c_size_t, _dtype, _op, _comm, _stream),
    "ncclReduceScatter": _status(_buf, _buf, c_size_t, _dtype, _op, _comm, _stream),
    "ncclAllGather": _status(_buf, _buf, c_size_t, _dtype, _comm, _stream),
    "ncclAlltoAll": _status(_buf, _buf, c_size_t, _dtype, _comm, _stream, since=(2, 28)),
    "ncclGather": _status(_buf, _buf, c_size_t, _dtype, _peer, _comm, _stream, since=(2, 28)),
    "ncclScatter": _status(_buf, _buf, c_size_t, _dtype, _peer, _comm, _stream, since=(2, 28)),
    "ncclReduceConfig": _status(
        _buf, _buf, c_size_t, _dtype, _op, _peer, _comm, _stream, _coll, since=(2, 31)
    ),
    "ncclBroadcastConfig": _status(
        _buf, _buf, c_size_t, _dtype, _peer, _comm, _stream, _coll, since=(2, 31)
    ),
    "ncclAllReduceConfig": _status(
        _buf, _buf, c_size_t, _dtype, _op, _comm, _stream, _coll, since=(2, 31)
    ),
    "ncclReduceScatterConfig": _status(
        _buf, _buf, c_size_t, _dtype, _op, _comm, _stream, _coll, since=(2, 31)
    ),
    "ncclAllGatherConfig": _status(
        _buf, _buf, c_size_t, _dtype, _comm, _stream, _coll, since=(2, 31)
    ),
    "ncclAlltoAllConfig": _status(
        _buf, _buf, c_size_t, _dtype, _comm, _stream, _coll, since=(2, 31)
    ),
    "ncclGatherConfig": _status(
        _buf, _buf, c_size_t, _dtype, _peer, _comm, _stream, _coll, since=(2, 31)
    ),
    "ncclScatterConfig": _status(
        _buf, _buf, c_size_t, _dtype, _peer, _comm, _stream, _coll, since=(2, 31)
    ),
    # Point to point, one-sided
    "ncclSend": _status(_buf, c_size_t, _dtype, _peer, _comm, _stream),
    "ncclRecv": _status(_buf, c_size_t, _dtype, _peer, _comm, _stream),
    "ncclPutSignal": _status(
        _buf, c_size_t, _dtype, _peer, _window, c_size_t, c_int, c_int, c_uint, _comm, _stream,
        since=(2, 29),
    ),
    "ncclSignal": _status(_peer, c_int, c_int, c_uint, _comm, _stream, since=(2, 29)),
    "ncclWaitSignal": _status(c_int, POINTER(WaitSignalDesc), _comm, _stream, since=(2, 29)),
    # Groups
    "ncclGroupStart": _status(),
    "ncclGroupEnd": _status(),
    "ncclGroupSimulateEnd": _status(POINTER(SimInfo), since=(2, 22)),
    # Parameters
    "ncclParamBind": _status(POINTER(_param), c_char_p, since=(2, 30)),
    "ncclParamGetI8": _status(_param, POINTER(c_int8), since=(2, 30)),
    "ncclParamGetI16": _status(_param, POINTER(c_int16), since=(2, 30)),
    "ncclParamGetI32": _status(_param, POINTER(c_int32), since=(2, 30)),
    "ncclParamGetI64": _status(_param, POINTER(c_int64), since=(2, 30)),
    "ncclParamGetU8": _status(_param, POINTER(c_uint8), since=(2, 30)),
    "ncclParamGetU16": _status(_param, POINTER(c_uint16), since=(2, 30)),
    "ncclParamGetU32": _status(_param, POINTER(c_uint32), since=(2, 30)),
    "ncclParamGetU64": _status(_param, POINTER(c_uint64), since=(2, 30)),
    "ncclParamGetStr": _status(_param, POINTER(c_char_p), since=(2, 30)),
    "ncclParamGet": _status(_param, c_void_p, c_int, POINTER(c_int), since=(2, 30)),
    "ncclParamGetParameter": _status(
        c_char_p, POINTER(c_char_p), POINTER(c_int), since=(2, 30)
    ),
    "ncclParamGetAllParameterKeys": _status(
        POINTER(POINTER(c_char_p)), POINTER(c_int), since=(2, 30)
    ),
    "ncclParamDumpAll": Function(None, (), (2, 30)),
}  # fmt: skip

# The host side of nccl_device.h, raw: structs that a kernel is compiled against (communicators, requirements, barriers,
# buffers) are void pointers here, since their layout goes with the release and only CUDA code reads them.
_devcomm = _requirements = _properties = _handle = c_void_p

DEVICE_FUNCTIONS: dict[str, Function] = {
    # Device communicators
    "ncclCommQueryProperties": _status(_comm, _properties, since=(2, 29)),
    "ncclDevCommCreate": _status(_comm, _requirements, _devcomm, since=(2, 28)),
    "ncclDevCommDestroy": _status(_comm, _devcomm, since=(2, 28)),
    # Teams
    "ncclTeamWorld": Function(Team, (_comm,), (2, 28)),
    "ncclTeamLsa": Function(Team, (_comm,), (2, 28)),
    "ncclTeamRail": Function(Team, (_comm,), (2, 28)),
    "ncclTeamCft": Function(Team, (_comm, c_int), (2, 31)),
    "ncclTeamCftMultimem": Function(Team, (_comm,), (2, 31)),
    "ncclTeamRankToWorld": Function(c_int, (_comm, Team, c_int), (2, 28)),
    "ncclTeamRankToLsa": Function(c_int, (_comm, Team, c_int), (2, 28)),
    # Where a window lies on the device: window, offset in bytes, whose memory, then the result
    "ncclGetPeerDevicePointer": _status(_window, c_size_t, c_int, POINTER(c_void_p), since=(2, 29)),
    "ncclGetLsaDevicePointer": _status(_window, c_size_t, c_int, POINTER(c_void_p), since=(2, 29)),
    "ncclGetLsaMultimemDevicePointer": _status(_window, c_size_t, POINTER(c_void_p), since=(2, 29)),
    "ncclGetMultimemDevicePointer": _status(
        _window, c_size_t, MultimemHandle, POINTER(c_void_p), since=(2, 29)
    ),
    "ncclGetPeerDeviceLeInfo": _status(
        _window, c_size_t, c_int, POINTER(c_uint32), POINTER(c_size_t), since=(2, 31)
    ),
    "ncclGetCftDeviceLeInfo": _status(
        _window, c_size_t, c_int, Team, POINTER(c_uint32), POINTER(c_size_t), since=(2, 31)
    ),
    "ncclGetMultimemDeviceLeInfo": _status(
        _window, c_size_t, POINTER(c_uint32), POINTER(c_size_t), since=(2, 31)
    ),
    # What a device communicator has to provide: sizes, then the handle and the requirement to fill in
    "ncclLsaBarrierCreateRequirement": _status(Team, c_int, _handle, _requirements, since=(2, 28)),
    "ncclGinBarrierCreateRequirement": _status(
        _comm, Team, c_int, _handle, _requirements, since=(2, 28)
    ),
    "ncclLLA2ACalcSlots": Function(c_int, (c_int, c_int), (2, 28)),
    "ncclLLA2ACreateRequirement": _status(c_int, c_int, _handle, _requirements, since=(2, 28)),
}  # fmt: skip


def version_code(version: Version) -> int:
    """(2, 28, 9) -> 22809, as NCCL_VERSION encodes releases after 2.8."""
    major, minor, patch = (*version, 0, 0)[:3]
    return major * 10000 + minor * 100 + patch


def version_tuple(code: int) -> Version:
    """22809 -> (2, 28, 9); codes below 10000 are those of 2.8 and earlier."""
    if code < 10000:
        return code // 1000, code % 1000 // 100, code % 100
    return code // 10000, code % 10000 // 100, code % 100


def struct_size(struct: type[Structure], since: dict[str, Version], version: Version) -> int:
    """Bytes of the prefix of `struct` that a library of `version` was compiled with."""
    known = [name for name, _ in struct._fields_ if since.get(name, MIN_VERSION) <= version]  # type: ignore[misc]
    last = getattr(struct, known[-1])
    alignment = ctypes.alignment(struct)
    return -(-(last.offset + last.size) // alignment) * alignment
