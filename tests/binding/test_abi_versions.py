"""Every `since` of abi.py, and every struct cut for an older library, against what fifteen releases really contain.

tests/support/data/nccl_abi.json was taken from the wheels of those releases by scripts/dump_nccl_abi.py.
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
# Exported without a declaration that a C program on Linux could include: one is internal, two are declared for Windows.
NO_ROW = {"ncclResetDebugInitInternal", "ncclGinInboxA2ACreateRequirement", "ncclGinOutboxCreateRequirement"}


def number(version: str) -> abi.Version:
    return tuple(map(int, version.split(".")))


def first(contains: Callable[[dict[str, Any]], bool]) -> abi.Version:
    """(major, minor) of the first release that has something; fails if a later one has it no more."""
    having = [version for version, release in RELEASES.items() if contains(release)]
    assert having and having == list(RELEASES)[-len(having) :], f"only in {having}"
    return number(having[0])[:2]


def test_the_data_covers_the_releases_that_are_supported() -> None:
    minors = [number(version)[:2] for version in RELEASES]
    assert minors == [(2, minor) for minor in range(abi.MIN_VERSION[1], abi.HEADER_VERSION[1] + 1)]
    assert [abi.version_tuple(release["code"]) for release in RELEASES.values()] == list(map(number, VERSIONS))
    assert abi.version_tuple(2708) == (2, 7, 8)  # as codes were until 2.8


def test_every_function_has_a_row_and_appeared_with_its_type_when_the_row_says() -> None:
    appeared = {name: first(lambda release, name=name: name in release["symbols"]) for name in ROWS}  # type: ignore[misc]
    assert appeared == {name: row.since for name, row in ROWS.items()}
    exported = {name for release in RELEASES.values() for name in release["symbols"]}
    assert exported - ROWS.keys() == NO_ROW
    types = {pair for release in RELEASES.values() for pair in release["prototypes"].items()}
    assert sorted(name for name, _ in types) == sorted(abi.FUNCTIONS)  # each once: its type never changed


def test_each_release_gets_its_own_struct() -> None:
    """The size that a struct is stamped with, and the place of every field, are those of the release's header."""
    for name, (struct, since) in STRUCTS.items():
        fields = [field for field, _ in struct._fields_]  # type: ignore[misc]
        assert not since or fields == ["size", "magic", "version", *since]
        assert list(since.values()) == sorted(since.values()), "a later field after an earlier one: no prefix any more"
        for version, release in RELEASES.items():
            if name not in release["structs"]:
                continue
            layout, here = release["structs"][name], number(version)
            assert abi.struct_size(struct, since, here) == layout["size"], (version, name)
            known = {field: getattr(struct, field) for field in fields if since.get(field, (0,)) <= here}
            found = {field: [at.offset, at.size] for field, at in known.items()}
            assert found == layout["fields"], (version, name)
