"""Read the dumps of torch's flight recorder as records, so that the verdict covers torch's own NCCL and gloo, too.

A dump is the pickle that ProcessGroupNCCL writes on a timeout, one file per rank: PREFIX0, PREFIX1, ...; or what
`torch._C._distributed_c10d._dump_fr_trace()` or `_dump_fr_trace_json()` returned, of format 2.4 to 2.10.

A dump names neither process nor host, and the time of its file counts as its own. It has no root and no reduction
operator. `pg_status` is not used: it counts messages and collectives together. Gloo records no messages, no ranks of
its groups and no states: a call that has left is "retired".
"""

from __future__ import annotations

import glob
import io
import math
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NoReturn

from ...watch.formatting import numbers
from ...watch.frames import internal_files
from ...watch.records import COMPLETED, ISSUED, UNKNOWN, CallRecord, CommRecord, ProcessRecord

PICKLE = b"\x80"  # the first byte of a pickle
_MAX_RANK = 1 << 20
_MAX = 1 << 63  # of any number; NCCL counts with 64 bits
_MAX_DIMENSIONS = 64
_FILE = re.compile(r"(.*?)(\d+)(?:\.\w+)?", re.DOTALL)  # prefix, rank
_ENDS = re.compile(r"(\d+)(?:->|<-)(\d+)")  # "0->1" of a send, "0<-1" of a recv: the rank itself, its peer
# Frames that are not the user's: of torch (installed, or a build of its source) and its decorators, of C++.
_LIBRARY = re.compile(
    r".*/(?:site|dist)-packages/(?:torch|pynccl\w*)/|.*/torch/(?:_\w+|autograd|distributed|nn|utils)/"
    r"|.*/typing_extensions\.py$|.*\.(?:cpp|h)$|\?"
)
_FORM = re.compile(r"^_|(?:_base|_single|_oop|_v|_into_tensor|_tensor|_coalesced)+$")  # of one operation
_OPERATIONS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_OPERATIONS |= {"all_reduce_barrier": "barrier"}
_OF_OUTPUT = ("broadcast", "reduce_scatter", "scatter", "recv")  # here the outputs have one size on all ranks
_UNEVEN = ("all_to_all", "barrier", "all_gather_v", "reduce_scatter_v")  # sizes may differ, or there are none
_DTYPES = {"Char": "INT8", "Byte": "UINT8", "Int": "INT32", "Long": "INT64", "Half": "FLOAT16", "Float": "FLOAT32"}
_DTYPES |= {"Double": "FLOAT64", "Float8_e4m3fn": "FLOAT8_E4M3"}  # the others have the same name as ours


@dataclass
class Dump:
    """The dump of one rank. By name of a process group, `groups`: its description and global ranks, or () if unknown;
    `calls`: its calls. `stack`: of the newest call"""

    path: str
    prefix: str
    rank: int
    written: float
    groups: dict[str, tuple[str, tuple[int, ...]]]
    calls: dict[str, list[CallRecord]]
    stack: str


def paths_in(folder: str) -> list[str]:
    """Return the pickles in a folder whose names end with a number."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), "*[0-9]")))
    return [path for path in paths if os.path.isfile(path) and os.access(path, os.R_OK) and first_byte(path) == PICKLE]


def first_byte(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1)


def unpickled(path: str) -> Any:
    """Return the content of a pickle that consists of builtin values. Raises ValueError."""
    with open(path, "rb") as file:
        data = io.BytesIO(file.read())
    try:
        return _BuiltinsOnly(data).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(f"not a dump of torch, or damaged: {type(error).__name__}: {error}") from None


class _BuiltinsOnly(pickle._Unpickler):
    """The unpickler in Python: the one in C allocates as much memory as a damaged file asks for."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(
            f"it names {module[:60]}.{name[:60]}, but dumps have only numbers, texts and lists"
        )


def is_dump(values: Any) -> bool:
    return isinstance(values, dict) and "version" in values and "pg_config" in values


def read(path: str, values: Any) -> Dump:
    """Return the dump with this content. Raises ValueError."""
    if not is_dump(values):
        raise ValueError('not a dump of torch: expected "version" and "pg_config"')
    version = _get(values, "version", str)
    if not re.fullmatch(r"2\.\d{1,3}", version):
        raise ValueError(f"version {version[:20]} of torch's dumps; 2.4 to 2.10 can be read")
    groups = {name: _group(info) for name, info in _get(values, "pg_config", dict).items()}
    entries: dict[str, list[Any]] = {}
    for entry in (every := _get(values, "entries", list)):
        name, description = (*map(str, _get(entry, "process_group", list)[:2]), "", "")[:2]
        groups.setdefault(name, (description, ()))
        entries.setdefault(name, []).append(entry)
    prefix, rank = _prefix_and_rank(path, groups, every)
    for name in entries:
        if groups[name][1] and rank not in groups[name][1]:
            raise ValueError(f"process group {name[:60]!r} does not contain rank {rank}: was the file renamed?")
    # Up to torch 2.5, a batch of messages also counts as a collective, but only on its own ranks.
    miscounted = int(version[2:]) <= 4
    calls = {name: _calls(rows, miscounted) for name, rows in entries.items()}
    newest = max((call.issued for rows in calls.values() for call in rows), default=0.0)
    stack = _stack(every[-1]) if every else ""
    return Dump(path, prefix, rank, max(newest, os.stat(path).st_mtime), groups, calls, stack)


