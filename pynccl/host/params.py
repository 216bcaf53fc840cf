"""ncclParam*: the host library's parameters with their current values; and other settings of the process."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ..bindings.abi import FUNCTIONS, EncryptionMode
from .argcheck import check_struct
from .comm import TIMEOUT_VARIABLE, seconds
from .exports import export, export_plain
from .failure import HostFailure, invalid_argument, invalid_usage
from .init import INIT_TIMEOUT_VARIABLE
from .link import VARIABLE as LINK_VARIABLE
from .sharing import VARIABLE as TRANSPORT_VARIABLE, requested_transport
from .version import VARIABLE as VERSION_VARIABLE, VERSION, dotted

# The values that a new communicator would use.
_VALUES: dict[str, Callable[[], str]] = {
    TIMEOUT_VARIABLE: lambda: f"{seconds(TIMEOUT_VARIABLE):g}",
    INIT_TIMEOUT_VARIABLE: lambda: f"{seconds(INIT_TIMEOUT_VARIABLE):g}",
    LINK_VARIABLE: lambda: os.environ.get(LINK_VARIABLE, ""),
    TRANSPORT_VARIABLE: requested_transport,
    VERSION_VARIABLE: lambda: dotted(VERSION),
    "GLOO_SOCKET_IFNAME": lambda: os.environ.get("GLOO_SOCKET_IFNAME", ""),
}
_FIRST_HANDLE = 0x9A4A0010
_handles = {_FIRST_HANDLE + 0x10 * i: key for i, key in enumerate(_VALUES)}


_keys = (ctypes.c_char_p * len(_VALUES))(*(key.encode() for key in _VALUES))


@cache
def _text(value: str) -> ctypes.c_char_p:
    """Return a C string that is never freed, since C may hold its address."""
    return ctypes.c_char_p(value.encode())


def _value(name: str, key: str) -> str:
    if key not in _VALUES:
        raise invalid_argument(f"{name}: key is {key!r}; expected one of {', '.join(_VALUES)}")
    return _VALUES[key]()


def _bound(name: str, handle: int | None) -> str:
    """Return the value of the parameter of a handle."""
    if handle not in _handles:
        raise invalid_argument(f"{name}: handle is {handle or 0:#x}; expected a handle from ncclParamBind")
    return _value(name, _handles[handle])


@export
def ncclParamBind(out: Any, key: bytes | None) -> None:
    text = (key or b"").decode(errors="replace")
    _value("ncclParamBind", text)
    out[0] = next(handle for handle, known in _handles.items() if known == text)


def _get_integer(name: str, low: int, high: int, handle: int | None, out: Any) -> None:
    text = _bound(name, handle)
    if not re.fullmatch(r"-?[0-9]+", text) or not low <= int(text) <= high:
        raise invalid_argument(
            f"{name}: {_handles[handle or 0]} is {text!r}; expected an integer from {low} to {high}, or use "
            "ncclParamGetStr"
        )
    out[0] = int(text)


# ncclParamGetI8 to ncclParamGetU64 differ only in their range.
for _name in FUNCTIONS:
    if _integer := re.fullmatch("ncclParamGet([IU])([0-9]+)", _name):
        _bits = int(_integer[2])
        _low, _high = (0, (1 << _bits) - 1) if _integer[1] == "U" else (-(1 << _bits - 1), (1 << _bits - 1) - 1)
        export(partial(_get_integer, _name, _low, _high), _name)


@export
def ncclParamGetStr(handle: int | None, out: Any) -> None:
    out[0] = _text(_bound("ncclParamGetStr", handle))


@export
def ncclParamGet(handle: int | None, out: int | None, capacity: int, length: Any) -> None:
    """Copy the text without a terminating 0."""
    data = _bound("ncclParamGet", handle).encode()
    if len(data) > capacity or (data and not out):
        raise invalid_argument(
            f"ncclParamGet: buffer of {capacity} bytes at {'an address' if out else 'NULL'}; the value has {len(data)}"
        )
    if data:
        ctypes.memmove(out or 0, data, len(data))
    if length:
        length[0] = len(data)


@export
def ncclParamGetParameter(key: bytes | None, value: Any, length: Any) -> None:
    text = _value("ncclParamGetParameter", (key or b"").decode(errors="replace"))
    value[0] = _text(text)
    if length:
        length[0] = len(text.encode())


@export
def ncclParamGetAllParameterKeys(table: Any, length: Any) -> None:
    table[0] = ctypes.cast(_keys, ctypes.POINTER(ctypes.c_char_p))
    length[0] = len(_VALUES)


@export_plain
def ncclParamDumpAll() -> None:
    for key, value in _VALUES.items():
        try:
            text = value()
        except HostFailure as failure:
            text = f"({failure.text})"
        print(f"{key}={text}", flush=True)


@export_plain
def ncclResetDebugInit() -> None:
    """Do nothing: the host library writes no log."""


@export
def ncclSetEncryption(config: Any) -> None:
    if not config:
        raise invalid_argument("ncclSetEncryption: config is NULL; expected an ncclEncryptionConfig_t")
    struct = config.contents
    check_struct(struct)
    if struct.mode == EncryptionMode.PSK:
        raise invalid_usage(
            "ncclSetEncryption: mode is 1 (pre-shared key), but the host library cannot encrypt its connections; set "
            "NCCL_ENCRYPTION_NONE and use trusted nodes and networks"
        )
    if struct.mode != EncryptionMode.NONE:
        raise invalid_argument(f"ncclSetEncryption: mode is {struct.mode}; expected 0 (none) or 1 (pre-shared key)")
