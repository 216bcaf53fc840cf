"""NCCL's runtime parameters (NCCL >= 2.30) and the encryption of its sockets (NCCL >= 2.32)."""

from __future__ import annotations

import ctypes

from .bindings.abi import EncryptionConfig, EncryptionMode
from .bindings.library import Library, chosen
from .bindings.structs import stamped
from .bindings.values import text


def params(library: Library | None = None) -> dict[str, str]:
    """Return all published parameters of the loaded library with their current values.

    Set NCCL_PARAM_DUMP_ALL=true to include the unpublished ones."""
    library = chosen(library, "params")
    table, length = ctypes.POINTER(ctypes.c_char_p)(), ctypes.c_int()
    library.check(
        library.ncclParamGetAllParameterKeys(ctypes.byref(table), ctypes.byref(length)), "ncclParamGetAllParameterKeys"
    )
    keys = [(table[i] or b"").decode() for i in range(length.value)]
    return {key: param(key, library) for key in keys}


def param(key: str, library: Library | None = None) -> str:
    """Return the value of one parameter, as NCCL formats it. Raises NcclInvalidArgument for an unknown name."""
    library = chosen(library, "param")
    name = text(key, "param: key", "the name of a parameter, a string such as 'NCCL_DEBUG',")
    value, length = ctypes.c_char_p(), ctypes.c_int()
    code = library.ncclParamGetParameter(name, ctypes.byref(value), ctypes.byref(length))
    library.check(code, f"param: ncclParamGetParameter({key!r})")
    return (value.value or b"").decode()


def set_encryption(psk: str | None, library: Library | None = None) -> None:
    """Encrypt NCCL's TCP sockets with a pre-shared key; None: plain text.

    Call it on all ranks, before the first communicator is created."""
    library = chosen(library, "set_encryption")
    mode = EncryptionMode.NONE if psk is None else EncryptionMode.PSK
    try:
        key = None if psk is None else text(psk, "psk")
    except ValueError:  # its message would show the key
        raise ValueError(
            "set_encryption: psk is not a valid C string; expected a string without NUL, or None"
        ) from None
    config = stamped(EncryptionConfig, library)
    config.mode, config.psk = int(mode), key
    library.check(library.ncclSetEncryption(ctypes.byref(config)), f"ncclSetEncryption({mode.name})")
