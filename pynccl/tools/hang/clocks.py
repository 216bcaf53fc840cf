"""By how much the clocks of machines differ, as far as collectives that they did together show it.

Where every rank needs something of every other, none has completed before the last one has entered. So of two machines
each completion on one is later than each entry on the other. A clock is moved only if that does not hold as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...watch.records import ProcessRecord

_MEETING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
Entries = dict[tuple[str, int], tuple[float, float]]  # (communicator, number) -> latest entry, earliest completion


def machine_of(process: ProcessRecord) -> str:
    return process.host or process.machine


def offsets(processes: Iterable[ProcessRecord]) -> dict[str, float]:
    """Seconds to be added to the times of each machine, to compare them with those of the machine of most processes."""
    by_machine: dict[str, list[ProcessRecord]] = {}
    for process in processes:
        by_machine.setdefault(machine_of(process), []).append(process)
    names = sorted(by_machine, key=lambda name: -len(by_machine[name]))
    met = {name: _entries(by_machine[name]) for name in names}
    return {name: _offset(met[names[0]], met[name]) if name != names[0] else 0.0 for name in names}


def _entries(processes: list[ProcessRecord]) -> Entries:
    found: Entries = {}
    for process in processes:
        for comm in process.comms:
            for call in comm.calls:
                if call.collective and call.issued and call.operation.startswith(_MEETING):
                    entered, done = found.get((comm.uid, call.number), (0.0, math.inf))
                    completed = call.completed or call.returned if call.state == "completed" else 0.0
                    found[comm.uid, call.number] = (
                        max(entered, call.issued),
                        min(done, completed if completed else math.inf),
                    )
    return found


def _offset(reference: Entries, other: Entries) -> float:
    """The smallest and the largest one for which no completion comes too early; between them, where 0 is not."""
    low, high = -math.inf, math.inf
    for key in reference.keys() & other.keys():
        (entered, done), (other_entered, other_done) = reference[key], other[key]
        low = max(low, entered - other_done)
        high = min(high, done - other_entered)
    if low <= 0 <= high or not (math.isfinite(low) or math.isfinite(high)):
        return 0.0
    if math.isfinite(low) and math.isfinite(high):
        return (low + high) / 2
    return low if math.isfinite(low) else high
