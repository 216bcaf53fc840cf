"""What the steps of scripts/gpu_check.sh run: as far as it goes on the CPU, over the host library."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "gpu"))

import gpu_profile  # noqa: E402
import gpu_run  # noqa: E402
import gpu_steps  # noqa: E402
import torch  # noqa: E402
from gpu.launches import alone, as_ranks  # noqa: E402
from gpu.overlapped import Timeline  # noqa: E402
from gpu.test_gpu_streams import test_what_a_stream_of_pynccl_holds_does_not_grow as holds_no_more  # noqa: E402
from ranks import RankPool  # noqa: E402

import pynccl_autograd as ad  # noqa: E402
from pynccl import Communicator  # noqa: E402
from pynccl.comm.observing import observing  # noqa: E402
from pynccl_autograd import OverlapConfig  # noqa: E402

ON_HOST = {"PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}


def perform(step: gpu_steps.Step, work: Path, grace: float = 20.0) -> gpu_steps.Step:
    """Run it as gpu_check does."""
    step.allotted = 90.0
    gpu_run.perform(step, work, gpu_run.Manner(shared=True, grace=grace, tick=lambda: None))
    return step


def planned(name: str, work: Path) -> gpu_steps.Step:
    step = next(step for call in gpu_steps.CALLS for step in gpu_steps.plan(call, work, 1) if step.name == name)
    step.env.update(ON_HOST)
    return step


def test_the_collectives_of_the_probe_check_out(tmp_path: Path) -> None:
    step = perform(planned("collectives_2", tmp_path), tmp_path)
    assert step.status == "passed", step.output
    assert [found["wrong"] for found in step.results] == [[], []]
    assert all(found["device"] == "cpu" and found["all_reduce_64MiB_GB/s"] > 0 for found in step.results)


def test_ranks_that_do_not_meet_are_told_from_wrong_values(tmp_path: Path) -> None:
    step = planned("collectives_2", tmp_path)
    step.ranks = 1
    step.env["RANK"] = "7"
    assert perform(step, tmp_path).returncodes == [2]
    assert "RANK" in step.output and gpu_steps.WRONG_VALUES != 1


def test_an_abort_beside_a_hung_peer_is_timed(tmp_path: Path) -> None:
    step = perform(planned("hang_2", tmp_path), tmp_path)
    assert step.status == "passed", step.output
    first, second = step.results
    assert 0 <= first["abort_s"] <= first["thread_free_s"] < 10 and second["abort_s"] < 10
    assert "the collective ended: NcclInvalidUsage" in step.output  # it was under way, and abort() set the thread free


def test_the_profile_leaves_a_trace_with_what_was_started_and_what_ran_beside_it(tmp_path: Path) -> None:
    step = perform(planned("profile_2", tmp_path), tmp_path)
    assert step.status == "passed", step.output
    with gzip.open(tmp_path / "trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    for name in ("start all_gather", "matmuls", "wait"):
        assert names.count(name) == gpu_profile.ROUNDS
    assert all(found["ms per round"] > 0 and found["kernels of NCCL"] == 0 for found in step.results)


def test_the_overlap_of_kernels_is_read_off_a_trace() -> None:
    def kernel(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        kernel("ncclDevKernel_AllGather_RING_LL", 0, 100),
        kernel("gemm", 10, 20),
        kernel("gemm", 20, 20),  # beside the other one: 10 to 40 together
        kernel("gemm", 90, 30),
        kernel("cudaLaunchKernel", 0, 1000, cat="cuda_runtime"),
        {"ph": "M", "name": "process_name"},
    ]
    nccl, others = gpu_profile.kernels({"traceEvents": events})
    assert (gpu_profile.length(nccl), gpu_profile.length(others)) == (100, 60)
    assert gpu_profile.overlap(nccl, others) == 40


@pytest.mark.parametrize("with_timeouts", [True, False])
def test_pytest_takes_the_options_with_and_without_pytest_timeout(
    tmp_path: Path, with_timeouts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_timeouts:
        pytest.importorskip("pytest_timeout")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    step = gpu_steps.tests("errors", 1, 60, "tests/gpu/test_gpu_errors.py")
    step.env.update(ON_HOST, CUDA_VISIBLE_DEVICES="")
    step.command += [] if with_timeouts else ["-p", "no:timeout"]
    assert ("--timeout-method=thread" in step.command) is with_timeouts
    perform(step, tmp_path)
    assert (step.status, step.reason) == ("failed", "no test has passed: see the skips"), step.output
    assert (
        step.returncodes == [0]
        and set(step.tests) == {"skipped"}
        and step.tests["skipped"] == sum(step.skips.values()) > 4
    )
    assert any("no CUDA GPU" in reason for reason in step.skips)


def write_tests(folder: Path, text: str) -> str:
    """A test file with the hooks and the communicator of tests/gpu, on the host library, without a GPU."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(
        textwrap.dedent(f"""
        import sys
        sys.path[:0] = {[str(ROOT / "tests"), str(ROOT / "tests" / "support")]!r}
        from gpu.conftest import *

        @pytest.fixture(scope="session", autouse=True)
        def told():
            seen = []
            yield seen
            print("in the end", *(repr(one) for one in seen))

        @pytest.fixture(autouse=True)
        def tell(told, comm):
            told[:] = [comm]

        import pynccl
        host = pynccl.load("host")
        pynccl.load = lambda spec=None: host
        """)
    )
    (folder / "test_it.py").write_text(textwrap.dedent(text))
    return str(folder)


