"""Write the last calls of a job as a trace for ui.perfetto.dev: one process per rank, one lane per communicator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import chrome_trace as chrome
from ...watch.formatting import call_name, clean
from ...watch.records import INSIDE, ISSUED, CallRecord, ProcessRecord
from .table import rank_of


def write(path: str, processes: list[ProcessRecord]) -> None:
    """Write Chrome's trace format. Times are from each node's own clock."""
    chrome.write(path, _events(processes), {"source": "python -m pynccl hang --timeline"})


def _events(processes: list[ProcessRecord]) -> Iterator[chrome.Event]:
    """Yield the events. Times are relative to the earliest one."""
    calls = (call for process in processes for comm in process.comms for call in comm.calls)
    moments = [call.issued for call in calls if call.issued] + [
        process.end_at for process in processes if process.end_at
    ]
    zero = min(moments, default=0.0)
    for pid, process in enumerate(sorted(processes, key=lambda process: (rank_of(process), process.host, process.pid))):
        where = f"pid {process.pid} on {clean(process.host, 60)}" if process.pid > 0 else "a dump of torch"
        yield from chrome.process(pid, f"rank {rank_of(process)}", where)
        for tid, comm in enumerate(process.comms, 1):
            yield from chrome.lane(pid, tid, clean(comm.name, 60) or "communicator")
            free = 0.0  # calls of a stream run one after another
            for call in filter(lambda call: call.issued, comm.calls):
                open_ = call.state in (INSIDE, ISSUED)
                begin = max(call.issued, free)
                end = max(process.now if open_ else call.completed or call.returned, begin)
                free = free if open_ else end
                name = call_name(call, comm.ranks) + (f" ({call.state})" if open_ else "")
                yield chrome.piece(name, "comm", pid, tid, begin - zero, end - zero, _args(call))
        if process.end_at:
            yield chrome.moment(f"ended: {clean(process.end, 120)}", "end", pid, 0, process.end_at - zero)


def _args(call: CallRecord) -> dict[str, Any]:
    numbers = {"number": call.number or -1, "count": call.count, "root": call.root, "peer": call.peer}
    names = ("dtype", "op", "site", "function", "forward_site", "detail", "error", "group")
    texts = {name: getattr(call, name) for name in names if getattr(call, name)}
    return {name: value for name, value in numbers.items() if value >= 0} | texts