def _group(info: Any) -> tuple[str, tuple[int, ...]]:
    ranks = re.findall(r"\d+", _get(info, "ranks", str))
    return _get(info, "desc", str), tuple(_checked("ranks", int(rank), _MAX_RANK) for rank in ranks)


def _prefix_and_rank(path: str, groups: dict[str, Any], entries: Sequence[Any]) -> tuple[str, int]:
    """Return the rank that the file's name ends with, and what precedes it; else the rank that the messages name."""
    if found := _FILE.fullmatch(path):
        return found[1], _checked("rank in the file's name", int(found[2]), _MAX_RANK)
    for entry in entries:
        ends = _ENDS.search(_get(entry, "profiling_name", str))
        for rank in groups[str(_get(entry, "process_group", list)[0])][1][int(ends[1]) :] if ends else ():
            return path, rank
    raise ValueError("of which rank? the file's name must end with it, as in nccl_trace_rank_3")


# Calls


def _calls(entries: Sequence[Any], miscounted: bool) -> list[CallRecord]:
    """Return the calls of one process group, oldest first. The entries of a batch (coalesced calls) share a number."""
    newest = _get(entries[-1], "pg_id", int)  # a group that was destroyed may have had the same name
    entries = [entry for entry in entries if _get(entry, "pg_id", int) == newest]
    batches: dict[tuple[bool, int], list[Any]] = {}
    for entry in entries:
        message = _get(entry, "is_p2p", bool)
        number = _get(entry, "p2p_seq_id" if message else "collective_seq_id", int)
        batches.setdefault((message, number), []).append(entry)
    calls: list[CallRecord] = []
    for (message, _), batch in batches.items():
        found = [_call(entry) for entry in batch]
        if len(found) == 1:
            calls += [call for call in found if call.peer >= 0 or not message]
        elif batch[0] is entries[0] and found[0].entry > 1:
            continue  # its first entries may be overwritten
        elif _get(batch[-1], "profiling_name", str).endswith("coalesced"):  # else nothing of it was issued
            calls += _batch(found, _get(batch[-1], "record_id", int) + 1)
    calls.sort(key=lambda call: call.entry)
    if miscounted and calls and calls[0].entry == 1:
        for number, call in enumerate((call for call in calls if call.number), 1):
            call.number = number
    return calls


def _batch(calls: list[CallRecord], group: int) -> list[CallRecord]:
    """Return the messages of a batch, or one call for its collectives, with the state of the entry that closes it."""
    *calls, last = calls
    if not last.number:
        return [replace(call, group=group, completed=last.completed, state=last.state) for call in calls]
    if last.operation == "coalesced":
        runs = [(operation, len(list(same))) for operation, same in groupby(call.operation for call in calls)]
        names = " + ".join(operation if times == 1 else f"{times} {operation}" for operation, times in runs)
        last.operation = f"coalesced {names}" if len(calls) > 1 else names
    dtypes, counts = {call.dtype for call in calls}, [call.count for call in calls]
    last.count = -1 if min(counts) < 0 else sum(counts)
    last.dtype = dtypes.pop() if len(dtypes) == 1 else ""
    return [replace(last, entry=calls[0].entry, site=calls[0].site, issued=calls[0].issued)]


def _call(entry: Any) -> CallRecord:
    backend, _, name = _get(entry, "profiling_name", str).partition(":")
    name, _, ends = name.partition(" ")
    operation = _FORM.sub("", name.lower())
    operation = _OPERATIONS.get(operation, operation) or "call"
    side = "output" if operation in _OF_OUTPUT else "input"
    sizes = [] if {operation, name.lstrip("_")} & {*_UNEVEN} else _get(entry, f"{side}_sizes", list)
    dtype = str(next(iter(_get(entry, f"{side}_dtypes", list)), ""))[:20]
    state = _get(entry, "state", str)
    done = state == "completed" or (backend == "gloo" and _get(entry, "retired", bool))
    message = _ENDS.fullmatch(ends)
    return CallRecord(
        entry=_get(entry, "op_id", int),
        number=0 if _get(entry, "is_p2p", bool) else _get(entry, "collective_seq_id", int),
        operation=operation,
        count=_checked("sizes", sum(map(_elements, sizes)), _MAX) if sizes else -1,
        dtype=_DTYPES.get(dtype, dtype.upper()) if sizes else "",
        peer=_checked("peer", int(message[2]), _MAX_RANK) if message else -1,
        site=next((line for line, _, own in _frames(entry) if own), ""),
        issued=(issued := _get(entry, "time_created_ns", int) / 1e9),
        started=_get(entry, "time_discovered_started_ns", int) / 1e9 or (issued if state == "started" else 0.0),
        completed=_get(entry, "time_discovered_completed_ns", int) / 1e9 if done else 0.0,
        state=COMPLETED if done else ISSUED,
    )


