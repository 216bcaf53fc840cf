"""What is wrong with the doctor's findings, each problem with the command or the change that mends it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from .findings import Findings, Wheel


@dataclass(frozen=True)
class Problem:
    """Something wrong. `code` never changes; `fix` is a shell command if `is_command`, else advice."""

    code: str
    text: str
    fix: str
    is_command: bool = False


def problems(found: Findings) -> list[Problem]:
    """What is wrong; wheels first, then torch, since they explain the rest."""
    wheels = list(_of_wheels(found.wheels))
    mend = "mend the wheel named above, then look again" if wheels else ""
    return [*wheels, *_of_torch(found, mend), *_of_library(found, mend), *_of_driver(found), *_of_process(found)]


def _pip(action: str, installer: str = "pip") -> str:
    """`pip install` for this very interpreter: the pip on PATH may be another one's. What uv made has none."""
    python = shlex.quote(sys.executable)
    return f"uv pip {action} --python {python}" if installer == "uv" else f"{python} -m pip {action}"


def _reinstall(wheel: Wheel) -> str:
    """The command that writes the wheel's files anew and touches nothing else."""
    return f"{_pip('install', wheel.installer)} --force-reinstall --no-deps {wheel.name}=={wheel.version}"


def _of_wheels(wheels: list[Wheel]) -> Iterator[Problem]:
    for path in dict.fromkeys(wheel.file.path for wheel in wheels):
        first, *others = [wheel for wheel in wheels if wheel.file.path == path]
        if others:
            yield _collision([first, *others])
        elif first.state == "missing":
            text = f"{first} is installed, but its file {path} is gone, as after uninstalling another such wheel"
            yield Problem("wheel-file-missing", text, _reinstall(first), True)
        elif first.state == "replaced":
            text = f"{path} is not the file of {first}: its hash differs, and it says that it is {first.file.what}"
            yield Problem("wheel-file-replaced", text, _reinstall(first), True)


def _collision(sharing: list[Wheel]) -> Problem:
    """The fix: uninstall all but torch's, or the intact one. Its file goes with the others, so it is installed anew."""
    file = sharing[0].file
    owner = next((f"that of {wheel}" for wheel in sharing if wheel.state == "intact"), "that of none of them")
    fate = "The file is gone" if sharing[0].state == "missing" else f"The file there is {owner} ({file.what})"
    text = f"{' and '.join(map(str, sharing))} are both installed and write the same file, {file.path}. {fate}"
    try:
        wanted = re.search(r"nvidia-nccl-cu\d+", " ".join(metadata.requires("torch") or []))
    except metadata.PackageNotFoundError:
        wanted = None
    name = wanted[0] if wanted else ""
    *others, kept = sorted(sharing, key=lambda wheel: (wheel.name == name, wheel.state == "intact", wheel.name))
    yes = "" if kept.installer == "uv" else "-y "
    fix = f"{_pip('uninstall', kept.installer)} {yes}{' '.join(wheel.name for wheel in others)} && {_reinstall(kept)}"
    return Problem("wheel-collision", text, fix, True)


def _of_torch(found: Findings, mend: str) -> Iterator[Problem]:
    """A torch that cannot be imported, maybe since it is given an older libnccl than its own."""
    if found.torch is None or found.torch["error"] is None:
        return
    text = f"torch is installed but cannot be imported: {found.torch['error']}"
    if "undefined symbol: nccl" in text:
        paths = [f"{name}={os.environ.get(name, '')}" for name in ("LD_PRELOAD", "LD_LIBRARY_PATH")]
        text += f". It is given an older libnccl than its own ({', '.join(paths)})"
        fix = "take that out of these variables, and import torch before whatever loads it; or "
        yield Problem("torch-broken", text, fix + (mend or f"{_pip('install')} --force-reinstall torch"))
    elif mend:
        yield Problem("torch-broken", text, mend)
    else:
        yield Problem("torch-broken", text, f"{_pip('install')} --force-reinstall torch", True)


def _of_library(found: Findings, mend: str) -> Iterator[Problem]:
    library = found.library
    if library["error"] is None:
        return
    asked = library["asked"] or ("nccl" if found.driver["usable"] else "host")
    text = f"the library that is asked for ({asked}) cannot be used: {library['error'].splitlines()[0].rstrip(':')}"
    if asked not in ("host", "nccl"):
        fix = "set PYNCCL_LIBRARY to the path of a libnccl.so.2, to nccl or to host, or unset it"
    elif asked == "nccl":
        flavour = "cu12" if (found.driver["cuda"] or "").startswith("12.") else "cu13"
        fix = mend or f"{_pip('install')} nvidia-nccl-{flavour}"
    else:
        fix = "mend torch, which carries the host library" if found.torch else f"{_pip('install')} torch"
    yield Problem("library-unusable", text, fix, is_command=" install " in fix)


def _of_driver(found: Findings) -> Iterator[Problem]:
    """Having no GPU is no problem: the host library is used. Asking for one in vain is."""
    driver, library = found.driver, found.library
    if not driver["usable"] and library["asked"] not in (None, "host"):
        text = f"{library['because']} asks for a library that needs a GPU, and there is none: {driver['problem']}"
        fix = "unset PYNCCL_LIBRARY: the host library then runs on the CPU; or mend the driver: nvidia-smi must work"
        yield Problem("no-driver", text, fix)
    # Within one major version CUDA is compatible both ways; a newer major version needs a newer driver.
    built, runs = library["cuda"], driver["cuda"]
    if built and runs and int(built.split(".")[0]) > int(runs.split(".")[0]):
        text = f"{library['path']} was built for CUDA {built}, but the driver runs CUDA up to {runs}"
        fix = f"update the driver, or install packages for CUDA {runs.split('.')[0]}: torch, and what it brings"
        yield Problem("driver-too-old", text, fix)


def _of_process(found: Findings) -> Iterator[Problem]:
    if len(found.mapped) > 1:
        copies = "; ".join(map(str, found.mapped))
        text = (
            f"{len(found.mapped)} copies of libnccl are in this process, each with its own state and memory: {copies}"
        )
        fix = "see LD_PRELOAD, LD_LIBRARY_PATH and what this process imports; keep one copy, uninstall the others"
        if os.path.isabs(found.library["asked"] or ""):
            fix = "unset PYNCCL_LIBRARY, so that pynccl shares the copy that is there already"
        yield Problem("several-copies", text, fix)
