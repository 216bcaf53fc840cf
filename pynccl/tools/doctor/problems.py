"""What is wrong with the doctor's findings, each problem with the command or the change that mends it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from ...bindings.library import SONAME
from .findings import Findings
from .wheels import FILE_IN_WHEEL, Wheel, identify, pip


@dataclass(frozen=True)
class Problem:
    """Something wrong. `code` never changes; `fix` is a shell command if `is_command`, else advice."""

    code: str
    text: str
    fix: str
    is_command: bool = False


def problems(found: Findings) -> list[Problem]:
    """What is wrong; wheels first, then a libnccl that torch is given, since they explain the rest."""
    wheels = list(_of_wheels(found.wheels))
    before = list(_before_torch(found))
    mend = "mend the wheel named above, then look again" if wheels else ""
    return [
        *wheels,
        *before,
        *_of_torch(found, mend or ("mend what is named above, then look again" if before else "")),
        *_of_library(found, mend),
        *_of_driver(found),
        *([] if before else _older_than_torch(found)),
        *_of_process(found),
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# ------------------------------------------------------------------------------------------------------------- wheels


def _of_wheels(wheels: list[Wheel]) -> Iterator[Problem]:
    for path in dict.fromkeys(wheel.file.path for wheel in wheels):
        first, *others = [wheel for wheel in wheels if wheel.file.path == path]
        if others:
            yield Problem("wheel-collision", _collision([first, *others]), _keep_one([first, *others]), True)
        elif first.state == "missing":
            text = f"{first} is installed, but its file {path} is gone, as after uninstalling another such wheel"
            yield Problem("wheel-file-missing", text, first.reinstall, True)
        elif first.state == "replaced":
            text = f"{path} is not the file of {first}: its hash differs, and it says that it is {first.file.what}"
            yield Problem("wheel-file-replaced", text, first.reinstall, True)


def _collision(sharing: list[Wheel]) -> str:
    file = sharing[0].file
    owner = next((f"that of {wheel}" for wheel in sharing if wheel.state == "intact"), "that of none of them")
    fate = "The file is gone" if sharing[0].state == "missing" else f"The file there is {owner} ({file.what})"
    return f"{' and '.join(map(str, sharing))} are both installed and write the same file, {file.path}. {fate}"


def _keep_one(sharing: list[Wheel]) -> str:
    """Uninstall all but torch's, or the intact one. Its file goes with the others, so it is installed anew."""
    wanted = _wheel_of_torch()
    *others, kept = sorted(sharing, key=lambda wheel: (wheel.name == wanted, wheel.state == "intact", wheel.name))
    yes = "" if kept.installer == "uv" else "-y "
    return f"{pip('uninstall', kept.installer)} {yes}{' '.join(wheel.name for wheel in others)} && {kept.reinstall}"


def _wheel_of_torch() -> str | None:
    """The nvidia-nccl wheel that the installed torch names as its own."""
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    names = (re.match(r"nvidia-nccl-cu\d+", requirement) for requirement in requirements)
    return next((name.group() for name in names if name), None)


# -------------------------------------------------------------------------------------------------------------- torch


def _before_torch(found: Findings) -> Iterator[Problem]:
    """Who needs a library by its name gets the one that is there already, as torch does."""
    own, given = (found.torch.own, found.torch.given) if found.torch else (None, None)
    if own and given and own.version and given.version and _numbers(given.version) < _numbers(own.version):
        text = f"torch has its own libnccl, {own}, but is given an older one of that name, which was loaded first: "
        yield Problem("nccl-before-torch", text + str(given), _remedy(given.path))


def _of_torch(found: Findings, mend: str) -> Iterator[Problem]:
    if found.torch is None or found.torch.error is None:
        return
    text = f"torch is installed but cannot be imported: {found.torch.error}"
    folders = re.split("[:;]", os.environ.get("LD_LIBRARY_PATH", ""))
    there = (os.path.join(os.path.normpath(folder), SONAME) for folder in folders if folder)
    path = next(filter(os.path.exists, there), None)
    if mend:
        yield Problem("torch-broken", text, mend)
    elif path and "undefined symbol: nccl" in found.torch.error:  # which comes before torch's RUNPATH
        yield Problem("torch-broken", f"{text}. Its libnccl is {identify(path)}", _remedy(path))
    else:
        yield Problem("torch-broken", text, f"{pip('install')} --force-reinstall torch", True)


