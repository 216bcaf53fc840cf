"""Every PYNCCL_ variable: what makes no sense is an error that names the variable, its value, and what it takes."""

from __future__ import annotations

import concurrent.futures
import re
from pathlib import Path

from forks import Ended, Forks

ROOT = Path(__file__).resolve().parents[2]
# Variable -> (values that make no sense, what the error says that it takes).
NONSENSE = {
    "PYNCCL_CHECK": (("yes please",), "1, .* or 0"),
    "PYNCCL_HOST_INIT_TIMEOUT": (("nan",), "seconds above 0"),
    "PYNCCL_HOST_LINK": (("fast", "bandwidth=0GB/s"), "latency=50us,bandwidth=1GB/s"),
    "PYNCCL_HOST_TIMEOUT": (("soon", "0"), "seconds above 0"),
    "PYNCCL_HOST_TRANSPORT": (("pigeon",), "auto, shm or sockets"),
    "PYNCCL_HOST_VERSION": (("9.9.9",), "from 2.18 to 2"),
    "PYNCCL_JOB_KEY": (("short",), "16 or more"),  # what the error says of it, not its value, which is a secret
    "PYNCCL_LIBRARY": (("Host", "/etc/hostname"), "the path of a libnccl.so.2, .* 'host'"),
    "PYNCCL_WATCH": (("maybe",), "on, off"),
    "PYNCCL_WATCH_ACTION": (("panic",), "report, raise"),
    "PYNCCL_WATCH_TIMEOUT": (("-1", "nan"), "seconds, such as 60; 0 to never look"),
}
ANY = {"PYNCCL_WATCH_DIR"}  # a folder that cannot be written to is as good as none
CASES = [(name, value) for name, (values, _) in NONSENSE.items() for value in values]
PROGRAM = """
import pynccl
from pynccl.tools import command

def main():
    with pynccl.init() as comm:
        comm.barrier()

command.run(main, "program.py")
"""


def test_every_variable_is_here() -> None:
    sources = [path for room in ("pynccl", "autograd") for path in (ROOT / room).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"\"(PYNCCL_[A-Z_]*[A-Z])\"", path.read_text())}
    assert named == NONSENSE.keys() | ANY


def test_nonsense_is_named_with_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {"PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": str(tmp_path / "watch")}

    def run(case: tuple[str, str]) -> list[Ended]:
        """Of two ranks."""
        return forks.run((str(tmp_path / "program.py"),), 2, tmp_path, {**environment, case[0]: case[1]})

    with Forks() as forks, concurrent.futures.ThreadPoolExecutor(3) as threads:
        ended = dict(zip(CASES, threads.map(run, CASES), strict=True))
    for (name, value), both in ended.items():
        for rank, (code, out, err) in enumerate(both):
            assert code in (1, 2) and out == "", err
            assert name in err and value in err and re.search(NONSENSE[name][1], err), err
            assert err.startswith(f"program.py: rank {rank}: ") and len(err.splitlines()) <= 3, err
            assert "Traceback" not in err
