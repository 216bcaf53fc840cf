"""nccl.h in Python: enums, structs, and one row per C function with the release in which it appeared.

Written from NCCL 2.32.3's nccl.h. `since` of functions and struct fields is the first minor release from 2.18 on whose
wheel exports the symbol or declares the field; (2, 18) means "2.18 or earlier". All C signatures are here.
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
    """One data type in the notation of each buffer protocol."""

    dtype: DataType
    itemsize: int  # in bytes
    name: str  # of the torch dtype, and of the NumPy dtype if it has one
    typestr: str  # of __array_interface__, without the byte order; "" if it has none
    dlpack: tuple[int, int]  # type code and bits of dlpack.h
    bits_as: str  # torch dtype of the same width for arithmetic, since torch lacks most of it for wide unsigned ints


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
    """NCCL's built-in reduction operators, ncclRedOp_t. `op=` accepts them and their names: RedOp.SUM is "sum".

    AVG divides the sum by the number of ranks. For a scaled sum see `Communicator.pre_mul_sum`."""

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
    """ncclConfig_t. Older libraries have a prefix of it: see CONFIG_SINCE."""

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
    """ncclTeam_t: nRanks ranks, every stride-th one. Passed and returned by value."""

    _fields_ = [("nRanks", c_int), ("rank", c_int), ("stride", c_int)]


class MultimemHandle(Structure):
    """ncclMultimemHandle_t, passed by value."""

    _fields_ = [("mcBasePtr", c_void_p)]


class Function(NamedTuple):
    """A C function: return type, argument types, argument names as in the header, and the release that added it."""

    restype: Any
    argtypes: tuple[Any, ...]
    names: tuple[str, ...]
    since: Version


def _returns(restype: Any, /, since: Version = MIN_VERSION, **arguments: Any) -> Function:
    return Function(restype, tuple(arguments.values()), tuple(arguments), since)


def _status(since: Version = MIN_VERSION, **arguments: Any) -> Function:
    """Return the row of a function that returns ncclResult_t."""
    return _returns(c_int, since, **arguments)


_comm, _stream, _buf, _window, _param = c_void_p, c_void_p, c_void_p, c_void_p, c_void_p
_dtype = _op = _peer = c_int
_coll = POINTER(CollConfig)

FUNCTIONS: dict[str, Function] = {
    # Library
    "ncclGetVersion": _status(version=POINTER(c_int)),
    "ncclGetErrorString": _returns(c_char_p, result=c_int),
    "ncclGetLastError": _returns(c_char_p, comm=_comm),
    "ncclResetDebugInit": _returns(None, since=(2, 24)),
    "ncclSetEncryption": _status(config=POINTER(EncryptionConfig), since=(2, 32)),
    # Communicator creation
    "ncclGetUniqueId": _status(uniqueId=POINTER(UniqueId)),
    "ncclCommInitRank": _status(comm=POINTER(_comm), nranks=c_int, commId=UniqueId, rank=c_int),
    "ncclCommInitRankConfig": _status(
        comm=POINTER(_comm), nranks=c_int, commId=UniqueId, rank=c_int, config=POINTER(Config)
    ),
    "ncclCommInitRankScalable": _status(
        newcomm=POINTER(_comm), nranks=c_int, myrank=c_int, nId=c_int, commIds=POINTER(UniqueId),
        config=POINTER(Config), since=(2, 23)
    ),
    "ncclCommInitAll": _status(comm=POINTER(_comm), ndev=c_int, devlist=POINTER(c_int)),
    "ncclCommSplit": _status(comm=_comm, color=c_int, key=c_int, newcomm=POINTER(_comm), config=POINTER(Config)),
    "ncclCommShrink": _status(
        comm=_comm, excludeRanksList=POINTER(c_int), excludeRanksCount=c_int, newcomm=POINTER(_comm),
        config=POINTER(Config), shrinkFlags=c_int, since=(2, 27)
    ),
    "ncclCommGetUniqueId": _status(comm=_comm, uniqueId=POINTER(UniqueId), since=(2, 29)),
    "ncclCommGrow": _status(
        comm=_comm, nRanks=c_int, uniqueId=POINTER(UniqueId), rank=c_int, newcomm=POINTER(_comm),
        config=POINTER(Config), since=(2, 29)
    ),
    # Communicator state and teardown
    "ncclCommFinalize": _status(comm=_comm),
    "ncclCommDestroy": _status(comm=_comm),
    "ncclCommAbort": _status(comm=_comm),
    "ncclCommRevoke": _status(comm=_comm, revokeFlags=c_int, since=(2, 28)),
    "ncclCommSuspend": _status(comm=_comm, flags=c_int, since=(2, 29)),
    "ncclCommResume": _status(comm=_comm, since=(2, 29)),
    "ncclCommGetAsyncError": _status(comm=_comm, asyncError=POINTER(c_int)),
    "ncclCommCount": _status(comm=_comm, count=POINTER(c_int)),
    "ncclCommCuDevice": _status(comm=_comm, device=POINTER(c_int)),
    "ncclCommUserRank": _status(comm=_comm, rank=POINTER(c_int)),
    "ncclCommMemStats": _status(comm=_comm, stat=c_int, value=POINTER(c_uint64), since=(2, 29)),
    # Memory
    "ncclMemAlloc": _status(ptr=POINTER(c_void_p), size=c_size_t, since=(2, 19)),
    "ncclMemFree": _status(ptr=c_void_p, since=(2, 19)),
    "ncclCommRegister": _status(comm=_comm, buff=_buf, size=c_size_t, handle=POINTER(c_void_p), since=(2, 19)),
    "ncclCommDeregister": _status(comm=_comm, handle=c_void_p, since=(2, 19)),
    "ncclCommWindowRegister": _status(
        comm=_comm, buff=_buf, size=c_size_t, win=POINTER(_window), winFlags=c_int, since=(2, 27)
    ),
    "ncclCommWindowDeregister": _status(comm=_comm, win=_window, since=(2, 27)),
    "ncclWinGetUserPtr": _status(comm=_comm, win=_window, outUserPtr=POINTER(c_void_p), since=(2, 29)),
    # Reduction operators
    "ncclRedOpCreatePreMulSum": _status(
        op=POINTER(c_int), scalar=c_void_p, datatype=_dtype, residence=c_int, comm=_comm
    ),
    "ncclRedOpDestroy": _status(op=_op, comm=_comm),
    # Collectives: buffers, count in elements, data type, then operator or root
    "ncclReduce": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, op=_op, root=_peer, comm=_comm, stream=_stream
    ),
    "ncclBcast": _status(buff=_buf, count=c_size_t, datatype=_dtype, root=_peer, comm=_comm, stream=_stream),
    "ncclBroadcast": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, root=_peer, comm=_comm, stream=_stream
    ),
    "ncclAllReduce": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, op=_op, comm=_comm, stream=_stream
    ),
    "ncclReduceScatter": _status(
        sendbuff=_buf, recvbuff=_buf, recvcount=c_size_t, datatype=_dtype, op=_op, comm=_comm, stream=_stream
    ),
    "ncclAllGather": _status(
        sendbuff=_buf, recvbuff=_buf, sendcount=c_size_t, datatype=_dtype, comm=_comm, stream=_stream
    ),
    "ncclAlltoAll": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, comm=_comm, stream=_stream, since=(2, 28)
    ),
    "ncclGather": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, root=_peer, comm=_comm, stream=_stream,
        since=(2, 28)
    ),
    "ncclScatter": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, root=_peer, comm=_comm, stream=_stream,
        since=(2, 28)
    ),
    "ncclReduceConfig": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, op=_op, root=_peer, comm=_comm, stream=_stream,
        config=_coll, since=(2, 31)
    ),
    "ncclBroadcastConfig": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, root=_peer, comm=_comm, stream=_stream,
        config=_coll, since=(2, 31)
    ),
    "ncclAllReduceConfig": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, op=_op, comm=_comm, stream=_stream,
        config=_coll, since=(2, 31)
    ),
    "ncclReduceScatterConfig": _status(
        sendbuff=_buf, recvbuff=_buf, recvcount=c_size_t, datatype=_dtype, op=_op, comm=_comm, stream=_stream,
        config=_coll, since=(2, 31)
    ),
    "ncclAllGatherConfig": _status(
        sendbuff=_buf, recvbuff=_buf, sendcount=c_size_t, datatype=_dtype, comm=_comm, stream=_stream, config=_coll,
        since=(2, 31)
    ),
    "ncclAlltoAllConfig": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, comm=_comm, stream=_stream, config=_coll,
        since=(2, 31)
    ),
    "ncclGatherConfig": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, root=_peer, comm=_comm, stream=_stream,
        config=_coll, since=(2, 31)
    ),
    "ncclScatterConfig": _status(
        sendbuff=_buf, recvbuff=_buf, count=c_size_t, datatype=_dtype, root=_peer, comm=_comm, stream=_stream,
        config=_coll, since=(2, 31)
    ),
    # Point to point, one-sided
    "ncclSend": _status(sendbuff=_buf, count=c_size_t, datatype=_dtype, peer=_peer, comm=_comm, stream=_stream),
    "ncclRecv": _status(recvbuff=_buf, count=c_size_t, datatype=_dtype, peer=_peer, comm=_comm, stream=_stream),
    "ncclPutSignal": _status(
        localbuff=_buf, count=c_size_t, datatype=_dtype, peer=_peer, peerWin=_window, peerWinOffset=c_size_t,
        sigIdx=c_int, ctx=c_int, flags=c_uint, comm=_comm, stream=_stream, since=(2, 29)
    ),
    "ncclSignal": _status(peer=_peer, sigIdx=c_int, ctx=c_int, flags=c_uint, comm=_comm, stream=_stream, since=(2, 29)),
    "ncclWaitSignal": _status(
        nDesc=c_int, signalDescs=POINTER(WaitSignalDesc), comm=_comm, stream=_stream, since=(2, 29)
    ),
    # Groups
    "ncclGroupStart": _status(),
    "ncclGroupEnd": _status(),
    "ncclGroupSimulateEnd": _status(simInfo=POINTER(SimInfo), since=(2, 22)),
    # Parameters
    "ncclParamBind": _status(out=POINTER(_param), key=c_char_p, since=(2, 30)),
    "ncclParamGetI8": _status(h=_param, out=POINTER(c_int8), since=(2, 30)),
    "ncclParamGetI16": _status(h=_param, out=POINTER(c_int16), since=(2, 30)),
    "ncclParamGetI32": _status(h=_param, out=POINTER(c_int32), since=(2, 30)),
    "ncclParamGetI64": _status(h=_param, out=POINTER(c_int64), since=(2, 30)),
    "ncclParamGetU8": _status(h=_param, out=POINTER(c_uint8), since=(2, 30)),
    "ncclParamGetU16": _status(h=_param, out=POINTER(c_uint16), since=(2, 30)),
    "ncclParamGetU32": _status(h=_param, out=POINTER(c_uint32), since=(2, 30)),
    "ncclParamGetU64": _status(h=_param, out=POINTER(c_uint64), since=(2, 30)),
    "ncclParamGetStr": _status(h=_param, out=POINTER(c_char_p), since=(2, 30)),
    "ncclParamGet": _status(h=_param, out=c_void_p, maxLen=c_int, len=POINTER(c_int), since=(2, 30)),
    "ncclParamGetParameter": _status(key=c_char_p, value=POINTER(c_char_p), valueLen=POINTER(c_int), since=(2, 30)),
    "ncclParamGetAllParameterKeys": _status(table=POINTER(POINTER(c_char_p)), tableLen=POINTER(c_int), since=(2, 30)),
    "ncclParamDumpAll": _returns(None, since=(2, 30)),
}  # fmt: skip

# The host functions of nccl_device.h. Structs that kernels are compiled against (communicators, requirements, barriers,
# buffers) are void pointers here, since their layout depends on the release and only CUDA code reads them.
_devcomm = _requirements = _properties = _handle = c_void_p

DEVICE_FUNCTIONS: dict[str, Function] = {
    # Device communicators
    "ncclCommQueryProperties": _status(comm=_comm, props=_properties, since=(2, 29)),
    "ncclDevCommCreate": _status(comm=_comm, reqs=_requirements, outDevComm=_devcomm, since=(2, 28)),
    "ncclDevCommDestroy": _status(comm=_comm, devComm=_devcomm, since=(2, 28)),
    # Teams
    "ncclTeamWorld": _returns(Team, comm=_comm, since=(2, 28)),
    "ncclTeamLsa": _returns(Team, comm=_comm, since=(2, 28)),
    "ncclTeamRail": _returns(Team, comm=_comm, since=(2, 28)),
    "ncclTeamCft": _returns(Team, comm=_comm, mode=c_int, since=(2, 31)),
    "ncclTeamCftMultimem": _returns(Team, comm=_comm, since=(2, 31)),
    "ncclTeamRankToWorld": _returns(c_int, comm=_comm, team=Team, rank=c_int, since=(2, 28)),
    "ncclTeamRankToLsa": _returns(c_int, comm=_comm, team=Team, rank=c_int, since=(2, 28)),
    # Device addresses of a window: window, offset in bytes, peer, then the result
    "ncclGetPeerDevicePointer": _status(
        window=_window, offset=c_size_t, peer=c_int, outPtr=POINTER(c_void_p), since=(2, 29)
    ),
    "ncclGetLsaDevicePointer": _status(
        window=_window, offset=c_size_t, lsaRank=c_int, outPtr=POINTER(c_void_p), since=(2, 29)
    ),
    "ncclGetLsaMultimemDevicePointer": _status(
        window=_window, offset=c_size_t, outPtr=POINTER(c_void_p), since=(2, 29)
    ),
    "ncclGetMultimemDevicePointer": _status(
        window=_window, offset=c_size_t, multimem=MultimemHandle, outPtr=POINTER(c_void_p), since=(2, 29)
    ),
    "ncclGetPeerDeviceLeInfo": _status(
        window=_window, offset=c_size_t, peerWorld=c_int, leId=POINTER(c_uint32), leOffset=POINTER(c_size_t),
        since=(2, 31)
    ),
    "ncclGetCftDeviceLeInfo": _status(
        window=_window, offset=c_size_t, peerCft=c_int, cftTeam=Team, leId=POINTER(c_uint32),
        leOffset=POINTER(c_size_t), since=(2, 31)
    ),
    "ncclGetMultimemDeviceLeInfo": _status(
        window=_window, offset=c_size_t, leId=POINTER(c_uint32), leOffset=POINTER(c_size_t), since=(2, 31)
    ),
    # Requirements of a device communicator: sizes, then the handle and the requirement to fill in
    "ncclLsaBarrierCreateRequirement": _status(
        team=Team, nBarriers=c_int, outHandle=_handle, outReq=_requirements, since=(2, 28)
    ),
    "ncclGinBarrierCreateRequirement": _status(
        comm=_comm, team=Team, nBarriers=c_int, outHandle=_handle, outReq=_requirements, since=(2, 28)
    ),
    "ncclLLA2ACalcSlots": _returns(c_int, maxElts=c_int, maxEltSize=c_int, since=(2, 28)),
    "ncclLLA2ACreateRequirement": _status(
        nBlocks=c_int, nSlots=c_int, outHandle=_handle, outReq=_requirements, since=(2, 28)
    ),
}  # fmt: skip


def version_code(version: Version) -> int:
    """(2, 28, 9) -> 22809, as NCCL_VERSION encodes releases after 2.8."""
    major, minor, patch = (*version, 0, 0)[:3]
    return major * 10000 + minor * 100 + patch


def version_tuple(code: int) -> Version:
    """22809 -> (2, 28, 9); codes below 10000 encode 2.8 and earlier."""
    if code < 10000:
        return code // 1000, code % 1000 // 100, code % 100
    return code // 10000, code % 10000 // 100, code % 100


def struct_size(struct: type[Structure], since: dict[str, Version], version: Version) -> int:
    """Return the size in bytes of the prefix of `struct` that a library of `version` was compiled with."""
    known = [name for name, _ in struct._fields_ if since.get(name, MIN_VERSION) <= version]  # type: ignore[misc]
    last = getattr(struct, known[-1])
    alignment = ctypes.alignment(struct)
    return -(-(last.offset + last.size) // alignment) * alignment
