"""Every `since` of abi.py, and every struct truncated for an older library, matches fifteen releases of NCCL.

scripts/dump_nccl_abi.py created tests/support/data/nccl_abi.json from the wheels of those releases.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pynccl.bindings import abi

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from dump_nccl_abi import OUT, VERSIONS, expand

RELEASES = expand(json.loads(OUT.read_text()))
ROWS = {**abi.FUNCTIONS, **abi.DEVICE_FUNCTIONS}
STRUCTS: dict[str, tuple[type[ctypes.Structure], dict[str, abi.Version]]] = {
    "ncclUniqueId": (abi.UniqueId, {}),
    "ncclConfig_t": (abi.Config, abi.CONFIG_SINCE),
    "ncclCollConfig_t": (abi.CollConfig, abi.COLL_CONFIG_SINCE),
    "ncclSimInfo_t": (abi.SimInfo, {}),
    "ncclEncryptionConfig_t": (abi.EncryptionConfig, {}),
    "ncclWaitSignalDesc_t": (abi.WaitSignalDesc, {}),
}
# Exported without a declaration for C programs on Linux: one is internal, two are declared for Windows only.
NO_ROW = {"ncclResetDebugInitInternal", "ncclGinInboxA2ACreateRequirement", "ncclGinOutboxCreateRequirement"}


def number(version: str) -> abi.Version:
    return tuple(map(int, version.split(".")))


def first(contains: Callable[[dict[str, Any]], bool]) -> abi.Version:
    """Return (major, minor) of the first release that contains something. Fails if a later one lacks it."""
    versions = [version for version, release in RELEASES.items() if contains(release)]
    assert versions and versions == list(RELEASES)[-len(versions) :], f"only in {versions}"
    return number(versions[0])[:2]


def test_abi_data_covers_supported_releases() -> None:
    minors = [number(version)[:2] for version in RELEASES]
    assert minors == [(2, minor) for minor in range(abi.MIN_VERSION[1], abi.HEADER_VERSION[1] + 1)]
    assert [abi.version_tuple(release["code"]) for release in RELEASES.values()] == list(map(number, VERSIONS))
    assert abi.version_tuple(2708) == (2, 7, 8)  # version codes until 2.8


def test_function_since_versions_match_releases() -> None:
    appeared = {name: first(lambda release, name=name: name in release["symbols"]) for name in ROWS}  # type: ignore[misc]
    assert appeared == {name: row.since for name, row in ROWS.items()}
    exported = {name for release in RELEASES.values() for name in release["symbols"]}
    assert exported - ROWS.keys() == NO_ROW
    types = {pair for release in RELEASES.values() for pair in release["prototypes"].items()}
    assert sorted(name for name, _ in types) == sorted(abi.FUNCTIONS)  # once each, so no type ever changed


def test_struct_layout_matches_each_release() -> None:
    """The size field of a struct and the offsets of its fields match the header of each release."""
    for name, (struct, since) in STRUCTS.items():
        fields = [field for field, _ in struct._fields_]  # type: ignore[misc]
        assert not since or fields == ["size", "magic", "version", *since]
        assert list(since.values()) == sorted(since.values()), (
            "fields must be ordered by version, so that an older struct is a prefix"
        )
        for version, release in RELEASES.items():
            if name not in release["structs"]:
                continue
            layout, here = release["structs"][name], number(version)
            assert abi.struct_size(struct, since, here) == layout["size"], (version, name)
            known = {field: getattr(struct, field) for field in fields if since.get(field, (0,)) <= here}
            found = {field: [at.offset, at.size] for field, at in known.items()}
            assert found == layout["fields"], (version, name)
