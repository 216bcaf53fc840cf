"""How long abort() takes where a peer hangs: after a barrier, with a collective under way that will never end.

Rank 1 stops to communicate after the barrier. Rank 0 starts an all_reduce, gives it time to hang, and aborts. Rank 1
aborts once rank 0 says so by a file in FOLDER. Prints the seconds.

examples:
  PYNCCL_LIBRARY=host torchrun --standalone --nproc-per-node=2 scripts/gpu/gpu_hang.py out/hang
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_collectives import join, synchronize

import pynccl
from pynccl.tools import command

HANG_SECONDS = 1.0  # nothing tells a collective that hangs from one that has not begun
MOST_SECONDS = 10.0
PEER_SECONDS = 25.0


def abort(comm: pynccl.Communicator) -> float:
    started = time.monotonic()
    comm.abort()
    return time.monotonic() - started


def first(comm: pynccl.Communicator) -> dict[str, float]:
    """Rank 0: seconds of abort(), and until the thread that waits for the collective is free."""
    x = torch.ones(1 << 20, device=comm.device)

    def hang() -> None:
        try:
            comm.all_reduce(x, x)
            synchronize(comm)
        except (pynccl.NcclError, RuntimeError) as error:
            print(f"the collective ended: {type(error).__name__}: {error}")

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    if not thread.is_alive():
        raise command.FailedError("the collective ended although the peer takes no part in it")
    started = time.monotonic()
    seconds = abort(comm)
    thread.join(MOST_SECONDS)
    free = time.monotonic() - started if not thread.is_alive() else float("inf")
    return {"abort_s": round(seconds, 3), "thread_free_s": round(free, 3)}


def second(comm: pynccl.Communicator, told: Path) -> dict[str, float]:
    """Rank 1: seconds of abort(), once rank 0 is gone."""
    deadline = time.monotonic() + PEER_SECONDS
    while not told.exists():
        if time.monotonic() > deadline:
            raise command.FailedError(f"rank 0 was not done after {PEER_SECONDS:g} s")
        time.sleep(0.02)
    return {"abort_s": round(abort(comm), 3)}


def main() -> int:
    parser = command.Parser(__doc__, failed=f"an abort took over {MOST_SECONDS:g} s")
    parser.add_argument(
        "folder", type=command.output_folder, metavar="FOLDER", help="of the file by which rank 0 tells rank 1"
    )
    folder: Path = parser.parse_args().folder
    (folder / "done").unlink(missing_ok=True)  # of an earlier run
    comm = join()
    comm.barrier()  # which leaves pinned memory behind, for abort() to give back
    if comm.rank == 0:
        try:
            found = first(comm)
        finally:
            (folder / "done").touch()
    else:
        found = second(comm, folder / "done")
    print("RESULT " + json.dumps(found), flush=True)
    return int(max(found.values()) > MOST_SECONDS)


if __name__ == "__main__":
    command.run(main)
