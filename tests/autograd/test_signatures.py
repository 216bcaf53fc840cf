"""What an editor reads of the functions is what they take: jedi, of IPython and many editors, reads sources alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import pynccl_autograd as ad

PLACES: dict[str, Any] = {"": ad, "nn.": ad.nn, "overlap.": ad.overlap, "partition.": ad.partition}
PLACES |= {"testing.": ad.testing, "rng.": ad.rng}
FUNCTIONS = {
    prefix + name: value
    for prefix, place in PLACES.items()
    for name, value in vars(place).items()
    if name in getattr(place, "__all__", vars(place)) and not name.startswith("_") and callable(value)
    if getattr(value, "__module__", "").startswith("pynccl_autograd") and not isinstance(value, type)
}


@pytest.mark.slow
def test_what_an_editor_reads_is_what_the_functions_take() -> None:
    """Of overloads each may leave out an option."""
    jedi = pytest.importorskip("jedi")
    assert {"all_reduce", "parallelize", "partition.zero_volume_tensor", "testing.check_adjoint"} <= set(FUNCTIONS)
    for name, function in FUNCTIONS.items():
        parameters = inspect.signature(function).parameters.values()
        allowed = [str(one.replace(annotation=one.empty)).lstrip("*").partition("=")[0] for one in parameters]
        found = jedi.Script(f"import pynccl_autograd as ad\nad.{name}(").get_signatures()
        assert found, name
        for signature in found:
            assert signature.name == name.rpartition(".")[2]
            read = [one.to_string().lstrip("*").partition(":")[0].partition("=")[0] for one in signature.params]
            if name != "start":  # of which it solves the operation's parameters
                assert [one for one in allowed if one in read] == read, (name, allowed, read)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast"])
def test_the_convention_has_no_default(name: str) -> None:
    for place in (getattr(ad, name), getattr(ad.nn, name.title().replace("_", ""))):
        assert inspect.signature(place).parameters["grad"].default is inspect.Parameter.empty
