"""One page, without anything from outside, on which the elements of every collective move: page.html, .css, .js.

What moves where, in which step, and every number on the page come from runs of the collectives here; the page's script
only shows them.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from .execute import Area, Run, number, ranks_of_this_process, run
from .operations import OPERATIONS, OTHER, example, words_of

RANKS = range(2, 9)


def page(name: str = "reduce_scatter", op: str = "sum", grad: str = "", ranks: int = 4, root: int = 0) -> str:
    """The page as HTML, the same for the same arguments: what it opens with."""
    parts: dict[str, int] = {}  # what several runs have in common stands there once
    data = {
        "start": [name, op, grad, ranks, root],
        "ranks": list(RANKS),
        "operations": [
            {"name": name, "ops": row.ops, "grads": row.grads, "rooted": row.rooted} for name, row in OPERATIONS.items()
        ],
        "runs": {
            key: [parts.setdefault(json.dumps(part, ensure_ascii=False), len(parts)) for part in shown]
            for ranks in RANKS
            for key, shown in _runs(ranks).items()
        },
        "parts": [json.loads(text) for text in parts],
    }
    folder = resources.files(__package__ or "")
    text = (folder / "page.html").read_text(encoding="utf-8")
    compact = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    for mark, part in (
        ("/*style*/", (folder / "page.css").read_text(encoding="utf-8")),
        ("/*script*/", (folder / "page.js").read_text(encoding="utf-8")),
        ("/*data*/", compact),
    ):
        text = text.replace(mark, part)
    return text


def _runs(ranks: int) -> dict[str, list[Any]]:
    """Key of a run -> its forward, its adjoint, and its words."""
    found = {}
    with ranks_of_this_process(ranks) as comms:
        for name, row in OPERATIONS.items():
            for op, grad, root in (
                (op, grad, root) for op in row.ops for grad in row.grads for root in range(ranks if row.rooted else 1)
            ):
                one = run(comms, name, op, grad, example(name, ranks, root))
                found[f"{name}|{op}|{grad}|{ranks}|{root}"] = [_pass(one.forward), _pass(one.adjoint), _words(one)]
    return found


def _pass(areas: list[Area]) -> dict[str, Any]:
    """areas: label, numbers of each rank, sizes of the blocks of each rank; stages: what leads from one to the next."""
    return {
        "areas": [[area.label, [list(map(number, own)) for own in area.values], area.cuts] for area in areas],
        "stages": [_stage(area) for area in areas[1:]],
    }


def _stage(area: Area) -> dict[str, Any]:
    """moves: source rank, its element, target rank, its element, step, what the target holds after it."""
    steps = range(1 + max((landing.step for landing in area.landings), default=-1))
    return {
        "text": area.text,
        "steps": [_step_text(area, step, len(area.values)) for step in steps],
        "moves": [[*move, step, number(value)] for move, step, value in area.landings],
    }


def _step_text(area: Area, step: int, ranks: int) -> str:
    """Who sends to whom in a step."""
    pairs = sorted({(one.move.source, one.move.target) for one in area.landings if one.step == step})
    far = (pairs[0][1] - pairs[0][0]) % ranks
    if far == 0:
        return area.text if area.is_local else "each rank's own part"
    if len(pairs) == ranks:
        return f"every rank r → r + {far} mod {ranks}"
    return "rank " + ", ".join(f"{source} → {target}" for source, target in pairs)


def _words(found: Run) -> dict[str, Any]:
    words = words_of(found.name, found.op, found.grad, found.setup)
    return {
        "does": [words.does, words.back],
        "formula": [words.formula, words.gradient],
        "shapes": words.shapes,
        "calls": [["pynccl", words.pynccl], ["pynccl_autograd", words.autograd], ["torch.distributed", words.torch]],
        "note": words.note,
        "other": OTHER.get(found.grad, ""),
    }