def pytest_on(folder: str, ranks: int, *options: str) -> gpu_steps.Step:
    command = ["-m", "pytest", folder, "-p", "gpu_record", "-p", "no:cacheprovider", "-s", "-v", *options]
    return gpu_steps.Step("tests", command, 60, ranks=ranks, env=dict(ON_HOST))


def test_after_a_failure_nothing_waits_for_the_other_ranks(tmp_path: Path) -> None:
    folder = write_tests(
        tmp_path,
        """
        import torch

        def test_both(comm):
            assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2]

        def test_one(comm, child):
            assert comm.rank == 0

        def test_that_would_hang(comm):
            comm.all_reduce(torch.ones(2))
            if comm.rank:
                comm.recv(torch.ones(2), 0)
        """,
    )
    step = perform(pytest_on(folder, 2), tmp_path)
    logs = [Path(log).read_text() for log in step.logs]
    assert step.seconds < 60 and "killed" not in step.reason, step.reason
    failures = {(each["rank"], each["test"].partition("::")[2]): each["message"] for each in step.failures}
    assert "test_it.py::test_one failed on this rank" in failures[1, "test_that_would_hang"]
    assert (1, "test_one") in failures and (0, "test_both") not in failures
    assert "in the end <pynccl.Communicator rank 1 of 2 on cpu, aborted>" in logs[1]


