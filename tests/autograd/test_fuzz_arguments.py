"""Nonsense in place of one argument of any public function raises an error that names both, on all ranks alike.

scripts/faults/fuzzer.py makes many more calls.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from fuzz import argument_ranks
from fuzz.argument_calls import CALLS
from fuzz.call_fuzzing import fuzz
from ranks import RankPool

import pynccl
import pynccl_autograd as ad

RUNS = 400
NO_CALL = {
    "from_mpi": {"mpi_comm"},  # needs mpi4py
    "grow": {"unique_id", "config"},  # waits for the new rank; checked as by join_grown and split
    "shrink": {"abort", "config"},  # not called by all ranks; checked as by the others
    "check_model": {"batch"},  # any value that the models take
}
MODULES: Any = (pynccl, ad, ad.overlap, ad.partition, ad.testing)
CLASSES: Any = (pynccl.Communicator, ad.Mesh, ad.CommOverlap, ad.CommOverlapHelper)
RETURNED = {  # made by functions, not by users
    *("Event", "Library", "Memory", "Plan", "PreMulSum", "Registration", "Simulation", "Stream", "UniqueId", "Window"),
    *("Decision", "Difference", "IncompatibleKeys", "ModelReport", "Report", "Slices", "Trace", "Tracing", "Work"),
    *("FinishedInBackward", "Communicator"),
}


@pytest.mark.parametrize("n", [1, 2])
def test_nonsense_raises_errors_that_name_the_function_and_the_argument(ranks: RankPool, n: int) -> None:
    found = fuzz(ranks, range(n * RUNS, (n + 1) * RUNS), n, kind=argument_ranks)
    assert sum(found.counts.values()) == RUNS
    assert found.counts["clear"] > RUNS / 2 and found.counts["right"] > 0
    lines = [f"{record.outcome}: {record.text} (seed {record.seed}): {record.message}" for record in found.bad]
    assert not lines, "\n".join(lines)


def public() -> Iterator[tuple[str, Any]]:
    """All functions, classes and methods with parameters, by the name that calls them."""
    for module in MODULES:
        yield from ((name, getattr(module, name)) for name in module.__all__)
    for name, kind in vars(ad.nn).items():
        if isinstance(kind, type) and issubclass(kind, ad.nn.Operation) and kind is not ad.nn.Operation:
            yield name, kind
    for kind in CLASSES:
        names = [name for name in dir(kind) if not name.startswith("_") and hasattr(kind, name)]
        yield from ((name, getattr(kind, name)) for name in names)


def is_called(name: str, value: Any) -> bool:
    if not isinstance(value, type):
        return inspect.isroutine(value)
    return not issubclass(value, (BaseException, int, ad.Collective)) and name not in RETURNED


def test_each_public_argument_is_replaced() -> None:
    replaced: defaultdict[str, set[str | None]] = defaultdict(set)
    for call in CALLS:
        for node in ast.walk(ast.parse(call)):
            if isinstance(node, ast.Call):
                pairs = [one.value for one in node.args if isinstance(one, ast.Starred)]  # by position: *pair(x=..)
                for one in (node, *(pair for pair in pairs if isinstance(pair, ast.Call))):
                    replaced[ast.unparse(node.func).rpartition(".")[2]] |= {each.arg for each in one.keywords}
    left: defaultdict[str, set[str]] = defaultdict(set)
    for name, value in public():
        for parameter in inspect.signature(value).parameters.values() if is_called(name, value) else ():
            variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.name != "self" and not variadic and parameter.name not in replaced[name]:
                left[name].add(parameter.name)
    assert left == NO_CALL
