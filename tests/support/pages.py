"""Parse the Markdown pages: Python blocks, commands, printed output, links and paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
STARTS = [ROOT, *(ROOT / name for name in ("pynccl", "autograd", "scripts", "tests", "docs"))]
KINDS = ("python", "text", "console", "sh", "")  # of fenced blocks
_SET = r"(?:[A-Z_]+=\S+ )*"
_COMMAND = re.compile(rf"{_SET}(?:python3?|torchrun|make|pip|ssh|srun|sbatch|mpirun|scripts/\S+\.(?:py|sh)) .*|make")


class Block(NamedTuple):
    line: int  # of the page, of its first line of text
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of the page."""
    found: list[Block] = []
    inside: list[str] | None = None
    kind, start = "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            if inside is None:
                kind, start, inside = line.strip().removeprefix("```").strip(), number + 1, []
            else:
                found.append(Block(start, kind, "\n".join(inside) + "\n"))
                inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, f"{page.name}:{start - 1}: unclosed block"
    return found


def program(page: Path, python: list[Block]) -> str:
    """Return the Python of a page as one module with the page's line numbers, so that errors name the right line."""
    lines = [""] * max((block.line + block.text.count("\n") for block in python), default=0)
    for block in python:
        for offset, line in enumerate(block.text.splitlines()):
            lines[block.line - 1 + offset] = line
    return "\n".join(lines) + "\n"


def prose(page: Path) -> list[tuple[int, str]]:
    """Return the lines outside fenced blocks, with their numbers."""
    fenced = {block.line + i for block in blocks(page) for i in range(-1, block.text.count("\n") + 1)}
    return [(number, line) for number, line in enumerate(page.read_text().splitlines(), 1) if number not in fenced]


def commands(page: Path) -> list[tuple[int, str]]:
    """Return the commands of the page, from blocks and from backquoted text."""
    lines = [line for block in blocks(page) for line in enumerate(block.text.splitlines(), block.line)]
    lines += [(number, text) for number, line in prose(page) for text in [line.strip(), *re.findall("`(.+?)`", line)]]
    return [(number, text.strip().removeprefix("$ ")) for number, text in lines if _COMMAND.match(text.strip("$ "))]


def links(page: Path) -> list[tuple[int, str]]:
    """Return (line, target) of the links to files of the project, including anchors."""
    found = [(number, target) for number, line in prose(page) for target in re.findall(r"\]\(([^)\s]+)\)", line)]
    return [(number, target) for number, target in found if not re.match(r"https?:|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub derives from the headings."""
    heads = [line.lstrip("#").strip() for _, line in prose(page) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def paths(page: Path) -> list[tuple[int, str]]:
    """Return (line, path) of backquoted text that looks like a file or folder of the project."""
    found = re.compile(r"`([\w.-]+/[\w./-]*)`")
    ours = {folder.name for start in STARTS for folder in start.iterdir() if folder.is_dir()}
    every = [(number, path) for number, line in prose(page) for path in found.findall(line)]
    return [(number, path) for number, path in every if path.partition("/")[0] in ours]
