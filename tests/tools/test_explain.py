"""`python -m pynccl explain`: what is drawn is what the collectives gave, forwards and backwards.

The numbers are held against NumPy (tests/support/explained.py), and the adjoints also against pynccl_autograd.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import explained
import numpy as np
import pytest
import torch
from ranks import RankPool

import pynccl
import pynccl_autograd as ad
from pynccl.__main__ import main
from pynccl.tools.explain import terminal
from pynccl.tools.explain.execute import Run, ranks_of_this_process, run
from pynccl.tools.explain.operations import OPERATIONS, backwards, variants, words_of

ROOT = Path(__file__).resolve().parents[2]
ALL = variants()
EVERY_SIZE = range(2, 9)


def runs_of(n: int) -> list[Run]:
    with ranks_of_this_process(n) as comms:
        return [run(comms, name, grad) for name, grad in ALL]


@pytest.mark.parametrize("n", EVERY_SIZE)
def test_forward_and_adjoint_are_those_of_the_definition(n: int) -> None:
    for found in runs_of(n):
        name, grad, x, g = found.name, found.grad, found.forward.before, found.adjoint.before
        assert_values(found.forward.after, explained.outputs(name, x), (name, grad))
        assert_values(found.adjoint.after, explained.gradients(name, grad, x, g), (name, grad, "adjoint"))


def assert_values(found: Any, expected: Any, what: tuple[str, ...]) -> None:
    assert len(found) == len(expected)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12, err_msg=f"{what}, rank {rank}")


@pytest.mark.parametrize("n", EVERY_SIZE)
def test_the_adjoint_identity_holds_of_what_is_linear(n: int) -> None:
    """<y, A x> = <A^T y, x>: inner products over all ranks; what is one value counts once."""
    for found in runs_of(n):
        xs, ys, gs, grads = (*found.forward[1:3], *found.adjoint[1:3])
        one_y, one_x = found.grad == "replicated", OPERATIONS[found.name].one_input
        there = sum(map(np.dot, gs[:1] if one_y else gs, ys))
        assert there == sum(map(np.dot, grads[:1] if one_x else grads, xs)), (found.name, found.grad)


def gradients_of_autograd(comm: pynccl.Communicator, tasks: list[tuple[str, str, Any, Any]]) -> list[Any]:
    """(output, gradient) of each task on this rank, by pynccl_autograd and backward()."""
    found = []
    for name, grad, xs, gs in tasks:
        x = torch.tensor(xs[comm.rank], dtype=torch.float64, requires_grad=True)
        if name == "scatter" and comm.rank:  # gives type and dimensions; its gradient is 0
            x = torch.zeros(comm.size, dtype=torch.float64, requires_grad=True)
        y = called(comm, name, grad, x)
        y.backward(torch.tensor(gs[comm.rank], dtype=torch.float64))
        found.append((y.tolist(), x.grad.tolist()))
    return found


def called(comm: Any, name: str, grad: str, x: Any) -> Any:
    n, rank = comm.size, comm.rank
    return {
        "all_reduce": lambda: ad.all_reduce(x, comm, grad=grad),
        "reduce_scatter": lambda: ad.reduce_scatter(x, comm),
        "all_gather": lambda: ad.all_gather(x, comm, grad=grad),
        "broadcast": lambda: ad.broadcast(x, comm, 0, grad=grad),
        "reduce": lambda: ad.reduce(x, comm, 0),
        "scatter": lambda: ad.scatter(x, comm, 0),
        "gather": lambda: ad.gather(x, comm, 0),
        "all_to_all": lambda: ad.all_to_all(x, comm),
        "permute": lambda: ad.permute(x, comm, [(peer, (peer + 1) % n) for peer in range(n)]),
        "send_recv": lambda: ad.send_recv(x, comm, target=None if rank else 1, source=0 if rank == 1 else None),
        "halo_exchange": lambda: ad.halo_exchange(x, comm, 0, 1),
        "copy": lambda: ad.copy(x, comm),
        "split": lambda: ad.split(x, comm),
    }[name]()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_adjoint_is_what_pynccl_autograd_gives(ranks: RankPool, n: int) -> None:
    runs = runs_of(n)
    by_rank = ranks.run(
        n, gradients_of_autograd, [(one.name, one.grad, one.forward.before, one.adjoint.before) for one in runs]
    )
    for at, found in enumerate(runs):
        assert_values(found.forward.after, [own[at][0] for own in by_rank], (found.name, found.grad))
        expected = [own[at][1] for own in by_rank]
        if found.name == "scatter":  # drawn without what the other ranks pass for its shape alone
            assert not np.any(expected[1:])
            expected[1:] = [[]] * (n - 1)
        assert_values(found.adjoint.after, expected, (found.name, found.grad, "adjoint"))


def test_every_differentiable_operation_is_there() -> None:
    ops = {name for name in ad.__all__ if name.islower() and callable(getattr(ad, name))}
    collectives = {name for name in ops if getattr(ad, name).__module__.startswith("pynccl_autograd.ops.")}
    assert collectives == set(OPERATIONS)


# ------------------------------------------------------------------------------------------------------- the moves


@pytest.mark.parametrize("n", EVERY_SIZE)
def test_the_moves_lead_from_what_the_ranks_hold_to_what_the_library_writes(n: int) -> None:
    for found in runs_of(n):
        for one in (found.forward, found.adjoint):
            arrived = [[0] * len(own) for own in one.after]
            for source, at, target, to in one.moves:
                arrived[target][to] += one.before[source][at]
            assert arrived == one.after, (found.name, found.grad)


# ---------------------------------------------------------------------------------------------------- in characters


def explain(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pynccl", "explain", *options]
    env = {**os.environ, "PYNCCL_WATCH": "off", **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


def drawn(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["explain", *options]) == 0
    return capsys.readouterr().out


def box_rows(text: str) -> list[list[str]]:
    """The numbers of each line of boxes."""
    return [re.findall(r"│ *([\d/-]+) *│", line) for line in text.splitlines() if re.search(r"│ *[\d/]+ *│", line)]


def test_reduce_scatter_is_drawn_with_its_sums_and_where_they_go(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = drawn(capsys, "reduce_scatter", "--ranks", "3")
    rows = box_rows(text)
    assert rows[:4] == [["1", "11", "21"], ["2", "12", "22"], ["3", "13", "23"], ["33", "36", "39"]]
    assert rows[4:] == [["1", "11", "21"], ["1", "1", "1"], ["11", "11", "11"], ["21", "21", "21"]]
    assert "│ 1  │ ← │ 11 │ ← │ 21 │  sum 33 → rank 0" in text
    assert "│ 2  │ → │ 12 │ ← │ 22 │  sum 36 → rank 1" in text
    assert "comm.reduce_scatter(x, y)" in text and "ad.reduce_scatter(x, comm)" in text
    assert "dist.reduce_scatter_tensor(y, x)" in text


def test_the_drawing_in_the_docs_is_what_comes_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sh\npython -m pynccl explain reduce_scatter\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert block == drawn(capsys, "reduce_scatter")


def test_who_has_an_all_gather_function_before_them_finds_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(drawn(capsys, "all_gather").split())
    for word in ("Function around dist.all_gather", "grad_output", "dist.reduce_scatter(grad_input, input_list)"):
        assert word in text
    assert "adds chunk r of all ranks'" in text


@pytest.mark.parametrize("n", EVERY_SIZE)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_every_drawing_fits_and_says_what_it_cannot_encode_in_ascii(n: int, encoding: str) -> None:
    for found in runs_of(n):
        text = terminal.drawing(found, encoding)
        assert max(map(len, text.splitlines())) <= 80, (found.name, found.grad)
        assert "{" not in text
        assert text.isascii() or encoding == "utf-8"


def test_words_are_filled_in_for_every_variant() -> None:
    for name, grad in ALL:
        words = words_of(name, grad)
        texts = [words.does, words.shapes, words.formula, words.note, words.gradient, backwards(name, grad)]
        texts += [words.pynccl, words.autograd, words.torch]
        assert all(text and "{" not in text for text in texts), (name, grad)


def test_the_calls_in_the_words_are_there() -> None:
    for name, grad in ALL:
        words = words_of(name, grad)
        for prefix, text, owner in (
            ("comm", words.pynccl, pynccl.Communicator),
            ("ad", words.autograd, ad),
            ("dist", words.torch, torch.distributed),
        ):
            named = re.findall(rf"\b{prefix}\.(\w+)", text)
            assert all(hasattr(owner, one) for one in named), (name, text)


# ------------------------------------------------------------------------------------------------- the command line


@pytest.mark.slow
def test_in_a_process_of_its_own_without_utf8() -> None:
    done = explain("all_gather", "--ranks", "2", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii() and re.search(r"\| 1  \| *= *\| 11 \|", done.stdout)


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    code = f"{sys.executable} -m pynccl explain all_reduce --ranks 8 | head -n 1"
    env = {**os.environ, "PYNCCL_WATCH": "off"}
    done = subprocess.run(code, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "all_reduce, 8 ranks\n" and done.stderr == ""


def test_without_a_name_it_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = drawn(capsys)
    assert re.findall(r"^  (\w+) ", text, re.MULTILINE) == list(OPERATIONS)
    assert max(map(len, text.splitlines())) <= 80


WRONG = {
    "nope": "argument OPERATION: invalid choice: 'nope' (choose from ",
    "all_reduce --ranks 1": "argument --ranks: '1': expected a whole number from 2 to 8",
    "all_reduce --ranks 9": "argument --ranks: '9': expected",
    "all_reduce --ranks two": "argument --ranks: 'two': expected",
    "all_reduce --ranks ²": "argument --ranks: '²': expected",
    "all_gather --grad both": "argument --grad: invalid choice: 'both'",
    "split --grad sum": "--grad 'sum': split has one gradient only",
    "copy --html /proc/nowhere/x": "argument --html: /proc/nowhere/x: ",
    "copy split": "unrecognized arguments: split",
    "copy --loud": "unrecognized arguments: --loud",
    "copy --ranks": "argument --ranks: expected one argument",
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


def test_help_has_examples_that_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--help"])
    assert ended.value.code == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    examples = [re.split(r"\s{2,}", line)[0] for line in lines if line.startswith("python -m pynccl explain")]
    assert len(examples) >= 5
    for example_line in examples:
        options = example_line.split()[3:]
        options = [str(tmp_path / one) if one.endswith(".html") else one for one in options]
        assert main(options) == 0, example_line
        capsys.readouterr()
    assert "<!DOCTYPE html>" in (tmp_path / "page.html").read_text()
