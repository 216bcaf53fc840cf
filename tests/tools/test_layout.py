"""The structure of the project: import order, where frameworks are imported, what importing pynccl loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# All modules, bottom-up: each imports only earlier ones, also within functions and for type checkers.
ORDER: dict[str, str] = {
    "pynccl": """
        admission chrome_trace
        bindings.installed bindings.resource bindings.values bindings.torch_names bindings.workers bindings.abi
        bindings.errors bindings.share_gpu bindings.library bindings.structs bindings.listing
        interop.dlpack interop.tensors interop.handles interop.buffers interop.devices interop.events interop.keepalive
        interop.streams
        watch.layout watch.records watch.folder watch.frames watch.recorder
        watch.track watch.reader watch.formatting watch.job watch.points watch.graph
        watch.findings watch.verdict watch.store watch.cross_node watch.diagnosis
        watch.watchdog watch.exit_hooks
        comm.deadline comm.observers comm.scratch comm.base comm.call comm.consistency comm.redop comm.groups
        comm.argcheck comm.enqueue comm.collectives comm.collectives_v comm.memory comm.mempool comm.rma
        comm.plan comm.finalize comm.init comm.communicator comm.simulation
        bootstrap.rendezvous bootstrap.master_store bootstrap.generation bootstrap.join
        bootstrap.survivors bootstrap.sync_state bootstrap.env bootstrap.mpi bootstrap.stores bootstrap
        torch_backend.c10d torch_backend.tensors torch_backend.work torch_backend.routes torch_backend.messages
        torch_backend.collectives torch_backend.backend torch_backend
        nccl_params __init__
        compat.wrapper compat.stateless compat.vllm compat.sglang
        progress tools.command
        tools.doctor.findings tools.doctor.problems tools.doctor
        tools.explain.moves tools.explain.operations tools.explain.execute tools.explain.terminal
        tools.explain.page tools.explain
        tools.hang.torch_dumps tools.hang.jobs tools.hang.table tools.hang.report tools.hang.timeline tools.hang
        tools.perf.options tools.perf.cases tools.perf.measure tools.perf.report tools.perf __main__
    """,
    "pynccl.host": """
        failure interfaces store connect link memory alarm futex segment reduction rendezvous connection channel
        watchdog transport branch shared sharing mailbox comm version argcheck operation shared_collectives algorithms
        jobs stream group exports init rma
        collectives register params query finalize atexit __init__
    """,
    "pynccl_autograd": """
        torch_internals state names recompute wire arguments main_grad mesh agreement rng checks compiled collective
        ops.coalesced ops.all_reduce ops.all_gather ops.extremes ops.rooted ops.all_to_all ops.permute ops.halo
        operators streams work
        overlap.config overlap.keys overlap.schedules overlap.tune overlap.saved overlap.buffers overlap.lanes
        overlap.choose overlap.report overlap.limits overlap.unfused overlap.matmul overlap.gather
        overlap.reduce overlap.call overlap.handoff overlap.linear overlap.functions overlap.te
        overlap layers.dtensors layers.shard layers.shards layers.in_flight layers.gradients layers.linear
        layers.vocabulary layers.dropout layers.plan layers.plan_checks layers.same_input layers.hooks layers.replace
        layers.buckets layers.data_parallel layers.optimizers layers.scaler
        layers.checkpoint_files layers.checkpoint layers.checkpoint_optimizer layers plans nn
        tracing.recording tracing.merge tracing.tracing
        tracing
        partition.cartesian partition.transfer partition.modules partition testing.gradients testing.adjoint
        testing.model_gradients testing.check_model testing
        __init__
    """,
}
HOST_IMPORTS = {
    "pynccl.admission",
    "pynccl.bindings.abi",
    "pynccl.bindings.errors",
    "pynccl.bindings.resource",
    "pynccl.bindings.values",
    "pynccl.bindings.workers",
}


class Import(NamedTuple):
    target: str  # dotted and absolute, e.g. pynccl.bindings.errors
    line: int
    when_called: bool


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the import name of a file of the project; autograd/ is pynccl_autograd."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return re.sub(r"^autograd\b", "pynccl_autograd", ".".join(parts))


def folder_of(package: str) -> Path:
    return ROOT / package.replace(".", "/").replace("pynccl_autograd", "autograd")


def imports_of(path: Path) -> Iterator[Import]:
    """Return all imports of a file; `from . import x` imports module x if it exists."""
    package = module_of(path).split(".")[:-1]

    def visit(node: ast.AST, when_called: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, when_called) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package[: len(package) - child.level + 1] if child.level else []
                base = ".".join([*above, *([child.module] if child.module else [])])
                folder = folder_of(base)
                names = [alias.name for alias in child.names]
                modules = [name for name in names if (folder / f"{name}.py").exists() or (folder / name).is_dir()]
                for target in [f"{base}.{name}" for name in modules] or [base]:
                    yield Import(target, child.lineno, when_called)
            else:
                typing = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
                deferred = typing or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from visit(child, when_called or deferred)

    yield from visit(ast.parse(path.read_text()), False)


@pytest.mark.parametrize("package", ORDER)
def test_the_order_lists_every_module_once_and_imports_follow_it(package: str) -> None:
    listed = [package if name == "__init__" else f"{package}.{name}" for name in ORDER[package].split()]
    found = {module_of(path).removesuffix(".__init__"): path for path in sorted(folder_of(package).rglob("*.py"))}
    modules = {
        name: path
        for name, path in found.items()
        if not (package == "pynccl" and name.startswith("pynccl.host")) and len(ast.parse(path.read_text()).body) > 1
    }
    assert sorted(listed) == sorted(modules)
    upward = [
        f"{name}:{each.line} imports {each.target}"
        for name, path in modules.items()
        for each in imports_of(path)
        if each.target in modules and listed.index(each.target) >= listed.index(name)
    ]
    assert upward == []


def test_imports_stay_within_their_layers() -> None:
    """Check which imports are allowed where.

    Installed modules import only installed modules. The binding never imports autograd, and imports frameworks only
    within functions, except torch_backend, which needs torch. Only library.py opens the host library, which imports
    only a few modules."""
    outside = {"scripts", "tests", *(path.stem for path in python_files("scripts", "tests"))}
    heavy = {"torch", "cuda", "numpy", "cupy", "mpi4py"}
    wrong = []
    for path in python_files("pynccl", "autograd"):
        binding, host = (path.is_relative_to(ROOT / name) for name in ("pynccl", "pynccl/host"))
        for found in imports_of(path):
            first = found.target.split(".")[0]
            allowed = first not in outside
            allowed &= not (binding and first in {"pynccl_autograd", "autograd"})
            with_torch = host or path.is_relative_to(ROOT / "pynccl/torch_backend")
            allowed &= with_torch or not (binding and first in heavy and not found.when_called)
            if host and first == "pynccl":
                allowed &= found.target.startswith("pynccl.host") or found.target in HOST_IMPORTS
            wrong += [] if allowed else [f"{path}:{found.line} imports {found.target}"]
        opens = "pynccl.host" in path.read_text() and path.name != "library.py"
        if not host and opens:
            wrong.append(f"{path} names the host library")
    assert wrong == []


def test_every_package_is_installed_with_its_types() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    modules = {module_of(path).removesuffix(".__init__") for path in python_files("pynccl", "autograd")}
    packages = {module for module in modules if (folder_of(module) / "__init__.py").exists()}
    assert sorted(re.findall(r'"(\S+)"', listed)) == sorted(packages)
    for package in ("pynccl", "pynccl_autograd"):
        assert (folder_of(package) / "py.typed").is_file() and f'{package} = ["py.typed"]' in text


def test_importing_pynccl_loads_no_framework_and_importing_autograd_raises() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import pynccl
print(sorted({{"torch", "cuda", "numpy", "mpi4py"}} & set(sys.modules)))
import autograd
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "[]\n"
    assert run.returncode != 0 and "ImportError" in run.stderr and "import pynccl_autograd" in run.stderr
