"""Start the ranks of an elastic job on this node, serve their store, and let them live and die on their own.

torchrun ends all ranks when one fails. With this starter the others go on: see `Communicator.survivors`. It exits with
0 if a rank has ended with 0, that is, has finished the job; the others then have a minute to end, too. Ctrl-C and
SIGTERM end all ranks.

examples:
  python scripts/recipes/elastic_start.py 4 train.py --steps 100  # long
  python scripts/recipes/elastic_start.py 2 scripts/recipes/ddp.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from torch.distributed import TCPStore

from pynccl.tools import command

LAST_SECONDS = 60.0  # for the other ranks once one has finished: one may be stopped for ever


def main() -> int:
    parser = command.Parser(__doc__, failed="no rank has ended with 0")
    parser.add_argument("ranks", type=command.integer(1), help="number of ranks")
    parser.add_argument("program", help="the Python program of each rank")
    parser.add_argument("arguments", nargs="...", help="and its arguments")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(options.ranks)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # so that rank 0 does not serve the store
    running: dict[int, subprocess.Popen[bytes]] = {}
    finished_at = 0.0
    try:
        for rank in range(options.ranks):
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            running[rank] = subprocess.Popen([sys.executable, options.program, *options.arguments], env=env)
        while running and not (finished_at and time.monotonic() > finished_at + LAST_SECONDS):
            for rank in [rank for rank, process in running.items() if process.poll() is not None]:
                code = running.pop(rank).returncode
                finished_at = finished_at or (0.0 if code else time.monotonic())
                how = f"exited with {code}" if code > 0 else f"was killed by signal {-code}"
                print(f"elastic_start.py: rank {rank} {how}\n" if code else "", end="", file=sys.stderr)
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.kill()
    return 0 if finished_at else 1


if __name__ == "__main__":
    command.run(main)
