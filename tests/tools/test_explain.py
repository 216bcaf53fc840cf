"""`python -m pynccl explain`: what is drawn is what the collectives gave, forwards and backwards.

The numbers are held against NumPy (tests/support/explained.py), and the adjoints also against pynccl_autograd.
"""

from __future__ import annotations

import importlib
import io
import itertools
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
from pynccl.tools.command import FailedError
from pynccl.tools.explain import terminal
from pynccl.tools.explain.execute import Run, ranks_of_this_process, run
from pynccl.tools.explain.moves import WAYS, Setup
from pynccl.tools.explain.operations import COUNTED, OPERATIONS, example, variants, words_of

ROOT = Path(__file__).resolve().parents[2]
ALL = variants()
EVERY_SIZE = range(2, 9)
UNEVEN = (3, 0, 2, 1, 0, 4, 1, 2)


def random_setup(name: str, n: int) -> Setup:
    """Other sizes than those of the example, and the last rank as root."""
    return Setup(n, UNEVEN[:n] if name in COUNTED else (2,) * n, n - 1 if OPERATIONS[name].rooted else 0)


def random_values(name: str, op: str, grad: str, setup: Setup) -> tuple[list[Any], list[Any]]:
    """Inputs and cotangents with ties and zeros among them, alike where they are one value."""
    row = OPERATIONS[name]
    way = WAYS[name]
    source = np.random.default_rng(setup.ranks)
    xs = [source.integers(-2, 3, sum(own)).astype(float) for own in way.before(setup)]
    gs = [source.standard_normal(sum(own)) for own in way.after(setup)]
    if row.one_input:
        xs = [xs[0]] * setup.ranks
    return xs, [gs[0]] * setup.ranks if grad == "replicated" else gs


@pytest.mark.parametrize("n", EVERY_SIZE)
def test_forward_and_adjoint_are_those_of_the_definition(n: int) -> None:
    with ranks_of_this_process(n) as comms:
        for name, op, grad in ALL:
            setup = random_setup(name, n)
            xs, gs = random_values(name, op, grad, setup)
            found = run(comms, name, op, grad, setup, xs, gs)
            expected = explained.outputs(name, op, xs, setup.counts, setup.root)
            assert_values(found.forward[-1].values, expected, (name, op, grad))
            expected = explained.gradients(name, op, grad, xs, gs, setup.counts, setup.root)
            assert_values(found.adjoint[-1].values, expected, (name, op, grad, "adjoint"))


def assert_values(found: Any, expected: Any, what: tuple[str, ...]) -> None:
    assert len(found) == len(expected)
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12, err_msg=f"{what}, rank {rank}")


@pytest.mark.parametrize("n", EVERY_SIZE)
def test_the_adjoint_identity_holds_of_what_is_linear(n: int) -> None:
    """<y, A x> = <A^T y, x> for random x and y: inner products over all ranks; what is one value counts once."""
    with ranks_of_this_process(n) as comms:
        for name, op, grad in ALL:
            setup = random_setup(name, n)
            xs, gs = random_values(name, op, grad, setup)
            found = run(comms, name, op, grad, setup, xs, gs)
            forward, adjoint = found.forward[-1].values, found.adjoint[-1].values
            there = sum(map(np.dot, gs[:1], forward[:1]) if grad == "replicated" else map(np.dot, gs, forward))
            back = sum(map(np.dot, adjoint, xs))
            if OPERATIONS[name].one_input:
                back = np.dot(adjoint[0], xs[0])
            assert abs(there - back) <= 1e-12 * max(1.0, abs(there)), (name, op, grad)


def gradients_of_autograd(comm: pynccl.Communicator, tasks: list[tuple[str, str, str, Any, Any]]) -> list[Any]:
    """(output, gradient) of each task on this rank, by pynccl_autograd and backward()."""
    found = []
    for name, op, grad, xs, gs in tasks:
        setup = random_setup(name, comm.size)
        x = torch.tensor(xs[comm.rank], dtype=torch.float64, requires_grad=True)
        given = x
        if name.startswith("scatter") and comm.rank != setup.root:  # gives type and dimensions; its gradient is 0
            given = x = torch.zeros(sum(setup.counts), dtype=torch.float64, requires_grad=True)
        y = called(comm, name, op, grad, setup, given)
        y.backward(torch.tensor(gs[comm.rank], dtype=torch.float64))
        found.append((y.tolist(), x.grad.tolist()))
    return found


