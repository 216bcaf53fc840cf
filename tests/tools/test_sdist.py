"""The source distribution contains all files that the tests, `make` and the pages need."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pynccl", "autograd", "tests", "scripts", "docs", ".ci")
FILES = {"pyproject.toml", "setup.py", "Makefile", "constraints.txt", "mkdocs.yml"}
FILES |= {"README.md", "CHANGELOG.md", "LICENSE"}


def test_the_source_distribution_is_complete(tmp_path: Path) -> None:
    # A separate egg-base, since an earlier SOURCES list would be included.
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
        (information,) = (
            member for member in opened.getmembers() if member.name.count("/") == 1 and "PKG-INFO" in member.name
        )
        file = opened.extractfile(information)
        assert file is not None
        links = re.findall(r"\]\((.*?)\)", file.read().decode())
    assert len(links) > 20 and all(link.startswith("https://") for link in links)  # relative links do not work on PyPI
    found = {path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    needed = FILES | {str(path) for path in found if "__pycache__" not in path.parts}
    assert needed - packed == set()
    assert not [name for name in packed if name.startswith(".packages/") or name.endswith(".pyc")]
