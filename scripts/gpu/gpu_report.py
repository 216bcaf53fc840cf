"""A page in Markdown of what gpu_check found, from its JSON files, for docs/results/."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

LONGEST = 1200  # characters of one failure


def page(calls: list[dict[str, Any]]) -> str:
    """All calls on one page: where and when, what came of each step, what failed, what was not run, the figures."""
    machines = [call["machine"] for call in calls]
    parts = [f"# GPU check: {_device(machines)}, {_each(machine['date'] for machine in machines)}"]
    if any(machine["fake"] for machine in machines):
        parts.append("**A rehearsal with steps that stand for the real ones: nothing of this ran on a GPU.**")
    if problems := [machine["problem"] for machine in machines if machine["problem"]]:
        parts.append(f"**Nothing ran: {_each(problems)}.**")
    parts += [_machine(machines), _verdict(calls)]
    for call in calls:
        parts.append(_steps(call))
    parts += [_failures(calls), _skips(calls), _figures(calls)]
    return "\n\n".join(filter(None, parts))


def _each(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, texts)))


def _device(machines: list[dict[str, Any]]) -> str:
    found = [gpu for machine in machines for gpu in machine.get("versions", {}).get("gpus", [])]
    return _each(found) or _each(machine["driver"] for machine in machines) or "no GPU"


def _machine(machines: list[dict[str, Any]]) -> str:
    versions = [machine.get("versions", {}) for machine in machines]
    rows = {
        "GPUs": _each(f"{machine['gpus']} ({machine['driver'] or 'no nvidia-smi'})" for machine in machines),
        "machine": _each(f"{machine['platform']}, {machine['cores']} cores" for machine in machines),
        "commit": _each(machine["commit"] for machine in machines) or "unknown",
    }
    for name in ("python", "torch", "cuda", "nccl", "libnccl"):
        rows[name] = _each(str(found.get(name) or "") for found in versions)
    rows["packages"] = _each(
        ", ".join(f"{name} {version}" for name, version in found.get("packages", {}).items() if version != "-")
        for found in versions
    )
    commands = "\n".join(dict.fromkeys(f"    {machine['command']}" for machine in machines))
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items() if value)
    return f"{commands}\n\n| | |\n|---|---|\n{table}"


def _verdict(calls: list[dict[str, Any]]) -> str:
    steps = [step for call in calls for step in call["steps"]]
    counts: dict[str, int] = {}
    for step in steps:
        counts[step["status"]] = counts.get(step["status"], 0) + 1
    found = "Steps: " + ", ".join(f"{number} {status}" for status, number in counts.items()) + "."
    settings = {name: value for call in calls for name, value in call["nccl_env"].items()}
    if settings:
        found += " Set for all of NCCL: " + ", ".join(f"`{name}={value}`" for name, value in settings.items()) + "."
    return found


def _steps(call: dict[str, Any]) -> str:
    rows = []
    for step in call["steps"]:
        tests = ", ".join(f"{number} {name}" for name, number in step["tests"].items())
        ended = f"{step['seconds']:g} s" if step["seconds"] else ""
        cells = [step["name"], str(step["ranks"] or 1), f"**{step['status']}**", ended, tests, step["reason"]]
        rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    heading = f"## {call['call']} (budget {call['budget']:g} s)"
    return "\n".join([heading, "", "| step | ranks | | time | tests | |", "|---|---|---|---|---|---|", *rows])


def _failures(calls: list[dict[str, Any]]) -> str:
    found = []
    for step in (step for call in calls for step in call["steps"] if step["status"] in ("failed", "running")):
        told = "\n\n".join(f"rank {each['rank']}: {each['test']}\n{each['message']}" for each in step["failures"])
        found.append(f"### {step['name']}\n\n```\n{(told or step['output'])[-LONGEST * 2 :]}\n```")
    return "## What did not pass\n\n" + "\n\n".join(found) if found else ""


def _skips(calls: list[dict[str, Any]]) -> str:
    reasons: dict[str, list[str]] = {}
    for step in (step for call in calls for step in call["steps"]):
        for reason, number in step["skips"].items():
            reasons.setdefault(reason, []).append(f"{number} in {step['name']}")
    rows = [f"- {reason}: {', '.join(where)}" for reason, where in reasons.items()]
    return "\n".join(["## Tests that were skipped", "", *rows]) if rows else ""


def _figures(calls: list[dict[str, Any]]) -> str:
    """What the steps' scripts printed behind RESULT, but for the versions."""
    found = []
    for step in (step for call in calls for step in call["steps"]):
        if step["results"] and step["name"] != "versions" and "in an earlier call" not in step["reason"]:
            found.append(f"### {step['name']}\n")
            for rank, result in enumerate(step["results"]):
                found.append(_result(rank, result))
    return "\n".join(["## Figures", "", *found]) if found else ""


def _result(rank: int, result: Any) -> str:
    """One rank's: a table of calls, as bench_overhead has it, or names and values."""
    if not isinstance(result, dict):
        return f"- rank {rank}: {result}"
    rows = result.get("calls")
    plain = {name: value for name, value in result.items() if name != "calls" and value not in ([], {})}
    told = f"- rank {rank}: " + ", ".join(f"{name} {_shown(value)}" for name, value in plain.items())
    if not rows:
        return told
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(_cell(str(row[name])) for name in names) + " |" for row in rows]
    return "\n".join([told, "", *lines, ""])


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
