"""How libnccl is found, the error if there is none, and functions that bind on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from libraries import Stub, compiled, torch_with_cuda

import pynccl
from pynccl.bindings.abi import HEADER_VERSION, Version, version_code

ROOT = Path(__file__).resolve().parents[2]
SONAME = "libnccl.so.2"
OLD = (2, 21, 5)


def python(code: str, *options: str, **environment: str) -> str:
    """Run `code` in a new interpreter that can import pynccl, without PYNCCL_LIBRARY, and return its output."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYNCCL_LIBRARY", "LD_LIBRARY_PATH")}
    code = f"import sys; sys.path.append({str(ROOT)!r})\n{code}"
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, check=False, env={**kept, **environment}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_functions_bind_on_first_use_or_name_required_version() -> None:
    stub = Stub(OLD)
    library = pynccl.Library(stub.path, "stub", stub._resolve)
    assert library.ncclReduce is library.ncclReduce
    assert stub.bound.count("ncclReduce") == 1
    with pytest.raises(AttributeError, match=r"nccl\.h has no function 'ncclAllRedcue'"):
        library.ncclAllRedcue  # noqa: B018
    assert not library.supports("ncclAlltoAll")
    with pytest.raises(pynccl.NcclVersionError) as caught:
        library.ncclCommShrink(None, None, 0, None, None, 0)
    assert str(caught.value) == f"ncclCommShrink needs NCCL >= 2.27; loaded 2.21.5 from {stub.path}"


def test_load_caches_path_and_reports_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled(OLD)
    library = pynccl.load(path)
    assert library is pynccl.load(path)
    assert (library.path, library.origin, library.version, library.is_host) == (path, "given path", OLD, False)
    monkeypatch.setenv("PYNCCL_LIBRARY", path)
    assert pynccl.load() is library
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    assert pynccl.load().is_host


def test_unloadable_library_error_names_alternatives(tmp_path: Path) -> None:
    missing = str(tmp_path / "libnccl.so.2")
    with pytest.raises(pynccl.NcclLibraryNotFound) as caught:
        pynccl.load(missing)
    assert str(caught.value).startswith(f"load: spec is '{missing}': cannot open shared object file")
    assert "pass the path of a libnccl.so.2, 'nccl' to search for one, or 'host'" in str(caught.value)
    with pytest.raises(pynccl.NcclLibraryNotFound, match=r"libc\.so\.6 \(given path\) has no ncclGetVersion"):
        pynccl.load("libc.so.6")
    with pytest.raises(pynccl.NcclVersionError, match=r"needs NCCL >= 2\.18; loaded 2\.17\.1 from .*libstub21701"):
        pynccl.load(compiled((2, 17, 1)))


def wheel(folder: Path, version: Version = (2, 27, 7)) -> str:
    """Create a stub under `folder` with the layout of the nvidia-nccl wheels and return its path."""
    path = folder / "nvidia" / "nccl" / "lib" / SONAME
    path.parent.mkdir(parents=True)
    path.write_bytes(Path(compiled(version, SONAME)).read_bytes())
    return str(path)


REPORT = "import pynccl; found = pynccl.load('nccl'); print(found.path, found.version, found.origin)"


def test_loaded_library_takes_precedence_over_wheel(tmp_path: Path) -> None:
    """-S hides site-packages, and so torch, whose libnccl would take precedence."""
    path, other = wheel(tmp_path / "path"), wheel(tmp_path / "other")
    output = python(REPORT, "-S", PYTHONPATH=str(tmp_path / "path"))
    assert output == f"{path} (2, 27, 7) wheel"
    output = python(f"import ctypes; ctypes.CDLL({other!r})\n{REPORT}", "-S", PYTHONPATH=str(tmp_path / "path"))
    assert output == f"{other} (2, 27, 7) already in the process"


# torch links libnccl.so.2 by name, so it gets the one that was loaded first.

BEFORE_TORCH = """
import pynccl
library = pynccl.load({spec!r})
import torch
"""
AFTER_TORCH = """
import pynccl, torch
library = pynccl.load({spec!r})
"""
BOTH = """
print(torch.cdll.version(), library.version, library.path, library.origin, sep="; ")
"""
NEW = f"{version_code(HEADER_VERSION)}; "
both_orders = pytest.mark.parametrize("order", [BEFORE_TORCH, AFTER_TORCH], ids=["pynccl first", "torch first"])


@both_orders
def test_search_and_soname_find_torch_libnccl(tmp_path: Path, order: str) -> None:
    own = torch_with_cuda(tmp_path / "torchs")
    folder = Path(wheel(tmp_path / "first")).parent
    paths = os.pathsep.join([str(tmp_path / "first"), str(tmp_path / "torchs")])
    output = python(order.format(spec="nccl") + BOTH, PYTHONPATH=paths)
    origin = "torch's own" if order == BEFORE_TORCH else "already in the process"
    assert output == f"{NEW}{HEADER_VERSION}; {own}; {origin}"
    output = python(order.format(spec=SONAME) + BOTH, PYTHONPATH=str(tmp_path / "torchs"), LD_LIBRARY_PATH=str(folder))
    assert output == f"{NEW}{HEADER_VERSION}; {own}; given path"


def test_not_found_error_lists_searched_places() -> None:
    code = """
import pynccl
try:
    print(pynccl.load("nccl").origin)
except pynccl.NcclLibraryNotFound as error:
    print(error)
"""
    output = python(code, "-S", PYTHONPATH="")  # -S hides site-packages, and so the wheel
    if output == "system":
        pytest.skip("the system's loader finds a libnccl")
    assert output.startswith(f"no {SONAME} found:")
    for place in ("already in the process", "cuda.pathfinder", "system"):
        assert f"  {place}: " in output
    assert "pynccl-autograd[cu13]" in output and "PYNCCL_LIBRARY=host" in output
