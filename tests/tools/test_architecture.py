"""docs/architecture.md lists every package once, and every file and function that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_package_is_listed_once() -> None:
    packages = {path.parent for package in ("pynccl", "autograd") for path in (ROOT / package).glob("*/**/__init__.py")}
    listed = re.findall(r"^\| `(\S+)/` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(package_folder.relative_to(ROOT).as_posix() for package_folder in packages)


def test_everything_that_the_page_names_exists() -> None:
    """Check each `folder/file.py: name`, where a method is written as Class.method."""
    named = re.findall(r"`((?:\w+/)+\w+\.py): ([\w.]+)`", PAGE)
    assert named
    for file, name in named:
        text = (ROOT / file).read_text()
        for part in name.split("."):
            assert re.search(rf"^ *((def|class) {part}\b|{part}\b.* = )", text, re.MULTILINE), (file, name)
