"""Judge a run of the fault campaign: a right result, a right error, or a failure.

An error is right if every rank that failed names the culprit rank, and the culprit's line if there is one to name.
The error of a rank is what it wrote to stderr, without the frames of its own stack and without its own rank number.
It names a rank if its first clause (up to a semicolon) with any rank in it contains that rank. It names a line if the
line is anywhere in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from faults.programs import BLAMELESS, Program
from faults.ranks import Rank, RunResult

OUTCOMES = (
    *("right result", "right error", "wrong name", "no error", "false alarm", "late", "hang", "crash", "wrong data"),
    *("left-over process", "left-over file"),
)
GOOD = OUTCOMES[:2]
MAX_INTERRUPT_SECONDS = 1.0  # Ctrl-C must end a rank within this time

_CRASHES = re.compile(
    r"Fatal Python error|terminate called|Segmentation fault|Exception in thread|Exception ignored|double free|Aborted"
)
# Messages of torch without DNS and with an unreachable store, and of triton's bindings as some processes exit.
_TORCH_MESSAGES = re.compile(
    r"^(\[[WE]\d+ .*\[c10d\] |Exception raised from .*most recent call first|frame #|<omitting python frames>"
    r"|nanobind: | - (leaked|\.\.\.)|See https://nanobind).*\n?",
    re.MULTILINE,
)
_OWN_NUMBER = re.compile(
    r"rank \d+ of \d+|watchdog: rank \d+|\(rank=\d+, nranks=\d+\)|\(reported by rank \d+\)"
)  # itself, and the reporter
_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and |, and |-)\d+)*)|\branks? \[([\d, ]+)\]")


@dataclass
class Verdict:
    """The verdict on one run. named_rank, named_line: None if there is nothing to name."""

    seed: int
    fault: str
    outcome: str
    why: str = ""
    nodes: int = 1
    named_rank: bool | None = None
    named_line: bool | None = None
    seconds: float = 0.0  # from the fault to the exit of the last innocent rank


def judge(program: Program, ended: RunResult) -> Verdict:
    """Return the worst outcome that applies to a run."""
    verdict = Verdict(program.seed, program.fault.name, "right result", nodes=len(program.fault.nodes) or 1)
    survivors = [rank for rank in ended.ranks if rank.number != _culprit(program)]
    verdict.seconds = max(0.0, max(rank.at for rank in survivors) - ended.struck)
    failed = [rank for rank in survivors if rank.status != 0]
    expected_lines = program.fault.lines
    if not failed and program.fault.kind.call:  # a root may be the only rank that fails
        failed = [rank for rank in ended.ranks if rank.status != 0]
        expected_lines = set()  # its own traceback has the line
        verdict.outcome, verdict.why = "no error", "all ranks exited cleanly despite the fault"
    if failed and program.fault.name not in BLAMELESS:
        verdict.outcome, verdict.why = "right error", ""
        _judge_names(program, failed, expected_lines, verdict)
    for outcome, why in _worst(program, ended, survivors):
        if why:
            verdict.outcome, verdict.why = outcome, why
            break
    return verdict


def _culprit(program: Program) -> int:
    """Return the rank that may exit uncleanly; -1: none."""
    return -1 if program.fault.name == "link-cut" else program.fault.rank


def _worst(program: Program, ended: RunResult, survivors: list[Rank]) -> list[tuple[str, str]]:
    """Return (outcome, why) of all failures, worst first. why is "" if the failure did not occur."""
    wrong = [line for rank in ended.ranks for line in rank.err.splitlines() if line.startswith("WRONG DATA")]
    return [
        ("hang", f"ranks {ended.hung} were still running" if ended.hung else ""),
        ("crash", next(filter(None, (_crash(program, rank) for rank in ended.ranks)), "")),
        ("wrong data", wrong[0] if wrong else ""),
        ("left-over process", ", ".join(ended.processes)),
        ("left-over file", ", ".join(ended.files[:5])),
        ("late", _late(program, ended)),
        ("false alarm", _alarm(program, survivors)),
    ]


def crashes(text: str) -> str:
    """Return what in the stderr of a rank says that it crashed; "" if nothing does."""
    found = _CRASHES.search(text)
    return found[0] if found else ""


def _crash(program: Program, rank: Rank) -> str:
    """Return why the exit of a rank counts as a crash; "" if it does not."""
    if found := crashes(rank.err):
        return f"rank {rank.number}: {found}"
    kind = program.fault.kind
    if rank.number == _culprit(program) and not kind.call:
        if rank.status in (kind.status, 0, 1):  # its program or another rank may have ended before
            return ""
        return f"rank {rank.number}, broken by {program.fault.name}, exited with {rank.status}, expected {kind.status}"
    if rank.status == 0:
        return ""
    raised = last_error(rank.err)
    if rank.status != 1 or not raised.startswith("pynccl.Nccl"):
        return f"rank {rank.number} exited with {rank.status}: {raised[:200]}"
    return ""


def last_error(text: str) -> str:
    """Return the first line of the exception that ended a rank; "" if there is none."""
    found = re.findall(r"^Traceback \(most recent call last\):\n(?:^ .*\n|^\n)*^(\S.*)$", text, re.MULTILINE)
    return str(found[-1]) if found else ""


def _late(program: Program, ended: RunResult) -> str:
    if program.fault.name != "ctrl-c":
        return ""
    seconds = ended.ranks[program.fault.rank].left - ended.struck
    return f"Ctrl-C took {seconds:.1f} s" if seconds > MAX_INTERRUPT_SECONDS else ""


def _alarm(program: Program, survivors: list[Rank]) -> str:
    """Return why a run without a culprit is a false alarm; "" if it is none. With packet loss, warnings are allowed."""
    if program.fault.name not in BLAMELESS:
        return ""
    for rank in survivors:
        text = _TORCH_MESSAGES.sub("", rank.err).strip()
        if rank.status or (text and program.fault.name == "none") or "done" not in rank.out:
            return f"rank {rank.number} exited with {rank.status}: {text[-300:]}"
    return ""


def _judge_names(program: Program, failed: list[Rank], expected_lines: set[int], verdict: Verdict) -> None:
    without_rank = [rank for rank in failed if not accepted(program, rank) & blamed_ranks(rank.err)]
    verdict.named_rank = not without_rank
    without_line = [rank for rank in failed if expected_lines and not expected_lines & named_lines(rank.err)]
    verdict.named_line = not without_line if expected_lines else None
    if without_rank or without_line:
        rank = (without_rank or without_line)[0]
        expected = f"line {sorted(expected_lines)}" if not without_rank else f"rank {sorted(accepted(program, rank))}"
        verdict.outcome = "wrong name"
        verdict.why = f"rank {rank.number} does not name {expected}: {last_error(rank.err)[:200]}"


def accepted(program: Program, rank: Rank) -> set[int]:
    """Return the numbers of the culprit that a rank may name: in the job, and in the communicator of its call."""
    fault = program.fault
    culprits = fault.either or {fault.rank}
    if fault.name == "link-cut":  # all on the other node
        culprits = set(next(node for node in fault.nodes if rank.number not in node))
    numbers = set(culprits)
    called = [int(line) for line in re.findall(r'program\.py", line (\d+)', rank.err)]
    comm = program.comms.get(called[-1]) if called else None
    for group in comm.groups if comm else ():
        if rank.number in group:
            numbers |= {group.index(culprit) for culprit in culprits if culprit in group}
    return numbers


def message_lines(text: str) -> list[str]:
    """Return the lines of stderr without the frames of the rank's own tracebacks and stack."""
    lines, in_frame, in_stack = [], False, False
    for line in text.splitlines():
        in_stack = in_stack and re.match(r"\s+\S+:\d+ \S+$", line) is not None
        if re.match(r'\s+File ".*", line \d+', line):
            in_frame = True
        elif not in_stack and not (in_frame and line.startswith("    ")):
            in_frame = False
            lines.append(line)
        in_stack = in_stack or "this rank's stack" in line
    return lines


def blamed_ranks(text: str) -> set[int]:
    """Return the ranks in the first clause that contains any: "rank 2", "ranks 0, 2-4", "ranks [1, 3]"."""
    for clause in ";".join(message_lines(text)).split(";"):
        found = " ".join("".join(groups) for groups in _RANKS.findall(_OWN_NUMBER.sub("", clause)))
        if found:
            ranges = re.findall(r"(\d+)(?:-(\d+))?", found)
            return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}
    return set()


def named_lines(text: str) -> set[int]:
    return {
        int(number) for line in message_lines(text) for number in re.findall(r'program\.py(?::|", line )(\d+)', line)
    }
