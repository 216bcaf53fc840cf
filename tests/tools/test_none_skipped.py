"""The check that tests which must not be skipped ran, on the results of a real run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def results_of(tmp_path: Path, source: str) -> str:
    """What pytest writes about a file of tests."""
    folder = tmp_path / "tests" / "autograd"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir=.", "-p", "no:cacheprovider", "--junitxml=tests.xml"]
    subprocess.run([*command, "tests"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    return str(tmp_path / "tests.xml")


def checked(results: str, *files: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "scripts" / "none_skipped.py"), results, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


def test_tests_that_ran_are_all_right(tmp_path: Path) -> None:
    results = results_of(tmp_path, "def test_a(): pass\ndef test_b(): pass\n")
    assert checked(results, "tests/autograd/test_it.py") == (0, "all tests of 1 files ran\n")


def test_a_skipped_test_and_a_file_that_did_not_run_are_named(tmp_path: Path) -> None:
    skips = "import pytest\ndef test_a(): pass\n@pytest.mark.skip(reason='too slow')\ndef test_b(): pass\n"
    results = results_of(tmp_path, skips)
    code, text = checked(results, "tests/autograd/test_it.py", "tests/autograd/test_other.py")
    assert code == 1
    assert text.splitlines() == [
        "tests/autograd/test_other.py: no test of it ran",
        "tests.autograd.test_it: test_b was skipped: too slow",
    ]
