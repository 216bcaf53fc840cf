"""`python -m pynccl doctor`: which libnccl this environment uses, what is wrong with it, and how to mend that."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from .findings import examine
from .problems import problems
from .report import render

FAILED = "there is a problem"
EXAMPLES = """
examples:
  python -m pynccl doctor
  python -m pynccl doctor --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. The exit code is 1 if there is a problem."""
    found = examine()
    wrong = problems(found)
    if arguments.json:
        print(
            json.dumps({"ok": not wrong, **asdict(found), "problems": [asdict(problem) for problem in wrong]}, indent=2)
        )
    else:
        print(render(found, wrong))
    return 1 if wrong else 0
