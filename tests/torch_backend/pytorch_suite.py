"""Run PyTorch's tests of torch.distributed, which are part of the torch package, with the "pynccl" backend.

    [OVER=gloo] [WORLD_SIZE=4] python tests/torch_backend/pytorch_suite.py [test ...]

Without names, all tests run; OVER=gloo runs them with gloo, for comparison. Each runs in three processes, on the CPU,
and on GPUs if there is one per process. Many tests are for GPUs or NCCL only and are skipped. The script prints a line
per test, the message of each failure, and how many tests passed, failed and were skipped. It exits with 1 if one fails.

Most tests check the name of the backend, at import and again when they run. The module is imported with the name gloo,
for all_to_all with MPI, and then the name is changed.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BACKEND = os.environ.get("OVER", "pynccl")
READ_AS = os.environ.get("READ_AS", "gloo")
SECONDS = 60  # timeout of a test
JOBS = 2  # tests that run at the same time

os.environ |= {"BACKEND": READ_AS, "MASTER_ADDR": "127.0.0.1", "INIT_METHOD": "env://"}
os.environ["WORLD_SIZE"] = os.environ.get("WORLD_SIZE", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())

import torch  # noqa: E402
from torch.testing._internal import common_distributed as common  # noqa: E402

import pynccl.torch_backend  # noqa: E402, F401

if BACKEND == "pynccl":  # NCCL cannot receive from any rank, and PyTorch does not run these tests for "nccl" either
    common.DistTestCases.skip_collective["sendrecv anysource"].add(READ_AS)
for features in common.DistTestCases.backend_feature.values():
    features |= {READ_AS, BACKEND}

from torch.testing._internal.distributed import distributed_test  # noqa: E402

distributed_test.BACKEND = BACKEND
os.environ["BACKEND"] = "mpi"  # for other backends, PyTorch skips tests on 3 ranks: "Skipped due to small world size"


class PyTorchTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All tests, each in its own processes."""

    def setUp(self) -> None:
        super().setUp()
        start_method = (
            "spawn" if torch.cuda.is_available() else "fork"
        )  # forked processes need not import torch, which is much faster
        context: Any = torch.multiprocessing.get_context(start_method)
        self._start_processes(context.Process)

    def run_test(self, name: str, *args: Any) -> None:
        if "no_sync" in name:  # these tests support only a few backends by name
            distributed_test.BACKEND = READ_AS
        super().run_test(name, *args)


class _Lines(unittest.TestResult):
    """Prints one line of JSON for each test: name, outcome, reason, seconds."""

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def _line(self, test: Any, outcome: str, reason: str = "") -> None:
        print("\n@@" + json.dumps([test._testMethodName, outcome, reason, time.monotonic() - self._began]), flush=True)

    def addSuccess(self, test: Any) -> None:
        self._line(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._line(test, "skipped", reason)

    def addError(self, test: Any, err: Any) -> None:
        self._line(test, "failed", str(err[1]))

    addFailure = addError


def run_here(names: Sequence[str]) -> None:
    """Run these tests one after the other, in child processes of this one."""
    logging.disable(logging.INFO)
    common.TIMEOUT_OVERRIDE.clear()
    common.TIMEOUT_DEFAULT = SECONDS
    unittest.TestSuite(PyTorchTests(name) for name in names).run(_Lines())


def run(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Run these tests in parallel jobs and return the outcome and reason of each."""
    found: dict[str, tuple[str, str]] = {}
    hidden = {} if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]) else {"CUDA_VISIBLE_DEVICES": ""}

    def job(read_as: str, names: Sequence[str]) -> None:
        env = os.environ | {"READ_AS": read_as} | hidden
        command = [sys.executable, __file__, "--here", *names]
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            for line in process.stdout or ():
                if line.startswith("@@"):
                    name, outcome, reason, seconds = json.loads(line[2:])
                    found[name] = outcome, reason
                    print(f"{outcome:8}{seconds:6.1f} s  {name}", flush=True)

    def is_for_mpi(name: str) -> bool:
        return name.startswith("test_all_to_all") and "cuda" not in name

    rest = [name for name in names if not is_for_mpi(name)]
    jobs = [("gloo", rest[first::JOBS]) for first in range(JOBS)] + [("mpi", list(filter(is_for_mpi, names)))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job_args: job(*job_args), [job_args for job_args in jobs if job_args[1]]))
    return {name: found.get(name, ("failed", "no result: the process that ran it has exited")) for name in names}


def main(names: Sequence[str]) -> int:
    found = run(names or unittest.TestLoader().getTestCaseNames(PyTorchTests))
    outcomes = Counter(outcome for outcome, _ in found.values())
    for name, (outcome, reason) in found.items():
        if outcome == "failed":
            print(f"\nFAILED {name}\n{reason}")
    print(f"\nover {BACKEND}: " + ", ".join(f"{outcomes[key]} {key}" for key in ("passed", "failed", "skipped")))
    for reason, count in Counter(reason for outcome, reason in found.values() if outcome == "skipped").most_common():
        print(f"{count:5} skipped: {reason}")
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(run_here(sys.argv[2:]) if sys.argv[1:2] == ["--here"] else main(sys.argv[1:]))
