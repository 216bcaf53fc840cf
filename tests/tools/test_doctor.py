"""Findings of `python -m pynccl doctor`: the library in use, overwritten wheels, several copies, the driver.

Most tests run without site-packages (`python -S`), so that only the fake installation is found.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from libraries import compile_c

from pynccl.bindings.abi import version_code
from pynccl.tools.doctor.problems import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
SONAME = "libnccl.so.2"
PIP = f"{shlex.quote(sys.executable)} -m pip"

SOURCE = r"""
const char text[] = "NCCL version %(version)s+cuda%(cuda)s";
int ncclGetVersion(int *version) { *version = %(code)d; return 0; }
const char *ncclGetErrorString(int code) { return text; }
const char *ncclGetLastError(void *comm) { return ""; }
"""

CUDA = r"""
int cuInit(unsigned flags) { return %(code)d; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
"""


def stub(version: str, cuda: str) -> bytes:
    """Return the bytes of a minimal libnccl of this version."""
    code = version_code(tuple(map(int, version.split("."))))
    source = SOURCE % {"version": version, "cuda": cuda, "code": code}
    if code >= version_code((2, 28)):  # torch needs this symbol
        source += "int ncclDevCommDestroy(void) { return 0; }"
    options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{SONAME}"]
    return compile_c(source, f"libdoctor{code}cuda{cuda}.so", options).read_bytes()


def write_file(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def install(site: Path, name: str, version: str, content: bytes, installer: str = "pip") -> Path:
    """Install the library over an existing one, with a RECORD like pip's; return its path."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record = f"nvidia/nccl/lib/{SONAME},sha256={digest},{len(content)}\n{info}/METADATA,,\n{info}/RECORD,,\n"
    write_file(site / info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode())
    write_file(site / info / "RECORD", record.encode())
    write_file(site / info / "INSTALLER", f"{installer}\n".encode())
    return write_file(site / "nvidia" / "nccl" / "lib" / SONAME, content)


def doctor(
    *options: str, site: Path | None = None, code: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the doctor in a new interpreter after `code`, by default without GPUs."""
    removed = ("PYNCCL_", "NCCL_", "PYTHONPATH", "LD_LIBRARY_PATH", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    paths = ([str(site)] if site else []) + [str(ROOT)]
    overrides = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths), **environment}
    program = f"{code}\nimport sys\nfrom pynccl.__main__ import main\nsys.exit(main(['doctor', *sys.argv[1:]]))"
    command = [sys.executable, *(["-S"] if site else []), "-c", program, *options]
    return subprocess.run(command, env={**kept, **overrides}, capture_output=True, text=True, timeout=100, check=False)


def findings(site: Path | None = None, code: str = "", **environment: str) -> dict[str, Any]:
    """Return the output of --json; check that there is no other output."""
    done = doctor("--json", site=site, code=code, **environment)
    assert not done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0)
    assert found["ok"] is not bool(found["problems"])
    return found


def problem(found: dict[str, Any], code: str) -> dict[str, Any]:
    """Return the only problem with this code."""
    (match,) = (problem for problem in found["problems"] if problem["code"] == code)
    return match


def codes(found: dict[str, Any]) -> list[str]:
    return [problem["code"] for problem in found["problems"]]


CU12, CU13 = ("nvidia-nccl-cu12", "2.27.7"), ("nvidia-nccl-cu13", "2.28.9")


def both_wheels(site: Path) -> Path:
    install(site, *CU12, stub("2.27.7", "12.9"))
    return install(site, *CU13, stub("2.28.9", "13.0"))


def reinstall_command(name: str, version: str) -> str:
    return f"{PIP} install --force-reinstall --no-deps {name}=={version}"


def test_wheels_that_overwrote_each_other_are_identified_and_get_a_fix(tmp_path: Path) -> None:
    path = both_wheels(tmp_path)
    found = findings(tmp_path, PYNCCL_LIBRARY="nccl")
    states = [(wheel["name"], wheel["state"]) for wheel in found["wheels"]]
    assert states == [("nvidia-nccl-cu12", "replaced"), ("nvidia-nccl-cu13", "intact")]
    collision = problem(found, "wheel-collision")
    assert collision["text"] == (
        f"nvidia-nccl-cu12 2.27.7 and nvidia-nccl-cu13 2.28.9 are both installed and write the same file, {path}. "
        "The file belongs to nvidia-nccl-cu13 2.28.9 (NCCL 2.28.9 for CUDA 13.0)"
    )
    fix = f"{PIP} uninstall -y nvidia-nccl-cu12 && {reinstall_command(*CU13)}"
    assert collision["is_command"] and collision["fix"] == fix
    library = found["library"]
    assert (library["version"], library["cuda"], library["origin"]) == ("2.28.9", "13.0", "wheel")

    done = doctor(site=tmp_path, PYNCCL_LIBRARY="nccl", COLUMNS="80")
    assert done.returncode == 1 and "nvidia-nccl-cu12 2.27.7: file replaced" in done.stdout
    wheels = done.stdout.partition("problem 2 ")[2]  # the first one is that there is no GPU
    printed = wheels.partition("fix: ")[2].partition("\n\n")[0].replace("\\\n", "")  # joins lines like a shell
    assert shlex.split(printed) == shlex.split(fix)


def test_a_missing_or_replaced_library_gets_a_reinstall_command(tmp_path: Path) -> None:
    path = install(tmp_path, *CU13, stub("2.28.9", "13.0"))
    path.write_bytes(stub("2.27.7", "12.9"))
    replaced = problem(findings(tmp_path, PYNCCL_LIBRARY="nccl"), "wheel-file-replaced")
    assert "its hash differs, and it contains NCCL 2.27.7 for CUDA 12.9" in replaced["text"]
    assert replaced["fix"] == reinstall_command(*CU13)

    install(tmp_path, *CU13, b"", installer="uv").unlink()  # reinstall with uv
    found = findings(tmp_path, PYNCCL_LIBRARY="nccl")
    assert [wheel["state"] for wheel in found["wheels"]] == ["missing"]
    missing = problem(found, "wheel-file-missing")
    assert str(path) in missing["text"] and "nvidia-nccl-cu13 2.28.9" in missing["text"]
    python = shlex.quote(sys.executable)
    assert missing["fix"] == f"uv pip install --python {python} {reinstall_command(*CU13).partition('install ')[2]}"


def test_the_library_several_copies_and_a_missing_gpu_are_reported(tmp_path: Path) -> None:
    first = write_file(tmp_path / "first" / SONAME, stub("2.27.7", "12.9"))
    second = write_file(tmp_path / "second" / SONAME, stub("2.28.9", "13.0"))
    plugin = write_file(tmp_path / "libnccl-net.so", stub("2.27.7", "12.9"))
    code = f"import ctypes\nfor path in {[str(first), str(second), str(plugin)]}: ctypes.CDLL(path)"
    found = findings(tmp_path, code, PYNCCL_LIBRARY=str(first))
    library = found["library"]
    assert (library["path"], library["version"], library["cuda"]) == (str(first), "2.27.7", "12.9")
    copies = {copy["path"]: (copy["version"], copy["cuda"]) for copy in found["mapped"]}
    assert copies == {str(first): ("2.27.7", "12.9"), str(second): ("2.28.9", "13.0")}
    assert sorted(codes(found)) == ["no-driver", "several-copies"]
    assert problem(found, "several-copies")["text"].startswith("2 copies of libnccl are in this process")
    assert found["driver"]["problem"] in problem(found, "no-driver")["text"]


@pytest.mark.parametrize("name", ["nothing/libnccl.so.2", "text.so", "libc.so.6", "old.so"])
def test_a_file_that_is_not_libnccl_or_too_old_gets_advice(tmp_path: Path, name: str) -> None:
    write_file(tmp_path / "text.so", b"not a library")
    write_file(tmp_path / "old.so", stub("2.17.1", "12.0"))
    path = name if name == "libc.so.6" else str(tmp_path / name)
    found = findings(tmp_path, PYNCCL_LIBRARY=path)
    assert found["library"]["path"] is None
    unusable = problem(found, "library-unusable")
    assert path in unusable["text"] and ("needs NCCL >= 2.18" in unusable["text"]) is (name == "old.so")
    assert unusable["fix"] == "unset PYNCCL_LIBRARY, to use the host library on the CPU"
    assert "no-driver" not in codes(found)
    assert problem(found, "library-unusable") == found["problems"][0] and unusable["text"].count(path) <= 2


# PYNCCL_LIBRARY, without a GPU -> the first fix that is printed
REQUESTS = {
    "nccl": "unset PYNCCL_LIBRARY, to use the host library on the CPU",
    "HOST": "set PYNCCL_LIBRARY=host",
    "ncl": "unset PYNCCL_LIBRARY, to use the host library on the CPU",
}


@pytest.mark.parametrize("value", REQUESTS)
def test_a_request_that_cannot_work_here_is_the_first_problem_and_has_one_fix(tmp_path: Path, value: str) -> None:
    """Whatever else is wrong: no wheel, no torch; nothing is to be installed."""
    printed = doctor(site=tmp_path, PYNCCL_LIBRARY=value).stdout
    assert re.findall(r"problem \d +PYNCCL_LIBRARY=(\S+)", printed) == [value]
    before, fixes = printed.partition("problem 1 ")[0], re.findall(r"fix: (.*)", printed)
    assert fixes[0] == REQUESTS[value] and "nvidia-nccl-cu" not in "".join(fixes)
    assert "install" not in before.replace("not installed", "").replace("is installed", "")


def test_misspelt_and_invalid_variables_are_reported(tmp_path: Path) -> None:
    found = findings(tmp_path, PYNCCL_CHEK="1", PYNCCL_CHECK="yes")
    assert problem(found, "variable-unknown")["text"] == (
        "PYNCCL_CHEK is not a variable of pynccl; did you mean PYNCCL_CHECK?"
    )
    assert problem(found, "variable-invalid")["text"].startswith("PYNCCL_CHECK='yes': expected 1")


def test_doctor_and_page_list_the_variables_that_the_package_reads() -> None:
    root = Path(__file__).parents[2]
    files = [path for folder in ("pynccl", "autograd") for path in (root / folder).rglob("*.py")]
    sources = [path.read_text() for path in files if path.name != "problems.py"]  # which has the list
    read = {name for source in sources for name in re.findall(r"[\"'](PYNCCL_[A-Z_]+[A-Z])[\"']", source)}
    page = (root / "docs" / "binding.md").read_text().partition("## Environment variables")[2]
    assert read == set(VARIABLES) == set(re.findall("`(PYNCCL_[A-Z_]+)`", page))


def test_missing_or_broken_torch_is_reported_for_the_host_library(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert found["torch"] is None and found["versions"]["torch"] is None
    assert problem(found, "library-unusable")["fix"] == f"{PIP} install torch"
    write_file(tmp_path / "torch" / "__init__.py", b"raise ImportError('undefined symbol: ncclCommWindowRegister')")
    found = findings(tmp_path)
    assert found["torch"]["error"] == "ImportError: undefined symbol: ncclCommWindowRegister"
    assert problem(found, "torch-broken")["fix"].endswith(f"; or {PIP} install --force-reinstall torch")
    assert "fix torch" in problem(found, "library-unusable")["fix"]


OURS, OTHER = ("pynccl-autograd", "0.1.0"), ("pynccl", "0.1.2")
SOURCE_URL = "file:///a/pynccl autograd.whl"


def files_of_this_project() -> dict[str, bytes]:
    packages = {"pynccl": ROOT / "pynccl", "pynccl_autograd": ROOT / "autograd"}
    return {
        f"{name}/{path.relative_to(folder)}": path.read_bytes()
        for name, folder in packages.items()
        for path in folder.rglob("*.py")
    }


def pip_install(site: Path, distribution: tuple[str, str], files: dict[str, bytes], **direct_url: Any) -> None:
    """Write the files over those that are there, as pip does."""
    name, version = distribution
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    added = {"METADATA": metadata, "INSTALLER": b"pip\n", "direct_url.json": json.dumps(direct_url).encode()}
    files = files | {f"{info}/{path}": content for path, content in added.items()}
    for path, content in files.items():
        write_file(site / path, content)
    write_file(site / info / "RECORD", "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")).encode())


def pip_uninstall(site: Path, distribution: tuple[str, str]) -> None:
    """Delete the files that it lists, whoever wrote them, as pip does."""
    name, version = distribution
    record = site / f"{name.replace('-', '_')}-{version}.dist-info" / "RECORD"
    for line in record.read_text().splitlines():
        (site / line.removesuffix(",,")).unlink(missing_ok=True)


def last_line(site: Path, *command: str, packages: str = "") -> str:
    """Return the last line on stderr of a Python that finds these packages only."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), packages])}
    command = (sys.executable, "-S", *command)
    done = subprocess.run(command, env=variables, cwd=site, capture_output=True, text=True, timeout=100, check=False)
    return done.stderr.splitlines()[-1] if done.returncode else ""


def test_another_project_named_pynccl_is_found_in_each_state_and_gets_the_pip_commands(tmp_path: Path) -> None:
    """The states are those that pip leaves: both write pynccl/__init__.py, and each deletes it."""
    site, ours = tmp_path / "site", files_of_this_project()
    other = {"pynccl/__init__.py": b"from .api import Nccl", "pynccl/api.py": b"import no_numba"}
    reinstall = f"{PIP} install --force-reinstall --no-deps {shlex.quote(SOURCE_URL)}"
    both = f"{PIP} uninstall -y pynccl && {reinstall}"
    start = "pynccl 0.1.2, another project on PyPI with a package of the same name, is installed"
    over = f"{start} over pynccl-autograd 0.1.0; run {both}"
    missing = "pynccl/__init__.py of pynccl-autograd 0.1.0 is missing: uninstalling pynccl, another project, deletes it"

    pip_install(site, OURS, ours, url=SOURCE_URL)
    pip_install(site, OTHER, other)
    assert last_line(site, "-c", "import pynccl_autograd") == f"ImportError: {over}"
    pip_install(site, OTHER, other | {"pynccl/api.py": b"Nccl = 1"})  # its own requirements are there
    assert last_line(site, "-c", "import pynccl_autograd") == f"ImportError: {over}"
    assert last_line(site, "-m", "pynccl", "doctor") == f"python -m pynccl: error: {over}"

    pip_install(site, OURS, ours, url=SOURCE_URL)
    found = problem(findings(site), "other-pynccl")
    assert found["text"].startswith(f"{start} too: ") and found["is_command"] and found["fix"] == both

    pip_uninstall(site, OTHER)
    assert last_line(site, "-c", "import pynccl_autograd") == f"ImportError: {missing}; run {reinstall}"
    assert last_line(site, "-m", "pynccl", "doctor") == f"python -m pynccl: error: {missing}; run {reinstall}"
    pip_install(site, OURS, ours, url=SOURCE_URL)
    assert "other-pynccl" not in codes(findings(site))
    assert "No module named 'torch'" in last_line(site, "-c", "import pynccl_autograd")


def test_another_project_named_pynccl_beside_an_editable_install_is_only_uninstalled(tmp_path: Path) -> None:
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    for path, content in files_of_this_project().items():
        write_file(checkout / path, content)
    pip_install(site, OTHER, {"pynccl/__init__.py": b"import no_numba"})
    text = last_line(site, "-c", "import pynccl_autograd", packages=str(checkout))
    fix = f"; run {PIP} uninstall -y pynccl"  # ours is not installed, but on PYTHONPATH
    assert text.endswith(f"is installed over pynccl-autograd{fix}")
    pip_install(site, OURS, {}, url="file:///checkout", dir_info={"editable": True})
    text = last_line(site, "-c", "import pynccl_autograd", packages=str(checkout))
    assert text.endswith(f"is installed over pynccl-autograd 0.1.0{fix}")


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ({}, "pynccl-autograd==0.1.0"),
        ({"url": "file:///checkout", "dir_info": {}}, "file:///checkout"),
        ({"url": "https://host/x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}, "git+https://host/x@abc"),
    ],
)
def test_this_project_is_reinstalled_from_where_it_came(tmp_path: Path, origin: dict[str, Any], source: str) -> None:
    pip_install(tmp_path, OURS, {}, **origin)
    pip_install(tmp_path, OTHER, {})
    fix = problem(findings(tmp_path), "other-pynccl")["fix"]
    assert fix == f"{PIP} uninstall -y pynccl && {PIP} install --force-reinstall --no-deps {source}"


@pytest.mark.parametrize("code", [0, 802])
def test_a_driver_that_is_too_old_or_broken_is_reported(tmp_path: Path, code: int) -> None:
    """A stub driver of two GPUs, for CUDA 12.4, whose cuInit returns `code`."""
    write_file(tmp_path / "torch" / "__init__.py", b"__version__ = 'none of it'")  # the real import takes seconds
    built = compile_c(CUDA % {"code": code}, f"libcuda.so.1.{code}", ["-shared", "-fPIC", "-w"])
    write_file(tmp_path / "libcuda.so.1", built.read_bytes())
    library = write_file(tmp_path / SONAME, stub("2.28.9", "13.0"))
    start = f"import os, sys; del os.environ['CUDA_VISIBLE_DEVICES']; sys.path.insert(0, {str(tmp_path)!r})"
    found = findings(code=start, PYNCCL_LIBRARY=str(library), LD_LIBRARY_PATH=str(tmp_path))
    if code:
        assert "error 802 from cuInit" in problem(found, "no-driver")["text"]
        return
    assert found["driver"] == {"usable": 2, "problem": "", "cuda": "12.4"}
    assert codes(found) == ["driver-too-old"]
    assert "was built for CUDA 13.0, but the driver supports CUDA up to 12.4" in found["problems"][0]["text"]
