"""pytest plugin of the ranks that gpu_check starts: a file for each test, and a barrier after it.

A rank only writes files, and waits until gpu_check lets all ranks go on. For test number N and rank R, the folder
GPU_CHECK_FOLDER has

  chosen  from gpu_check: ids of the tests to run; absent: all
  tests   ids of the tests that the ranks run
  start-R [outcome, message, seconds] before the first test
  N-R     the same of test N
  N-go    from gpu_check: all ranks have ended test N, and none is out of step
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

FOLDER, RANK, PARENT = Path(os.environ["GPU_CHECK_FOLDER"]), os.environ["RANK"], os.getppid()
POLL_SECONDS = 0.005
_reports: list[pytest.TestReport] = []  # setup, call and teardown of the running test
_ended: list[str] = []


def publish(name: str, *content: object) -> None:
    """Write a file, which appears with its entire content."""
    path = FOLDER / f"{name}.{RANK}.new"
    path.write_text(json.dumps(content))
    path.replace(FOLDER / name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (FOLDER / "chosen").exists():
        chosen = set(json.loads((FOLDER / "chosen").read_text()))
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish(session: pytest.Session) -> None:
    publish("tests", *(item.nodeid for item in session.items))
    publish(f"start-{RANK}", "passed")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test, write its outcome, and wait for the other ranks as long as gpu_check lives."""
    _reports.clear()
    began, number = time.monotonic(), len(_ended)
    result = yield
    _ended.append(item.nodeid)
    publish(f"{number}-{RANK}", *outcome(), round(time.monotonic() - began, 3))
    while not (FOLDER / f"{number}-go").exists() and os.getppid() == PARENT:
        time.sleep(POLL_SECONDS)
    return result


def outcome() -> tuple[str, str]:
    """Return the outcome of the test, and its first error or why it was skipped."""
    told = [report for report in _reports if report.failed] or [report for report in _reports if report.skipped]
    if not told:
        return "passed", ""
    where = told[0].longrepr
    return told[0].outcome, where[-1] if isinstance(where, tuple) else told[0].longreprtext
