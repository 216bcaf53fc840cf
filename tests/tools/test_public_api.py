"""The public names of both packages, and what their functions take: a change here is a change for every user.

The table is public_api.txt. A change that is meant is written there by hand, or by
`python -c "import test_public_api as t; print(t.table(), end='')"` in this folder, and stands in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import traceback
import types
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import pynccl
import pynccl_autograd
from pynccl import Communicator

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
    for name in sorted(dir(Communicator)):
        value = inspect.getattr_static(Communicator, name)
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            rows.append(f"property Communicator.{name}{' (settable)' if value.fset else ''}")
        elif isinstance(value, classmethod):
            rows.append(f"classmethod Communicator.{name}{signature(getattr(Communicator, name))}")
        else:
            rows.append(f"method Communicator.{name}{signature(value)}")
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


def test_dir_shows_the_public_names_and_no_module_has_the_name_of_a_function() -> None:
    for package in (pynccl, pynccl_autograd):
        assert dir(package) == sorted([*package.__all__, "__version__"])
        small = [name for name in package.__all__ if name.islower()]
        modules = {name for name in small if isinstance(getattr(package, name), types.ModuleType)}
        assert modules <= {"nn", "operators", "overlap", "partition", "plans", "rng", "testing"}
        assert all(inspect.isfunction(getattr(package, name)) for name in small if name not in modules)


def test_public_classes_have_the_name_by_which_they_are_imported() -> None:
    classes = {name: value for name in pynccl.__all__ if isinstance(value := getattr(pynccl, name), type)}
    assert {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in classes.items()} == {
        name: f"pynccl.{name}" for name in classes
    }
    told = traceback.format_exception_only(pynccl.NcclTimeout("late"))
    assert told == ["pynccl.NcclTimeout: late\n"]


def test_public_values_can_be_pickled_and_their_types_looked_at() -> None:
    error = pynccl.NcclRemoteError("gone")
    values = [pynccl.CommConfig(max_ctas=4), pynccl.CollConfig(), pynccl.DataType.BFLOAT16, pynccl.Result.TIMEOUT]
    assert [pickle.loads(pickle.dumps(value)) for value in values] == values
    assert repr(pickle.loads(pickle.dumps(error))) == repr(error)
    assert bytes(pickle.loads(pickle.dumps(pynccl.UniqueId()))) == bytes(128)
    assert get_type_hints(pynccl.CommConfig)["max_ctas"] == int | None
    assert get_type_hints(Communicator.init)["library"] == pynccl.Library | None
