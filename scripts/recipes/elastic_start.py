"""Start the ranks of an elastic job on this node, serve their store, and let them live and die on their own.

torchrun ends all ranks when one fails. With this starter the others go on: see `Communicator.survivors`. It exits with
0 if at least one rank has ended with 0, that is, has finished the job.

examples:
  python scripts/recipes/elastic_start.py 4 train.py --steps 100  # long
  python scripts/recipes/elastic_start.py 2 scripts/recipes/ddp.py
"""

from __future__ import annotations

import os
import subprocess
import sys

from torch.distributed import TCPStore

from pynccl.tools import command


def main() -> int:
    parser = command.Parser(__doc__, failed="no rank has ended with 0")
    parser.add_argument("ranks", type=command.integer(1), help="number of ranks")
    parser.add_argument("program", help="the Python program of each rank")
    parser.add_argument("arguments", nargs="...", help="and its arguments")
    options = parser.parse_args()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(options.ranks)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # so that rank 0 does not serve the store
    processes = [
        subprocess.Popen(
            [sys.executable, options.program, *options.arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(options.ranks)
    ]
    codes = [process.wait() for process in processes]
    for rank, code in enumerate(codes):
        if code:
            how = f"exited with {code}" if code > 0 else f"was killed by signal {-code}"
            print(f"elastic_start.py: rank {rank} {how}", file=sys.stderr)
    return 0 if 0 in codes else 1


if __name__ == "__main__":
    command.run(main)
