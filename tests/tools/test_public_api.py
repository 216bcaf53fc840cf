"""The public names of both packages, and what their functions take: a change here is a change for every user.

The table is public_api.txt. A change that is meant is written there by hand, or by
`python -c "import test_public_api as t; print(t.table(), end='')"` in this folder, and stands in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import types
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pynccl
import pynccl_autograd
from pynccl import Communicator
from pynccl.bindings import abi

TABLE = Path(__file__).with_name("public_api.txt")


def kind_of(value: Any) -> str:
    """As a user would say it."""
    if not isinstance(value, type):
        return "function" if inspect.isfunction(value) else type(value).__name__
    if issubclass(value, BaseException):
        return "exception"
    return "enum" if issubclass(value, Enum) else "class"


def signature(function: Any) -> str:
    """Names, kinds and defaults of its parameters. What types they have is mypy's to see."""
    found = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def rows_of_pynccl() -> list[str]:
    rows = []
    for name in sorted(pynccl.__all__):
        value = getattr(pynccl, name)
        kind = kind_of(value)
        bases = f"({', '.join(base.__name__ for base in value.__bases__)})" if kind == "exception" else ""
        rows.append(f"{kind} pynccl.{name}{signature(value) if kind == 'function' else bases}")
    return rows


def rows_of_communicator() -> list[str]:
    rows = []
    for name in sorted(name for name in dir(Communicator) if not name.startswith("_")):
        value = inspect.getattr_static(Communicator, name)
        if isinstance(value, property):
            rows.append(f"property Communicator.{name}{' (settable)' if value.fset else ''}")
        else:
            kind = "classmethod" if isinstance(value, classmethod) else "method"
            rows.append(f"{kind} Communicator.{name}{signature(getattr(Communicator, name))}")
    return rows


def rows_of_autograd() -> list[str]:
    rows = []
    for module in ("", "nn", "overlap", "partition", "testing"):
        place = importlib.import_module(f"pynccl_autograd.{module}".rstrip("."))
        for name in sorted(names_of(place)):
            value = getattr(place, name)
            takes = signature(value) if inspect.isfunction(value) else ""
            rows.append(f"{kind_of(value)} {place.__name__}.{name}{takes}")
    return rows


def names_of(place: types.ModuleType) -> set[str]:
    """`__all__`, or where there is none, what the module defines."""
    own = {name for name, value in vars(place).items() if getattr(value, "__module__", "") == place.__name__}
    return set(getattr(place, "__all__", own)) - {name for name in own if name.startswith("_")}


def table() -> str:
    return "\n".join([*rows_of_pynccl(), *rows_of_communicator(), *rows_of_autograd(), ""])


def test_the_public_names_and_their_signatures_are_those_of_the_table() -> None:
    assert table().splitlines() == TABLE.read_text().splitlines()


def test_public_values_can_be_pickled_and_are_named_as_they_are_imported() -> None:
    for package in (pynccl, pynccl_autograd):
        assert dir(package) == sorted([*package.__all__, "__version__"])
    classes = {name: value for name in pynccl.__all__ if isinstance(value := getattr(pynccl, name), type)}
    assert all(f"{kind.__module__}.{kind.__qualname__}" == f"pynccl.{name}" for name, kind in classes.items())
    values = [pynccl.CommConfig(max_ctas=4), pynccl.CollConfig(), pynccl.DataType.BFLOAT16, pynccl.Result.TIMEOUT]
    assert [pickle.loads(pickle.dumps(value)) for value in values] == values
    error = pynccl.NcclRemoteError("gone")
    assert repr(pickle.loads(pickle.dumps(error))) == repr(error)
    assert bytes(pickle.loads(pickle.dumps(pynccl.UniqueId()))) == bytes(128)


def flat(name: str) -> str:
    """all_gather, AllGather and ncclAllGather are one name."""
    return name.replace("_", "").lower()


def names_of_nccl_and_torch() -> set[str]:
    places: list[Any] = [torch, torch.nn, torch.nn.utils, torch.nn.functional, torch.cuda, torch.autograd, torch.Tensor]
    places += [dist, dist.ProcessGroup, torch.cuda.Stream, torch.cuda.Event, torch.distributed.device_mesh.DeviceMesh]
    functions = {flat(name).removeprefix("nccl") for name in abi.FUNCTIONS}
    shortened = {name.removeprefix(prefix) for name in functions for prefix in ("comm", "group", "win", "mem")}
    types = {"datatype", "redop", "result", "uniqueid"}
    return {flat(name) for place in places for name in dir(place)} | functions | shortened | types


def test_a_public_name_is_one_of_nccl_or_pytorch_or_in_the_glossary() -> None:
    glossary = (TABLE.parents[2] / "docs" / "glossary.md").read_text().partition("\n## Names")[2]
    cells = [
        cell for row in re.findall(r"^\| (`.+?) \|", glossary, re.MULTILINE) for cell in re.findall("`(.+?)`", row)
    ]
    explained = {cell.split(".")[-1] for cell in cells}
    known = names_of_nccl_and_torch()
    names = [re.split(r"[ (]", row, maxsplit=2)[1].split(".") for row in TABLE.read_text().splitlines()]
    unknown = [name for *_, name in names if flat(name) not in known and name not in explained]
    errors = [name for name in unknown if not name.startswith("Nccl")]  # one line for all of them
    assert errors == []
    assert explained - {part for name in names for part in name} == set()
