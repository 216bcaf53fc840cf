"""The verdict: one sentence on which rank or call blocks the job, derived from the records of all processes.

    verdict = judge(processes)
    print(render(verdict))

Times are compared within one record or between records of one node, since clocks of different nodes differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..bindings.errors import Outcome
from .findings import Finding, Priority, describe_end, find_mismatches, find_unavailable_ranks, new_finding
from .formatting import call_site, seconds
from .graph import WaitGraph
from .job import MAX_LINES, Job, Member, names_of
from .points import NO_RECORD, Dependency, SyncPoint
from .records import DEAD, FAILED, UNKNOWN, ProcessRecord

NOTHING_WRONG = ("running", "finished", "empty")
_MIN_WAIT_BEFORE_KILL = 5.0  # seconds; if all processes were killed after such a wait, the wait is the cause
_MAX_FINDINGS = 4
_STALLED_SECONDS = 10.0  # a call that all ranks have entered may take this long
_STALLED_SECONDS_OF_COMM = 1.0  # the same for a communicator that has already failed or timed out
_MAX_CROSSED = 3
_POSSIBLE_CAUSES = "check the network between them, the GPUs, and the work before it on its stream"
_CAUSES_OF_GROW = "the new ranks have not all called join_grown, or cannot be reached"
_MATCHING_CALLS = {"send": "recv from", "recv": "send to", "wait_signal": "signal to"}


@dataclass
class Verdict(Finding):
    """The cause of a hang or failure: the first of all findings.

    kind      "running", "finished", "empty": nothing is wrong. "missing": a rank has not entered a collective, or has
              no record; "unmatched": a send without recv, or the reverse; "crossed": ranks wait for each other;
              "mismatch": ranks made different calls; "dead", "stopped", "destroyed" (it has ended its communicator),
              "failed" (its call raised), "stalled" (all ranks have entered the call, and it makes no progress), "late"
              (it entered a call long after the others, just before a dump)
    sentence  the finding in one sentence; details: one line per rank concerned
    culprits  (uid of the communicator, rank in it); lines: their lines of code, with full paths
    comms     uids of the communicators concerned; processes: (host, pid) of the culprits' processes
    findings  all findings, beginning with this one
    """

    findings: list[Finding] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return self.kind not in NOTHING_WRONG

    def to_json(self) -> dict[str, Any]:
        """Return plain values for json.dumps."""
        return dataclasses.asdict(self)


def judge(processes: Sequence[ProcessRecord], *, min_wait: float = 0.0, uid: str = "") -> Verdict:
    """Return what blocks the ranks. Waits shorter than `min_wait` seconds are ignored.

    uid  the communicator of interest: if several wait for the same rank, the verdict names this one"""
    if not processes:
        text = "no records found here (another node? another PYNCCL_WATCH_DIR?)"
        return Verdict("empty", Priority.CONSEQUENCE, text)
    graph = WaitGraph(Job(processes), min_wait, uid)
    found = _find_all(graph)
    if graph.post_mortem:
        _reweigh_post_mortem(graph, found)
    found.sort(key=lambda finding: (finding.priority, -finding.waiting, -finding.age))
    found = _without_repeats(found) or [_nothing_wrong(graph.job)]
    for finding in found:
        finding.sentence = finding.sentence.rstrip(".") + "."
    return Verdict(**vars(found[0]), findings=found)


def render(verdict: Verdict) -> str:
    """Return the verdict with its details and further findings as text."""
    lines = [verdict.sentence, *verdict.details]
    for finding in verdict.findings[1:_MAX_FINDINGS]:
        lines += [f"also: {finding.sentence}", *(f"  {detail}" for detail in finding.details[:4])]
    if len(verdict.findings) > _MAX_FINDINGS:
        lines.append(f"and {len(verdict.findings) - _MAX_FINDINGS:,} more findings")
    return "\n".join(lines)


def about(verdict: Verdict, uid: str, rank: int) -> str:
    """Return the text to add to an exception of this rank of this communicator; "" if there is none."""
    own = [finding for finding in verdict.findings if finding.kind == "failed" and finding.culprits == [(uid, rank)]]
    others = [finding for finding in verdict.findings if finding.kind not in NOTHING_WRONG and finding not in own]
    if own and own[0] is verdict.findings[0] and own[0].is_cause:
        return "\n".join(verdict.details[:3])
    if not others:
        return ""
    first, concerned = others[0], [finding for finding in others if uid in finding.comms and finding.is_cause]
    if concerned and first.kind != "mismatch":  # a mismatch matters in any communicator, even if its ranks do not wait
        first = concerned[0]
        alike = [
            finding
            for finding in concerned
            if finding.kind == first.kind and any(owner == uid for owner, _ in finding.culprits)
        ]
        if first.kind == "missing" and alike:  # prefer missing ranks of this communicator
            first = alike[0]
    return "\n".join([first.sentence, *first.details[:3]])


def _find_all(graph: WaitGraph) -> list[Finding]:
    found = [*find_unavailable_ranks(graph), *find_mismatches(graph), *_find_crossed(graph), *_find_missing(graph)]
    if not any(finding.is_cause for finding in found):  # any other cause would explain a stall
        found += _find_stalled(graph)
    if any(finding.is_cause for finding in found):  # ends that follow from a cause are not reported
        found = [finding for finding in found if finding.kind != "dead" or finding.is_cause]
    return found


def _without_repeats(found: Sequence[Finding]) -> list[Finding]:
    """Drop missing and unmatched findings on ranks that an earlier finding names already, for example as dead."""
    named: set[tuple[str, int]] = set()
    kept = []
    for finding in found:
        if finding.kind not in ("missing", "unmatched") or not named.issuperset(finding.culprits):
            kept.append(finding)
        named.update(finding.culprits)
    return kept


def _reweigh_post_mortem(graph: WaitGraph, found: list[Finding]) -> None:
    """Adjust priorities after all processes ended: a wait is the cause if they gave up or were killed after it."""
    if not any(finding.kind == "dead" and finding.is_cause for finding in found):
        return
    silent = all(process.killed or process.exited_cleanly or process.gave_up for process in graph.job.processes)
    for finding in found:
        if finding.kind == "dead":
            finding.priority = Priority.KILLED if silent else finding.priority
        elif finding.kind != "mismatch" and not (silent and finding.age >= _MIN_WAIT_BEFORE_KILL):
            finding.priority = Priority.BEFORE_THE_END


def _nothing_wrong(job: Job) -> Finding:
    ended = sum(process.state == DEAD for process in job.processes)
    running = len(job.processes) - ended
    unknown = sum(process.state == UNKNOWN for process in job.processes)
    if unknown:
        return Finding("running", Priority.CONSEQUENCE, f"no rank is stuck in the records of {unknown:,} ranks")
    if not running:
        return Finding("finished", Priority.CONSEQUENCE, f"all {ended:,} ranks have finished")
    return Finding("running", Priority.CONSEQUENCE, f"no rank is stuck: {running:,} running, {ended:,} finished")


# Live ranks that block others: they are elsewhere, wait for each other in a cycle, or make no progress


def _find_missing(graph: WaitGraph) -> list[Finding]:
    """Return a finding for each sync point that waits for ranks which wait for nothing, or which have no record."""
    found: list[Finding] = []
    known: dict[tuple[int, ...], Finding] = {}
    for point in graph.stuck():
        idle = point.idle()
        key = tuple(id(member.process) for member in idle)
        if key in known:  # the same ranks, in another communicator or a later call
            _add_communicator(known[key], point)
        elif idle:
            known[key] = _not_entered(graph, point, idle)
            found.append(known[key])
        if NO_RECORD in point.missing.values():
            found.append(_no_record(graph, point))
    return found


def _add_communicator(found: Finding, point: SyncPoint) -> None:
    if point.group.uid not in found.comms:
        found.details.append(f"also not entered: {point.short_name()}, where {point.waiting()}")
        found.comms.append(point.group.uid)
        found.waiting += len(point.arrived)


def _not_entered(graph: WaitGraph, point: SyncPoint, members: Sequence[Member]) -> Finding:
    who, call = names_of(members), point.describe()
    if point.collective:
        kind, text = "missing", f"{who} never entered {call}; {point.waiting(' there')}"
    else:
        kind, text = "unmatched", f"{who} never called {_matching_call(point)}; {point.waiting()} in {call}"
    details = graph.job.status_lines(members)
    for rank in point.arrived:
        if point.group.members[rank].process is members[0].process:
            fix = "if one thread makes the calls of both ranks, put them into a pynccl.group()"
            details.append(f"{point.group.names([rank])} waits there in the same process: {fix}")
    return new_finding(
        graph,
        kind,
        Priority.NOT_ENTERED,
        text,
        points=[point],
        details=details,
        culprits=[member.key for member in members],
        sites=[member.site for member in members],
    )


def _no_record(graph: WaitGraph, point: SyncPoint) -> Finding:
    ranks = [rank for rank, why in point.missing.items() if why == NO_RECORD]
    lost = {call.code for call in point.arrived.values() if call.outcome == Outcome.PEER_LOST}
    ranks = [rank for rank in ranks if rank in lost] or ranks
    why = "it has not entered init, runs on another node, or uses another PYNCCL_WATCH_DIR"
    text = f"no record of {point.group.names(ranks)} of comm '{point.group.name}' ({why})"
    if all(member.process.pid < 0 for member in point.group.members.values()):  # known from dumps of torch
        text = f"no dump of {point.group.names(ranks)} was given (it has exited, or its file is on another node)"
    text += f"; {point.waiting()} in {point.describe()}"
    ended = [process for process in graph.job.processes if process.gave_up]  # their errors may say more
    ended.sort(key=lambda process: process.outcome != Outcome.MISMATCH)
    details = [describe_end(graph, process) for process in ended[:1]]
    if ended and ended[0].outcome == Outcome.MISMATCH:  # this error names the mismatched calls
        text, details[0] = details[0], text
    culprits = [(point.group.uid, rank) for rank in ranks]
    return new_finding(graph, "missing", Priority.UNKNOWN, text, points=[point], details=details, culprits=culprits)


def _matching_call(point: SyncPoint) -> str:
    """Return the call that the peer of a message must make."""
    waiter, call = next(iter(point.arrived.items()))
    return f"{_MATCHING_CALLS[call.operation]} rank {point.group.number(waiter)}"


def _find_crossed(graph: WaitGraph) -> Iterator[Finding]:
    """Yield the cycles of ranks that wait for each other."""
    for cycle in graph.cycles():
        if all(point.age() >= graph.min_wait for point in cycle):
            yield _crossed(graph, cycle)


def _crossed(graph: WaitGraph, cycle: Sequence[SyncPoint]) -> Finding:
    edges = [
        (later, later.blocked_by[other], other) for later, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    edges.reverse()
    texts = [_edge_text(*edge) for edge in edges[:_MAX_CROSSED]]
    more = f", and {len(edges) - _MAX_CROSSED:,} more in this cycle" if len(edges) > _MAX_CROSSED else ""
    certain = all(any(dependency.certain for dependency in dependencies) for _, dependencies, _ in edges)
    details, sites = [], []
    for later, dependencies, _ in edges[:MAX_LINES]:
        if dependencies[0].later_call is None:
            missing_call = f"entered {later.short_name()}" if later.collective else f"called {_matching_call(later)}"
            details.append(f"{_rank_names(dependencies)}: never {missing_call}")
    for _, (dependency, *_), _ in edges[:MAX_LINES]:
        details.append(f"{graph.job.name(dependency.member.process)}: {graph.job.status(dependency.member)}")
        sites += [call.site for call in (dependency.earlier_call, dependency.later_call) if call]
    return new_finding(
        graph,
        "crossed",
        Priority.CROSSED if certain else Priority.UNCERTAIN,
        f"ranks wait for each other: {', '.join(texts)}{more}",
        points=cycle,
        details=details,
        culprits=[
            (earlier.group.uid, dependency.member.rank)
            for _, dependencies, earlier in edges
            for dependency in dependencies
        ],
        sites=sites,
    )


def _edge_text(later: SyncPoint, dependencies: Sequence[Dependency], earlier: SyncPoint) -> str:
    """ "rank 0 in all_reduce #3 of comm 'tp' at a.py:1", "rank 0 in ... at a.py:1 before ... at a.py:2"."""
    first, then = dependencies[0].earlier_call, dependencies[0].later_call
    text = f"{_rank_names(dependencies)} in {earlier.group.short_name(first)}{call_site(first)}"
    return f"{text} before {later.group.short_name(then)}{call_site(then)}" if then else text


def _rank_names(dependencies: Sequence[Dependency]) -> str:
    members = {dependency.member.rank: dependency.member for dependency in dependencies}
    return names_of([members[rank] for rank in sorted(members)])


def _find_stalled(graph: WaitGraph) -> Iterator[Finding]:
    """Yield matching calls that all ranks have entered and that do not complete, or not on all ranks."""
    shortest = max(graph.min_wait, _STALLED_SECONDS_OF_COMM if graph.uid else _STALLED_SECONDS)
    from_dumps = all(process.state == UNKNOWN for process in graph.job.processes)  # of jobs that had timed out
    for point in graph.points:
        revoked = all(point.group.members[rank].revoked for rank in point.arrived)
        if point.missing or point.blocked_by or graph.ages[point] < shortest or revoked:
            continue
        if point.complete_since() >= shortest:
            yield _stalled(graph, point)
        elif from_dumps and point.complete():
            yield _late(graph, point)


def _late(graph: WaitGraph, point: SyncPoint) -> Finding:
    """Report the ranks that entered a call long after the others, and shortly before the end of the record."""
    issued = {rank: call.issued for rank, call in point.arrived.items()}
    gap = max(issued.values()) - min(issued.values())
    members = [point.group.members[rank] for rank, when in issued.items() if when > min(issued.values()) + gap / 2]
    return new_finding(
        graph,
        "late",
        Priority.STALLED,
        f"{names_of(members)} entered {point.describe()} {seconds(gap)} after the others",
        points=[point],
        details=graph.job.status_lines(members),
        culprits=[member.key for member in members],
        sites=[point.arrived[member.rank].site for member in members],
    )


def _stalled(graph: WaitGraph, point: SyncPoint) -> Finding:
    group = point.group
    arrived = {rank: call for rank, call in point.arrived.items() if not group.members[rank].revoked}
    revoked = [rank for rank, member in group.members.items() if member.revoked]
    members = [group.members[rank] for rank in arrived]
    gave_up = all(call.state == FAILED for call in arrived.values())
    idle = [members[i] for i, call in enumerate(arrived.values()) if not call.started]
    how = f"{'gave up' if gave_up else 'not done'} after {seconds(point.age())}"
    others = group.members.keys() - point.arrived.keys() - point.excluded if point.collective else {point.call.peer}
    rest = "and no rank is missing" if point.complete() else f"which {group.names(others)} completed"
    causes = _CAUSES_OF_GROW if point.call.operation == "grow" else _POSSIBLE_CAUSES
    if point.call.operation == "wait_signal" and point.call.peer < 0:
        rest, causes = "which waits for several ranks", "one of them has not called signal or put_signal"
    if 0 < len(idle) < len(members):  # the kernel of these waits behind another one
        members, causes = idle, f"{names_of(idle)} issued it, and only the streams of the others have begun it"
    if revoked:
        rest, causes = f"and {group.names(revoked)} left, as the communicator was revoked", "it was not revoked here"
    text = f"{group.names(arrived)} in {point.describe()}, {how}, {rest}: {causes}"
    # Within a group, messages between two nodes or containers are the likelier ones to be lost.
    several = len({(member.process.machine, member.process.host) for member in members[:4]}) > 1
    return new_finding(
        graph,
        "stalled",
        Priority.STALLED_BETWEEN_NODES if several else Priority.STALLED,
        text,
        points=[point],
        details=graph.job.status_lines(members[:4]),
        culprits=[] if revoked or (point.complete() and members is not idle) else [member.key for member in members],
    )
