"""What to do where another project is installed too: pynccl on PyPI, whose package has our name and overwrites ours.

pynccl_autograd runs this file by its path where `import pynccl` fails, so it imports nothing of this package.
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from os.path import exists

OTHER, OURS = "pynccl", "pynccl-autograd"


def pip(action: str, installer: str = "pip") -> str:
    """Return the pip command of this interpreter (the pip on PATH may differ), or uv's: its environments lack pip."""
    python = shlex.quote(sys.executable)
    if installer == "uv":
        return f"uv pip {action} --python {python}"
    return f"{python} -m pip {action}{' -y' if action == 'uninstall' else ''}"


def conflict(works: bool = False) -> tuple[str, str] | None:
    """Return what is wrong with the installed package pynccl and the command that mends it; None: nothing.

    works  whether `import pynccl` gives ours"""
    other, ours = _installed(OTHER), _installed(OURS)
    mend = _reinstall(ours) if ours is not None else ""
    if other is not None:
        found = f"{OTHER} {other.version}, another project on PyPI with a package of the same name,"
        if works:
            text = f"{found} is installed too: reinstalling it hides {OURS}, uninstalling it may delete files of {OURS}"
        else:
            text = f"{found} is installed over {OURS}{f' {ours.version}' if ours is not None else ''}"
        uninstall = f"{pip('uninstall', _installer(other))} {OTHER}"
        return text, f"{uninstall} && {mend}" if mend else uninstall
    if not works and mend and ours is not None and not exists(str(ours.locate_file("pynccl/__init__.py"))):
        text = (
            f"pynccl/__init__.py of {OURS} {ours.version} is missing: uninstalling {OTHER}, another project, deletes it"
        )
        return text, mend
    return None


def sentence() -> str:
    """Return what is wrong and the command, for an ImportError; "" if nothing is known."""
    return "; run ".join(conflict() or ())


def _installed(name: str) -> metadata.Distribution | None:
    """Return what an installer put into this environment, not the egg-info of a checkout."""
    every = metadata.distributions(name=name)
    return next((each for each in every if each.read_text("RECORD") is not None and "Version" in each.metadata), None)


def _installer(distribution: metadata.Distribution) -> str:
    return (distribution.read_text("INSTALLER") or "pip").strip()


def _reinstall(ours: metadata.Distribution) -> str:
    """Return the command that writes our files again, from where they came; "" for an editable install, which has its
    files in the checkout."""
    source, origin = f"{OURS}=={ours.version}", json.loads(ours.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return ""
    if "url" in origin:
        vcs = origin.get("vcs_info")
        source = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
    return f"{pip('install', _installer(ours))} --force-reinstall --no-deps {shlex.quote(source)}"
