"""What is wrong with the doctor's findings, each problem with the command or the change that mends it."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata

from ...bindings.library import SONAME
from .findings import Findings
from .wheels import FILE_IN_WHEEL, identify, pip, wheel_problems


@dataclass(frozen=True)
class Problem:
    """Something wrong. `code` never changes; `fix` is a shell command if `is_command`, else advice."""

    code: str
    text: str
    fix: str
    is_command: bool = False


def problems(found: Findings) -> list[Problem]:
    """What is wrong, each with the command or the change that mends it; wheels first, since they explain the rest."""
    wheels = [Problem(*problem, is_command=True) for problem in wheel_problems(found.wheels, _wheel_of_torch())]
    judges = (
        _order_problem,
        _torch_problem,
        _library_problem,
        _driver_problem,
        _cuda_problem,
        _age_problem,
        _copies_problem,
        _core_problem,
    )
    rest = [judge(found, bool(wheels)) for judge in judges]
    return [*wheels, *(problem for problem in rest if problem)]


def _wheel_of_torch() -> str | None:
    """The nvidia-nccl wheel that the installed torch names as its own."""
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    names = (re.match(r"nvidia-nccl-cu\d+", requirement) for requirement in requirements)
    return next((name.group() for name in names if name), None)


def _order_problem(found: Findings, _: bool) -> Problem | None:
    """Whoever needs a library by its name gets the one that is there already, as torch does."""
    if found.torch is None or found.torch.own is None or found.torch.given is None:
        return None
    own, given = found.torch.own, found.torch.given
    if not own.version or not given.version or _numbers(given.version) >= _numbers(own.version):
        return None
    text = f"torch has its own libnccl, {own}, but is given an older one of that name, which was loaded first: {given}"
    return Problem("nccl-before-torch", text, _remedy(given.path))


def _remedy(path: str) -> str:
    """Against the library at `path` being the one that torch gets."""
    if entry := _entry("LD_PRELOAD", path):
        return f"take {entry} out of LD_PRELOAD"
    if entry := _entry("LD_LIBRARY_PATH", os.path.dirname(path)):
        return f"take {entry} out of LD_LIBRARY_PATH"
    if entry := next((entry for entry in sys.path if os.path.join(entry, FILE_IN_WHEEL) == path), None):
        return f"take {entry} off sys.path (see PYTHONPATH): torch loads what it finds there in nvidia/nccl/lib"
    return "import torch, or call pynccl.load(), before whatever loads it (here a .pth file, or sitecustomize.py)"


def _entry(variable: str, path: str) -> str | None:
    """The entry of a variable of the dynamic loader that leads to `path`. LD_PRELOAD is cut at spaces, too."""
    entries = filter(None, re.split("[: ]" if variable == "LD_PRELOAD" else "[:;]", os.environ.get(variable, "")))
    return next((entry for entry in entries if os.path.realpath(entry) == os.path.realpath(path)), None)


def _torch_problem(found: Findings, wheel_is_broken: bool) -> Problem | None:
    if found.torch is None or found.torch.error is None:
        return None
    text = f"torch is installed but cannot be imported: {found.torch.error}"
    if wheel_is_broken:
        return Problem("torch-broken", text, "mend the wheel named above, then look again")
    if _order_problem(found, wheel_is_broken):
        return Problem("torch-broken", text, "mend what is named above, then look again")
    if "undefined symbol: nccl" in found.torch.error:  # a torch that has a RUNPATH is given what is there
        for folder in re.split("[:;]", os.environ.get("LD_LIBRARY_PATH", "")):
            if folder and os.path.exists(path := os.path.join(os.path.normpath(folder), SONAME)):
                return Problem("torch-broken", f"{text}. Its libnccl is {identify(path)}", _remedy(path))
    return Problem("torch-broken", text, f"{pip('install')} --force-reinstall torch", is_command=True)


def _library_problem(found: Findings, wheel_is_broken: bool) -> Problem | None:
    library = found.library
    if library.error is None:
        return None
    asked = library.asked or ("nccl" if found.driver.usable else "host")
    text = f"the library that is asked for ({asked}) cannot be used: {library.error.splitlines()[0].rstrip(':')}"
    if asked not in ("host", "nccl"):
        fix = "set PYNCCL_LIBRARY to the path of a libnccl.so.2, to nccl or to host, or unset it"
        return Problem("library-unusable", text, fix)
    if asked == "nccl" and wheel_is_broken:
        return Problem("library-unusable", text, "mend the wheel named above, then look again")
    if asked == "host" and found.torch is not None:
        return Problem("library-unusable", text, "mend torch, which carries the host library")
    flavour = "cu12" if (found.driver.cuda or "").startswith("12.") else "cu13"
    package = "torch" if asked == "host" else f"nvidia-nccl-{flavour}"
    return Problem("library-unusable", text, f"{pip('install')} {package}", is_command=True)


def _driver_problem(found: Findings, _: bool) -> Problem | None:
    """Having no GPU is no problem: the host library is used. One that does not work is, or asking for it in vain."""
    driver = found.driver
    if driver.usable:
        return None
    if driver.gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        text = f"the driver lists GPUs ({len(driver.gpus)}), but no program can use them: {driver.problem}"
        fix = "see nvidia-smi and dmesg; on machines with NVSwitch also systemctl status nvidia-fabricmanager"
        return Problem("gpu-unusable", text, fix)
    if found.library.asked in (None, "host"):
        return None
    text = f"{found.library.because} asks for a library that needs a GPU, and there is none to use: {driver.problem}"
    fix = "unset PYNCCL_LIBRARY (the host library then runs on the CPU), or install the driver: nvidia-smi must work"
    return Problem("no-driver", text, fix)


def _cuda_problem(found: Findings, _: bool) -> Problem | None:
    """Within one major version CUDA is compatible both ways; a newer major version needs a newer driver."""
    built, runs = found.library.cuda, found.driver.cuda
    if built is None or runs is None or _numbers(built)[0] <= _numbers(runs)[0]:
        return None
    text = f"{found.library.path} was built for CUDA {built}, but the driver runs CUDA up to {runs}"
    fix = f"update the driver, or install packages for CUDA {_numbers(runs)[0]}: torch, and what it brings along"
    return Problem("driver-too-old", text, fix)


def _age_problem(found: Findings, _: bool) -> Problem | None:
    """torch calls what was there when it was built; an older libnccl may lack it."""
    if found.torch is None or found.torch.built_with_nccl is None or _order_problem(found, False):
        return None
    built_with = found.torch.built_with_nccl
    old = [file for file in found.torch.files if file.version and _numbers(file.version) < _numbers(built_with)]
    if not old:
        return None
    text = f"torch was built with NCCL {built_with}, but has loaded the older {old[0]}"
    fix = f"{pip('install')} '{_wheel_of_torch() or 'nvidia-nccl-cu13'}>={built_with}'"
    return Problem("nccl-older-than-torch", text, fix, is_command=True)


def _copies_problem(found: Findings, _: bool) -> Problem | None:
    if len(found.mapped) < 2:
        return None
    copies = "; ".join(map(str, found.mapped))
    text = f"{len(found.mapped)} copies of libnccl are in this process, each with its own state and memory: {copies}"
    if os.path.isabs(found.library.asked or ""):
        fix = "unset PYNCCL_LIBRARY, so that pynccl shares the copy that is there already"
    else:
        fix = "see LD_PRELOAD, LD_LIBRARY_PATH and what this process imports; keep one copy, uninstall the others"
    return Problem("several-copies", text, fix)


def _core_problem(found: Findings, _: bool) -> Problem | None:
    if found.cuda_core is None:
        return None
    text, fix = found.cuda_core.split("\n  ", 1)
    return Problem("cuda-core-broken", text, fix)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
