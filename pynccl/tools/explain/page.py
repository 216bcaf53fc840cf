"""Build the interactive page of all operations: one self-contained file from page.html, page.css and page.js.

The moves and all numbers before and after come from running the collectives; the page's script only animates them and
computes the partial sums in between.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from .execute import Pass, ranks_of_this_process, run
from .operations import GRAD_NOTES, OPERATIONS, adjoint_text, texts_for, variants

RANKS = range(2, 9)


def page() -> str:
    """Return the page as HTML. The result is deterministic."""
    runs = {}
    for ranks in RANKS:
        with ranks_of_this_process(ranks) as comms:
            for name, grad in variants():
                found = run(comms, name, grad)
                runs[f"{name}|{grad}|{ranks}"] = [_pass(found.forward), _pass(found.adjoint)]
    data = {
        "ranks": list(RANKS),
        "grads": {name: row.grads for name, row in OPERATIONS.items()},
        "texts": {f"{name}|{grad}": _texts(name, grad) for name, grad in variants()},
        "runs": runs,
    }
    folder = resources.files(__package__ or "")
    text = (folder / "page.html").read_text(encoding="utf-8")
    for mark, part in (
        ("/*style*/", (folder / "page.css").read_text(encoding="utf-8")),
        ("/*script*/", (folder / "page.js").read_text(encoding="utf-8")),
        ("/*data*/", json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")),
    ):
        text = text.replace(mark, part)
    return text


def _pass(shown: Pass) -> dict[str, Any]:
    return {"labels": shown.labels, "values": [shown.before, shown.after], "moves": shown.moves, "text": shown.text}


def _texts(name: str, grad: str) -> dict[str, Any]:
    texts = texts_for(name, grad)
    return {
        "does": [texts.does, adjoint_text(name, grad)],
        "formula": [texts.formula, texts.gradient],
        "shapes": texts.shapes,
        "calls": [["pynccl", texts.pynccl], ["pynccl_autograd", texts.autograd], ["torch.distributed", texts.torch]],
        "note": texts.note,
        "grad_note": GRAD_NOTES[grad],
    }
