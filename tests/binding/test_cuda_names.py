"""Every name of CUDA's Python packages and of torch.cuda that this project uses exists in the supported versions."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_names import ABSENT, BINDINGS, BROKEN_PAIRS, CORE, LOOKED_UP, TORCH

from pynccl.interop.devices import import_remedy

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("pynccl", "autograd", "scripts", "tests/gpu") for path in (ROOT / folder).rglob("*.py")]
# Expressions that are objects of cuda.core in FILES_OF_CORE.
OBJECTS = ("self.core", "self._core", "self._event", "event.core", "end.core", "core", "other", "core_device", "device")
FILES_OF_CORE = ("devices.py", "keepalive.py", "scratch.py", "streams.py")


def dotted(node: ast.AST) -> str:
    """Return the dotted name of an expression; calls are "()", and sys.modules["torch"] is torch."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    if ast.unparse(node) == "sys.modules['torch']":
        return "torch"
    return node.id if isinstance(node, ast.Name) else "?"


def names_in(path: Path) -> Iterator[str]:
    """Yield the names that a file uses, such as cuda.core.Stream.from_handle and cuda.bindings.driver.cuInit.

    An attribute of an object of cuda.core, whose class is unknown, is yielded as cuda.core.*.record."""
    text = path.read_text()
    if "cuda" not in text and path.name not in FILES_OF_CORE:
        return
    tree = ast.parse(text)
    drivers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cuda.bindings"):
            drivers |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Assign) and dotted(node.value) == "cuda_driver()":
            drivers |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    modules = {name: name for name in drivers} | {"cuda_driver()": "driver"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            text = f"{dotted(node.args[0])}.{name.value!s}" if isinstance(name, ast.Constant) else ""
        else:
            text = dotted(node) if isinstance(node, ast.Attribute) else ""
        start, _, rest = text.partition(".")
        if text.startswith(("torch.cuda.", "torch._C._cuda")):
            yield text.split("()")[0]
        elif start in modules and rest:
            yield f"cuda.bindings.{modules[start]}.{rest.split('()')[0]}"
        elif start in ("cuda_core()", "_cuda_core()"):
            yield f"cuda.core.{rest.replace('()', '')}"
        elif path.name in FILES_OF_CORE and isinstance(node, ast.Attribute) and dotted(node.value) in OBJECTS:
            yield f"cuda.core.*.{node.attr}"


def table() -> set[str]:
    """Return the names of the table without arguments, and cuda.core.*.name for attributes."""
    core = {f"cuda.core.{row.partition('(')[0]}" for row in CORE}
    core |= {name.rpartition(".")[0] for name in core if name.count(".") > 2}
    attributes = {f"cuda.core.*.{name.rpartition('.')[2]}" for name in core}
    others = {f"cuda.bindings.{row}" for row in BINDINGS} | {f"torch.{row}" for row in TORCH}
    others |= {name.rpartition(".")[0] for name in others}
    return core | attributes | others


def test_every_used_name_is_in_table() -> None:
    used = {name: path for path in SOURCES for name in names_in(path)}
    assert {"cuda.bindings.driver.cuStreamQuery", "cuda.core.Stream.from_handle", "cuda.core.*.is_done"} < set(used)
    assert {"torch.cuda.ExternalStream", "torch._C._cuda_getCurrentRawStream"} < set(used)
    missing = sorted(set(used) - table())
    assert not missing, f"{missing}: look these up in {LOOKED_UP}, and add them to tests/support/cuda_names.py"


def parameters(found: Any) -> set[str]:
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    return set(inspect.signature(found.__new__ if inspect.isclass(found) else found).parameters)


def absent(module: Any, row: str) -> bool:
    name, _, arguments = row.partition("(")
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    argument_names = {argument for argument in arguments.rstrip(")").split(",") if argument}
    return found is None or bool(argument_names and not argument_names <= parameters(found))


def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")


def without(prefix: str, version: str) -> set[str]:
    """Return the names that `version` lacks according to the table, or those of the last earlier version in it."""
    known = LOOKED_UP[prefix]
    numbers = [tuple(map(int, version_text.split("."))) for version_text in known]
    here = tuple(int(part) for part in version.split("+")[0].split(".")[:3])
    nearest = known[max((i for i, number in enumerate(numbers) if number <= here), default=0)]
    return {name for name, (versions, _) in ABSENT.items() if name.startswith(prefix) and nearest in versions}


def test_cuda_core_matches_table() -> None:
    lacking = without("cuda.core", installed("cuda-core"))
    module = importlib.import_module("cuda.core")
    assert {f"cuda.core.{row}" for row in CORE if absent(module, row)} == lacking


def test_cuda_bindings_match_table() -> None:
    lacking = without("cuda.bindings", installed("cuda-bindings"))
    for name in ("driver", "nvml"):
        if find_spec(f"cuda.bindings.{name}") is None:
            assert f"cuda.bindings.{name}" in lacking
            continue
        module = importlib.import_module(f"cuda.bindings.{name}")
        rows = [row.partition(".")[2] for row in BINDINGS if row.startswith(f"{name}.")]
        assert not [row for row in rows if absent(module, row)]


def test_torch_matches_table() -> None:
    stubs = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()  # for builds with CUDA and without
    missing = [
        row
        for row in TORCH
        if (f"def {row.removeprefix('_C.')}(" not in stubs if row.startswith("_C.") else absent(torch, row))
    ]
    assert not missing


def test_broken_version_pairs_get_install_command() -> None:
    for core, bindings in BROKEN_PAIRS:
        assert import_remedy(core, bindings).startswith("pip install 'cuda-core>=1.0.1'")
    assert "'cuda-bindings==12.*'" in import_remedy("0.5.0", "12.9.0")
    assert "'cuda-bindings==13.*'" in import_remedy("(not installed)", "(not installed)")
