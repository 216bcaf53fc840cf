"""Derive problems from the doctor's findings, each with the command or the change that fixes it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from ...bindings.errors import NcclInvalidUsage
from ...bindings.installed import conflict, pip
from ...bindings.values import closest, did_you_mean
from ...comm.base import check_enabled
from .findings import Findings, Wheel

VARIABLES = (
    *("PYNCCL_CHECK", "PYNCCL_JOB_KEY", "PYNCCL_LIBRARY", "PYNCCL_SHARE_GPU"),
    *("PYNCCL_WATCH", "PYNCCL_WATCH_ACTION", "PYNCCL_WATCH_DIR", "PYNCCL_WATCH_TIMEOUT"),
    *("PYNCCL_HOST_INIT_TIMEOUT", "PYNCCL_HOST_LINK", "PYNCCL_HOST_TIMEOUT", "PYNCCL_HOST_TRANSPORT"),
    "PYNCCL_HOST_VERSION",
)


@dataclass(frozen=True)
class Problem:
    """A problem. `code` is stable across releases; `fix` is a shell command if `is_command`, else advice."""

    code: str
    text: str
    fix: str
    is_command: bool = False


def problems(found: Findings) -> list[Problem]:
    """Return the problems: first PYNCCL_LIBRARY, if it cannot work here; then wheels and torch, since these cause the
    others."""
    wheels = list(_wheel_problems(found.wheels))
    wheel_fix = "fix the wheel named above, then run the doctor again" if wheels else ""
    return [
        *_name_problems(),
        *_request_problems(found),
        *wheels,
        *_torch_problems(found, wheel_fix),
        *_library_problems(found, wheel_fix),
        *_driver_problems(found),
        *_process_problems(found),
        *_variable_problems(found),
    ]


def _name_problems() -> Iterator[Problem]:
    """Report another project whose package has the name of this one."""
    if found := conflict(works=True):
        yield Problem("other-pynccl", *found, is_command=True)


def _reinstall(wheel: Wheel) -> str:
    """Return the command that writes the wheel's files again and changes nothing else."""
    return f"{pip('install', wheel.installer)} --force-reinstall --no-deps {wheel.name}=={wheel.version}"


def _wheel_problems(wheels: list[Wheel]) -> Iterator[Problem]:
    for path in dict.fromkeys(wheel.file.path for wheel in wheels):
        first, *others = [wheel for wheel in wheels if wheel.file.path == path]
        if others:
            yield _collision([first, *others])
        elif first.state == "missing":
            text = f"{first} is installed, but its file {path} is missing; uninstalling another nvidia-nccl deletes it"
            yield Problem("wheel-file-missing", text, _reinstall(first), True)
        elif first.state == "replaced":
            text = f"{path} is not the file of {first}: its hash differs, and it contains {first.file.description}"
            yield Problem("wheel-file-replaced", text, _reinstall(first), True)


def _collision(sharing: list[Wheel]) -> Problem:
    """Uninstall all but the wheel that torch requires (else the intact one), then restore its file by reinstalling."""
    file = sharing[0].file
    owner = next((f"belongs to {wheel}" for wheel in sharing if wheel.state == "intact"), "belongs to none of them")
    status = "The file is missing" if sharing[0].state == "missing" else f"The file {owner} ({file.description})"
    text = f"{' and '.join(map(str, sharing))} are both installed and write the same file, {file.path}. {status}"
    try:
        required = re.search(r"nvidia-nccl-cu\d+", " ".join(metadata.requires("torch") or []))
    except metadata.PackageNotFoundError:
        required = None
    name = required[0] if required else ""
    *others, kept = sorted(sharing, key=lambda wheel: (wheel.name == name, wheel.state == "intact", wheel.name))
    fix = f"{pip('uninstall', kept.installer)} {' '.join(wheel.name for wheel in others)} && {_reinstall(kept)}"
    return Problem("wheel-collision", text, fix, True)


