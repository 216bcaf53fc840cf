"""What help(), editors and errors say of the arguments; above all of `grad`, which has no default."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator

PLACES: dict[str, Any] = {"": ad, "nn.": ad.nn, "overlap.": ad.overlap, "partition.": ad.partition}
PLACES |= {"testing.": ad.testing, "rng.": ad.rng}
FUNCTIONS = {
    prefix + name: value
    for prefix, place in PLACES.items()
    for name, value in vars(place).items()
    if name in getattr(place, "__all__", vars(place)) and not name.startswith("_") and callable(value)
    if getattr(value, "__module__", "").startswith("pynccl_autograd") and not isinstance(value, type)
}


def test_the_functions_were_found() -> None:
    assert {"all_reduce", "start", "parallelize", "partition.zero_volume_tensor", "testing.check_adjoint"} <= set(
        FUNCTIONS
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_an_editor_reads_is_what_the_function_takes(name: str) -> None:
    """jedi reads sources, and completes in IPython and many editors. Of overloads each may leave out an option."""
    jedi = pytest.importorskip("jedi")
    expected = [
        str(one.replace(annotation=one.empty)) for one in inspect.signature(FUNCTIONS[name]).parameters.values()
    ]
    script = jedi.Script(f"import pynccl_autograd as ad\nad.{name}(")
    for found in script.get_signatures():
        read = [one.to_string() for one in found.params]
        names = [text.lstrip("*").partition(":")[0].partition("=")[0] for text in read]
        assert found.name == name.rpartition(".")[2]
        if name == "start":  # of which it solves the operation's parameters
            continue
        allowed = [text.lstrip("*").partition("=")[0] for text in expected]
        assert [one for one in allowed if one in names] == names, (expected, read)
    assert script.get_signatures()


WITH_GRAD: dict[str, Callable[[Communicator, torch.Tensor], Any]] = {
    "all_reduce": lambda comm, x: ad.all_reduce(x, comm),
    "all_gather": lambda comm, x: ad.all_gather(x, comm),
    "broadcast": lambda comm, x: ad.broadcast(x, comm, 0),
    "all_reduce of a list": lambda comm, x: ad.all_reduce([x, x], comm),
    "all_reduce, started": lambda comm, x: ad.start(ad.all_reduce, x, comm),
    "all_reduce by place": lambda comm, x: ad.all_reduce(x, comm, "sum", "sum"),
    "nn.AllReduce": lambda comm, x: ad.nn.AllReduce(comm),
    "nn.AllGather": lambda comm, x: ad.nn.AllGather(comm),
    "nn.Broadcast": lambda comm, x: ad.nn.Broadcast(comm, 0),
}


def _messages(comm: Communicator) -> dict[str, str]:
    said = {}
    for name, call in WITH_GRAD.items():
        with pytest.raises(TypeError) as error:
            call(comm, torch.ones(3))
        said[name] = str(error.value)
    return said


@pytest.mark.parametrize("n", [1, 2])
def test_without_grad_the_error_says_which_to_take(ranks: RankPool, n: int) -> None:
    for said in ranks.run(n, _messages):
        for name, text in said.items():
            assert text.startswith(name.split(",")[0].split(" ")[0] + ": grad= is missing"), text
            assert "'sum' (each rank goes on with work of its own" in text, text
            assert "'replicated' (every rank goes on alike)" in text, text


@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "broadcast", "nn.AllReduce", "nn.AllGather", "nn.Broadcast"]
)
def test_help_shows_grad_as_required_and_says_what_it_is(name: str) -> None:
    value = getattr(ad.nn, name[3:]) if name.startswith("nn.") else getattr(ad, name)
    assert inspect.signature(value).parameters["grad"].default is inspect.Parameter.empty
    text = pydoc.plain(pydoc.render_doc(value))
    assert "grad: 'Grad'" in text
    if not name.startswith("nn."):
        assert '"replicated" if all go on alike' in text and '"sum" if each goes on with work of its own' in text
    else:
        assert "ee `" in text or 'grad="sum"' in text
