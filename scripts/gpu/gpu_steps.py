"""The steps of gpu_check, in three calls, each to be done within CALL_SECONDS."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent
ROOT = SCRIPTS.parent

CALL_SECONDS = 510.0  # of the 600 that a call may take where it is to run
CALLS = ("probe", "ranks", "train")
FIRST = ("install", "versions")  # of every call: the machine may be a new one each time
TRANSFORMS = "tests/gpu/test_gpu_transforms.py"
STREAMS = [f"tests/gpu/test_gpu_{name}.py" for name in ("streams", "trace", "watch")]
OVERLAP = [f"tests/gpu/test_gpu_{name}.py" for name in ("overlap_streams", "effects")]
ENDS, EXAMPLES, PERF = (f"tests/gpu/test_gpu_{name}.py" for name in ("ends", "examples", "perf"))
LEAST_SHARE = 0.25  # of its limit, that a step is started with
STACKS_AFTER = 25  # seconds in one test, after which pytest writes where it is
TEST_SECONDS = 40  # in one test, after which it ends the process, where pytest-timeout is there
COMPILE_SECONDS = 60  # the same where a test compiles

# What may keep two ranks on one GPU from reaching each other; tried where they do not.
REMEDIES = {
    "lo": {"NCCL_SOCKET_IFNAME": "lo"},
    "cumem": {"NCCL_CUMEM_HOST_ENABLE": "0"},
    "ras": {"NCCL_RAS_ENABLE": "0"},
    "all": {"NCCL_SOCKET_IFNAME": "lo", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_RAS_ENABLE": "0"},
}
REACH = "collectives_2"  # the step that shows whether they do
WRONG_VALUES = 3  # its exit code where they do, and a result is wrong


@dataclass
class Step:
    """What to do, and how it went."""

    name: str
    command: list[str]  # after the interpreter
    limit: float  # seconds
    ranks: int = 0  # so many processes with RANK and WORLD_SIZE set; 0: one without
    env: dict[str, str] = field(default_factory=dict)
    remedy: dict[str, str] = field(default_factory=dict)  # the settings that it tries, where REACH has failed
    status: str = "not run"  # skipped, not run, running, passed, failed, worked around
    reason: str = "not reached"
    allotted: float = 0.0  # seconds: the limit, or what was left of the budget
    seconds: float = 0.0
    returncodes: list[int | None] = field(default_factory=list)
    tests: dict[str, int] = field(default_factory=dict)  # passed, failed, skipped, cut off: sums over the ranks
    failures: list[dict[str, Any]] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)  # reason -> how often
    results: list[Any] = field(default_factory=list)  # what each rank printed behind RESULT
    output: str = ""  # the end of it
    logs: list[str] = field(default_factory=list)


def plan(call: str, work: Path, gpus: int) -> list[Step]:
    """The steps of one call; `work` is a folder for what they write."""
    steps = [
        Step("install", ["-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "-e", "."], 45),
        Step("versions", [str(HERE / "gpu_versions.py")], 50),
    ]
    return [*steps, *{"probe": _probe, "ranks": _ranks, "train": _train}[call](work, gpus)]


def _probe(work: Path, gpus: int) -> list[Step]:
    """What only a GPU can show: order on streams, what is hidden, the end of what hangs."""
    return [
        Step("doctor", ["-m", "pynccl", "doctor"], 20),
        tests("streams_1", 1, 40, *STREAMS),
        *reach(40, 25),
        tests("streams_2", 2, 60, *STREAMS),
        tests("overlap_2", 2, 95, *OVERLAP),
        tests("ends_1", 1, 125, ENDS),
        tests("examples_1", 1, 35, EXAMPLES),
    ]


def _ranks(work: Path, gpus: int) -> list[Step]:
    """Values: of the tests that no other step has."""
    others = [f"--ignore={path}" for path in (*STREAMS, *OVERLAP, ENDS, EXAMPLES, PERF, TRANSFORMS)]
    return [
        *reach(30, 25),
        tests("examples_2", 2, 40, EXAMPLES),
        tests("tests_1", 1, 60, "tests/gpu", *others),
        tests("tests_2", 2, 95, "tests/gpu", *others),
        tests("tests_4", 4, 105, "tests/gpu", *others),
        tests("transforms_2", 2, 85, TRANSFORMS),
    ]


def _train(work: Path, gpus: int) -> list[Step]:
    steps = reach(30, 25)
    for n, dtype in ((1, "float32"), (2, "float32"), (2, "bfloat16")):
        device = "cuda" if gpus >= n else "cuda:0"
        options = ["--check", "--steps", "40", "--device", device, "--dtype", dtype]
        out = ["--out", str(work / f"train_{n}_{dtype}")]
        steps.append(Step(f"train_{n}_{dtype}", [str(SCRIPTS / "train.py"), *out, *options], 35 + 5 * n, ranks=n))
    checked = tests("checked_2", 2, 45, "tests/gpu/test_gpu_collectives.py")
    checked.env["PYNCCL_CHECK"] = "1"
    # Two processes take turns on a GPU, and a collective of both may take milliseconds: far fewer of them.
    overhead = [str(SCRIPTS / "bench" / "overhead.py"), "--gpu", "--rounds"]
    return [
        *steps,
        Step("hang_2", [str(HERE / "gpu_hang.py"), str(work / "hang")], 35, ranks=2),
        Step("profile_2", [str(HERE / "gpu_profile.py"), str(work / "trace.json.gz")], 40, ranks=2),
        checked,
        Step("overhead_1", [*overhead, "31", "--calls", "100"], 30, ranks=1),
        Step("overhead_2", [*overhead, "11", "--calls", "20"], 40, ranks=2),
        tests("perf_1", 1, 60, PERF),
    ]


def reach(seconds: float, seconds_each: float) -> list[Step]:
    """Do two ranks reach each other; and the settings to try, where they do not."""
    command = [str(HERE / "gpu_collectives.py")]
    first = Step(REACH, command, seconds, ranks=2, env={"NCCL_DEBUG": "INFO"})
    tries = [
        Step(f"{REACH}_{name}", command, seconds_each, 2, {"NCCL_DEBUG": "INFO", **remedy}, remedy)
        for name, remedy in REMEDIES.items()
    ]
    return [first, *tries]


def tests(name: str, ranks: int, limit: float, *what: str) -> Step:
    """Tests on so many ranks. With several, the first failure ends a rank: the others are no longer where it is."""
    command = ["-m", "pytest", *what, "-v", "--tb=short", "-p", "no:cacheprovider", "-p", "gpu_record"]
    command += ["-o", f"faulthandler_timeout={STACKS_AFTER}"]
    if importlib.util.find_spec("pytest_timeout"):  # by a thread: a signal waits for the end of a call of C
        seconds = COMPILE_SECONDS if TRANSFORMS in what else TEST_SECONDS
        command += [f"--timeout={seconds}", "--timeout-method=thread"]
    else:  # `timeout` of pyproject.toml is then an option that pytest does not know, and --strict-config refuses it
        command += ["-o", "addopts=-ra --strict-markers"]
    return Step(name, [*command, *["-x"] * (ranks > 1)], limit, ranks=ranks)


def names() -> list[str]:
    """Of all steps, in the order of the calls."""
    return list(dict.fromkeys(step.name for call in CALLS for step in plan(call, Path(), 1)))


def selected(what: list[str], work: Path, gpus: int) -> list[tuple[str, list[Step]]]:
    """(name of the call, its steps) for what was asked for: calls, or names of single steps, which are one call.

    A single step brings along what has to come before it."""
    calls = [name for name in CALLS if name in what] if what else list(CALLS)
    found = [(call, plan(call, work, gpus)) for call in calls]
    single = [name for name in what if name not in CALLS]
    if single:
        every = {step.name: step for call in reversed(CALLS) for step in plan(call, work, gpus)}
        steps = [step for step in every.values() if step.name in (*FIRST, *single)]
        if any(step.ranks > gpus and not step.name.startswith(REACH) for step in steps):
            steps += [step for step in reach(30, 25) if step.name not in single]
        order = ["", *names()]
        found.append(("steps", sorted(steps, key=lambda step: order.index(step.name))))
    return found


def listing(gpus: int = 1) -> str:
    """What --list prints."""
    lines = []
    for call in CALLS:
        steps = plan(call, Path("WORK"), gpus)
        total = sum(step.limit for step in steps if not step.remedy)
        lines.append(f"{call}: limits of {total:g} s in all, without {REACH}_*, which run where {REACH} fails")
        for step in steps:
            shown = " ".join([*(f"{name}={value}" for name, value in step.env.items()), "python", *step.command])
            lines.append(f"  {step.name:22s}{step.limit:5g} s  {step.ranks or 1} x {shown}")
    return "\n".join(lines)
