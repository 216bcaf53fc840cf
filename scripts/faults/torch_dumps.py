"""Compare `python -m pynccl hang` with torch's own fr_trace on dumps of torch's flight recorder, for 13 faults.

The dumps of 4 ranks have the format of ProcessGroupNCCL. "gloo": processes run the fault on gloo, and its entries are
written in that format. "made": where NCCL hangs, gloo crashes or records nothing, so the entries are made by hand.

examples:
  python scripts/faults/torch_dumps.py --only size
  python scripts/faults/torch_dumps.py --keep dumps --markdown  # long
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pynccl.tools import command

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
PREFIX = "nccl_trace_rank_"
SECONDS = 12.0  # until each rank of gloo dumps
TORCH = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"
GROUPS = {"0": "default_pg", "1": "tp", "2": "dp"}
Entry = dict[str, Any]


def dump(entries: list[Entry], version: str = "2.10") -> Entry:
    """Return the content of a dump in which all groups have all ranks."""
    config = {name: {"name": name, "desc": text, "ranks": str([*range(RANKS)])} for name, text in GROUPS.items()}
    return {"version": version, "pg_config": config, "pg_status": {}, "entries": entries}


class Rank:
    """Writes the entries of one rank as ProcessGroupNCCL does; each call takes the line of its caller."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.entries: list[Entry] = []
        self._counts = {name: {"collective_seq_id": 0, "p2p_seq_id": 0, "op_id": 0} for name in GROUPS}
        self._time = time.time_ns() - 30 * 10**9

    def call(
        self, name: str, size: tuple[int, ...] = (8,), dtype: str = "Float", *, group: str = "0", hangs: bool = False
    ) -> None:
        self._count("collective_seq_id", group)
        outputs = [[RANKS * size[0]]] if name == "all_gather" else [list(size)]
        self._add(name, [list(size)], outputs, dtype, group, "started" if hangs else "completed")

    def message(self, name: str, peer: int, *, group: str = "0", hangs: bool = False) -> None:
        self._count("p2p_seq_id", group)
        arrow = "->" if name == "send" else "<-"
        self._add(f"{name} {self.rank}{arrow}{peer}", [[8]], [[8]], "Float", group, "started" if hangs else "completed")

    def batch(self, *names: str, group: str = "0", hangs: bool = False) -> None:
        """Coalesced calls: all entries have one number, and only that of the last, which closes the batch, has a state.
        A message is named as it is recorded: "send 0->1"."""
        messages = "->" in names[0] or "<-" in names[0]
        self._count("p2p_seq_id" if messages else "collective_seq_id", group)
        for name in names:
            self._add(name, [[8]], [[RANKS * 8 if name == "all_gather" else 8]], "Float", group, "scheduled")
        self._counts[group]["op_id"] -= 1
        self._add("coalesced", [], [], "", group, "started" if hangs else "completed")
        self.entries[-1]["is_p2p"] = messages

    def wait(self, seconds: float) -> None:
        self._time += int(seconds * 1e9)

    def _count(self, what: str, group: str) -> None:
        self._counts[group][what] += 1

    def _add(self, name: str, inputs: Any, outputs: Any, dtype: str, group: str, state: str) -> None:
        self._count("op_id", group)
        self._time += 10**6
        done = self._time + 10**5 if state == "completed" else None
        caller = sys._getframe(2)
        frames = [(TORCH, 3245, name), (caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name)]
        entry: Entry = {
            "frames": [dict(zip(("filename", "line", "name"), frame, strict=True)) for frame in frames],
            "record_id": len(self.entries),
            "pg_id": int(group),
            "process_group": (group, GROUPS[group]),
            **self._counts[group],
            "is_p2p": name.startswith(("send", "recv")),
            "profiling_name": f"nccl:{name}",
            "time_created_ns": self._time,
            "input_sizes": inputs,
            "input_dtypes": [dtype] * len(inputs),
            "output_sizes": outputs,
            "output_dtypes": [dtype] * len(outputs),
            "state": state,
            "time_discovered_started_ns": self._time if state != "scheduled" else None,
            "time_discovered_completed_ns": done,
            "retired": state == "completed",
            "timeout_ms": 10_000,
        }
        self.entries.append(entry)


