"""The doctor's findings as text for a terminal: one label per topic, problems at the end, each with its fix."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterator

from .findings import Chosen, Driver, Findings, Torch
from .problems import Problem
from .wheels import describe

LABEL = 12
WIDTHS = (60, 100)  # lines as wide as the terminal, within these

Row = tuple[str, list[str]]  # label, lines


def render(found: Findings, problems: list[Problem]) -> str:
    """The whole report, without a newline at its end."""
    lines: list[str] = []
    for label, texts in _rows(found):
        for index, text in enumerate(texts):
            lines += _wrapped(label if index == 0 else "", text)
    lines.append("")
    if not problems:
        lines.append("No problems found.")
    for number, problem in enumerate(problems, 1):
        lines += _wrapped(f"problem {number}", problem.text)
        lines += _fix(problem)
        lines.append("")
    return "\n".join(lines).rstrip()


def _fix(problem: Problem) -> list[str]:
    """Advice is wrapped. A command is there to be copied: it may be long, and breaks only where the shell allows it."""
    if not problem.is_command:
        return _wrapped("", f"fix: {problem.fix}")
    return (" " * LABEL + "fix: " + problem.fix.replace(" && ", " && \\\n" + " " * (LABEL + 5))).splitlines()


def _rows(found: Findings) -> Iterator[Row]:
    yield "library", _library(found.library)
    if found.library.error is None:
        yield "functions", _functions(found.library)
    yield "torch", _torch(found.torch)
    yield (
        "wheels",
        [f"{wheel}, installed by {wheel.installer}: {_state(wheel.state)}" for wheel in found.wheels]
        or ["no nvidia-nccl wheel is installed"],
    )
    yield "in process", [str(file) for file in found.mapped] or ["no libnccl is loaded"]
    yield "driver", _driver(found.driver)
    yield (
        "variables",
        [
            f"{setting.name}={setting.value}"
            + (f"   (from {setting.source})" if setting.source != "environment" else "")
            for setting in found.settings
        ]
        or ["no NCCL_* or PYNCCL_* variable is set"],
    )
    installed = [f"{name} {version}" for name, version in found.versions.items() if version]
    absent = [name for name, version in found.versions.items() if not version]
    yield "versions", [", ".join(installed)] + ([f"not installed: {', '.join(absent)}"] if absent else [])


def _library(library: Chosen) -> list[str]:
    if library.error is not None:
        return ["none", *library.error.splitlines(), _because(library)]
    if library.is_host:
        return [f"the host library, on CPU memory, with the interface of NCCL {library.version}", _because(library)]
    lines = [describe(library.version, library.cuda), str(library.path)]
    if library.origin != "PYNCCL_LIBRARY":  # a path that was given needed no search
        lines.append(f"found by: {library.origin}")
    return [*lines, _because(library)]


def _because(library: Chosen) -> str:
    if library.asked is None:
        return f"chosen because: {library.because}"
    return "chosen by PYNCCL_LIBRARY" if library.asked == library.path else f"chosen by PYNCCL_LIBRARY={library.asked}"


def _functions(library: Chosen) -> list[str]:
    missing = sum(map(len, library.missing_functions.values()))
    if not missing:
        return [f"all {library.known_functions} of nccl.h are there"]
    present, known = library.known_functions - missing, library.known_functions
    lines = [f"{present} of the {known} of nccl.h are there; missing, under the NCCL version that brought them:"]
    return lines + [f"{version}  {' '.join(names)}" for version, names in library.missing_functions.items()]


def _torch(torch: Torch | None) -> list[str]:
    if torch is None:
        return ["not installed"]
    if torch.error is not None:
        return [f"cannot be imported: {torch.error}", *_own(torch)]
    if torch.built_with_nccl is None:
        return [f"{torch.version}, without NCCL" + ("" if torch.cuda or torch.hip else " (a build for CPUs)")]
    made_for = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}"
    loaded = [f"loaded {file}" for file in torch.files] or ["no libnccl file loaded: it is linked into torch"]
    return [f"{torch.version} for {made_for}, built with NCCL {torch.built_with_nccl}", *loaded, *_own(torch)]


def _own(torch: Torch) -> list[str]:
    """Its own libnccl, where that is not simply the one that was loaded."""
    if torch.own is None or (torch.given == torch.own and not torch.error):
        return []
    return [
        f"its own is {torch.own}",
        *([f"but it is given {torch.given}"] if torch.given not in (None, torch.own) else []),
    ]


def _state(state: str) -> str:
    return {
        "intact": "file intact",
        "replaced": "file REPLACED",
        "missing": "file MISSING",
        "unrecorded": "no record to compare the file with",
    }[state]


def _driver(driver: Driver) -> list[str]:
    lines = []
    if driver.cuda:
        lines.append(f"{driver.version or 'of unknown version'}, runs CUDA up to {driver.cuda}")
        lines += [f"GPU {i}  {gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for i, gpu in enumerate(driver.gpus)]
    if driver.problem:
        lines.append(driver.problem)
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        lines.append(f"{driver.usable} usable" + (f" with CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else ""))
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    width = min(max(shutil.get_terminal_size((WIDTHS[1], 24)).columns, WIDTHS[0]), WIDTHS[1])
    head = re.match(r" *(fix: |[\d.]+  )?", text)
    hang = head.end() if head and head.group(1) else len(text) - len(text.lstrip()) + 2
    return textwrap.wrap(
        text,
        width,
        initial_indent=label.ljust(LABEL),
        subsequent_indent=" " * (LABEL + hang),
        break_long_words=False,  # paths are there to be copied
        break_on_hyphens=False,
    )
