"""docs/architecture.md names every room once, and no file or function that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = ("pynccl", "autograd")


def listed() -> list[str]:
    """The rooms that the tables name."""
    return re.findall(r"^\| `(\S+/)` \|", PAGE, re.MULTILINE)


def in_the_tree() -> list[str]:
    rooms = {path.parent for package in PACKAGES for path in (ROOT / package).glob("*/**/__init__.py")}
    return [f"{room.relative_to(ROOT).as_posix()}/" for room in rooms]


def named() -> list[tuple[str, str]]:
    """(file, name) of each `folder/file.py: name` on the page."""
    return re.findall(r"`((?:\w+/)+\w+\.py): ([\w.]+)`", PAGE)


def definitions(path: Path) -> set[str]:
    """Names of what a file defines, of methods as Class.method."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_every_room_is_listed_once() -> None:
    assert sorted(listed()) == sorted(in_the_tree())


def test_what_the_page_names_is_there() -> None:
    assert named()
    assert [(file, name) for file, name in named() if name not in definitions(ROOT / file)] == []