# Made by hand


def another_operation(it: Rank) -> None:
    it.call("all_reduce")
    it.call("all_gather" if it.rank == 1 else "all_reduce", hangs=True)


def another_size(it: Rank) -> None:
    it.call("all_reduce")
    it.call("all_reduce", (4,) if it.rank == 1 else (8,), hangs=True)


def another_type(it: Rank) -> None:
    it.call("all_reduce")
    it.call("all_reduce", dtype="Double" if it.rank == 0 else "Float", hangs=True)


def another_root(it: Rank) -> None:
    it.call("all_reduce")
    it.call("broadcast", hangs=it.rank != 2)  # the root is not recorded


def crossed_messages(it: Rank) -> None:
    it.call("all_reduce")
    it.call("all_reduce")
    if it.rank < 2:
        it.message("recv", 1 - it.rank, hangs=True)


def another_batch(it: Rank) -> None:
    it.call("all_reduce")
    it.batch("all_reduce", "all_gather" if it.rank == 1 else "all_reduce", hangs=True)


def exited(it: Rank) -> None:
    it.call("all_reduce")
    if it.rank == 1:
        raise SystemExit  # a rank that has exited writes no dump
    it.call("all_reduce", hangs=True)


def two_faults(it: Rank) -> None:
    it.call("all_reduce")
    if it.rank != 3:
        it.call("all_reduce", (4,) if it.rank == 1 else (8,), hangs=True)


def slow(it: Rank) -> None:
    it.call("all_reduce")
    it.wait(29.0 if it.rank == 1 else 0.0)  # it enters just before the timeout of the others
    it.call("all_reduce", hangs=True)


def kernel_hangs(it: Rank) -> None:
    it.call("all_reduce")
    it.call("all_reduce", hangs=True)
    if it.rank == 1:  # its stream has not reached the call; known with TORCH_NCCL_ENABLE_TIMING
        it.entries[-1] |= {"state": "scheduled", "time_discovered_started_ns": None}


# On gloo


def never_comes(rank: int, dist: Any, tensor: Any, tp: Any, dp: Any) -> None:
    dist.all_reduce(tensor)
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(tensor)


def two_orders(rank: int, dist: Any, tensor: Any, tp: Any, dp: Any) -> None:
    dist.all_reduce(tensor)
    if rank == 1:
        dist.all_reduce(tensor, group=dp)
    dist.all_reduce(tensor, group=tp)
    dist.all_reduce(tensor, group=dp)


def no_fault(rank: int, dist: Any, tensor: Any, tp: Any, dp: Any) -> None:
    while True:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=tp)


class Fault(NamedTuple):
    """A fault, whether it runs on gloo, and the words that the verdict is expected to have."""

    program: Callable[..., None]
    gloo: bool
    expected: str


NOTHING = "no rank is stuck"
FAULTS = {
    "never-comes": Fault(never_comes, True, "rank 1 never entered all_reduce #3"),
    "operation": Fault(another_operation, False, "rank 1 calls all_gather(count=8, FLOAT32)"),
    "size": Fault(another_size, False, "rank 1 calls all_reduce(count=4, FLOAT32)"),
    "type": Fault(another_type, False, "rank 0 calls all_reduce(count=8, FLOAT64)"),
    "root": Fault(another_root, False, "ranks 0, 1 and 3 in broadcast #2"),
    "order": Fault(two_orders, True, "ranks wait for each other"),
    "messages": Fault(crossed_messages, False, "ranks wait for each other: rank 0 in recv from rank 1"),
    "exited": Fault(exited, False, "no dump of rank 1 was given"),
    "slow": Fault(slow, False, "rank 1 entered all_reduce #2"),
    "kernel": Fault(kernel_hangs, False, "rank 1 issued it, and only the streams of the others have begun it"),
    "two": Fault(two_faults, False, "rank 1 calls all_reduce(count=4, FLOAT32)"),
    "no-dump": Fault(never_comes, True, "no dump of rank 1 was given"),
    "batch": Fault(another_batch, False, "rank 1 calls coalesced all_reduce + all_gather"),
    "none": Fault(no_fault, True, NOTHING),
}


