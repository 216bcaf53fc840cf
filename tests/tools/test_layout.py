"""The shape of the project: which way imports run, where gloo and torch may be named, and what an import costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Every module from the ground up: each imports only from those before it, also for type checkers and when called.
ORDER: dict[str, str] = {
    "pynccl": """
        admission chrome_trace
        bindings.resource bindings.values bindings.workers bindings.abi bindings.errors bindings.library
        bindings.structs bindings.listing
        interop.dlpack interop.tensors interop.buffers interop.devices interop.keepalive interop.streams
        watch.layout watch.records watch.settings watch.folder watch.frames watch.notes watch.recorder
        watch.track watch.reader watch.formatting watch.job watch.waits watch.disagree
        watch.gone watch.verdict watch.store watch.across watch.diagnosis watch.exit_hooks
        watch.progress watch.watchdog
        comm.deadline comm.observing comm.scratch comm.base comm.call comm.consistency comm.redop comm.groups
        comm.argcheck comm.enqueue comm.collectives comm.collectives_v comm.memory comm.mempool comm.rma
        comm.plan comm.finalize comm.init comm.communicator comm.simulation
        bootstrap.rendezvous bootstrap.master_store bootstrap.join bootstrap.env bootstrap.mpi
        bootstrap.stores bootstrap
        nccl_params __init__
        compat.wrapper compat.stateless compat.vllm compat.sglang
        progress tools.command
        tools.doctor.findings tools.doctor.problems tools.doctor
        tools.explain.moves tools.explain.operations tools.explain.execute tools.explain.terminal
        tools.explain.page tools.explain
        tools.hang.jobs tools.hang.table tools.hang.report tools.hang.timeline tools.hang
        tools.perf.options tools.perf.cases tools.perf.measure tools.perf.report tools.perf __main__
    """,
    "pynccl.host": """
        failure interfaces store connect link memory futex segment reduction rendezvous connection channel watchdog
        transport shared sharing comm version argcheck operation shared_collectives algorithms
        stream group exports init rma
        collectives register params query finalize atexit __init__
    """,
    "pynccl_autograd": """
        torch_internals recompute wire arguments mesh agreement rng checks collective
        ops.coalesced ops.all_reduce ops.all_gather ops.extremes ops.rooted ops.all_to_all ops.permute ops.halo
        operators streams work
        overlap.config overlap.workspace overlap.trials overlap.routes overlap.unfused overlap.lanes overlap.trace
        overlap.reporting overlap.limits overlap.matmul overlap.gathering overlap.reducing overlap.passes
        overlap.slices overlap.patterns overlap.functions overlap.comm_overlap
        overlap layers.dtensors layers.shards layers.in_flight layers.gradients layers.linear
        layers.vocabulary layers.dropout layers.plan layers.plan_checks layers.hooks layers.replace
        layers.checkpoint_files layers.checkpoint layers.checkpoint_optimizer
        layers.buckets layers.data_parallel layers plans nn
        tracing.recording tracing.merge tracing.tracing
        tracing
        partition.cartesian partition.transfer partition.modules partition testing.gradients testing.adjoint
        testing.model_gradients testing.check_model testing
        __init__
    """,
}
# What is in the folder of a package, but a package of its own here.
APART = {"pynccl": ("pynccl.host",), "pynccl.host": (), "pynccl_autograd": ()}
HOST_RESTS_ON = {
    "pynccl.admission",
    "pynccl.bindings.abi",
    "pynccl.bindings.errors",
    "pynccl.bindings.resource",
}
IMPORT_SECONDS = 0.5


class Import(NamedTuple):
    target: str  # dotted and absolute, e.g. pynccl.bindings.errors
    line: int
    when_called: bool
    for_types: bool = False


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    """Import name of a file of the project; the folder autograd/ is pynccl_autograd."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return re.sub(r"^autograd\b", "pynccl_autograd", ".".join(parts))


