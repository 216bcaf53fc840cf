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

import pytest

from pynccl.bindings import abi

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from dump_nccl_abi import OUT, VERSIONS, expand, merge, patch

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
    assert having, "no release has it"
    assert having == list(RELEASES)[-len(having) :], f"only in {having}"
    return number(having[0])[:2]


def test_the_data_covers_the_releases_that_are_supported() -> None:
    assert tuple(RELEASES) == VERSIONS
    minors = [number(version)[:2] for version in VERSIONS]
    assert minors == [(2, minor) for minor in range(abi.MIN_VERSION[1], abi.HEADER_VERSION[1] + 1)]
    assert [abi.version_tuple(release["code"]) for release in RELEASES.values()] == list(map(number, VERSIONS))


def test_every_function_appeared_when_its_row_says() -> None:
    appeared = {name: first(lambda release, name=name: name in release["symbols"]) for name in ROWS}  # type: ignore[misc]
    assert appeared == {name: row.since for name, row in ROWS.items()}


def test_every_exported_function_has_a_row() -> None:
    exported = {name for release in RELEASES.values() for name in release["symbols"]}
    assert exported - ROWS.keys() == NO_ROW


def test_the_first_table_is_what_nccl_h_declares() -> None:
    declared = {name for release in RELEASES.values() for name in release["prototypes"]}
    assert declared == abi.FUNCTIONS.keys()
    assert not abi.FUNCTIONS.keys() & abi.DEVICE_FUNCTIONS.keys()


def test_no_function_ever_changed_its_type() -> None:
    """So a row taken from the newest header holds for every older library that has the function."""
    types: dict[str, set[str]] = {}
    for release in RELEASES.values():
        for name, prototype in release["prototypes"].items():
            types.setdefault(name, set()).add(prototype)
    assert len(types) > 70
    assert {name: found for name, found in types.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", ["ncclConfig_t", "ncclCollConfig_t"])
def test_every_config_field_appeared_when_its_table_says(name: str) -> None:
    struct, since = STRUCTS[name]

    def appeared(field: str) -> abi.Version:
        return first(lambda release: field in release["structs"].get(name, {"fields": {}})["fields"])

    assert {field: appeared(field) for field in since} == since
    assert [field for field, _ in struct._fields_] == ["size", "magic", "version", *since]  # type: ignore[misc]


@pytest.mark.parametrize("version", RELEASES)
def test_each_release_gets_its_own_struct(version: str) -> None:
    """The size that a struct is stamped with, and the place of every field, are those of the release's header."""
    layouts = RELEASES[version]["structs"]
    for name, (struct, since) in STRUCTS.items():
        if name in layouts:
            assert abi.struct_size(struct, since, number(version)) == layouts[name]["size"], name
            ours = {field: getattr(struct, field) for field, _ in struct._fields_}  # type: ignore[misc]
            known = {field: place for field, place in ours.items() if since.get(field, (0,)) <= number(version)}
            assert {field: [at.offset, at.size] for field, at in known.items()} == layouts[name]["fields"], name


def test_every_struct_of_the_headers_is_in_python() -> None:
    """ncclConfigExt_t alone is not: only vendors' libraries read it, and CollConfig carries it as a pointer."""
    assert {name for release in RELEASES.values() for name in release["structs"]} == {*STRUCTS, "ncclConfigExt_t"}


def test_a_release_read_back_is_the_release_written() -> None:
    old = {"code": 1, "symbols": {"a": True, "gone": True}, "fields": {"x": [0, 4]}}
    new = {"code": 2, "symbols": {"a": True, "b": False}, "fields": {"x": [0, 8]}, "more": {"y": 1}}
    change = patch(old, new)
    assert change == {"code": 2, "symbols": {"b": False, "gone": None}, "fields": {"x": [0, 8]}, "more": {"y": 1}}
    assert merge(old, change) == new
    assert merge({}, patch({}, old)) == old