def _elements(size: Any) -> int:
    if not isinstance(size, list) or len(size) > _MAX_DIMENSIONS:
        raise ValueError("sizes: expected a list of shapes")
    return math.prod(_checked("sizes", length, _MAX) for length in size)


def _frames(entry: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield "file:line", the function and whether it is user code, for each frame, innermost first. JSON has none."""
    for frame in _get(entry, "frames", list):
        file = _get(frame, "filename", str)[-500:]
        own = not (_LIBRARY.match(file) or internal_files[file])
        yield f"{file}:{_get(frame, 'line', int)}", _get(frame, "name", str)[:100], own


def _stack(entry: Any) -> str:
    """Return the stack down to the function of torch that user code called, outermost line first."""
    frames = list(_frames(entry))
    inner = next((i for i, (*_, own) in enumerate(frames) if own), 0)
    return "\n".join(f"{line} {name}" for line, name, _ in reversed(frames[max(inner - 1, 0) :]))


def _get(values: Any, key: str, kind: type) -> Any:
    """Return a field of this type, or its empty value if it is missing or None. Raises ValueError."""
    value = values.get(key) if isinstance(values, dict) else 0.0
    value = kind() if value is None else list(value) if isinstance(value, tuple) else value
    if type(value) is not kind:
        raise ValueError(f"{key}: expected {kind.__name__}, got {type(value).__name__}")
    return _checked(key, value, _MAX) if kind is int else value


def _checked(what: str, value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{what}: expected a number from 0 to {limit - 1:,}")
    return value


# Records


def records(dumps: Sequence[Dump]) -> Iterator[ProcessRecord]:
    """Yield one record per dump. Files of one prefix, in any folders, are one job; if two have the same rank, the job
    is that of the folder."""
    by_name: dict[str, list[Dump]] = {}
    for dump in dumps:
        by_name.setdefault(os.path.basename(dump.prefix), []).append(dump)
    jobs: dict[str, list[Dump]] = {}
    for name, together in by_name.items():
        several = len({dump.rank for dump in together}) < len(together)
        for dump in together:
            jobs.setdefault(dump.prefix if several else name, []).append(dump)
    for job, together in jobs.items():
        groups = _groups(together)
        for dump in together:
            yield _record(job.rstrip("_-.") or "torch", dump, groups)


_Groups = dict[tuple[str, tuple[int, ...]], tuple[str, dict[int, list[CallRecord]]]]


def _groups(dumps: Sequence[Dump]) -> _Groups:
    """Return the process groups that were called: by name and ranks, the description, and by rank the calls. If the
    ranks are unknown, they are those that have called it; of the default group, all."""
    every = tuple(range(max(dump.rank for dump in dumps) + 1))
    callers: dict[str, list[int]] = {}
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        for name in dump.calls:
            callers.setdefault(name, []).append(dump.rank)
    found: _Groups = {}
    for dump in dumps:
        for name, calls in dump.calls.items():
            description, ranks = dump.groups[name]
            ranks = ranks or (every if description == "default_pg" else tuple(dict.fromkeys(callers[name])))
            found.setdefault((name, ranks), (description, {}))[1][dump.rank] = calls
    for _, by_rank in found.values():
        if any(calls[0].entry > 1 for calls in by_rank.values() if calls):
            for calls in by_rank.values():
                _number_messages(calls)
    return found


def _number_messages(calls: Sequence[CallRecord]) -> None:
    """Number the messages of an incomplete record, so that the last one completed has one number on both ranks."""
    pairs: dict[tuple[str, int], list[CallRecord]] = {}
    for call in calls:
        if call.peer >= 0:
            pairs.setdefault((call.operation, call.peer), []).append(call)
    for pair in pairs.values():
        completed = sum(call.state == COMPLETED for call in pair)
        for number, call in enumerate(pair, _MAX_RANK - completed):
            call.message = number


def _record(job: str, dump: Dump, groups: _Groups) -> ProcessRecord:
    comms = [
        CommRecord(
            uid=f"{job}/{name}/{numbers(ranks, len(ranks))}",
            name=name if description in ("", "undefined") else description,
            rank=(rank := ranks.index(dump.rank)),
            size=len(ranks),
            ranks=list(ranks),
            calls=[call for call in calls.get(dump.rank, []) if call.peer != rank],  # no rank waits for itself
        )
        for (name, ranks), (description, calls) in groups.items()
        if dump.rank in ranks
    ]
    for comm in comms:
        comm.entered = max((call.number for call in comm.calls), default=0)
        comm.completed = max((call.number for call in comm.calls if call.state == COMPLETED), default=0)
    times = [call.issued for comm in comms for call in comm.calls]
    return ProcessRecord(
        pid=-1 - dump.rank,  # unknown: negative, and unique in the job
        host="",
        job=job,
        rank=dump.rank,
        path=dump.path,
        started=min(times, default=0.0),
        now=dump.written,
        heartbeat=dump.written,
        where_at=max(times, default=0.0),
        stack=dump.stack,
        state=UNKNOWN,
        comms=comms,
    )
