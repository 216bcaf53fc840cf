"""Write a random program as Python source in one of several styles of calling the collectives. See programs.py."""

from __future__ import annotations

import random

from .programs import Kind, Program, Step, Text

STYLES = ("function", "module", "list", "start", "checkpoint", "reentrant")
LISTED = ("all_reduce", "all_gather", "reduce_scatter")  # take lists; programs pass two terms of one tensor


def source(program: Program, style: str) -> str:
    """Return the source of program(comm, leaves), which returns (outputs, results of all collectives)."""
    names = program.names
    first = len(program.leaves)
    lines = [f"{', '.join(names[:first])}, = leaves"]
    rng = random.Random(program.seed)
    if style in ("checkpoint", "reentrant"):
        lines += _segments(program, rng, style == "reentrant")
    elif style == "start":
        lines += _started(program, rng)
    else:
        lines += [_line(program, i, style) for i in range(len(program.steps))]
    kept = [] if style in ("checkpoint", "reentrant") else _results(program)  # results inside a segment have no name
    outputs = ", ".join(names[i] for i in program.outputs)
    body = "\n".join("    " + line for line in [*lines, f"return [{outputs}], [{', '.join(kept)}]"])
    return f"def program(comm, leaves):\n{body}\n"


def _results(program: Program) -> list[str]:
    """Return the names of the collectives' results that were not changed in place."""
    first = len(program.leaves)
    steps = enumerate(program.steps, first)
    return [program.names[i] for i, step in steps if not Kind.known[step.kind].local and not _changed(program, i)]


def _changed(program: Program, at: int) -> bool:
    return any(at == step.inputs[0] and "inplace" in Kind.known[step.kind].traits for step in program.steps)


def _text(program: Program, i: int) -> tuple[str, Text]:
    step: Step = program.steps[i]
    names = program.names
    text = Kind.known[step.kind].write([names[at] for at in step.inputs], step.args)
    return names[len(program.leaves) + i], text


def _line(program: Program, i: int, style: str = "function") -> str:
    name, text = _text(program, i)
    if not text.function:
        return f"{name} = {text.expression}"
    rest = f", {text.rest}" if text.rest else ""
    if style == "list" and text.function in LISTED:
        if not text.startable:
            return f"{name}, _ = ad.{text.function}([{text.x}, {text.x}], comm{rest})"
        return f"{name} = sum(ad.{text.function}([{text.x} * 0.25, {text.x} * 0.75], comm{rest}))"
    if style == "module" and text.function != "send_recv":
        module = "".join(word.capitalize() for word in text.function.split("_"))
        return f"{name} = ad.nn.{module}(comm{rest})({text.x})"
    return f"{name} = ad.{text.function}({text.x}, comm{rest})"


def _started(program: Program, rng: random.Random) -> list[str]:
    """Start most collectives at their step, and wait for each before the first use of its result."""
    lines = []
    flying: set[str] = set()
    for i, step in enumerate(program.steps):
        for at in step.inputs:
            if (used := program.names[at]) in flying:
                flying.discard(used)
                lines.append(f"{used} = h{used[1:]}.wait()")
        name, text = _text(program, i)
        if text.startable and rng.random() < 0.8:
            rest = f", {text.rest}" if text.rest else ""
            lines.append(f"h{name[1:]} = ad.start(ad.{text.function}, {text.x}, comm{rest})")
            flying.add(name)
        else:
            lines.append(_line(program, i))
    return lines + [f"{name} = h{name[1:]}.wait()" for name in sorted(flying, key=lambda name: int(name[1:]))]


def _segments(program: Program, rng: random.Random, reentrant: bool) -> list[str]:
    """Put some runs of steps into checkpoints."""
    lines: list[str] = []
    count = len(program.steps)
    at = 0
    while at < count:
        end = min(count, at + rng.randint(1, 4))
        if rng.random() < 0.6:
            lines += _segment(program, at, end, reentrant)
        else:
            lines += [_line(program, i) for i in range(at, end)]
        at = end
    return lines


def _segment(program: Program, start: int, end: int, reentrant: bool) -> list[str]:
    first = len(program.leaves)
    made = range(first + start, first + end)
    used = {i for step in program.steps[start:end] for i in step.inputs}
    later = {i for step in program.steps[end:] for i in step.inputs} | set(program.outputs)
    inputs = ", ".join(program.names[i] for i in sorted(used - set(made)))
    results = "".join(f"{program.names[i]}, " for i in made if i in later)
    body = [f"    {_line(program, i)}" for i in range(start, end)]
    call = f"checkpoint(segment, {inputs}, use_reentrant={reentrant})"
    if not results:
        return [_line(program, i) for i in range(start, end)]
    return [f"def segment({inputs}):", *body, f"    return {results}", f"{results}= {call}"]
