"""MkDocs hook: the pages that are not in docs/, and links to files that are not in the site."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import api_pages
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
MOVED = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
REPOSITORY = re.findall(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
ROW = re.compile(r"^\|.*", re.MULTILINE)  # of a table
CODE = re.compile(r"`[^`]+`")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: Any) -> Files:
    for source, name in MOVED.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for module, content in api_pages.pages().items():
        files.append(File.generated(config, f"api/{module}.md", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Make the links of a page, which are those of the repository, those of the site."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    source = {name: path for path, name in MOVED.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def target(found: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(source), found[2]))
        place = MOVED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if place is None:
            link = f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/HEAD/{path}"
        else:
            link = os.path.relpath(place, os.path.dirname(page.file.src_uri) or ".")
        return found[1] + link + (found[3] or "")

    # GitHub ends a paragraph at a fence, and reads \| as | in the code of a table.
    parts = [part if part.startswith("```") else mended(part, target) for part in FENCED.split(markdown)]
    return "\n".join(parts)


def mended(markdown: str, target: Callable[[re.Match[str]], str]) -> str:
    return ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), LINK.sub(target, markdown))
