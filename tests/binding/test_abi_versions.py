"""Every `since` of abi.py, and every struct cut for an older library, against what fifteen releases really contain.

tests/support/data/nccl_abi.json was taken from the wheels of those releases by scripts/dump_nccl_abi.py.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def test_every_function_has_a_row_in_its_table() -> None:
    exported = {name for release in RELEASES.values() for name in release["symbols"]}
    assert exported - ROWS.keys() == NO_ROW
    declared = {name for release in RELEASES.values() for name in release["prototypes"]}
    assert declared == abi.FUNCTIONS.keys()


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
    assert list(since.values()) == sorted(since.values()), "a later field after an earlier one: no prefix any more"


def test_each_release_gets_its_own_struct() -> None:
    """The size that a struct is stamped with, and the place of every field, are those of the release's header."""
    for version, release in RELEASES.items():
        for name, layout in release["structs"].items():
            if name not in STRUCTS:
                continue
            struct, since = STRUCTS[name]
            assert abi.struct_size(struct, since, number(version)) == layout["size"], (version, name)
            ours = {field: getattr(struct, field) for field, _ in struct._fields_}  # type: ignore[misc]
            known = {field: place for field, place in ours.items() if since.get(field, (0,)) <= number(version)}
            found = {field: [at.offset, at.size] for field, at in known.items()}
            assert found == layout["fields"], (version, name)


@pytest.mark.parametrize(
    ("code", "version"), [(2708, (2, 7, 8)), (2804, (2, 8, 4)), (21805, (2, 18, 5)), (23203, (2, 32, 3))]
)
def test_version_codes_read_as_releases(code: int, version: abi.Version) -> None:
    assert abi.version_tuple(code) == version
    assert abi.version_code(version) == code or code < 10000


def test_elements_have_the_sizes_of_their_types() -> None:
    sizes = {t.name: t.itemsize for t in abi.DataType}
    assert sizes == {name: int(re.findall(r"\d+", name)[0]) // 8 for name in sizes}
    assert len(sizes) == 12