def _remedy(path: str) -> str:
    """Against the library at `path` being the one that torch gets."""
    for variable, separators, place in (
        ("LD_PRELOAD", "[: ]", path),
        ("LD_LIBRARY_PATH", "[:;]", os.path.dirname(path)),
    ):
        for entry in filter(None, re.split(separators, os.environ.get(variable, ""))):
            if os.path.realpath(entry) == os.path.realpath(place):
                return f"take {entry} out of {variable}"
    for entry in sys.path:
        if os.path.join(entry, FILE_IN_WHEEL) == path:
            return f"take {entry} off sys.path (see PYTHONPATH): torch loads what it finds there in nvidia/nccl/lib"
    return "import torch, or call pynccl.load(), before whatever loads it (here a .pth file, or sitecustomize.py)"


def _older_than_torch(found: Findings) -> Iterator[Problem]:
    """torch calls what was there when it was built; an older libnccl may lack it."""
    built_with = found.torch.built_with_nccl if found.torch else None
    if found.torch is None or built_with is None:
        return
    old = [file for file in found.torch.files if file.version and _numbers(file.version) < _numbers(built_with)]
    if old:
        text = f"torch was built with NCCL {built_with}, but has loaded the older {old[0]}"
        fix = f"{pip('install')} '{_wheel_of_torch() or 'nvidia-nccl-cu13'}>={built_with}'"
        yield Problem("nccl-older-than-torch", text, fix, True)


# ----------------------------------------------------------------------------------------- library, driver, process


def _of_library(found: Findings, mend: str) -> Iterator[Problem]:
    library = found.library
    if library.error is None:
        return
    asked = library.asked or ("nccl" if found.driver.usable else "host")
    text = f"the library that is asked for ({asked}) cannot be used: {library.error.splitlines()[0].rstrip(':')}"
    if asked not in ("host", "nccl"):
        fix = "set PYNCCL_LIBRARY to the path of a libnccl.so.2, to nccl or to host, or unset it"
    elif asked == "nccl":
        flavour = "cu12" if (found.driver.cuda or "").startswith("12.") else "cu13"
        fix = mend or f"{pip('install')} nvidia-nccl-{flavour}"
    else:
        fix = "mend torch, which carries the host library" if found.torch else f"{pip('install')} torch"
    yield Problem("library-unusable", text, fix, is_command=" -m pip " in fix)


def _of_driver(found: Findings) -> Iterator[Problem]:
    """Having no GPU is no problem: the host library is used. One that does not work is, or asking for it in vain."""
    driver, library = found.driver, found.library
    if not driver.usable and driver.gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        text = f"the driver lists GPUs ({len(driver.gpus)}), but no program can use them: {driver.problem}"
        fix = "see nvidia-smi and dmesg; on machines with NVSwitch also systemctl status nvidia-fabricmanager"
        yield Problem("gpu-unusable", text, fix)
    elif not driver.usable and library.asked not in (None, "host"):
        text = f"{library.because} asks for a library that needs a GPU, and there is none to use: {driver.problem}"
        fix = (
            "unset PYNCCL_LIBRARY (the host library then runs on the CPU), or install the driver: nvidia-smi must work"
        )
        yield Problem("no-driver", text, fix)
    # Within one major version CUDA is compatible both ways; a newer major version needs a newer driver.
    if library.cuda and driver.cuda and _numbers(library.cuda)[0] > _numbers(driver.cuda)[0]:
        text = f"{library.path} was built for CUDA {library.cuda}, but the driver runs CUDA up to {driver.cuda}"
        major = _numbers(driver.cuda)[0]
        fix = f"update the driver, or install packages for CUDA {major}: torch, and what it brings along"
        yield Problem("driver-too-old", text, fix)


def _of_process(found: Findings) -> Iterator[Problem]:
    if len(found.mapped) > 1:
        copies = "; ".join(map(str, found.mapped))
        text = (
            f"{len(found.mapped)} copies of libnccl are in this process, each with its own state and memory: {copies}"
        )
        fix = "see LD_PRELOAD, LD_LIBRARY_PATH and what this process imports; keep one copy, uninstall the others"
        if os.path.isabs(found.library.asked or ""):
            fix = "unset PYNCCL_LIBRARY, so that pynccl shares the copy that is there already"
        yield Problem("several-copies", text, fix)
    if found.cuda_core is not None:
        text, fix = found.cuda_core.split("\n  ", 1)
        yield Problem("cuda-core-broken", text, fix)
