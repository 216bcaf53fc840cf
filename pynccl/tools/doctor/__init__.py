"""`python -m pynccl doctor`: print which libnccl this environment uses, what is wrong with it, and how to fix it."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from dataclasses import asdict
from typing import Any

from .findings import Findings, examine
from .problems import Problem, problems, reason_lines

FAILED = "there is a problem"
EXAMPLES = """
examples:
  python -m pynccl doctor
  python -m pynccl doctor --json
"""
_LABEL = 12


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Return exit code 1 if there is a problem."""
    found = examine()
    wrong = problems(found)
    if arguments.json:
        report = {"ok": not wrong, **asdict(found), "problems": [asdict(problem) for problem in wrong]}
        print(json.dumps(report, indent=2))
    else:
        print(_render(found, wrong))
    return 1 if wrong else 0


def _render(found: Findings, wrong: list[Problem]) -> str:
    """Return the report: one label per topic, then the problems, each with its fix."""
    rows = {
        "library": _library(found.library),
        "torch": [_torch(found.torch)],
        "wheels": [f"{wheel}: file {wheel.state}" for wheel in found.wheels] or ["no nvidia-nccl wheel is installed"],
        "in process": list(map(str, found.mapped)) or ["no libnccl is loaded"],
        "driver": _driver(found.driver),
        "variables": [f"{name}={value}" for name, value in found.settings.items()]
        or ["no NCCL_* or PYNCCL_* variable is set"],
        "versions": [", ".join(f"{name} {version or 'not installed'}" for name, version in found.versions.items())],
    }
    lines = []
    for label, texts in rows.items():
        for at, text in enumerate(texts):
            lines += _wrapped("" if at else label, text)
    for number, problem in enumerate(wrong, 1):
        lines += ["", *_wrapped(f"problem {number}", problem.text)]
        if problem.is_command:  # users copy it, so break long lines only with the shell's line continuation
            command = problem.fix.replace(" && ", " && \\\n" + " " * (_LABEL + 5))
            lines += [" " * _LABEL + f"fix: {command}"]
        else:
            lines += _wrapped("", f"fix: {problem.fix}")
    return "\n".join(lines) + ("" if wrong else "\n\nNo problems found.")


def _library(library: dict[str, Any]) -> list[str]:
    because = f"chosen because: {library['because']}"
    if library["error"] is not None:
        return ["none", *reason_lines(library["error"]), because]
    if library["is_host"]:
        return [f"the host library, on CPU memory, with the interface of NCCL {library['version']}", because]
    version = f"NCCL {library['version']}" + (f" for CUDA {library['cuda']}" if library["cuda"] else "")
    return [version, library["path"], f"found by: {library['origin']}", because]


def _torch(torch: dict[str, Any] | None) -> str:
    if torch is None:
        return "not installed"
    if torch["error"] is not None:
        return f"cannot be imported: {torch['error']}"
    if torch["built_with_nccl"] is None:
        return f"{torch['version']}, without NCCL"
    return f"{torch['version']} for CUDA {torch['cuda']}, built with NCCL {torch['built_with_nccl']}"


def _driver(driver: dict[str, Any]) -> list[str]:
    lines = [f"supports CUDA up to {driver['cuda']}"] if driver["cuda"] else []
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    usable = f"{driver['usable']} usable GPUs" + (f" with CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else "")
    return [*lines, driver["problem"] or usable]


def _wrapped(label: str, text: str) -> list[str]:
    """Wrap text at 100 columns without breaking paths, so that they can be copied."""
    first, rest = label.ljust(_LABEL), " " * (_LABEL + 2)
    return textwrap.wrap(
        text, 100, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
