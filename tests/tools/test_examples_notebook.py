"""scripts/examples/notebook.ipynb: what is stored in it is what it prints when it is run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel (pip install nbclient ipykernel)")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (pip install nbclient ipykernel)")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel (pip install nbclient ipykernel)")

NOTEBOOK = Path(__file__).parents[2] / "scripts" / "examples" / "notebook.ipynb"


def texts(notebook: Any) -> list[list[str]]:
    """Of each cell of code, the texts that are below it: printed, values, errors. A figure has one, with its size."""
    return [
        [output.get("text") or output.get("data", {}).get("text/plain") or output["ename"] for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.fixture(scope="module")
def stored() -> Any:
    return nbformat.read(NOTEBOOK, 4)


def test_the_stored_outputs_are_those_of_a_run(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    again = nbformat.read(NOTEBOOK, 4)
    for cell in again.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(again, timeout=60, kernel_name="python3", resources=resources).execute()
    pytest.importorskip("matplotlib", reason="the outputs in the notebook have a figure (pip install matplotlib)")
    assert texts(again) == texts(stored)


def test_the_notebook_is_as_saved_by_a_run_from_top_to_bottom(stored: Any) -> None:
    nbformat.validate(stored)
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    (figure,) = [output for cell in code for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(figure.data["image/png"]) < 60_000  # characters: it is in the repository


def test_who_calls_init_there_is_pointed_to_init_all(stored: Any) -> None:
    (cell,) = [cell for cell in stored.cells if "pynccl.init()\n" in cell.source and cell.cell_type == "code"]
    (output,) = cell.outputs
    assert "was not started by torchrun" in output.text and "comms = pynccl.init_all()" in output.text
