"""docs/architecture.md names every room once, and no file or function that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_room_is_listed_once() -> None:
    rooms = {path.parent for package in ("pynccl", "autograd") for path in (ROOT / package).glob("*/**/__init__.py")}
    listed = re.findall(r"^\| `(\S+)/` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(room.relative_to(ROOT).as_posix() for room in rooms)


def test_what_the_page_names_is_there() -> None:
    """Each `folder/file.py: name`, of a method as Class.method."""
    named = re.findall(r"`((?:\w+/)+\w+\.py): ([\w.]+)`", PAGE)
    assert named
    for file, name in named:
        text = (ROOT / file).read_text()
        for one in name.split("."):
            assert re.search(rf"^ *((def|class) {one}\b|{one}\b.* = )", text, re.MULTILINE), (file, name)
