"""A plugin of pytest that writes what every test came to, line by line, so that a run that is killed leaves it behind.

`-p gpu_record`, with the file to write in GPU_CHECK_RECORD; GPU_CHECK_FIRST leaves out so many tests, which have run.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

MOST_CHARACTERS = 1500


def _write(**row: Any) -> None:
    with open(os.environ["GPU_CHECK_RECORD"], "a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.hookimpl(trylast=True)  # once -k has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first = int(os.environ.get("GPU_CHECK_FIRST", "0"))
    config.hook.pytest_deselected(items=items[:first])
    del items[:first]
    _write(event="collected", first=first, tests=[item.nodeid for item in items])


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(event="start", test=nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write(event="end", test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        message = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        _write(event="report", test=report.nodeid, outcome=report.outcome, message=message[-MOST_CHARACTERS:])
