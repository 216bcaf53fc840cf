"""Run a command under CUDA's Multi-Process Service (MPS), so that ranks that share a GPU run at the same time.

Without it two processes take turns on a GPU, and each turn takes milliseconds. This script starts a service of its own,
sets PYNCCL_SHARE_GPU=1 for the command, and ends the service with the command, also after Ctrl-C or SIGTERM. Needs
nvidia-cuda-mps-control, which comes with the driver.

examples:
  python scripts/gpu/under_mps.py torchrun --standalone --nproc-per-node=2 scripts/examples/hello.py
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pynccl.tools import command

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 30.0  # to start or to end the service
GRACE_SECONDS = 3.0  # for the command, after an interrupt


@contextlib.contextmanager
def service() -> Iterator[dict[str, str]]:
    """Start the service, yield the environment of its clients, and end it. FailedError if nobody was a client: CUDA
    then goes on without the service, and says nothing."""
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        pipe, log = Path(folder, "pipe"), Path(folder, "log")
        env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        pipe.mkdir()
        log.mkdir()
        with (log / "start.log").open("w") as file:  # not ours: the service would keep it open
            started = subprocess.run([CONTROL, "-d"], env=env, stdout=file, stderr=file, timeout=SECONDS, check=False)
        if started.returncode:
            raise command.FailedError(f"{CONTROL} -d ended with {started.returncode}; {written(log)}")
        try:
            yield env
            if not (log / "server.log").exists() and not asked("get_server_list", env):
                raise command.FailedError(f"the command has not used a GPU through the service; {written(log)}")
        finally:
            stop(env)


def stop(env: dict[str, str]) -> None:
    """End the service, by force if it waits for clients or does not answer."""
    file, pids = Path(env["CUDA_MPS_PIPE_DIRECTORY"], f"{CONTROL}.pid"), []
    try:
        pids = asked("get_server_list", env)
        asked("quit", env)
    except subprocess.TimeoutExpired:
        for pid in [*pids, *(file.read_text().split() if file.exists() else [])]:
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid), signal.SIGKILL)


def asked(words: str, env: dict[str, str]) -> list[str]:
    """Return the words of the service's answer to a command of its own."""
    options: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "timeout": SECONDS}
    answer: str = subprocess.run([CONTROL], input=f"{words}\n", check=False, **options).stdout
    return answer.split()


def written(log: Path) -> str:
    """Return the end of what the service wrote."""
    text = "".join(path.read_text(errors="replace") for path in sorted(log.glob("*.log")))
    return f"it wrote: {text[-500:].strip()}" if text else "it wrote no log"


def ended(words: list[str], env: dict[str, str]) -> int:
    """Run a command and return its exit code. At an interrupt it may end its own processes first."""
    with subprocess.Popen(words, env=env) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            process.kill()
            raise


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
    faulthandler.disable()  # of SIGABRT, by which gpu_check ends a step
    for number in (signal.SIGTERM, signal.SIGABRT):  # so that the service ends, too
        signal.signal(number, signal.default_int_handler)
    code = 0
    try:
        with service() as env:
            code = ended(options.command, {**env, "PYNCCL_SHARE_GPU": "1"})
    except command.FailedError:
        if not code:  # else the command's own failure says more
            raise
    except subprocess.TimeoutExpired as error:
        raise command.FailedError(f"{CONTROL} does not answer within {error.timeout:g} s") from None
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    command.run(main)
