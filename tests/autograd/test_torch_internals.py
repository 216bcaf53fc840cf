"""torch_internals.py: its names exist in this torch and say what is wanted of them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import torch

from pynccl_autograd import torch_internals


def without(*missing: str) -> ModuleType:
    """torch_internals as it is in a torch that lacks these names."""
    resolve = pkgutil.resolve_name

    def found(name: str) -> Any:
        if name in missing:
            raise AttributeError(name)
        return resolve(name)

    spec = importlib.util.spec_from_file_location("lacking", torch_internals.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", found)
        spec.loader.exec_module(module)
    return module


def test_the_names_exist() -> None:
    for name in torch_internals.NAMES:
        assert pkgutil.resolve_name(name) is not None, name


def test_a_name_that_torch_lacks_is_said_where_it_is_used() -> None:
    name = "torch._C._len_torch_dispatch_stack"
    lacking: Any = without(name)
    with pytest.raises(NotImplementedError, match=rf"torch {torch.__version__.split('+')[0]}.* has no {name}"):
        lacking.dispatch_modes()