def imports_of(path: Path, for_types: bool = False) -> Iterator[Import]:
    """All imports of a file, those for type checkers if asked for; `from . import x` counts as an import of x."""
    package = package_of(path)

    def visit(node: ast.AST, when_called: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                if for_types:
                    yield from visit(child, when_called, True)
            elif isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, when_called, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                for target in targets(child, package):
                    yield Import(target, child.lineno, when_called, typing)
            else:
                called = when_called or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from visit(child, called, typing)

    yield from visit(ast.parse(path.read_text()), False, False)


def package_of(path: Path) -> str:
    return module_of(path).rpartition(".")[0]


def targets(node: ast.ImportFrom, package: str) -> list[str]:
    """`from .a import f` is pynccl.a; `from . import a` is pynccl.a too, where there is such a module."""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    folder = ROOT / base.replace(".", "/").replace("pynccl_autograd", "autograd")
    names = [alias.name for alias in node.names]
    modules = [name for name in names if (folder / f"{name}.py").exists() or (folder / name).is_dir()]
    return [f"{base}.{name}" for name in modules] or [base]


def place(path: Path, found: Import) -> str:
    return f"{path.relative_to(ROOT)}:{found.line} imports {found.target}"


def modules_of(package: str) -> dict[str, Path]:
    """Name -> file of the modules of a package that hold anything; a package is its __init__.py."""
    folder = ROOT / package.replace(".", "/").replace("pynccl_autograd", "autograd")
    found = {module_of(path).removesuffix(".__init__"): path for path in sorted(folder.rglob("*.py"))}
    own = (
        {name: path for name, path in found.items() if not name.startswith(APART[package])} if APART[package] else found
    )
    return {name: path for name, path in own.items() if len(ast.parse(path.read_text()).body) > 1}


def imports_within(package: str) -> dict[str, list[tuple[str, Import]]]:
    """Module -> the other modules of the package that it imports, and how."""
    modules = modules_of(package)
    return {
        name: [(found.target, found) for found in imports_of(path, for_types=True) if found.target in modules]
        for name, path in modules.items()
    }


def upward(package: str) -> list[str]:
    """The imports that do not go down in the order of the package."""
    names = [package if name == "__init__" else f"{package}.{name}" for name in ORDER[package].split()]
    return [
        f"{name}:{found.line} imports {other}"
        for name, imports in imports_within(package).items()
        for other, found in imports
        if names.index(other) >= names.index(name)
    ]


def circle(package: str) -> list[str]:
    """Modules of the package that import each other in a circle; [] if there is none."""
    edges = {name: [o for o, found in imports] for name, imports in imports_within(package).items()}
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name not in done:
            for other in edges[name]:
                if found := visit(other, [*above, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in edges if (found := visit(name, []))), [])


@pytest.mark.parametrize("package", ORDER)
def test_the_order_names_every_module_once(package: str) -> None:
    listed = [package if name == "__init__" else f"{package}.{name}" for name in ORDER[package].split()]
    assert sorted(listed) == sorted(modules_of(package))


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_downwards(package: str) -> None:
    assert upward(package) == []


@pytest.mark.parametrize("package", ORDER)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    assert circle(package) == []


def test_the_host_library_is_reached_from_library_alone() -> None:
    """Which opens it by name, as it opens the C libraries: nothing imports it."""
    others = [path for path in python_files("pynccl", "autograd") if "host" not in path.relative_to(ROOT).parts]
    assert [place(path, found) for path in others for found in imports_of(path) if "pynccl.host" in found.target] == []
    opens = [path.relative_to(ROOT).as_posix() for path in others if '"pynccl.host' in path.read_text()]
    assert opens == ["pynccl/bindings/library.py"]


def test_the_host_library_rests_on_the_abi_alone() -> None:
    wrong = [
        place(path, found)
        for path in python_files("pynccl/host")
        for found in imports_of(path)
        if found.target.split(".")[0] in {"pynccl", "pynccl_autograd"}
        and not found.target.startswith("pynccl.host")
        and found.target not in HOST_RESTS_ON
    ]
    assert not wrong


def test_pynccl_does_not_know_autograd() -> None:
    wrong = [
        place(path, found)
        for path in python_files("pynccl")
        for found in imports_of(path)
        if found.target.split(".")[0] in {"pynccl_autograd", "autograd"}
    ]
    assert not wrong


def test_nothing_installed_imports_scripts_or_tests() -> None:
    outside = {"scripts", "tests", *(path.stem for path in python_files("scripts", "tests"))}
    wrong = [
        place(path, found)
        for path in python_files("pynccl", "autograd")
        for found in imports_of(path)
        if found.target.split(".")[0] in outside
    ]
    assert not wrong


def test_pynccl_loads_torch_and_cuda_only_when_called() -> None:
    wrong = [
        place(path, found)
        for path in python_files("pynccl")
        if "host" not in path.relative_to(ROOT).parts
        for found in imports_of(path)
        if not found.when_called and found.target.split(".")[0] in {"torch", "cuda", "numpy", "cupy", "mpi4py"}
    ]
    assert not wrong


def test_gloo_is_named_in_the_host_library_alone() -> None:
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path in python_files("pynccl", "autograd")
        if "host" not in path.relative_to(ROOT).parts and "gloo" in path.read_text().lower()
    ]
    assert not wrong


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_importing_pynccl_is_quick_and_brings_no_framework() -> None:
    code = """
import sys, time
start = time.process_time()
import pynccl
print(time.process_time() - start)
print(sorted({"torch", "cuda", "numpy"} & set(sys.modules)))
"""
    run = python(code)
    assert run.returncode == 0, run.stderr
    seconds, heavy = run.stdout.splitlines()
    assert heavy == "[]"
    # Processor time, since the machine may be busy; and loose: it catches a framework that came along, no slow line.
    assert float(seconds) < IMPORT_SECONDS, f"import pynccl took {seconds} s"