def make(name: str, folder: Path) -> None:
    """Write the dumps of a fault to a new folder."""
    folder.mkdir(parents=True)
    if FAULTS[name].gloo:
        run_on_gloo(FAULTS[name].program, folder)
    else:
        for number in range(RANKS):
            rank = Rank(number)
            with contextlib.suppress(SystemExit):
                FAULTS[name].program(rank)
                write(folder, number, rank.entries)
    if name == "no-dump":
        (folder / f"{PREFIX}1").unlink()


def write(folder: Path, rank: int, entries: list[Entry]) -> None:
    (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump(entries), 2))


def run_on_gloo(program: Callable[..., None], folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_gloo_rank, args=(program, rank, folder)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
        process.kill()


def _gloo_rank(program: Callable[..., None], rank: int, folder: Path) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=RANKS)
    groups = [dist.new_group(list(range(RANKS)), group_desc=GROUPS[name]) for name in ("1", "2")]

    def finish() -> None:
        time.sleep(SECONDS)
        c10d: Any = torch._C._distributed_c10d
        values = pickle.loads(c10d._dump_fr_trace())
        write(folder, rank, [as_nccl(entry) for entry in values["entries"]])
        while len(list(folder.iterdir())) < RANKS:  # the others wait for this rank until their dumps are written
            time.sleep(0.05)
        os._exit(0)

    dist.barrier()
    threading.Thread(target=finish).start()
    program(rank, dist, torch.ones(8), *groups)


def as_nccl(entry: Entry) -> Entry:
    """Return an entry of gloo as one of NCCL: gloo has no states, and a call that has left is retired."""
    begun = entry["time_created_ns"]
    return {
        **entry,
        "profiling_name": entry["profiling_name"].replace("gloo:", "nccl:"),
        "state": "completed" if entry["retired"] else "started",
        "time_discovered_started_ns": begun,
        "time_discovered_completed_ns": begun + 10**5 if entry["retired"] else None,
    }


def ours(folder: Path) -> str:
    findings = json.loads(_output("-m", "pynccl", "hang", "--json", str(folder)))["verdict"]["findings"]
    return " also: ".join(finding["sentence"] for finding in findings)


def theirs(folder: Path) -> str:
    """Return what fr_trace prints, without the sizes and stacks."""
    printed = _output("-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-p", PREFIX)
    words = ("error msg", "missing ranks", "Not all", "Error:", "collective: ", "does not have", "empty op list")
    lines = [line.strip() for line in printed.splitlines() if any(word in line for word in words)]
    return "; ".join(dict.fromkeys(lines)) or "(nothing)"


def _output(*arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    return run.stdout or run.stderr if arguments[1] == "pynccl" else run.stdout + run.stderr


def main() -> int:
    parser = command.Parser(__doc__, failed="a verdict was not the expected one")
    parser.add_argument("--only", choices=FAULTS, metavar="FAULT", help="one fault of " + ", ".join(FAULTS))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the dumps in this new folder")
    parser.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in [options.only] if options.only else FAULTS:
            folder = (options.keep or Path(temporary)).resolve() / name
            make(name, folder)
            said = ours(folder)
            wrong += FAULTS[name].expected not in said
            row = [f"{name} ({'gloo' if FAULTS[name].gloo else 'made'})", said, theirs(folder)]
            print(f"| {' | '.join(row)} |" if options.markdown else "\n    ".join(row), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    command.run(main)
