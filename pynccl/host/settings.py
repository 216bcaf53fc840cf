"""ncclParam*: the host library's own parameters with their values in force; and what else is set per process."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from ..bindings.abi import EncryptionMode
from . import structs
from .birth import INIT_TIMEOUT_VARIABLE
from .comm import TIMEOUT_VARIABLE, seconds
from .failure import HostFailure, invalid_argument, invalid_usage
from .link import VARIABLE as LINK_VARIABLE
from .registry import VERSION, entry, plain_entry
from .version import VARIABLE as VERSION_VARIABLE
from .version import dotted


def _seconds_text(variable: str) -> str:
    return f"{seconds(variable, 600.0):g}"


# What a communicator made now would use.
_VALUES: dict[str, Callable[[], str]] = {
    TIMEOUT_VARIABLE: lambda: _seconds_text(TIMEOUT_VARIABLE),
    INIT_TIMEOUT_VARIABLE: lambda: _seconds_text(INIT_TIMEOUT_VARIABLE),
    LINK_VARIABLE: lambda: os.environ.get(LINK_VARIABLE, ""),
    VERSION_VARIABLE: lambda: dotted(VERSION),
    "GLOO_SOCKET_IFNAME": lambda: os.environ.get("GLOO_SOCKET_IFNAME", ""),
}
_FIRST_HANDLE = 0x9A4A0010
_handles = {_FIRST_HANDLE + 0x10 * i: key for i, key in enumerate(_VALUES)}


class _Answers(threading.local):
    """What was returned to this thread, and has to live until its next call."""

    def __init__(self) -> None:
        self.text = ctypes.c_char_p()
        self.parameter = ctypes.c_char_p()
        self.keys = (ctypes.c_char_p * len(_VALUES))(*(key.encode() for key in _VALUES))


_answers = _Answers()


def _value(name: str, key: str) -> str:
    if key not in _VALUES:
        raise invalid_argument(f"{name}: key is {key!r}; expected one of {', '.join(_VALUES)}")
    return _VALUES[key]()


def _bound(name: str, handle: int | None) -> str:
    """The value of the parameter behind a handle."""
    if handle not in _handles:
        raise invalid_argument(f"{name}: handle is {handle or 0:#x}; expected one that ncclParamBind returned")
    return _value(name, _handles[handle])


@entry
def ncclParamBind(out: Any, key: bytes | None) -> None:
    text = (key or b"").decode(errors="replace")
    _value("ncclParamBind", text)
    out[0] = next(handle for handle, known in _handles.items() if known == text)


def _define_getter(suffix: str, bits: int, signed: bool) -> None:
    """ncclParamGetI8 to ncclParamGetU64, which differ in their range alone."""
    name = f"ncclParamGet{suffix}"
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)

    def getter(handle: int | None, out: Any) -> None:
        text = _bound(name, handle)
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise invalid_argument(
                f"{name}: {_handles[handle or 0]} is {text!r}, no integer of {low} to {high}; use ncclParamGetStr"
            )
        out[0] = value

    getter.__name__ = name
    entry(getter)


for _bits in (8, 16, 32, 64):
    _define_getter(f"I{_bits}", _bits, signed=True)
    _define_getter(f"U{_bits}", _bits, signed=False)


@entry
def ncclParamGetStr(handle: int | None, out: Any) -> None:
    _answers.text = ctypes.c_char_p(_bound("ncclParamGetStr", handle).encode())
    out[0] = _answers.text


@entry
def ncclParamGet(handle: int | None, out: int | None, room: int, length: Any) -> None:
    """The bytes of the text without a final 0."""
    data = _bound("ncclParamGet", handle).encode()
    if len(data) > room or (data and not out):
        raise invalid_argument(
            f"ncclParamGet: room for {room} bytes at {'an address' if out else 'NULL'}; the value has {len(data)}"
        )
    if data:
        ctypes.memmove(out or 0, data, len(data))
    if length:
        length[0] = len(data)


@entry
def ncclParamGetParameter(key: bytes | None, value: Any, length: Any) -> None:
    data = _value("ncclParamGetParameter", (key or b"").decode(errors="replace")).encode()
    _answers.parameter = ctypes.c_char_p(data)
    value[0] = _answers.parameter
    if length:
        length[0] = len(data)


@entry
def ncclParamGetAllParameterKeys(table: Any, length: Any) -> None:
    table[0] = ctypes.cast(_answers.keys, ctypes.POINTER(ctypes.c_char_p))
    length[0] = len(_VALUES)


@plain_entry
def ncclParamDumpAll() -> None:
    for key, value in _VALUES.items():
        try:
            text = value()
        except HostFailure as failure:
            text = f"({failure.text})"
        print(f"{key}={text}", flush=True)


@plain_entry
def ncclResetDebugInit() -> None:
    """Nothing: the host library writes no log."""


@entry
def ncclSetEncryption(config: Any) -> None:
    if not config:
        raise invalid_argument("ncclSetEncryption: config is NULL; expected an ncclEncryptionConfig_t")
    given = config.contents
    structs.check(given)
    if given.mode == EncryptionMode.PSK:
        raise invalid_usage(
            "ncclSetEncryption: its connections are plain text, the host library cannot encrypt; run it on machines "
            "and networks that you trust, or set NCCL_ENCRYPTION_NONE"
        )
    if given.mode != EncryptionMode.NONE:
        raise invalid_argument(f"ncclSetEncryption: mode is {given.mode}; expected 0 (none) or 1 (pre-shared key)")
