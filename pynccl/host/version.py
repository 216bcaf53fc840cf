"""The NCCL version that the host library reports: PYNCCL_HOST_VERSION, else the newest in the ABI table.

An older version hides later C functions and rejects the larger structs of later headers. So you can test how a program
handles an old NCCL without installing it.
"""

from __future__ import annotations

import os
import re

from ..bindings.abi import HEADER_VERSION, MIN_VERSION, Version
from ..bindings.errors import NcclVersionError

VARIABLE = "PYNCCL_HOST_VERSION"


def dotted(version: Version) -> str:
    return ".".join(map(str, version))


def reported_version() -> Version:
    """Return (major, minor, patch) from the current environment."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return HEADER_VERSION
    version = tuple(map(int, text.split("."))) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3}){1,2}", text) else ()
    if not MIN_VERSION <= version <= HEADER_VERSION:
        newest, oldest = dotted(HEADER_VERSION), dotted(MIN_VERSION)
        raise NcclVersionError(
            f"{VARIABLE}={text!r}: expected the number of an NCCL release from {oldest} to {newest}, for example "
            f"{VARIABLE}=2.21.5; unset it for {newest}"
        )
    return (*version, 0)[:3]


VERSION = reported_version()
