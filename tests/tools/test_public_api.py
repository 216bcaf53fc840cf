"""The public names of both packages, and what their functions take: a change here is a change for every user.

The table is public_api.txt. A change that is meant is written there by hand, or by
`python -c "import test_public_api as t; print(t.table(), end='')"` in this folder, and stands in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import pydoc
import re
import subprocess
import sys
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
    for name in sorted(name for name in dir(Communicator) if not name.startswith("_") and hasattr(Communicator, name)):
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


PUBLIC_MODULES = {
    "pynccl": "bootstrap compat.sglang compat.vllm progress torch_backend",
    "pynccl_autograd": "nn operators overlap partition plans rng testing",
}


def public_modules() -> list[types.ModuleType]:
    names = [f"{package}.{name}" for package, names in PUBLIC_MODULES.items() for name in names.split()]
    return [pynccl, pynccl_autograd, *map(importlib.import_module, names)]


def test_dir_help_and_star_imports_of_public_modules_have_the_public_names_only() -> None:
    for module in public_modules():
        version = ["__version__"] * hasattr(module, "__version__")
        assert dir(module) == sorted([*module.__all__, *version]), module
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        private = {"pynccl.compat.vllm": {"memory"}, "pynccl.progress": {"T"}}.get(module.__name__, set())
        assert {name for name in own if not name.startswith("_")} - private <= set(module.__all__), module
        names: dict[str, Any] = {}
        exec(f"from {module.__name__} import *", names)
        assert set(module.__all__) <= set(names), module
        text = pydoc.plain(pydoc.render_doc(module))
        functions = [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
        assert [name for name in functions if name not in text] == []
        assert "check_comm" not in text.partition("FILE\n")[0].partition("\nDATA\n")[2]
    assert "class ReduceScatter(" in pydoc.plain(pydoc.render_doc(pynccl_autograd.nn))


# A wrong attribute -> the end of the line that Python prints if nobody catches the error.
WRONG_ATTRIBUTES = {
    "ad.all_reduc": "'pynccl_autograd' has no attribute 'all_reduc'. Did you mean: 'all_reduce'?",
    "ad.allreduce": "'pynccl_autograd' has no attribute 'allreduce'. Did you mean: 'all_reduce'?",
    "ad.rng.sed": "'pynccl_autograd.rng' has no attribute 'sed'. Did you mean: 'seed'?",
    "pynccl.creat_stream": "'pynccl' has no attribute 'creat_stream'. Did you mean: 'create_stream'?",
    "pynccl.progress.ovr": "'pynccl.progress' has no attribute 'ovr'. Did you mean: 'over'?",
    "comm.allreduce": "'Communicator' object has no attribute 'allreduce'. Did you mean: 'all_reduce'?",
    "pynccl.nothing": "module 'pynccl' has no attribute 'nothing'",
    # One hint, also where a name of ours is close.
    "comm.isend": "use comm.send and comm.recv in a `with pynccl.group():`; see docs/coming_from.md",
    "comm.plan.isend": "comm.plan has no operation 'isend'; did you mean send?",
    "pynccl.all_reduce": "use comm.all_reduce of a communicator, as pynccl.init() returns; see docs/coming_from.md",
    "pynccl.init_process_group": "use comm = pynccl.init(); see docs/coming_from.md",
    "ad.reduce_scatter_tensor": "use ad.reduce_scatter(x, comm); see docs/coming_from.md",
    "ad.all_gather_v": "use splits= of ad.all_gather and ad.reduce_scatter; see docs/coming_from.md",
    "ad.get_rank": "use comm.rank; see docs/coming_from.md",
    "ad.barrier": "use comm.barrier of a communicator, as pynccl.init() returns; see docs/coming_from.md",
}


def test_a_wrong_attribute_gets_one_hint_when_python_prints_the_error() -> None:
    """An interactive interpreter prints each error as a script does that ends by it: no Python code runs by then."""
    lines = ["import pynccl, pynccl.progress, pynccl_autograd as ad", "comm, = pynccl.init_all(1)"]
    for text in WRONG_ATTRIBUTES:
        lines += [text, f"def function():\n    {text}\n", "function()"]
    command, variables = [sys.executable, "-i", "-q"], {**os.environ, "PYNCCL_LIBRARY": "host"}
    code = "\n".join([*lines, ""])
    done = subprocess.run(command, input=code, env=variables, capture_output=True, text=True, timeout=100, check=False)
    found = [line for line in done.stderr.splitlines() if line.startswith("AttributeError: ")]
    expected = [hint for hint in WRONG_ATTRIBUTES.values() for _ in range(2)]
    assert [line for line, hint in zip(found, expected, strict=True) if not line.endswith(hint)] == []
    hints = ("Did you mean", "did you mean", "; use ")
    assert [line for line in found if sum(map(line.count, hints)) > 1] == []
