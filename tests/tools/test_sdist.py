"""The source distribution has what its tests, `make` and the pages need: all that is in the folders here."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pynccl", "autograd", "tests", "scripts", "docs", ".ci")
FILES = {"pyproject.toml", "setup.py", "Makefile", "constraints.txt", "README.md", "CHANGELOG.md", "LICENSE"}


def test_the_source_distribution_is_whole(tmp_path: Path) -> None:
    # Under an egg-base of its own: what an earlier list of sources names is taken along, mended or not.
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    here = {path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    needed = FILES | {str(path) for path in here if "__pycache__" not in path.parts}
    assert needed - packed == set()
    assert not [name for name in packed if name.startswith(".packages/") or name.endswith(".pyc")]
