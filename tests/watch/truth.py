"""Who waits for whom in a simulated job that has been played: the reference for the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from simulator import MESSAGES, Call, Job, Thread, nbytes

Node: TypeAlias = "Thread | Call"


class Truth:
    """Who waits for whom in a job that has been played: threads wait for calls, and calls for threads or calls.

    waiting  the ranks that are blocked
    cycle    the ranks in cycles; idle: the ranks that keep others waiting and wait for nothing
    sides    the ranks whose calls do not match: the minority, or all without a majority
    hits     the situations that occur in it"""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.hits: set[str] = set()
        blocked: list[Node] = [thread for thread in job.threads if self._blocked(thread)]
        self.waiting = {thread.rank for thread in blocked}
        after = _reach(blocked, self._edges)
        self.cycle = {node.rank for part in _cycles(after) for node in part}
        self.idle = {node.rank for node, others in after.items() if isinstance(node, Thread) and not others}
        self.sides = self._mismatched_messages() | self._mismatches()
        self._blocked_threads = blocked
        self._count_verdicts()
        self._count_unordered()

    def cycle_of(self, rank: int) -> set[int]:
        """Return the ranks of the cycles with this rank if all is counted that the records do not exclude: a call that
        has not begun needs its ranks too; streams may wait for each other, as NCCL starts kernels in the order of the
        calls; and with CUDA a thread may wait for any call of its rank."""
        after = _reach(self._blocked_threads, self._possible_edges)
        return {node.rank for part in _cycles(after) if any(node.rank == rank for node in part) for node in part}

    def _count_verdicts(self) -> None:
        endings = {process.ending for process in self.job.ranks}
        failed = any(call.outcome for rank in range(self.job.size) for call in self.job.pending(rank))
        reasons = any(hit.startswith("missing") for hit in self.hits)
        stalled = self.job.broken[1] > 0 and bool(self.waiting)
        self.hits |= {
            f"verdict: {kind}"
            for kind, holds in {
                "ended by its own error": bool(endings & {"EXCEPTION", "EXIT", "KILLED", "INTERRUPTED"}),
                "mismatch": bool(self.sides),
                "ended by NCCL": "CALL_FAILED" in endings,
                "cycle": bool(self.cycle and not self.sides),
                "raised": failed,
                "missing": reasons and not self.sides and not self.cycle,
                "stalled": stalled,
                "running": not self.waiting and not endings - {"", "CLEAN"},
            }.items()
            if holds
        }

    def _count_unordered(self) -> None:
        """Count the ranks that wait in two points of which neither is the first."""
        for unit in {id(unit): unit for unit in self.job.units()}.values():
            open_calls = [call for call in unit.calls if not call.done]
            if len({call.op.comm for call in open_calls}) > 1:
                self.hits.add("W2 not within a group")
        inside = Counter(thread.rank for thread in self.job.threads if self._blocked(thread) and not thread.in_wait)
        self.hits |= {"W2 not between two threads"} if max(inside.values(), default=0) > 1 else set()

    def _blocked(self, thread: Thread) -> bool:
        return self.job.ranks[thread.rank].state == "running" and not thread.asleep and thread.waits

    def _edges(self, node: Node) -> list[Node]:
        job = self.job
        if isinstance(node, Thread):
            return [call for call in node.blocked if not call.done] if self._blocked(node) else []
        if node.done or node.outcome:
            return []
        unit = job.unit_of(node)
        ahead: list[Node] = [call for first in unit.ahead() for call in first.calls if not call.done]
        if job.ranks[node.rank].state == "dead" or not (node.active or ahead):  # or of a stopped process
            return self._threads(node.rank, node.op.comm)
        if ahead:
            self.hits.add("W2 one stream" if node.stream else "W2 one communicator")
            return ahead
        self.hits.add(f"point {self._kind(node)}")
        return self._others(node)

    def _possible_edges(self, node: Node) -> list[Node]:
        found = self._edges(node)
        if isinstance(node, Thread):
            if self.job.cuda and self.job.ranks[node.rank].state == "running":
                found += [call for call in self.job.pending(node.rank) if call.stream and not call.outcome]
        elif found and not node.active:
            found += self._others(node)
        if isinstance(node, Call) and not (node.done or node.outcome):
            for call in self._halves(node).values():
                found += self._issued_before(call) if call.stream else []
        return found

    def _issued_before(self, call: Call) -> list[Node]:
        pending = self.job.pending(call.rank)
        return [other for other in pending if other.stream and other.issued < call.issued and not other.outcome]

    def _halves(self, call: Call) -> dict[int, Call]:
        """Return the calls by which ranks have come to the point of this call."""
        if call.op.operation not in (*MESSAGES, "wait_signal"):
            return self.job.meeting(call)
        half = self.job.partner(call)
        return {call.rank: call} if half is None else {call.rank: call, half.rank: half}

    def _others(self, call: Call) -> list[Node]:
        """Return what a call waits for on other ranks, once it has begun."""
        job, others = self.job, self._halves(call)
        found: list[Node] = []
        for rank in job.needed(call) - {call.rank}:
            other = others.get(rank)
            if other is None:
                found += self._threads(rank, call.op.comm)
                self._count(call, rank, found[-1])
            elif not other.active or job.ranks[rank].state == "dead":
                found.append(other)
        return found

    @staticmethod
    def _kind(call: Call) -> str:
        operation = call.op.operation
        return "collective" if call.op.numbered and operation != "split" else operation

    def _threads(self, rank: int, comm: str) -> list[Node]:
        """Return the thread of a rank that makes the calls of a communicator."""
        own = [thread for thread in self.job.threads if thread.rank == rank]
        return [thread for thread in own if thread.side == self.job.comms[comm].side]

    def _count(self, call: Call, rank: int, thread: Node) -> None:
        """Count the reason for which a rank is missing."""
        process, own = self.job.ranks[rank], self.job.members.get((call.op.comm, rank))
        assert isinstance(thread, Thread)
        raised = own is not None and any(other.outcome for other in own.calls)
        self.hits.add(
            "missing: no record" if not process.recorded
            else f"missing: {process.state}" if process.state != "running"
            else "missing: raised" if raised
            else "missing: communicator ended" if own is not None and own.ended
            else "missing: not entered" if not self._blocked(thread)
            else "W1 a thread waits for a stream" if thread.in_wait
            else "W1 a thread is inside a call"
        )  # fmt: skip
        early = [
            other
            for other in self.job.pending(rank)
            if other.op.operation == "recv" and self.job.comms[other.op.comm].route
        ]
        if early and not any(other in thread.blocked for other in early):
            self.hits.add("W3 an early irecv")

    def _mismatches(self) -> set[int]:
        """Compare the first calls that differ on each communicator, as the records have them: also those that have not
        begun."""
        by_number: dict[tuple[str, int], list[Call]] = {}
        for (name, _), own in self.job.members.items():
            for call in own.calls:
                if call.number:
                    by_number.setdefault((name, call.number), []).append(call)
        found: dict[str, set[int]] = {}
        for (name, _), calls in sorted(by_number.items()):
            votes = Counter(call.op.signature for call in calls)
            if len(votes) > 1 and name not in found:
                usual, most = votes.most_common(1)[0]
                all_of_them = 2 * most <= len(calls)
                found[name] = {call.rank for call in calls if all_of_them or call.op.signature != usual}
        return set().union(*found.values())

    def _mismatched_messages(self) -> set[int]:
        found: set[int] = set()
        for sends, recvs in self.job._messages.values():
            for send, recv in zip(sends, recvs, strict=False):
                if send.op.operation == "send" and nbytes(send) != nbytes(recv):
                    found |= {send.rank, recv.rank}
        return found


def _reach(starts: Iterable[Node], edges: Callable[[Node], list[Node]]) -> dict[Node, list[Node]]:
    """Return the edges of all nodes that can be reached."""
    after: dict[Node, list[Node]] = {}
    queue = [*starts]
    for node in queue:
        if node not in after:
            after[node] = edges(node)
            queue += after[node]
    return after


def _cycles(after: dict[Node, list[Node]]) -> list[list[Node]]:
    """Return the strongly connected components of more than one node (Tarjan's algorithm, without recursion)."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    on_stack: set[Node] = set()
    found: list[list[Node]] = []
    for root in after:
        if root in index:
            continue
        work = [(root, iter(after[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(after[other])))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    part: list[Node] = []
                    while not part or part[-1] is not node:
                        part.append(stack.pop())
                        on_stack.discard(part[-1])
                    if len(part) > 1:
                        found.append(part)
    return found
