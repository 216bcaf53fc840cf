"""Make docs/semantics.md from a run of test_semantics.py: which derivatives of which collective are tested.

Each test is a cell: it passes, or is skipped with the reason why there is no such thing. With --results the table is
made of an earlier run (pytest --junitxml=results.xml). Nothing is written if a cell
fails, nor with --check.

examples:
  python scripts/semantics_table.py --results out/tests.xml --check
  python scripts/semantics_table.py  # long: runs the tests
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

from pynccl.tools import command

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/autograd/test_semantics.py"

# What the columns say, in their order.
PROPERTIES = {
    "adjoint sum": 'output and gradient under `grad="sum"` equal the reference\'s; <F x, y> = <x, F* y> to 1e-12',
    "replicated": 'the same under `grad="replicated"`',
    "double backward": "second derivatives, under both conventions",
    "jvp": "`torch.func.jvp` of the function, and of its gradient",
    "vmap": "`torch.func.vmap` of the function, and of its gradient (per-sample gradients)",
    "compile": "`torch.compile(fullgraph=True)`, forward and backward",
    "uneven": "`splits=` of different sizes, an empty one among them; second derivatives too",
    "any dim": "along every dimension, counted from either end",
    "reduce_dtype": "bfloat16 tensors summed in float32, forward and backward",
    "complex": "complex128, output and gradient",
    "non-contiguous": "a transposed input; transposed cotangents and such of stride 0",
    "zero-size": "a dimension of size 0",
}
HEAD = """\
# What is differentiable, and how that is known

Made by `make semantics` from the results of `tests/autograd/test_semantics.py`; do not edit. Each cell is a test on 2
to 4 ranks in double precision, with inputs and cotangents that differ by rank, against torch's own derivative of a
reference that computes all ranks' outputs in one process. A number is a note: why there is no such thing.
docs/conventions.md says which of the two conventions a program wants.
"""


class Cell(NamedTuple):
    operation: str
    what: str
    status: str  # "passed", "failed", or the reason of a skip


def run_tests(results: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", TESTS, f"--junitxml={results}"]
    code = subprocess.run(words, cwd=ROOT, check=False).returncode
    if code not in (0, 1):  # 1: tests failed, which the table will say
        raise command.FailedError(f"{' '.join(words)} ended with exit code {code}")


def read_cells(results: Path) -> list[Cell]:
    cells = []
    try:
        found = ElementTree.parse(results)
    except ElementTree.ParseError as error:
        raise ValueError(f"{results} is no XML of pytest --junitxml: {error}") from None
    for case in found.iter("testcase"):
        named = {item.get("name"): item.get("value", "") for item in case.iter("property")}
        if "operation" not in named:
            continue
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        status = "failed" if failed else "passed" if skipped is None else skipped.get("message", "")
        cells.append(Cell(named["operation"], named["property"], status))
    return cells


def table(cells: list[Cell]) -> str:
    """The page; ValueError for columns that it does not know."""
    status = {(cell.operation, cell.what): cell.status for cell in cells}
    unknown = {cell.what for cell in cells} - PROPERTIES.keys()
    if unknown or not cells:
        raise ValueError(
            f"the results have the columns {sorted(unknown)} that PROPERTIES does not describe, or no cells"
        )
    notes: dict[str, int] = {}
    rows = []
    for operation in sorted({cell.operation for cell in cells}):  # workers report in any order
        marks = []
        for what in PROPERTIES:
            found = status.get((operation, what), "not run")
            marks.append("✓" if found == "passed" else f"{notes.setdefault(found, len(notes) + 1)}")
        rows.append(f"| {operation} | " + " | ".join(marks) + " |")
    lines = [
        HEAD,
        "| operation | " + " | ".join(PROPERTIES) + " |",
        "|---|" + ":-:|" * len(PROPERTIES),
        *rows,
        "",
        *(f"{number}. {note}" for note, number in notes.items()),
        "",
        "## Columns",
        "",
        *(f"- **{what}**: {meaning}" for what, meaning in PROPERTIES.items()),
    ]
    return "\n".join(lines) + "\n"


def check(page: str, path: Path) -> int:
    """Exit code 1, with the lines that differ, unless the file holds this page."""
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    if found == page:
        print(f"{path} is current")
        return 0
    names = (str(path), "what its tests say")
    print("\n".join(difflib.unified_diff(found.splitlines(), page.splitlines(), *names, lineterm="", n=0)))
    print(f"semantics_table.py: {path} is out of date: run `make semantics`", file=sys.stderr)
    return 1


def main() -> int:
    parser = command.Parser(__doc__, failed="a cell fails; with --check, the page is not what the table would be now")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "semantics.md", help="the page (default: docs/semantics.md)"
    )
    parser.add_argument("--results", type=Path, help="the XML of an earlier run, instead of running the tests")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = options.results or Path(folder, "results.xml")
        if options.results is None:
            run_tests(results)
        cells = read_cells(results)
    failed = [f"{cell.operation}, {cell.what}" for cell in cells if cell.status == "failed"]
    if failed:
        print(f"semantics_table.py: {len(failed)} cells failed: {'; '.join(failed)}", file=sys.stderr)
        return 1
    page = table(cells)
    if options.check:
        return check(page, options.out)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page, encoding="utf-8")
    print(f"{options.out}: {len(cells)} cells, {sum(cell.status == 'passed' for cell in cells)} pass")
    return 0


if __name__ == "__main__":
    command.run(main)