def called(comm: Any, name: str, op: str, grad: str, setup: Setup, x: Any) -> Any:
    splits = list(setup.counts) if setup.uneven else None
    n, rank, root = comm.size, comm.rank, setup.root
    return {
        "all_reduce": lambda: ad.all_reduce(x, comm, op, grad=grad),
        "reduce_scatter": lambda: ad.reduce_scatter(x, comm, op=op, splits=splits),
        "all_gather": lambda: ad.all_gather(x, comm, grad=grad, splits=splits),
        "broadcast": lambda: ad.broadcast(x, comm, root, grad=grad),
        "reduce": lambda: ad.reduce(x, comm, root, op),
        "scatter": lambda: ad.scatter(x, comm, root, splits=splits),
        "gather": lambda: ad.gather(x, comm, root, splits=splits),
        "all_to_all": lambda: ad.all_to_all(
            x,
            comm,
            send_splits=[setup.sent(rank, peer) for peer in range(n)] if setup.uneven else None,
            recv_splits=[setup.sent(peer, rank) for peer in range(n)] if setup.uneven else None,
        ),
        "permute": lambda: ad.permute(x, comm, [(peer, (peer + 1) % n) for peer in range(n)]),
        "send_recv": lambda: ad.send_recv(
            x,
            comm,
            target=setup.target if rank == root else None,
            source=root if rank == setup.target else None,
        ),
        "halo_exchange": lambda: ad.halo_exchange(x, comm, 0, 1),
        "copy": lambda: ad.copy(x, comm),
        "split": lambda: ad.split(x, comm),
    }[name]()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_adjoint_is_what_pynccl_autograd_gives(ranks: RankPool, n: int) -> None:
    tasks = []
    for name, op, grad in ALL:
        tasks.append((name, op, grad, *random_values(name, op, grad, random_setup(name, n))))
    by_rank = ranks.run(n, gradients_of_autograd, tasks)
    with ranks_of_this_process(n) as comms:
        for at, (name, op, grad, xs, gs) in enumerate(tasks):
            setup = random_setup(name, n)
            found = run(comms, name, op, grad, setup, xs, gs)
            assert_values(found.forward[-1].values, [own[at][0] for own in by_rank], (name, op, grad))
            expected = [own[at][1] for own in by_rank]
            if name.startswith("scatter"):  # drawn without what the other ranks pass for its shape alone
                others = [own for rank, own in enumerate(expected) if rank != setup.root]
                assert not np.any(others)
                expected = [own if rank == setup.root else [] for rank, own in enumerate(expected)]
            assert_values(found.adjoint[-1].values, expected, (name, op, grad, "adjoint"))


def test_every_differentiable_operation_and_every_operation_with_counts_is_there() -> None:
    ops = {name for name in ad.__all__ if name.islower() and callable(getattr(ad, name))}
    collectives = {name for name in ops if getattr(ad, name).__module__.startswith("pynccl_autograd.ops.")}
    counted = {name for name in dir(pynccl.Communicator) if name.endswith("_v") and name[0] != "_"}
    assert collectives == set(OPERATIONS)
    assert counted == {f"{name}_v" for name in COUNTED}


# ------------------------------------------------------------------------------------------------------- the moves


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_moves_lead_from_each_area_to_the_next(n: int) -> None:
    """An element is drawn where something lands, and at last holds what the library wrote there."""
    with ranks_of_this_process(n) as comms:
        for name, op, grad in ALL:
            found = run(comms, name, op, grad, example(name, n))
            for direction in (found.forward, found.adjoint):
                for before, area in itertools.pairwise(direction):
                    assert [sum(own) for own in area.cuts] == [len(own) for own in area.values]
                    steps = [landing.step for landing in area.landings]
                    assert steps == sorted(steps) and set(steps) == set(range(max(steps, default=-1) + 1))
                    last = {}
                    for (source, at, target, to), _, value in area.landings:
                        assert at < len(before.values[source])
                        last[target, to] = value
                    for rank, own in enumerate(area.values):
                        for i, value in enumerate(own):
                            assert last.get((rank, i), 0.0) == pytest.approx(value, abs=1e-12), (name, op, grad)


