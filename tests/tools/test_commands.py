"""Every command a user runs: help with examples that run as they stand, exit codes, errors in one line, quiet ends."""

from __future__ import annotations

import concurrent.futures
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from forks import Ended, Forks

import pynccl
from pynccl.__main__ import COMMANDS
from pynccl.tools import command

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "commands.md"
AT_ONCE = 3  # examples: some of them mostly wait
SECONDS = 100.0  # of patience, on a busy machine
CODES = {0: "good", 2: "options, files or settings that cannot work", 130: "interrupted"}


def scripts() -> Iterator[str]:
    """What a user launches: files that do something when they are run. faults/ranks.py is the campaign's own."""
    for folder in ("scripts", *(f"scripts/{name}" for name in ("bench", "faults", "gpu", "recipes"))):
        for path in sorted((ROOT / folder).glob("*.py")):
            if '__name__ == "__main__"' in path.read_text() and path.name != "ranks.py":
                yield path.relative_to(ROOT).as_posix()


MODULES = [f"-m pynccl {name}" for name in COMMANDS]
NAMES = [*MODULES, *scripts()]

JOB = """import pynccl
comm = pynccl.init()
comm.barrier()
if comm.rank == 1:
    raise ValueError("this rank fails")
comm.barrier()
"""


# ---------------------------------------------------------------------------------- commands in forks of one process


# Run by tests of their own, with options as short; here it is seen that the examples' options are understood.
ELSEWHERE = {
    "scripts/bench/data_parallel.py": "test_bench_data_parallel.py",
    "scripts/bench/overhead.py": "test_bench_overhead.py",
    "scripts/bench/overlap.py": "test_bench_overlap.py",
    "scripts/bench/scale.py": "test_bench_scale.py",
    "scripts/recipes/hugging_face.py": "test_recipes.py",
    "scripts/train.py": "test_train.py",
}
GOOD_CODES = {"-m pynccl hang": {0, 1}}  # a rank has failed in the job that it looks at


class Example(NamedTuple):
    """A line of a --help, taken apart. ranks: 0 without torchrun."""

    line: str
    words: tuple[str, ...]
    ranks: int
    environment: dict[str, str]

    @property
    def long(self) -> bool:
        return " # long" in self.line


def only_parsed(example: Example) -> bool:
    return example.long or example.words[0] in ELSEWHERE


