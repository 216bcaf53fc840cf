"""`python -m pynccl explain`: what is drawn is what the collectives gave, forwards and backwards.

The numbers are held against NumPy (tests/support/explained.py); test_docs.py compares the drawing of docs/explain.md.
"""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import explained
import numpy as np
import pytest
import torch

import pynccl
import pynccl_autograd as ad
from pynccl.__main__ import main
from pynccl.tools.explain import terminal
from pynccl.tools.explain.execute import Run, ranks_of_this_process, run
from pynccl.tools.explain.operations import OPERATIONS, backwards, variants, words_of

ALL = variants()


def runs_of(n: int) -> list[Run]:
    with ranks_of_this_process(n) as comms:
        return [run(comms, name, grad) for name, grad in ALL]


@pytest.mark.parametrize("n", range(2, 9))
def test_forward_and_adjoint_are_those_of_the_definition_and_the_moves_lead_there(n: int) -> None:
    for found in runs_of(n):
        name, grad, x, g = found.name, found.grad, found.forward.before, found.adjoint.before
        assert_values(found.forward.after, explained.outputs(name, x), (name, grad))
        assert_values(found.adjoint.after, explained.gradients(name, grad, x, g), (name, grad, "adjoint"))
        for one in (found.forward, found.adjoint):
            arrived = [[0] * len(own) for own in one.after]
            for source, at, target, to in one.moves:
                arrived[target][to] += one.before[source][at]
            assert arrived == one.after, (name, grad)
        for encoding in ("utf-8", "latin-1", "ascii"):
            text = terminal.drawing(found, encoding)
            assert max(map(len, text.splitlines())) <= 80 and "{" not in text, (name, grad)
            assert text.isascii() or encoding == "utf-8"


def assert_values(found: Any, expected: Any, what: tuple[str, ...]) -> None:
    assert len(found) == len(expected)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12, err_msg=f"{what}, rank {rank}")


def test_every_differentiable_operation_is_there() -> None:
    ops = {name for name in ad.__all__ if name.islower() and callable(getattr(ad, name))}
    collectives = {name for name in ops if getattr(ad, name).__module__.startswith("pynccl_autograd.ops.")}
    assert collectives == set(OPERATIONS)


def drawn(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["explain", *options]) == 0
    return capsys.readouterr().out


def test_words_of_every_variant_are_filled_in_and_name_calls_that_are_there() -> None:
    for name, grad in ALL:
        words = words_of(name, grad)
        texts = [words.does, words.shapes, words.formula, words.note, words.gradient, backwards(name, grad)]
        texts += [words.pynccl, words.autograd, words.torch]
        assert all(text and "{" not in text for text in texts), (name, grad)
        for prefix, text, owner in (
            ("comm", words.pynccl, pynccl.Communicator),
            ("ad", words.autograd, ad),
            ("dist", words.torch, torch.distributed),
        ):
            named = re.findall(rf"\b{prefix}\.(\w+)", text)
            assert all(hasattr(owner, one) for one in named), (name, text)


# ------------------------------------------------------------------------------------------------- the command line


def test_where_there_is_no_utf8_it_is_drawn_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["explain", "all_gather", "--ranks", "2"]) == 0
    assert re.search(rb"\| 1  \| *= *\| 11 \|", written.getvalue())


def test_without_a_name_it_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = drawn(capsys)
    assert re.findall(r"^  (\w+) ", text, re.MULTILINE) == list(OPERATIONS)
    assert max(map(len, text.splitlines())) <= 80


WRONG = {
    "nope": "argument OPERATION: invalid choice: 'nope' (choose from ",
    "all_reduce --ranks 1": "argument --ranks: '1': expected a whole number from 2 to 8",
    "all_reduce --ranks ²": "argument --ranks: '²': expected",
    "split --grad sum": "--grad 'sum': split has one gradient only",
    "copy --html /proc/nowhere/x": "argument --html: /proc/nowhere/x: ",
}


@pytest.mark.parametrize("line", WRONG)
def test_nonsense_is_one_line_and_exit_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(["explain", *line.split()])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert said.err.removeprefix("python -m pynccl explain: ").removeprefix("error: ").startswith(WRONG[line]), said.err