def test_a_library_that_writes_something_else_is_no_picture(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    module: Any = importlib.import_module("pynccl.tools.explain.execute")

    def wrong(*args: Any) -> None:
        right(*args)
        args[-1][1][0] += 1

    right = module.call
    monkeypatch.setattr(module, "call", wrong)
    with ranks_of_this_process(2) as comms, pytest.raises(FailedError, match=r"element 0 of rank 1 is 15\.0, and the"):
        run(comms, "reduce_scatter", "sum", "", Setup(2, (1, 1)))
    assert main(["explain", "reduce_scatter", "--ranks", "2"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("python -m pynccl explain: reduce_scatter: element 0 of rank 1 is ")


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
    assert "comm.reduce_scatter(x, y, 'sum')" in text and "ad.reduce_scatter(x, comm)" in text
    assert "dist.reduce_scatter_tensor(y, x, op=dist.ReduceOp.SUM)" in text


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


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("plain", [False, True], ids=["boxes", "ascii"])
def test_every_drawing_fits_and_says_what_it_cannot_encode_in_ascii(
    runs: dict[int, list[Run]], n: int, width: int, plain: bool
) -> None:
    for found in runs[n]:
        text = terminal.drawing(found, terminal.Style(width, plain, False))
        assert max(map(len, text.splitlines())) <= width, (found.name, found.op, found.grad)
        assert "{" not in text and "\x1b" not in text
        assert text.isascii() or not plain


@pytest.fixture(scope="module")
def runs() -> dict[int, list[Run]]:
    found = {}
    for n in (2, 4, 8):
        with ranks_of_this_process(n) as comms:
            found[n] = [run(comms, name, op, grad, example(name, n)) for name, op, grad in ALL]
    return found


class Stream(io.StringIO):
    def __init__(self, encoding: str, terminal: bool) -> None:
        super().__init__()
        self._encoding, self._terminal = encoding, terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


def test_colour_is_for_terminals_and_not_for_who_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert terminal.style_of(Stream("utf-8", True), 80).colour
    assert not terminal.style_of(Stream("utf-8", False), 80).colour
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.style_of(Stream("utf-8", True), 80).colour
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.style_of(Stream("utf-8", True), 80).colour
    assert terminal.style_of(Stream("ascii", True), 80).ascii
    assert terminal.style_of(Stream("latin-1", True), 80).ascii


def test_colours_tell_the_ranks_apart_and_leave_the_text_as_it_is(runs: dict[int, list[Run]]) -> None:
    for found in runs[8]:
        plain = terminal.drawing(found, terminal.Style(120, False, False))
        coloured = terminal.drawing(found, terminal.Style(120, False, True))
        assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
        codes = set(re.findall(r"\x1b\[38;5;(\d+)m", coloured))
        assert len(codes) == 8


def test_words_are_filled_in_for_every_variant() -> None:
    for name, op, grad in ALL:
        words = words_of(name, op, grad, random_setup(name, 4))
        texts = [words.does, words.shapes, words.formula, words.note, words.gradient, words.back]
        texts += [words.pynccl, words.autograd, words.torch]
        assert all(text and "{" not in text for text in texts), (name, op, grad)


def test_the_calls_in_the_words_are_there() -> None:
    for name, op, grad in ALL:
        words = words_of(name, op, grad, random_setup(name, 4))
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
    assert done.stdout == "all_reduce, sum, 8 ranks\n" and done.stderr == ""


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
    "all_reduce --op foo": "--op 'foo': expected sum or avg",
    "reduce_scatter --op max": "--op 'max': expected sum or avg",
    "broadcast --op sum": "--op 'sum': broadcast reduces nothing",
    "all_gather --grad both": "argument --grad: invalid choice: 'both'",
    "split --grad sum": "--grad 'sum': split has one gradient only",
    "all_reduce --root 0": "--root: all_reduce has no root",
    "scatter --root 4": "--root 4: expected a rank in 0..3",
    "scatter --root -1": "argument --root: '-1': expected",
    "all_reduce --elements 0": "argument --elements: '0': expected 1 to 9, or up to 8 such numbers: 2,0,3",
    "all_reduce --elements 10": "argument --elements: '10': expected a whole number from 0 to 9",
    "copy --elements 1,2": "--elements: copy has equal blocks, pass one number",
    "gather --elements 1,x": "argument --elements: 'x': expected a whole number",
    "gather --elements 0,0": "argument --elements: '0,0': expected",
    "gather --elements 1,2 --ranks 3": "--elements has 2 numbers, expected one, or one for each of 3 ranks",
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


def test_counts_of_ones_own_and_another_root(capsys: pytest.CaptureFixture[str]) -> None:
    text = drawn(capsys, "gather", "--elements", "2,0,3", "--root", "2")
    assert text.startswith("gather, 3 ranks") and "comm.gather_v(x, y, root=2, counts=[2, 0, 3])" in text
    assert "root=2" in text and "here [2] [0] [3] -> [0] [0] [5]" in " ".join(text.split())


def test_help_has_examples_that_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--help"])
    assert ended.value.code == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    examples = [re.split(r"\s{2,}", line)[0] for line in lines if line.startswith("python -m pynccl explain")]
    assert len(examples) >= 6
    for example_line in examples:
        options = example_line.split()[3:]
        options = [str(tmp_path / one) if one.endswith(".html") else one for one in options]
        assert main(options) == 0, example_line
        capsys.readouterr()
    assert "<!DOCTYPE html>" in (tmp_path / "page.html").read_text()