def test_no_file_has_what_a_later_python_will_refuse() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # of the compiler: invalid escapes, `is` with a literal
        for path in python_files("pynccl", "autograd", "scripts", "tests"):
            compile(path.read_text(), path, "exec")
    assert [f"{one.filename}:{one.lineno}: {one.message}" for one in said] == []


def test_a_step_of_training_gives_no_warning() -> None:
    """Neither one that comes from the project's lines nor one of anything left open."""
    own = (str(ROOT / "pynccl"), str(ROOT / "autograd"))
    code = f"""
import gc, warnings
said = []
warnings.showwarning = lambda text, kind, file, *_: said.append((kind.__name__, str(text), file))
warnings.simplefilter("always")
import pynccl, pynccl_autograd as ad, torch
with pynccl.Communicator.init_all(1)[0] as comm:
    layer = ad.ColumnParallelLinear(4, 4, comm, sequence_parallel=True, device=comm.device)
    loss = ad.all_reduce(layer(torch.ones(2, 4)).sum(), comm, grad="replicated")
    loss.backward()
    stream = pynccl.create_stream(comm.device)
    kept = comm.all_reduce(loss.detach(), stream=stream)
    stream.synchronize()
del stream, kept
gc.collect()
print([row for row in said if row[0] == "ResourceWarning" or row[2].startswith({own})])
"""
    run = python(code)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


def test_the_folder_name_is_no_import_name() -> None:
    run = python("import autograd")
    assert run.returncode != 0
    assert "ImportError" in run.stderr and "import pynccl_autograd" in run.stderr


@pytest.mark.parametrize("package", ["pynccl", "pynccl_autograd"])
def test_packages_say_that_they_are_typed(package: str) -> None:
    run = python(f"import importlib.resources as r; print((r.files({package!r}) / 'py.typed').is_file())")
    assert run.stdout.strip() == "True", run.stderr
