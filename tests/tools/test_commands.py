"""Every user command: help with runnable examples, exit codes and short error messages."""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Finished, Forks

from pynccl.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text()
AT_ONCE = 3  # some commands mostly wait
SECONDS = 100.0  # timeout, for a busy machine
# Other tests run these.
ELSEWHERE = {*(f"scripts/bench/{name}.py" for name in ("data_parallel", "overhead", "overlap", "scale"))}
ELSEWHERE |= {"-m pynccl hang", "scripts/recipes/hugging_face.py", "scripts/train.py", "scripts/semantics_table.py"}
ELSEWHERE |= {"scripts/recipes/ray_actors.py", "scripts/gpu/under_mps.py"}


def scripts() -> Iterator[str]:
    """Return the scripts that users launch; faults/ranks.py is internal to the campaign."""
    for folder in ("scripts", *(f"scripts/{name}" for name in ("bench", "faults", "gpu", "recipes"))):
        for path in sorted((ROOT / folder).glob("*.py")):
            if '__name__ == "__main__"' in path.read_text() and path.name != "ranks.py":
                yield path.relative_to(ROOT).as_posix()


MODULES = [f"-m pynccl {name}" for name in COMMANDS]
NAMES = [*MODULES, *scripts()]


def rows_of_the_page() -> list[tuple[str, str, str]]:
    """Return script, example and meaning of exit code 1 of each row of docs/commands.md."""
    rows = re.findall(r"^\| `((?:python|torchrun) .*?)` \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    scripts_in = [re.findall(r"-m pynccl \w+|scripts/\S+\.py", example) for example, _ in rows]
    return [(found[0], *row) for found, row in zip(scripts_in, rows, strict=True)]


def example_lines(text: str) -> list[str]:
    return [line.strip() for line in text.partition("\nexamples:\n")[2].splitlines() if line.strip()]


def environment_of(folder: Path) -> dict[str, str]:
    environment = {"PYNCCL_LIBRARY": "host", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    return {**environment, "OUT": str(folder / "out"), "PYNCCL_WATCH_DIR": str(folder / "watch")}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as server:
        yield server


@pytest.fixture(scope="module")
def threads() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as executor:
        yield executor


@pytest.fixture(scope="module")
def help_texts(
    forks: Forks, threads: concurrent.futures.Executor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Finished]:
    folder = tmp_path_factory.mktemp("help")
    commands = [(*name.split(), "--help") for name in NAMES]
    ended = threads.map(lambda words: forks.run(words, 0, folder, environment_of(folder))[0], commands)
    return dict(zip(NAMES, ended, strict=True))


def test_help_has_exit_codes_and_examples_and_docs_commands_shows_one(help_texts: dict[str, Finished]) -> None:
    rows = rows_of_the_page()
    assert sorted(name for name, _, _ in rows) == sorted(NAMES)
    of_the_page = {name: (example, fails.replace("`", "")) for name, example, fails in rows}
    for name, (code, out, err) in help_texts.items():
        assert (code, err) == (0, "") and out.startswith("usage: "), name
        flat = " ".join(out.split())
        fails = re.search(r"0 good; 1 (\w.*?); 2 .*options, files or settings that cannot work; 130 interrupted", flat)
        assert fails, name
        if name in MODULES:
            assert max(map(len, out.splitlines())) <= 80, name
        examples = example_lines(out)
        shown = name.split()[-1] if name in MODULES else name
        assert examples and all(shown in line for line in examples), name

        example, fails_there = of_the_page[name]
        assert example in [line.partition("#")[0].strip() for line in examples], name
        assert fails_there == fails[1], name


@pytest.mark.slow
def test_the_examples_in_help_texts_run(
    threads: concurrent.futures.Executor, help_texts: dict[str, Finished], tmp_path: Path
) -> None:
    def run(number: int, line: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / f"{number}"
        (folder / "out").mkdir(parents=True)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, **environment_of(folder), "PATH": path, "PYTHONPATH": str(ROOT)}
        words = [
            "bash",
            "-c",
            line.replace("scripts/", f"{ROOT}/scripts/").replace("torchrun", "torchrun --standalone"),
        ]
        return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)

    names = [name for name in NAMES if name not in ELSEWHERE]
    lines = [line for name in names for line in example_lines(help_texts[name].out) if " # long" not in line]
    for line, done in zip(lines, threads.map(run, range(len(lines)), lines), strict=True):
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


# ---------------------------------------------------------------------------------------------- options and variables

UNWRITABLE = "/proc/nowhere/x"  # not writable even for root
INVALID_OPTIONS = [
    ("-m pynccl perf", f"all_reduce --json {UNWRITABLE}"),
    ("scripts/train.py", "--nonsense"),
    ("scripts/bench/data_parallel.py", "--ranks 100000"),
    ("scripts/bench/overlap.py", "--balance fast"),
    ("scripts/bench/scale.py", "--ranks 1"),
    ("scripts/faults/campaign.py", "--only everything"),
    ("scripts/faults/fuzzer.py", "everything"),
    ("scripts/dump_nccl_abi.py", "/etc/hostname"),
    ("scripts/semantics_table.py", "--results /etc/hostname"),
    ("scripts/recipes/ddp.py", ""),  # outside a launch
]


def test_invalid_options_print_an_error(forks: Forks, threads: concurrent.futures.Executor, tmp_path: Path) -> None:
    commands = [(*name.split(), *options.split()) for name, options in INVALID_OPTIONS]
    ended = threads.map(lambda words: forks.run(words, 0, tmp_path, environment_of(tmp_path))[0], commands)
    for (name, options), (code, out, err) in zip(INVALID_OPTIONS, ended, strict=True):
        assert (code, out) == (2, ""), (name, options, err)
        lines = err.splitlines()
        prog = f"python {name}" if name in MODULES else name.rpartition("/")[2]
        assert lines[0].startswith(f"{prog}: ") and len(lines[0]) > len(prog) + 15, (name, options)
        assert all(line.startswith("  ") for line in lines[1:]), (name, options)  # further lines say what to do
        assert "Errno" not in err and "Traceback" not in err, (name, options)


# Variable -> (invalid values, pattern of the expected values in the error).
VARIABLES = {
    "PYNCCL_CHECK": (("yes please",), "1 .* or 0"),
    "PYNCCL_HOST_INIT_TIMEOUT": (("nan",), "positive number of seconds"),
    "PYNCCL_HOST_LINK": (("fast", "bandwidth=0GB/s"), "latency=50us,bandwidth=1GB/s"),
    "PYNCCL_HOST_TIMEOUT": (("soon", "0"), "positive number of seconds"),
    "PYNCCL_HOST_TRANSPORT": (("pigeon",), "auto, shm or sockets"),
    "PYNCCL_HOST_VERSION": (("9.9.9",), "from 2.18 to 2"),
    "PYNCCL_JOB_KEY": (("short",), "16 or more"),  # its value is a secret and not in the error
    "PYNCCL_LIBRARY": (("Host", "/etc/hostname"), "the path of a libnccl.so.2, .* 'host'"),
    "PYNCCL_SHARE_GPU": (("please",), "1 .* or 0"),
    "PYNCCL_WATCH": (("maybe",), "on, off"),
    "PYNCCL_WATCH_ACTION": (("panic",), "report, raise"),
    "PYNCCL_WATCH_TIMEOUT": (("-1", "nan"), "seconds, such as 60, or 0 to disable"),
}
UNCHECKED = {"PYNCCL_WATCH_DIR"}  # an unwritable folder only disables recording
PROGRAM = """
import pynccl
from pynccl.tools import command

def main():
    with pynccl.init() as comm:
        comm.barrier()

command.run(main, "program.py")
"""


def test_invalid_environment_variables_raise_with_the_expected_values(
    forks: Forks, threads: concurrent.futures.Executor, tmp_path: Path
) -> None:
    sources = [path for package in ("pynccl", "autograd") for path in (ROOT / package).rglob("*.py")]
    mentioned = {name for path in sources for name in re.findall(r"\"(PYNCCL_[A-Z_]*[A-Z])\"", path.read_text())}
    assert mentioned == VARIABLES.keys() | UNCHECKED
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(case: tuple[str, str]) -> list[Finished]:
        environment = {**environment_of(tmp_path), case[0]: case[1]}
        return forks.run((str(tmp_path / "program.py"),), 1, tmp_path, environment)

    cases = [(name, value) for name, (values, _) in VARIABLES.items() for value in values]
    for (name, value), ended in zip(cases, threads.map(run, cases), strict=True):
        for rank, (code, out, err) in enumerate(ended):
            assert code in (1, 2) and out == "" and len(err.splitlines()) <= 3, (name, err)
            assert name in err and value in err and re.search(VARIABLES[name][1], err), err
            assert err.startswith(f"program.py: rank {rank}: " if len(ended) > 1 else "program.py: "), err
