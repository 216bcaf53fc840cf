"""One page, without anything from outside, on which the elements of every collective move: page.html, .css, .js.

What moves where, in which step, and every number on the page come from runs of the collectives here; the page's script
only shows them.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from .arrows import labels, number, step_labels
from .colours import PLAIN, mixed
from .execute import Pass, Run, Stage, ranks_of_this_process, run
from .moves import Setup
from .operations import COUNTS, OPERATIONS, variants
from .options import LEAST_RANKS, MOST_RANKS
from .words import BRIEF, SNIPPET, other_convention, step_words, words_of

_SIGNS = {"": "+", "sum": "+", "prod": "×"}  # what stands between the parts of an element, where that is written out
_LIGHT, _DARK = "#ffffff", "#171b22"


def page(shown: Run | None = None) -> str:
    """The page as HTML, the same for the same arguments. shown: what it opens with, in place of its own example."""
    data = _Table()
    for ranks in range(LEAST_RANKS, MOST_RANKS + 1):
        with ranks_of_this_process(ranks) as comms:
            for name, op, grad in variants():
                data.add(run(comms, name, op, grad, example(name, ranks)))
    if shown is not None:
        data.add(shown)
    return filled(data.whole(shown))


def example(name: str, ranks: int) -> Setup:
    """What an operation is shown with where nothing else was asked for."""
    row = OPERATIONS[name]
    return Setup(ranks, COUNTS[:ranks] if row.by_counts else (row.elements,) * ranks, 0, row.by_counts)


def filled(data: dict[str, Any]) -> str:
    folder = resources.files(__package__ or "")
    text = (folder / "page.html").read_text(encoding="utf-8")
    compact = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    parts = {
        "/*style*/": _colours() + (folder / "page.css").read_text(encoding="utf-8"),
        "/*script*/": (folder / "page.js").read_text(encoding="utf-8"),
        "/*data*/": compact,
    }
    for mark, part in parts.items():
        before, after = text.split(mark)
        text = before + part + after
    return text


def _colours() -> str:
    """Each rank's colour and a pale one for the ground of its elements, on light and on dark."""

    def block(ground: str, part: float, ink: str) -> str:
        rows = (
            f"--rank{rank}: {mixed(colour, ink, 0.8)}; --pale{rank}: {mixed(colour, ground, part)};"
            for rank, colour in enumerate(PLAIN)
        )
        return "  " + "\n  ".join(rows)

    light, dark = block(_LIGHT, 0.26, "#000000"), block(_DARK, 0.48, "#ffffff")
    return f":root {{\n{light}\n}}\n@media (prefers-color-scheme: dark) {{\n:root {{\n{dark}\n}}\n}}\n"


class _Table:
    """Runs as the page reads them; what several have in common stands there once."""

    def __init__(self) -> None:
        self.passes: dict[str, int] = {}
        self.texts: dict[str, int] = {}
        self.runs: dict[str, list[int]] = {}

    def add(self, found: Run) -> None:
        key = "|".join([found.name, found.op, found.grad, str(found.setup.ranks)])
        self.runs[key] = [
            _placed(self.passes, _pass(found, found.forward)),
            _placed(self.passes, _pass(found, found.adjoint)),
            _placed(self.texts, _texts(found)),
        ]

    def whole(self, shown: Run | None) -> dict[str, Any]:
        start = ["reduce_scatter", "sum", "", 4]
        return {
            "start": start if shown is None else [shown.name, shown.op, shown.grad, shown.setup.ranks],
            "ranks": list(range(LEAST_RANKS, MOST_RANKS + 1)),
            "operations": [
                {"name": name, "brief": BRIEF[name], "ops": row.ops, "grads": row.grads}
                for name, row in OPERATIONS.items()
            ],
            "runs": self.runs,
            "passes": [json.loads(text) for text in self.passes],
            "texts": [json.loads(text) for text in self.texts],
        }


def _placed(table: dict[str, int], value: Any) -> int:
    return table.setdefault(json.dumps(value, ensure_ascii=False), len(table))


def _pass(found: Run, one: Pass) -> dict[str, Any]:
    return {
        "labels": labels(one),
        "values": [[number(value) for value in own] for own in one.values],
        "cuts": one.cuts,
        "stages": [_stage(found, stage) for stage in one.stages],
    }


def _stage(found: Run, stage: Stage) -> dict[str, Any]:
    """moves: source rank, its element, target rank, its element, step, what the target holds after it; the factor by
    which it is multiplied, where factors differ."""
    differ = len({factor for own in stage.factors for factor in own}) > 1
    moves = []
    for landing in stage.landings:
        factor = [number(stage.factors[landing.move.source][landing.move.at])] if differ else []
        moves.append([*landing.move, landing.step, number(landing.value), *factor])
    return {
        "text": step_words(stage.way, stage.op, found.setup.by_counts),
        "sign": _SIGNS.get(stage.op, "") if not stage.factors else "",
        "steps": step_labels(stage, found.setup.ranks),
        "moves": moves,
        "values": [[number(value) for value in own] for own in stage.values],
        "cuts": stage.cuts,
    }


def _texts(found: Run) -> dict[str, Any]:
    words, back = words_of(found.name, found.op, found.grad, found.setup)
    return {
        "does": words.does,
        "formula": words.formula,
        "shapes": words.shapes,
        "calls": [["pynccl", words.pynccl], ["pynccl_autograd", words.autograd], ["torch.distributed", words.torch]],
        "confused": words.confused,
        "back": back.does,
        "backFormula": back.formula,
        "other": other_convention(found.name, found.grad).partition(": --grad")[0],
        "snippet": SNIPPET if OPERATIONS[found.name].way == "all_gather" else [],
    }
