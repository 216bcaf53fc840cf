"""The doctor's findings as text for a terminal: one label per topic, problems at the end, each with its fix."""

from __future__ import annotations

import os
import re
import shutil
import textwrap

from .findings import Chosen, Driver, Findings, Torch
from .problems import Problem

LABEL = 12
STATES = {
    "intact": "file intact",
    "replaced": "file REPLACED",
    "missing": "file MISSING",
    "unrecorded": "no record to compare the file with",
}


def render(found: Findings, problems: list[Problem]) -> str:
    """The whole report, without a newline at its end."""
    sources = {setting.name: f"   (from {setting.source})" for setting in found.settings}
    sources = {name: "" if "(from environment)" in source else source for name, source in sources.items()}
    absent = [name for name, version in found.versions.items() if not version]
    installed = ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)
    rows = {
        "library": _library(found.library),
        "functions": _functions(found.library) if found.library.error is None else [],
        "torch": _torch(found.torch),
        "wheels": [f"{wheel}, installed by {wheel.installer}: {STATES[wheel.state]}" for wheel in found.wheels]
        or ["no nvidia-nccl wheel is installed"],
        "in process": list(map(str, found.mapped)) or ["no libnccl is loaded"],
        "driver": _driver(found.driver),
        "variables": [f"{one.name}={one.value}{sources[one.name]}" for one in found.settings]
        or ["no NCCL_* or PYNCCL_* variable is set"],
        "versions": [installed] + ([f"not installed: {', '.join(absent)}"] if absent else []),
    }
    lines = []
    for label, texts in rows.items():
        for at, text in enumerate(texts):
            lines += _wrapped("" if at else label, text)
    lines.append("")
    for number, problem in enumerate(problems, 1):
        lines += [*_wrapped(f"problem {number}", problem.text), *_fix(problem), ""]
    return "\n".join(lines).rstrip() + ("" if problems else "\n\nNo problems found.")


def _fix(problem: Problem) -> list[str]:
    """Advice is wrapped. A command is there to be copied: it may be long, and breaks only where the shell allows it."""
    if not problem.is_command:
        return _wrapped("", f"fix: {problem.fix}")
    return (" " * LABEL + "fix: " + problem.fix.replace(" && ", " && \\\n" + " " * (LABEL + 5))).splitlines()


def _library(library: Chosen) -> list[str]:
    because = f"chosen because: {library.because}"
    if library.asked is not None:
        because = "chosen by PYNCCL_LIBRARY" + (f"={library.asked}" if library.asked != library.path else "")
    if library.error is not None:
        return ["none", *library.error.splitlines(), because]
    if library.is_host:
        return [f"the host library, on CPU memory, with the interface of NCCL {library.version}", because]
    lines = [f"NCCL {library.version}" + (f" for CUDA {library.cuda}" if library.cuda else ""), str(library.path)]
    if library.origin != "PYNCCL_LIBRARY":  # a path that was given needed no search
        lines.append(f"found by: {library.origin}")
    return [*lines, because]


def _functions(library: Chosen) -> list[str]:
    missing, known = sum(map(len, library.missing_functions.values())), library.known_functions
    if not missing:
        return [f"all {known} of nccl.h are there"]
    lines = [
        f"{known - missing} of the {known} of nccl.h are there; missing, under the NCCL version that brought them:"
    ]
    return lines + [f"{version}  {' '.join(names)}" for version, names in library.missing_functions.items()]


def _torch(torch: Torch | None) -> list[str]:
    if torch is None:
        return ["not installed"]
    own = []
    if torch.own is not None and (torch.given != torch.own or torch.error):
        own.append(f"its own is {torch.own}")
        if torch.given not in (None, torch.own):
            own.append(f"but it is given {torch.given}")
    if torch.error is not None:
        return [f"cannot be imported: {torch.error}", *own]
    if torch.built_with_nccl is None:
        return [f"{torch.version}, without NCCL" + ("" if torch.cuda or torch.hip else " (a build for CPUs)")]
    made_for = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}"
    loaded = [f"loaded {file}" for file in torch.files] or ["no libnccl file loaded: it is linked into torch"]
    return [f"{torch.version} for {made_for}, built with NCCL {torch.built_with_nccl}", *loaded, *own]


def _driver(driver: Driver) -> list[str]:
    lines = []
    if driver.cuda:
        lines.append(f"{driver.version}, runs CUDA up to {driver.cuda}")
        for number, gpu in enumerate(driver.gpus):
            lines.append(f"GPU {number}  {gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    usable = f"{driver.usable} usable" + (f" with CUDA_VISIBLE_DEVICES={hidden}" if hidden is not None else "")
    return [*lines, driver.problem or usable]


def _wrapped(label: str, text: str) -> list[str]:
    """Lines as wide as the terminal, from 60 to 100 columns; what is listed in a text hangs under its first word."""
    head = re.match(r" *(fix: |[\d.]+  )?", text)
    hang = head.end() if head and head.group(1) else len(text) - len(text.lstrip()) + 2
    return textwrap.wrap(
        text,
        min(max(shutil.get_terminal_size((100, 24)).columns, 60), 100),
        initial_indent=label.ljust(LABEL),
        subsequent_indent=" " * (LABEL + hang),
        break_long_words=False,  # paths are there to be copied
        break_on_hyphens=False,
    )
