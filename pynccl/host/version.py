"""Which NCCL the host library poses as: PYNCCL_HOST_VERSION, else the newest that the ABI table knows.

An older version hides the C functions that came later and refuses the larger structs of later headers, so that a
program's ways of doing without them can be tested without that libnccl.
"""

from __future__ import annotations

import os
import re

from ..bindings.abi import HEADER_VERSION, MIN_VERSION, Version
from ..bindings.errors import NcclVersionError

VARIABLE = "PYNCCL_HOST_VERSION"


def dotted(version: Version) -> str:
    return ".".join(map(str, version))


def posed_version() -> Version:
    """(major, minor, patch), as the environment says now."""
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


VERSION = posed_version()
