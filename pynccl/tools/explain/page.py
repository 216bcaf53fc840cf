"""One page, without anything from outside, on which the elements of every collective move: page.html, .css, .js.

What moves where, and every number before and after, come from runs of the collectives here; the page's script shows
them, and adds up what has arrived on the way.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from .execute import Pass, ranks_of_this_process, run
from .operations import OPERATIONS, OTHER, backwards, variants, words_of

RANKS = range(2, 9)


def page() -> str:
    """The page as HTML, the same each time."""
    runs = {}
    for ranks in RANKS:
        with ranks_of_this_process(ranks) as comms:
            for name, grad in variants():
                one = run(comms, name, grad)
                runs[f"{name}|{grad}|{ranks}"] = [_pass(one.forward), _pass(one.adjoint)]
    data = {
        "ranks": list(RANKS),
        "grads": {name: row.grads for name, row in OPERATIONS.items()},
        "words": {f"{name}|{grad}": _words(name, grad) for name, grad in variants()},
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


def _pass(one: Pass) -> dict[str, Any]:
    return {"labels": one.labels, "values": [one.before, one.after], "moves": one.moves, "text": one.text}


def _words(name: str, grad: str) -> dict[str, Any]:
    words = words_of(name, grad)
    return {
        "does": [words.does, backwards(name, grad)],
        "formula": [words.formula, words.gradient],
        "shapes": words.shapes,
        "calls": [["pynccl", words.pynccl], ["pynccl_autograd", words.autograd], ["torch.distributed", words.torch]],
        "note": words.note,
        "other": OTHER[grad],
    }