def _torch_problems(found: Findings, wheel_fix: str) -> Iterator[Problem]:
    """Report a torch that cannot be imported, for instance because it loads an older libnccl than its own."""
    if found.torch is None or found.torch["error"] is None:
        return
    text = f"torch is installed but cannot be imported: {found.torch['error']}"
    if "undefined symbol: nccl" in text:
        paths = [f"{name}={os.environ.get(name, '')}" for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")]
        text += f". It loads an older libnccl than its own ({', '.join(paths)})"
        fix = "remove that libnccl from these variables, and import torch before anything that loads it; or "
        yield Problem("torch-broken", text, fix + (wheel_fix or f"{pip('install')} --force-reinstall torch"))
    elif wheel_fix:
        yield Problem("torch-broken", text, wheel_fix)
    else:
        yield Problem("torch-broken", text, f"{pip('install')} --force-reinstall torch", True)


def reason_lines(error: str) -> list[str]:
    """Return the lines of an error of `load` without its advice, which problems replace by what helps here."""
    lines = (re.sub(r"; (?:pass|set) .*", "", line) for line in error.splitlines())
    return [line for line in lines if not re.match(r"  (?:install pynccl|or set PYNCCL)", line)]


def _request_problems(found: Findings) -> Iterator[Problem]:
    """Report a PYNCCL_LIBRARY that cannot work here."""
    asked, library = found.library["asked"], found.library
    if asked in (None, "host"):
        return
    no_gpu = "" if found.driver["usable"] else found.driver["problem"]
    unset = "unset PYNCCL_LIBRARY" + (", to use the host library on the CPU" if no_gpu else "")
    if library["error"] is not None and asked != "nccl":
        reason = reason_lines(library["error"])[0].removeprefix(f"PYNCCL_LIBRARY={asked}: ")
        meant = closest(asked, ("host",) if no_gpu else ("host", "nccl"))
        unset += "" if no_gpu else ", or set it to the path of a libnccl.so.2"
        yield Problem(
            "library-unusable",
            f"PYNCCL_LIBRARY={asked} cannot be used: {reason}",
            f"set PYNCCL_LIBRARY={meant}" if meant else unset,
        )
    elif no_gpu:
        text = f"PYNCCL_LIBRARY={asked} requests a library that needs a GPU, but no GPU is usable: {no_gpu}"
        unset += ", or fix the driver until nvidia-smi works" if "reports error" in no_gpu else ""
        yield Problem("no-driver", text, unset)


def _library_problems(found: Findings, wheel_fix: str) -> Iterator[Problem]:
    library = found.library
    requested = library["asked"] or ("nccl" if found.driver["usable"] else "host")
    if library["error"] is None or requested not in ("host", "nccl"):
        return
    if requested == "nccl" and not found.driver["usable"]:  # see _request_problems
        return
    text = f"the library ({requested}) cannot be used: {reason_lines(library['error'])[0].rstrip(':')}"
    if requested == "nccl":
        flavour = "cu12" if (found.driver["cuda"] or "").startswith("12.") else "cu13"
        fix = wheel_fix or f"{pip('install')} nvidia-nccl-{flavour}"
    else:
        fix = "fix torch, which the host library runs on" if found.torch else f"{pip('install')} torch"
    yield Problem("library-unusable", text, fix, is_command=" install " in fix)


def _driver_problems(found: Findings) -> Iterator[Problem]:
    """Report a driver that is too old."""
    driver, library = found.driver, found.library
    # Minor versions of CUDA are compatible in both directions; a newer major version needs a newer driver.
    built, runs = library["cuda"], driver["cuda"]
    if built and runs and int(built.split(".")[0]) > int(runs.split(".")[0]):
        text = f"{library['path']} was built for CUDA {built}, but the driver supports CUDA up to {runs}"
        fix = f"update the driver, or install torch and its dependencies for CUDA {runs.split('.')[0]}"
        yield Problem("driver-too-old", text, fix)


def _process_problems(found: Findings) -> Iterator[Problem]:
    if len(found.mapped) > 1:
        copies = "; ".join(map(str, found.mapped))
        text = (
            f"{len(found.mapped)} copies of libnccl are in this process, each with its own state and memory: {copies}"
        )
        fix = "check LD_PRELOAD, LD_LIBRARY_PATH and this process's imports; keep one copy and uninstall the others"
        if os.path.isabs(found.library["asked"] or ""):
            fix = "unset PYNCCL_LIBRARY, so that pynccl shares the copy that is already loaded"
        yield Problem("several-copies", text, fix)


def _variable_problems(found: Findings) -> Iterator[Problem]:
    """Report misspelt PYNCCL_* variables, and an invalid PYNCCL_CHECK."""
    for name in found.settings:
        if name.startswith("PYNCCL_") and name not in VARIABLES and (suggestion := did_you_mean(name, VARIABLES)):
            text = f"{name} is not a variable of pynccl; {suggestion}"
            yield Problem("variable-unknown", text, f"rename or unset {name}")
    try:
        check_enabled()
    except NcclInvalidUsage as error:
        yield Problem("variable-invalid", str(error), "set PYNCCL_CHECK to 1 or 0, or unset it")
