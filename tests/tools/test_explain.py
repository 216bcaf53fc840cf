"""`python -m pynccl explain`: what is drawn is what the collectives gave, forwards and backwards; its page is current.

The numbers are held against NumPy (tests/support/explained.py); test_docs.py compares the drawing of docs/explain.md.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import explained
import numpy as np
import pytest
import torch

import pynccl
import pynccl_autograd as ad
from pynccl.__main__ import main
from pynccl.tools.explain import terminal
from pynccl.tools.explain.execute import ranks_of_this_process, run
from pynccl.tools.explain.operations import OPERATIONS, backwards, variants, words_of
from pynccl.tools.explain.page import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "collectives.html"


@pytest.mark.parametrize("n", [2, 3, 8])
def test_forward_and_adjoint_are_those_of_the_definition_and_the_moves_lead_there(n: int) -> None:
    with ranks_of_this_process(n) as comms:
        runs = [run(comms, name, grad) for name, grad in variants()]
    for found in runs:
        name, grad, x, g = found.name, found.grad, found.forward.before, found.adjoint.before
        assert_values(found.forward.after, explained.outputs(name, x), (name, grad))
        assert_values(found.adjoint.after, explained.gradients(name, grad, x, g), (name, grad, "adjoint"))
        for one in (found.forward, found.adjoint):
            arrived = [[0] * len(own) for own in one.after]
            for source, at, target, to in one.moves:
                arrived[target][to] += one.before[source][at]
            assert arrived == one.after, (name, grad)
        for encoding in ("utf-8", "latin-1"):
            text = terminal.drawing(found, encoding)
            assert max(map(len, text.splitlines())) <= 80 and "{" not in text, (name, grad)
            assert text.isascii() or encoding == "utf-8"


def assert_values(found: Any, expected: Any, what: tuple[str, ...]) -> None:
    assert len(found) == len(expected)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12, err_msg=f"{what}, rank {rank}")


def test_every_differentiable_operation_is_there_with_words_that_name_calls() -> None:
    ops = {name for name in ad.__all__ if name.islower() and callable(getattr(ad, name))}
    assert {name for name in ops if getattr(ad, name).__module__.startswith("pynccl_autograd.ops.")} == set(OPERATIONS)
    owners = {"pynccl": ("comm", pynccl.Communicator), "autograd": ("ad", ad), "torch": ("dist", torch.distributed)}
    for name, grad in variants():
        words = words_of(name, grad)
        texts = [words.does, words.shapes, words.formula, words.note, words.gradient, backwards(name, grad)]
        assert all(text and "{" not in text for text in texts), (name, grad)
        for field, (prefix, owner) in owners.items():
            text = getattr(words, field)
            assert text and all(hasattr(owner, one) for one in re.findall(rf"\b{prefix}\.(\w+)", text)), (name, text)


def test_the_page_is_current_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page() == text, "run `make collectives`"
    assert main(["explain", "gather", "--ranks", "3", "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_bytes() == PAGE.read_bytes()
    assert not re.search(r"https?://|@import|url\(|<[^>]*\ssrc=", text)


def test_without_utf8_it_is_drawn_in_ascii_and_without_a_name_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain"]) == 0
    assert re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE) == list(OPERATIONS)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["explain", "all_gather", "--ranks", "2"]) == 0
    assert re.search(rb"\| 1  \| *= *\| 11 \|", written.getvalue())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nope", "argument OPERATION: invalid choice: 'nope' (choose from "),
        ("all_reduce --ranks 1", "argument --ranks: '1': expected a whole number from 2 to 8"),
        ("split --grad sum", "--grad 'sum': split has one gradient only"),
    ],
)
def test_nonsense_is_one_line_and_exit_code_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(["explain", *line.split()])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.removeprefix("python -m pynccl explain: ").removeprefix("error: ").startswith(message), said.err
