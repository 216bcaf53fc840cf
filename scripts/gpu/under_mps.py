"""Run a command under CUDA's Multi-Process Service (MPS), so that ranks that share a GPU run at the same time.

Without it two processes take turns on a GPU, and each turn takes milliseconds. This script starts a service of its own,
sets PYNCCL_SHARE_GPU=1 for the command, and ends the service with the command. It changes nothing that lasts. Needs
nvidia-cuda-mps-control, which comes with the driver.

examples:
  python scripts/gpu/under_mps.py torchrun --standalone --nproc-per-node=2 scripts/examples/hello.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pynccl.tools import command

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 30.0  # to start or to end the service


@contextlib.contextmanager
def service() -> Iterator[dict[str, str]]:
    """Start the service, yield the environment of its clients, and end it."""
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for name in ("pipe", "log"):
            Path(folder, name).mkdir()
        try:
            started = subprocess.run([CONTROL, "-d"], env=env, timeout=SECONDS, check=False)
            if started.returncode:
                raise command.FailedError(f"{CONTROL} -d ended with {started.returncode}; {log(Path(folder))}")
            yield env
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for clients, and a killed one may linger
                subprocess.run([CONTROL], input="quit\n", text=True, env=env, timeout=SECONDS, check=False)


def log(folder: Path) -> str:
    """Return the end of what the service wrote."""
    written = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("log/*.log")))
    return f"it wrote: {written[-500:].strip()}" if written else "it wrote no log"


def main() -> int:
    parser = command.Parser(__doc__, failed="the command failed: its own exit code, 128 and the signal that ended it")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    options = parser.parse_args()
    if not options.command:
        parser.error("no command: name one, such as torchrun --nproc-per-node=2 train.py")
    if not shutil.which(options.command[0]):
        parser.error(f"{options.command[0]}: no such command")
    if not shutil.which(CONTROL):
        parser.error(f"{CONTROL} is not on the PATH; it comes with NVIDIA's driver")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the service ends, too
    with service() as env:
        code = subprocess.run(options.command, env={**env, "PYNCCL_SHARE_GPU": "1"}, check=False).returncode
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    command.run(main)