def test_tests_behind_a_failure_or_a_hang_are_run_by_new_processes(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        import ctypes, os, pytest

        def hang():
            ctypes.PyDLL(None).pause()

        def test_0(): pass

        def test_1():
            assert os.environ["RANK"] == "0"
            hang()

        def test_2():
            hang() if os.environ["RANK"] == "0" else os._exit(9)

        @pytest.mark.parametrize("i", range(3))
        def test_3(i): pass
        """)
    )
    step = perform(pytest_on(str(tmp_path), 2, "-x"), tmp_path, grace=1)
    failed = sorted({each["test"].partition("::")[2] for each in step.failures})
    assert (step.status, failed) == ("failed", ["test_1", "test_2"]), step.output
    assert step.tests == {"passed": 2 * 4, "failed": 1, "cut off": 3}
    assert "from test 3 on: " in step.reason and len(step.logs) == len(step.returncodes) == 6


def test_a_process_whose_parent_is_gone_already_does_not_begin() -> None:
    code = "import gpu_run; gpu_run._as_child(1); print('it goes on')"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_tests_that_no_time_is_left_for_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("import os\ndef test_ends(): os._exit(7)\ndef test_left(): pass\n")
    step = pytest_on(str(tmp_path), 0)
    step.limit = 1000.0  # so that what is allotted is no quarter of it
    perform(step, tmp_path)
    assert step.reason == "rank 0 ended with exit code 7; the tests from number 2 on were not run: no time left"
    assert step.tests == {"cut off": 1}


def test_without_a_failure_the_communicator_is_destroyed(tmp_path: Path) -> None:
    folder = write_tests(tmp_path, "def test_it(comm, child):\n    assert child.size == comm.size\n")
    step = perform(pytest_on(folder, 2), tmp_path)
    assert (step.status, step.tests) == ("passed", {"passed": 2})
    assert "in the end <pynccl.Communicator rank 0 of 2 on cpu, destroyed>" in Path(step.logs[0]).read_text()


def test_a_rank_alone_goes_on_after_a_failure(tmp_path: Path) -> None:
    folder = write_tests(
        tmp_path,
        """
        def test_wrong(comm):
            assert comm.size == 2

        def test_right(comm):
            assert comm.size == 1
        """,
    )
    step = perform(pytest_on(folder, 1), tmp_path)
    assert step.tests == {"failed": 1, "passed": 1}
    assert [each["test"].partition("::")[2] for each in step.failures] == ["test_wrong"]


def test_the_record_outlives_the_process(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "def test_passes(): pass\n"
        "def test_skips(): pytest.skip('for a reason')\n"
        "def test_ends(): os._exit(7)\n"
        "def test_comes_after(): pass\n"
    )
    step = perform(pytest_on(str(tmp_path), 0), tmp_path)
    assert step.tests == {"passed": 2, "skipped": 1, "cut off": 1} and step.returncodes == [7, 0]
    assert step.skips == {"Skipped: for a reason": 1}
    assert [(each["rank"], each["test"].partition("::")[2]) for each in step.failures] == [(0, "test_ends")]


def test_launch_overhead_is_measured_beside_torch_distributed(tmp_path: Path) -> None:
    step = planned("overhead_2", tmp_path)
    step.command[step.command.index("--rounds") + 1] = "2"
    perform(step, tmp_path)
    assert step.status == "passed", step.output
    (found,) = step.results  # of rank 0
    times = {row["way"]: row["us"] for row in found["calls"]}
    assert {"bare ctypes", "plan()", "comm.all_reduce(t, t)", "torch.distributed"} <= set(times)
    assert all(us > 0 for us in times.values()) and not found["left out"]
    assert found["where"].startswith("the CPU") and found["ranks"] == 2


def test_launch_overhead_on_a_gpu_needs_one() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYNCCL_LIBRARY": ""}
    command = [sys.executable, "scripts/bench/overhead.py", "--gpu"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "overhead.py: --gpu: " in done.stderr and "PYNCCL_LIBRARY=host rehearses it" in done.stderr


def test_the_versions_of_this_environment_are_told(tmp_path: Path) -> None:
    step = planned("versions", tmp_path)
    perform(step, tmp_path)
    assert step.status == "passed", step.output
    (found,) = step.results
    assert found["python"] == ".".join(map(str, sys.version_info[:3])) and found["packages"]["pytest"] != "-"
    assert found["imported from"][1].endswith("/autograd/__init__.py")


# ------------------------------------------------------------------------- what tests/gpu has of its own, on the CPU


def test_a_process_that_a_gpu_test_starts_is_not_a_rank_of_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for rank 0 of two, or claim to be it a second time."""
    step = gpu_steps.Step("tests_2", [], 60, ranks=2)
    for name, value in gpu_run.environment(step, 1, gpu_run.free_port(), True).items():
        monkeypatch.setenv(name, value)
    words = ["all_reduce", "-b", "8", "-e", "8", "-n", "2", "-c", "1"]
    done = alone(["-m", "pynccl", "perf", *words], 30, PYNCCL_LIBRARY="host")
    assert (done.code, "# rank 1" in done.out) == (0, False), done.err
    names = "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NCCL_HOSTID')))"
    ended = as_ranks(["-c", names], 2)
    assert [one.out for one in ended] == ["0 2 0 rank0\n", "1 2 0 rank1\n"]


def timeline_of(comm: Communicator) -> tuple[int, int]:
    """How many collectives and matmuls the GPU tests' observer sees of a layer that overlaps."""
    with observing(timeline := Timeline()):
        layer = ad.RowParallelLinear(8, 6, comm, overlap=OverlapConfig("slices", chunks=4))
        layer(torch.ones(8, 8 // comm.size)).sum().backward()
    return len(timeline.on("comm")), len(timeline.on("main", "second"))


def test_the_observer_of_gpu_tests_takes_all_that_it_is_told(ranks: RankPool) -> None:
    for collectives, matmuls in ranks.run(2, timeline_of):
        assert collectives == 8 and matmuls >= 4  # of both passes


def test_what_a_stream_holds_is_counted_without_its_insides() -> None:
    with Communicator.init_all(1)[0] as comm:
        holds_no_more(comm)