def taken_apart(line: str) -> Example:
    words = shlex.split(line, comments=True)
    environment = {}
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    ranks = 0
    if words[0] == "torchrun":
        ranks = next(int(word.partition("=")[2]) for word in words if word.startswith("--nproc-per-node="))
    first = next((i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")), 0)
    return Example(line, tuple(words[first:]), ranks, environment)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as server:
        yield server


@pytest.fixture(scope="module")
def threads() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as executor:
        yield executor


def environment_of(folder: Path) -> dict[str, str]:
    own = {"PYNCCL_LIBRARY": "host", "CUDA_VISIBLE_DEVICES": ""}
    return {**own, "OMP_NUM_THREADS": "1", "OUT": str(folder / "out"), "PYNCCL_WATCH_DIR": str(folder / "watch")}


def in_a_shell(line: str, where: Path, environment: dict[str, str]) -> Ended:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = {**os.environ, **environment, "PATH": path, "PYTHON": sys.executable}
    words = ["bash", "-c", line.replace("scripts/", f"{ROOT}/scripts/")]
    done = subprocess.run(words, cwd=where, env=shell, capture_output=True, text=True, timeout=SECONDS, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def run_all(
    forks: Forks, threads: concurrent.futures.Executor, examples: list[Example], folder: Path
) -> dict[str, concurrent.futures.Future[Ended]]:
    """Line -> how the worst of its ranks has ended, and all that rank 0 said."""

    job = folder / "job"  # that `hang` looks at
    job.mkdir()
    (job / "job.py").write_text(JOB)
    forks.run((str(job / "job.py"),), 2, job, environment_of(job))

    def one(example: Example) -> Ended:
        where = folder / f"{examples.index(example)}"
        (where / "out").mkdir(parents=True)
        (where / "out" / "tests.xml").write_text(results_of_the_tests())
        environment = {**environment_of(where), **example.environment}
        if "hang" in example.words:
            environment["PYNCCL_WATCH_DIR"] = str(job / "watch")
        if "$(" in example.line:
            return in_a_shell(example.line, where, environment)
        ranks = forks.run(example.words, example.ranks, where, environment, only_parse=only_parsed(example))
        codes = [one.code for one in ranks]
        return Ended(max(codes, key=abs), ranks[0].out, "".join(one.err for one in ranks))

    return {example.line: threads.submit(one, example) for example in examples}


# ------------------------------------------------------------------------------------------------------ --help


def module_of(name: str) -> tuple[str, ...]:
    return tuple(name.split())


@pytest.fixture(scope="module")
def helps(
    forks: Forks, threads: concurrent.futures.Executor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("help")
    environment = {**environment_of(folder), "COLUMNS": "80"}
    asked = [(*module_of(name), "--help") for name in NAMES]
    ended = threads.map(lambda words: forks.run(words, 0, folder, environment)[0], asked)
    return dict(zip(NAMES, ended, strict=True))


def examples_of(text: str) -> list[Example]:
    return [taken_apart(line.strip()) for line in text.partition("\nexamples:\n")[2].splitlines() if line.strip()]


def test_help_says_what_it_does_its_exit_codes_and_examples(helps: dict[str, Ended]) -> None:
    for name, (code, out, err) in helps.items():
        assert (code, err) == (0, ""), name
        assert out.startswith("usage: ") and len(out.splitlines()) < 90, name
        flat = " ".join(out.split())
        for number, meaning in CODES.items():
            assert f"{number} {meaning}" in flat, name
        assert re.search(r"; 1 \w+", flat), name
        examples = examples_of(out)
        assert any(not one.long for one in examples), name
        mine = name.split()[-1] if name in MODULES else name
        assert all(mine in one.words for one in examples), name


def test_the_page_of_commands_says_what_help_says(helps: dict[str, Ended]) -> None:
    for name, (_, out, _) in helps.items():
        title = f"python {name}" if name in MODULES else name
        section = re.search(rf"^### {re.escape(title)}\n\n(.*?)(?=^##|\Z)", DOCS.read_text(), re.MULTILINE | re.DOTALL)
        assert section, f"docs/commands.md has no section ### {title}"
        flat = " ".join(out.split())
        about, example, ends = section[1].strip().split("\n\n")
        assert about.lower() in flat.lower(), name
        short = [one for one in examples_of(out) if not one.long]
        assert example.strip("`") in [one.line.partition("  #")[0].rstrip() for one in short], name
        failed = re.match(r"- exit code 1: (.*)\n- writes: \S", ends)
        assert failed and f"; 1 {failed[1]}; 2 options" in flat, name


def test_the_page_of_commands_names_no_other() -> None:
    titles = re.findall(r"^### (?:python )?(.*)$", DOCS.read_text(), re.MULTILINE)
    assert sorted(titles) == sorted(NAMES)


# ------------------------------------------------------------------------------------------------------ examples


def results_of_the_tests() -> str:
    """The XML of a run of all tests, as far as pages and examples ask for it: what docs/semantics.md says passed."""
    page = (ROOT / "docs" / "semantics.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    notes = dict(re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE))
    cases = []
    for operation, *marks in rows[1:]:
        for what, mark in zip(rows[0][1:], marks, strict=True):
            skipped = "" if mark == "✓" else f"<skipped message={_quoted(notes[mark])}/>"
            told = f'<property name="operation" value={_quoted(operation)}/><property name="property" value="{what}"/>'
            cases.append(f"<testcase><properties>{told}</properties>{skipped}</testcase>")
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def _quoted(text: str) -> str:
    from xml.sax.saxutils import quoteattr

    return quoteattr(text)


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest,
    forks: Forks,
    threads: concurrent.futures.Executor,
    helps: dict[str, Ended],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, concurrent.futures.Future[Ended]]:
    """Line -> how it has ended, of the commands whose tests are run."""
    params = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {one.params.get("name") for one in params if one}
    examples = [one for name in NAMES if name in wanted for one in examples_of(helps[name].out)]
    return run_all(forks, threads, examples, tmp_path_factory.mktemp("examples"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_examples_run_as_they_stand(
    helps: dict[str, Ended], ran: dict[str, concurrent.futures.Future[Ended]], name: str
) -> None:
    for example in examples_of(helps[name].out):
        code, out, err = ran[example.line].result()
        good = {0} if only_parsed(example) else GOOD_CODES.get(name, {0})
        assert code in good, f"{example.line}\n{out}\n{err}"
        assert "Traceback" not in err


# ------------------------------------------------------------------------------------------- options and files

UNWRITABLE = "/proc/nowhere/x"  # where even root makes no file
NONSENSE = [
    ("-m pynccl doctor", "now"),
    ("-m pynccl hang", "--calls 0"),
    ("-m pynccl hang", "/nowhere"),
    ("-m pynccl perf", ""),
    ("-m pynccl perf", "allreduce"),
    ("-m pynccl perf", "all_reduce -n 0"),
    ("-m pynccl perf", f"all_reduce --json {UNWRITABLE}"),
    ("scripts/train.py", "--steps x"),
    ("scripts/train.py", f"--out {UNWRITABLE}"),
    ("scripts/train.py", "--model llama --heads 0"),
    ("scripts/train.py", "--lr -1"),
    ("scripts/train.py", "--out /etc/hostname"),
    ("scripts/timeline.py", "--out picture.txt"),
    ("scripts/bench/data_parallel.py", "--ranks 100000"),
    ("scripts/bench/data_parallel.py", "--bucket-mb 0"),
    ("scripts/bench/overlap.py", "--balance fast"),
    ("scripts/bench/parallelize.py", ""),
    ("scripts/bench/scale.py", "--timeout nan"),
    ("scripts/faults/campaign.py", "--runs 0"),
    ("scripts/faults/campaign.py", "--jobs 0"),
    ("scripts/faults/campaign.py", "--only everything"),
    ("scripts/faults/fuzzer.py", "everything"),
    ("scripts/faults/fuzzer.py", "models --ranks two"),
    ("scripts/faults/fuzzer.py", "autograd --ranks 0"),
    ("scripts/faults/fuzzer.py", "calls --timeout -1"),
    ("scripts/faults/fuzzer.py", "overlap --runs 0"),
    ("scripts/dump_nccl_abi.py", "/nowhere"),
    ("scripts/dump_nccl_abi.py", "/etc/hostname"),
    ("scripts/dump_nccl_abi.py", "/etc"),
    ("scripts/semantics_table.py", "--results /nowhere"),
    ("scripts/semantics_table.py", "--results /etc/hostname"),
    ("scripts/gpu/gpu_check.py", "everything"),
    ("scripts/gpu/gpu_check.py", "--budget 0"),
    ("scripts/recipes/ddp.py", ""),  # outside a launch
    ("scripts/recipes/clip_loss.py", ""),
    ("-m pynccl explain", "--nonsense"),
    ("scripts/train.py", "--nonsense"),
]


def test_what_cannot_work_is_said_in_a_line(forks: Forks, threads: concurrent.futures.Executor, tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    ended = threads.map(
        lambda asked: forks.run((*module_of(asked[0]), *asked[1].split()), 0, tmp_path, environment)[0], NONSENSE
    )
    for asked, (code, out, err) in zip(NONSENSE, ended, strict=True):
        assert (code, out) == (2, ""), (asked, err)
        lines = err.splitlines()
        prog = f"python {asked[0]}" if asked[0] in MODULES else asked[0].rpartition("/")[2]
        assert lines[0].startswith(f"{prog}: ") and len(lines[0]) > len(prog) + 15, asked
        assert all(line.startswith("  ") for line in lines[1:]), asked  # what to do, where it takes more than a line
        assert "Errno" not in err and "Traceback" not in err, asked


# ------------------------------------------------------------------------------------------- how a command ends


def test_each_kind_of_error_has_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    dist_error = torch.distributed.DistNetworkError("the port is in use")
    for error, code in (
        (ValueError("--x is 0"), 2),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2),
        (ImportError("matplotlib is not installed"), 2),
        (pynccl.NcclInvalidUsage("not under torchrun"), 2),
        (pynccl.NcclLibraryNotFound("no libnccl"), 2),
        (pynccl.NcclRemoteError("rank 1 is gone"), 1),
        (pynccl.NcclTimeout("rank 1 never came"), 1),
        (command.FailedError("the results differ"), 1),
        (MemoryError("too large"), 1),
        (ConnectionRefusedError("nobody listens"), 1),
        (dist_error, 1),
        (KeyboardInterrupt(), 130),
    ):

        def fails(error: BaseException = error) -> None:
            raise error

        assert command.ended(fails, "it.py") == code, error
        said = capsys.readouterr().err
        assert said.startswith("it.py: ") and len(said.splitlines()) == 1
        assert sys.last_value is error


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    def fails() -> None:
        raise KeyError("a key of the program's own")

    with pytest.raises(KeyError):
        command.ended(fails, "it.py")


def program(folder: Path, body: str) -> str:
    path = folder / "program.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    path.write_text(f"import sys, time\nfrom pynccl.tools import command\ndef main():\n{lines}\ncommand.run(main)\n")
    return str(path)


def shell(words: str, *arguments: str) -> Ended:
    done = subprocess.run(
        ["bash", "-c", words, "bash", sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def test_a_reader_who_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    many = program(tmp_path, "for i in range(100000):\n    print(i)")
    assert shell('"$1" "$2" | head -1; exit ${PIPESTATUS[0]}', many) == (1, "0\n", "")


def test_closed_output_and_a_full_disk(tmp_path: Path) -> None:
    one = program(tmp_path, "print('a line')")
    assert shell('"$1" "$2" >&-', one) == (0, "", "")
    assert shell('"$1" "$2" <&-', one) == (0, "a line\n", "")
    assert shell('"$1" "$2" 2>&-', one) == (0, "a line\n", "")
    assert shell('"$1" "$2" >/dev/full', one) == (2, "", "program.py: No space left on device\n")


def test_dev_mode_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    wrong = program(tmp_path, "raise ValueError('x is 0')")
    assert shell('"$1" "$2"', wrong) == (2, "", "program.py: x is 0\n")
    code, _, err = shell('"$1" -X dev "$2"', wrong)
    assert code == 1 and "Traceback" in err


def test_ctrl_c_is_130_and_a_line(tmp_path: Path) -> None:
    slow = program(tmp_path, "print('there', flush=True)\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, slow],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=SECONDS)[1], process.returncode) == ("program.py: interrupted\n", 130)
