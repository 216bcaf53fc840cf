"""One page, without anything from outside, on which the elements of every collective move: page.html, .css, .js.

What moves where, in which step, and every number on the page come from runs of the collectives here; the page's script
only shows them.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from .execute import Pass, Run, Stage, number, ranks_of_this_process, run
from .operations import OPERATIONS, example
from .words import SNIPPET, other_convention, words_of

RANKS = range(2, 9)


def page(shown: Run | None = None) -> str:
    """The page as HTML, the same for the same arguments. shown: what it opens with, in place of its own example."""
    runs = {}
    for ranks in RANKS:
        with ranks_of_this_process(ranks) as comms:
            for name in OPERATIONS:
                for op, grad, root in _choices(name, ranks):
                    runs[_key(name, op, grad, ranks, root)] = run(comms, name, op, grad, example(name, ranks, root))
    start = _key("reduce_scatter", "sum", "", 4, 0)
    if shown is not None:
        start = _key(shown.name, shown.op, shown.grad, shown.setup.ranks, shown.setup.root)
        runs[start] = shown
    parts: dict[str, int] = {}  # what several runs have in common stands there once
    data = {
        "start": start.split("|"),
        "ranks": list(RANKS),
        "operations": [
            {"name": name, "brief": row.brief, "ops": row.ops, "grads": row.grads, "rooted": row.rooted}
            for name, row in OPERATIONS.items()
        ],
        "runs": {
            key: [_index(parts, one) for one in (_pass(found.forward), _pass(found.adjoint), *_texts(found))]
            for key, found in runs.items()
        },
        "parts": [json.loads(text) for text in parts],
    }
    return filled(data)


def _choices(name: str, ranks: int) -> list[tuple[str, str, int]]:
    row = OPERATIONS[name]
    roots = range(ranks) if row.rooted else range(1)
    return [(op, grad, root) for op in row.ops for grad in row.grads for root in roots]


def _key(*words: object) -> str:
    return "|".join(map(str, words))


def filled(data: dict[str, Any]) -> str:
    folder = resources.files(__package__ or "")
    text = (folder / "page.html").read_text(encoding="utf-8")
    compact = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    parts = {
        "/*style*/": (folder / "page.css").read_text(encoding="utf-8"),
        "/*script*/": (folder / "page.js").read_text(encoding="utf-8"),
        "/*data*/": compact,
    }
    for mark, part in parts.items():
        before, after = text.split(mark)
        text = before + part + after
    return text


def _index(parts: dict[str, int], value: Any) -> int:
    return parts.setdefault(json.dumps(value, ensure_ascii=False), len(parts))


def _pass(one: Pass) -> dict[str, Any]:
    """areas: label, numbers of each rank, sizes of the blocks of each rank."""
    return {
        "areas": [[area.label, [list(map(number, own)) for own in area.values], area.cuts] for area in one.areas],
        "stages": [_stage(stage, len(one.areas[0].values)) for stage in one.stages],
    }


def _stage(stage: Stage, ranks: int) -> dict[str, Any]:
    """moves: source rank, its element, target rank, its element, step, what the target holds after it; the factor by
    which it is multiplied, where factors differ."""
    differ = len({factor for own in stage.factors for factor in own}) > 1
    moves = []
    for move, step, value in stage.landings:
        factor = [number(stage.factors[move.source][move.at])] if differ else []
        moves.append([*move, step, number(value), *factor])
    steps = [_step_text(stage, step, ranks) for step in range(stage.steps)]
    return {"text": stage.text, "steps": steps, "moves": moves}


def _step_text(stage: Stage, step: int, ranks: int) -> str:
    """Who sends to whom in a step."""
    pairs = sorted({(one.move.source, one.move.target) for one in stage.landings if one.step == step})
    far = (pairs[0][1] - pairs[0][0]) % ranks
    if far == 0:
        return stage.text if stage.is_local else "each rank's own part"
    if len(pairs) == ranks:
        return f"every rank r → r + {far} mod {ranks}"
    return "rank " + ", ".join(f"{source} → {target}" for source, target in pairs)


def _texts(found: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the forward, and of the adjoint."""
    words, back = words_of(found.name, found.op, found.grad, found.setup)
    forward = {
        "does": words.does,
        "formula": words.formula,
        "shapes": words.shapes,
        "calls": [["pynccl", words.pynccl], ["pynccl_autograd", words.autograd], ["torch.distributed", words.torch]],
        "confused": words.confused,
        "snippet": SNIPPET if OPERATIONS[found.name].way == "all_gather" else [],
    }
    return forward, {"does": back.does, "formula": back.formula, "other": other_convention(found.grad)}
