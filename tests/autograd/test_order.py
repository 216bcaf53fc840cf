"""Imports within pynccl_autograd run one way, and its public functions are what their names say."""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import pynccl_autograd as ad

FOLDER = Path(ad.__file__).parent
# From the ground up: a file imports from those that stand before it.
ORDER = (
    *("torch_internals", "levels", "recompute", "wire", "arguments", "agreement", "checks", "collective"),
    *("ops", "ops.coalesced", "ops.all_reduce", "ops.all_gather", "ops.extremes", "ops.rooted", "ops.all_to_all"),
    *("ops.permute", "ops.halo", "operators", "streams", "work", "overlap.unfused", "overlap"),
    *("layers.linear", "layers", "nn", "partition.cartesian", "partition.transfer", "partition.modules", "partition"),
    *("testing.gradients", "testing.adjoint", "testing", ""),
)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """What a file imports from its package, and whether that is within a function."""
    tree = ast.parse(path.read_text())
    package = list(path.relative_to(FOLDER).parts[:-1])
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (
            node.level or (node.module or "").startswith("pynccl_autograd")
        ):
            continue
        above = package[: len(package) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
        modules = [".".join(filter(None, [base, alias.name])) for alias in node.names]
        found = [module for module in modules if module in ORDER] or [base]
        yield from ((module, node not in tree.body) for module in found)


def test_every_file_has_its_place() -> None:
    assert sorted(map(module_of, FOLDER.rglob("*.py"))) == sorted(ORDER)


def test_imports_run_one_way() -> None:
    wrong = [
        f"{path.relative_to(FOLDER)} imports {module or 'the package'}{' within a function' if late else ''}"
        for path in sorted(FOLDER.rglob("*.py"))
        for module, late in imports_of(path)
        if late or module not in ORDER or ORDER.index(module) >= ORDER.index(module_of(path))
    ]
    assert wrong == []


def test_no_module_has_the_name_of_a_public_function() -> None:
    modules = {name for name in ad.__all__ if isinstance(getattr(ad, name), types.ModuleType)}
    assert modules == {"nn", "operators", "partition", "testing"}
    assert all(
        isinstance(getattr(ad, name), types.FunctionType)
        for name in ad.__all__
        if name.islower() and name not in modules
    )


PUBLIC = {
    "": "AllGather AllReduce AllSumReduce AllToAll AtRoot Broadcast CartesianPartition Coalesced Collective "
    "ColumnParallelLinear Copy Extremum Gather HaloExchange HaloReduce Partition Permute PreMul Product Reduce "
    "ReduceScatter Repartition RowParallelLinear Scatter Split SumReduce Work all_gather all_reduce all_to_all anchor "
    "broadcast copy gather halo_exchange key_of nn operators partition permute reduce reduce_scatter scatter send_recv "
    "split start testing zero_volume_tensor",
    "nn": "AllGather AllReduce AllToAll Broadcast Copy Gather HaloExchange Operation Permute Reduce ReduceScatter "
    "Scatter Sequential Split",
    "partition": "AllSumReduce Broadcast CartesianPartition Partition Repartition SumReduce zero_volume_tensor",
    "testing": "TOLERANCE AdjointError GradientError check_adjoint check_gradients",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_these(module: str) -> None:
    place = importlib.import_module(f"pynccl_autograd.{module}".removesuffix("."))
    if module == "nn":  # which has no list of them: its classes
        names = [name for name, value in vars(place).items() if getattr(value, "__module__", "") == place.__name__]
        names = [name for name in names if not name.startswith("_")]
    else:
        names = place.__all__
    assert sorted(names) == sorted(PUBLIC[module].split())
