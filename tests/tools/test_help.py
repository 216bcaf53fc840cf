"""help() and dir() of the packages: public names, functions first, of a length that a person reads."""

from __future__ import annotations

import pydoc
import re
from types import ModuleType

import pytest

import pynccl
import pynccl_autograd

packages = pytest.mark.parametrize("package", [pynccl, pynccl_autograd], ids=lambda package: package.__name__)


def help_of(thing: object) -> str:
    return pydoc.plain(pydoc.render_doc(thing))


@packages
def test_dir_shows_the_public_names(package: ModuleType) -> None:
    assert dir(package) == sorted([*package.__all__, "__version__"])


@packages
def test_help_shows_every_function_and_is_a_few_hundred_lines(package: ModuleType) -> None:
    text = help_of(package)
    assert len(text.splitlines()) < 600
    assert "\nFUNCTIONS\n" in text and "\nCLASSES\n" not in text
    for name in package.__all__:
        if callable(function := getattr(package, name)) and not isinstance(function, type):
            assert re.search(rf"\n    {name}( = \w+)?\(", text) and str(function.__doc__).splitlines()[0] in text


@packages
def test_the_docstring_names_all_that_is_public_before_the_first_function(package: ModuleType) -> None:
    words = set(re.findall(r"\w+", package.__doc__ or ""))
    assert set(package.__all__) - words == set()


def test_help_of_one_thing_is_whole() -> None:
    assert "the reduction of all ranks' send" in help_of(pynccl.Communicator.all_reduce)
    assert "all_reduce(self: 'Comm', send" in help_of(pynccl.Communicator)
    assert "grad: 'Grad'" in help_of(pynccl_autograd.all_reduce)
    assert "load_full(self, weight" in help_of(pynccl_autograd.ColumnParallelLinear)
