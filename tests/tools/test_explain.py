"""`python -m pynccl explain` draws the real results of the collectives and their adjoints; its page is up to date.

The numbers are compared with NumPy (tests/support/explain_reference.py). test_docs.py compares the drawing of
docs/explain.md.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import explain_reference
import numpy as np
import pytest
import torch

import pynccl
import pynccl_autograd as ad
from pynccl.__main__ import main
from pynccl.tools.explain import terminal
from pynccl.tools.explain.execute import ranks_of_this_process, run
from pynccl.tools.explain.operations import OPERATIONS, adjoint_text, texts_for, variants
from pynccl.tools.explain.page import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "collectives.html"


@pytest.mark.parametrize("n", [2, 3, 8])
def test_forward_adjoint_and_drawn_moves_equal_the_definition(n: int) -> None:
    with ranks_of_this_process(n) as comms:
        runs = [run(comms, name, grad) for name, grad in variants()]
    for found in runs:
        name, grad, x, g = found.name, found.grad, found.forward.before, found.adjoint.before
        assert_values(found.forward.after, explain_reference.outputs(name, x), (name, grad))
        assert_values(found.adjoint.after, explain_reference.gradients(name, grad, x, g), (name, grad, "adjoint"))
        for drawn in (found.forward, found.adjoint):
            arrived = [[0] * len(values) for values in drawn.after]
            for source, at, target, to in drawn.moves:
                arrived[target][to] += drawn.before[source][at]
            assert arrived == drawn.after, (name, grad)
        for encoding in ("utf-8", "latin-1"):
            text = terminal.drawing(found, encoding)
            assert max(map(len, text.splitlines())) <= 80 and "{" not in text, (name, grad)
            assert text.isascii() or encoding == "utf-8"


def assert_values(found: Any, expected: Any, what: tuple[str, ...]) -> None:
    assert len(found) == len(expected)
    for rank, (result, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(result, other, rtol=1e-12, atol=1e-12, err_msg=f"{what}, rank {rank}")


def test_every_operation_is_explained_and_named_calls_exist() -> None:
    ops = {name for name in ad.__all__ if name.islower() and callable(getattr(ad, name))}
    assert {name for name in ops if getattr(ad, name).__module__.startswith("pynccl_autograd.ops.")} == set(OPERATIONS)
    owners = {"pynccl": ("comm", pynccl.Communicator), "autograd": ("ad", ad), "torch": ("dist", torch.distributed)}
    for name, grad in variants():
        words = texts_for(name, grad)
        texts = [words.does, words.shapes, words.formula, words.note, words.gradient, adjoint_text(name, grad)]
        assert all(text and "{" not in text for text in texts), (name, grad)
        for field, (prefix, owner) in owners.items():
            text = getattr(words, field)
            assert text and all(hasattr(owner, call) for call in re.findall(rf"\b{prefix}\.(\w+)", text)), (name, text)


def test_the_page_is_current_and_self_contained(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page() == text, "run `make collectives`"
    assert main(["explain", "gather", "--ranks", "3", "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_bytes() == PAGE.read_bytes()
    assert not re.search(r"https?://|@import|url\(|<[^>]*\ssrc=", text)


def test_drawings_are_ascii_without_utf8_and_without_a_name_operations_are_listed(
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
        ("reduce_scater", "argument OPERATION: invalid choice: 'reduce_scater'; did you mean reduce_scatter?\n"),
        ("reducescatter", "argument OPERATION: invalid choice: 'reducescatter'; did you mean reduce_scatter?\n"),
        ("all_reduce --ranks 1", "argument --ranks: '1': expected an integer from 2 to 8"),
        ("split --grad sum", "--grad 'sum': split has only one gradient"),
    ],
)
def test_invalid_arguments_exit_with_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(["explain", *line.split()])
    except SystemExit as exit_error:
        code = exit_error.code
    output = capsys.readouterr()
    assert (code, output.out, output.err.count("\n")) == (2, "", 1)
    assert output.err.removeprefix("python -m pynccl explain: ").removeprefix("error: ").startswith(message), output.err
