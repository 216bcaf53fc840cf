"""What came of a run of the fault campaign: a right result, a right error, or what is wrong.

An error is right if every rank that failed names the rank that is to blame, and its line where there is one to name.
What a rank says is what it wrote to standard error, without the frames of its own stack and without its own number.
It names a rank if the first clause (up to a semicolon) that speaks of any rank speaks of that one; a line if it is
anywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from faults.programs import BLAMELESS, Program
from faults.ranks import Ended, Rank

OUTCOMES = (
    *("right result", "right error", "wrong name", "no error", "false alarm", "late", "hang", "crash", "wrong data"),
    *("left-over process", "left-over file"),
)
GOOD = OUTCOMES[:2]
HEARD_SECONDS = 1.0  # in which Ctrl-C ends a rank

_CRASHES = re.compile(
    r"Fatal Python error|terminate called|Segmentation fault|Exception in thread|Exception ignored|double free|Aborted"
)
# Without DNS; of a store that is not reached; and what triton's bindings say at the end of some processes.
_OF_TORCH = re.compile(
    r"^(\[[WE]\d+ .*\[c10d\] |Exception raised from .*most recent call first|frame #|<omitting python frames>"
    r"|nanobind: | - (leaked|\.\.\.)|See https://nanobind).*\n?",
    re.MULTILINE,
)
_OWN_NUMBER = re.compile(r"rank \d+ of \d+|\(rank=\d+, nranks=\d+\)|\(says rank \d+\)")  # itself, and who told it
_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and |, and |-)\d+)*)|\branks? \[([\d, ]+)\]")


@dataclass
class Verdict:
    """What is to be said of a run. named_rank, named_line: None where there is nothing to name."""

    seed: int
    fault: str
    outcome: str
    why: str = ""
    nodes: int = 1
    named_rank: bool | None = None
    named_line: bool | None = None
    seconds: float = 0.0  # from the fault to the end of the last rank that was not to blame


def judge(program: Program, ended: Ended) -> Verdict:
    """The worst that can be said of it."""
    verdict = Verdict(program.seed, program.fault.name, "right result", nodes=len(program.fault.nodes) or 1)
    survivors = [rank for rank in ended.ranks if rank.number != _to_blame(program)]
    verdict.seconds = max(0.0, max(rank.at for rank in survivors) - ended.struck)
    failed = [rank for rank in survivors if rank.status != 0]
    wanted = program.fault.lines
    if not failed and program.fault.kind.call:  # a root may be the only one that hears of it, or to be heard
        failed = [rank for rank in ended.ranks if rank.status != 0]
        wanted = set()  # it has the line before its eyes
        verdict.outcome, verdict.why = "no error", "all ranks ended as if nothing were wrong"
    if failed and program.fault.name not in BLAMELESS:
        verdict.outcome, verdict.why = "right error", ""
        _judge_names(program, failed, wanted, verdict)
    for outcome, why in _worst(program, ended, survivors):
        if why:
            verdict.outcome, verdict.why = outcome, why
            break
    return verdict


def _to_blame(program: Program) -> int:
    """The rank that need not end well; -1: none."""
    return -1 if program.fault.name == "link-cut" else program.fault.rank


def _worst(program: Program, ended: Ended, survivors: list[Rank]) -> list[tuple[str, str]]:
    """(outcome, why) for what must not happen, the worst first; why is "" if it did not."""
    wrong = [line for rank in ended.ranks for line in rank.err.splitlines() if line.startswith("WRONG DATA")]
    return [
        ("hang", f"ranks {ended.hung} were still there" if ended.hung else ""),
        ("crash", next(filter(None, (_crash(program, rank) for rank in ended.ranks)), "")),
        ("wrong data", wrong[0] if wrong else ""),
        ("left-over process", ", ".join(ended.processes)),
        ("left-over file", ", ".join(ended.files[:5])),
        ("late", _late(program, ended)),
        ("false alarm", _alarm(program, survivors)),
    ]


def _crash(program: Program, rank: Rank) -> str:
    """Why a rank has not ended as a rank may end."""
    if found := _CRASHES.search(rank.err):
        return f"rank {rank.number}: {found[0]}"
    kind = program.fault.kind
    if rank.number == _to_blame(program) and not kind.call:
        if rank.status in (kind.status, 0, 1):  # it may have met the end of its program, or of another rank, before
            return ""
        return f"rank {rank.number}, broken by {program.fault.name}, ended with {rank.status}, expected {kind.status}"
    if rank.status == 0:
        return ""
    raised = last_error(rank.err)
    if rank.status != 1 or not raised.startswith("pynccl.Nccl"):
        return f"rank {rank.number} ended with {rank.status}: {raised[:200]}"
    return ""


def last_error(text: str) -> str:
    """The first line of the exception that ended a rank; "" if there is none."""
    found = re.findall(r"^Traceback \(most recent call last\):\n(?:^ .*\n|^\n)*^(\S.*)$", text, re.MULTILINE)
    return str(found[-1]) if found else ""


def _late(program: Program, ended: Ended) -> str:
    if program.fault.name != "ctrl-c":
        return ""
    seconds = ended.ranks[program.fault.rank].left - ended.struck
    return f"Ctrl-C was heard after {seconds:.1f} s" if seconds > HEARD_SECONDS else ""


def _alarm(program: Program, survivors: list[Rank]) -> str:
    """A run without a fault fails nowhere, and says nothing; where packets are lost it may say that it has to wait."""
    if program.fault.name not in BLAMELESS:
        return ""
    for rank in survivors:
        text = _OF_TORCH.sub("", rank.err).strip()
        if rank.status or (text and program.fault.name == "none") or "done" not in rank.out:
            return f"rank {rank.number} ended with {rank.status}: {text[-300:]}"
    return ""


def _judge_names(program: Program, failed: list[Rank], wanted: set[int], verdict: Verdict) -> None:
    silent = [rank for rank in failed if not accepted(program, rank) & blamed(rank.err)]
    verdict.named_rank = not silent
    blind = [rank for rank in failed if wanted and not wanted & lines_named(rank.err)]
    verdict.named_line = not blind if wanted else None
    if silent or blind:
        rank = (silent or blind)[0]
        expected = f"line {sorted(wanted)}" if not silent else f"rank {sorted(accepted(program, rank))}"
        verdict.outcome = "wrong name"
        verdict.why = f"rank {rank.number} does not name {expected}: {last_error(rank.err)[:200]}"


def accepted(program: Program, rank: Rank) -> set[int]:
    """The numbers under which a rank may blame who is to blame: in the job, and in the communicator of its call."""
    fault = program.fault
    to_blame = fault.either or {fault.rank}
    if fault.name == "link-cut":  # all on the other node
        to_blame = set(next(node for node in fault.nodes if rank.number not in node))
    numbers = set(to_blame)
    called = [int(line) for line in re.findall(r'program\.py", line (\d+)', rank.err)]
    comm = program.comms.get(called[-1]) if called else None
    for group in comm.groups if comm else ():
        if rank.number in group:
            numbers |= {group.index(one) for one in to_blame if one in group}
    return numbers


def said(text: str) -> list[str]:
    """Lines of standard error without the frames of its own tracebacks and of its own stack."""
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


def blamed(text: str) -> set[int]:
    """Ranks in the first clause that speaks of any: "rank 2", "ranks 0, 2-4", "ranks [1, 3]"."""
    for clause in ";".join(said(text)).split(";"):
        found = " ".join("".join(one) for one in _RANKS.findall(_OWN_NUMBER.sub("", clause)))
        if found:
            ranges = re.findall(r"(\d+)(?:-(\d+))?", found)
            return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}
    return set()


def lines_named(text: str) -> set[int]:
    return {int(number) for line in said(text) for number in re.findall(r'program\.py(?::|", line )(\d+)', line)}
