"""`python -m pynccl perf`: columns and arithmetic, checked results, exit codes and invalid options."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from pynccl import Communicator
from pynccl.__main__ import main
from pynccl.comm.collectives import bus_factor
from pynccl.tools import perf
from pynccl.tools.perf import report
from pynccl.tools.perf.cases import (
    NEVER_IN_PLACE,
    case,
)
from pynccl.tools.perf.measure import Row, Side, connect_torch, disconnect_torch, measure_case, reduce_over_ranks
from pynccl.tools.perf.options import COLLECTIVES, REDUCING, configure, problem, size, sizes

SMALL = ["-b", "8", "-e", "4K", "-f", "8", "-n", "4", "-w", "1"]
ONCE = ["-n", "1", "-w", "0", "-c", "1"]


def parse(*words: str, ranks: int = 1) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    options = parser.parse_args(list(words))
    assert problem(options, ranks) == ""
    return options


# ------------------------------------------------------------------------------------------------ sizes and factors


def test_size_units_and_size_sequences() -> None:
    texts = {"8": 8, "4K": 4096, "4k": 4096, "128M": 128 << 20, "1G": 1 << 30, "2MB": 2 << 20, "3T": 3 << 40}
    assert {text: size(text) for text in texts} == texts
    for text in ("", "0", "-8", "K", "8X", "1e3", "4 K K", "1.5K", "٣"):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
            size(text)
    assert [sizes(8, 64, 2), sizes(8, 63, 2), sizes(5, 5, 4)] == [[8, 16, 32, 64], [8, 16, 32], [5]]
    options = parse("all_reduce")  # nccl-tests' defaults
    assert (options.minbytes, options.maxbytes, options.stepfactor, options.check) == (32 << 20, 32 << 20, 2, 1)
    assert [parse("reduce", "-d", name).datatype for name in ("float16", "float32", "float64")] == [
        *("half", "float", "double")
    ]
    assert (parse("reduce", "-e", "1K").minbytes, parse("reduce", "-b", "1G").maxbytes) == (1024, 1 << 30)


def test_count_size_and_bus_factor_of_a_row() -> None:
    for words, count, nbytes in (
        (("all_reduce", "half", "sum", 0, 3, 9), 4, 8),
        (("all_gather", "float", "sum", 0, 3, 1000), 80, 960),  # 333 bytes per block, aligned to 16 bytes
        (("reduce_scatter", "double", "sum", 0, 3, 8), 1, 24),
    ):
        row = case(*words)  # type: ignore[arg-type]
        assert (row.count, row.nbytes) == (count, nbytes), words
    constant, gathered, reduced = [1, 1, 1, 1], [0, 1 / 2, 2 / 3, 7 / 8], [0, 1, 4 / 3, 1.75]
    expected = {"all_reduce": reduced, "broadcast": constant, "reduce": constant, "send_recv": constant}
    for collective in COLLECTIVES:
        found = [bus_factor(collective, n) for n in (1, 2, 3, 8)]
        assert found == pytest.approx(expected.get(collective, gathered)), collective
    row_of_times = Row(case("all_reduce", "float", "sum", 0, 4, 1 << 20), [Side([1e-3], 1e-3, 3, None), None])
    cells = report.row_line(row_of_times, False).split()
    assert cells[:8] == ["1048576", "262144", "float", "sum", "-1", "1000.0", "1.05", "1.57"]
    assert cells[8:] == ["3", "N/A", "N/A", "N/A", "N/A", "WRONG"]


@contextlib.contextmanager
def torch_store(comm: Communicator) -> Any:
    """Provide a store at MASTER_PORT, as torchrun does, for torch's process group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    port = reduce_over_ranks(comm, [float(store.port if store else 0)], "max")[0]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(int(port))}
    yield
    comm.barrier()


def run_every_collective(comm: Communicator) -> list[Any]:
    """Return wrong or missing results, out of place and in place; one dtype is compared with torch."""
    bad: list[Any] = []
    with torch_store(comm):
        connect_torch(comm)
        for collective in COLLECTIVES:
            for kind, op in (("float", "sum"), ("bfloat16", "avg"), ("uint8", "max"), ("int64", "prod")):
                compare = kind == "float"
                options = parse(collective, *ONCE, *(["--compare", "torch"] if compare else []))
                for nbytes in (1, 40_000):
                    used_op = op if collective in REDUCING else "sum"
                    row = case(collective, kind, used_op, comm.size - 1, comm.size, nbytes)
                    found = measure_case(comm, row, options)
                    expected_wrong = [0, None if collective in NEVER_IN_PLACE else 0]
                    in_place = collective in ("all_reduce", "broadcast", "reduce")  # torch runs the others out of place
                    compared = [bool(side and side.torch) for side in found.sides]
                    if [side and side.wrong for side in found.sides] != expected_wrong:
                        bad.append((row, found))
                    if compared != [compare and not in_place, compare and in_place]:
                        bad.append((row, compared))
        disconnect_torch()
    values = [float(comm.rank), 10.0 - comm.rank]
    n = comm.size - 1
    if [reduce_over_ranks(comm, values, how) for how in ("avg", "min", "max")] != [
        [n / 2, 10 - n / 2],
        [0, 10 - n],
        [n, 10],
    ]:
        bad.append("reduce_over_ranks")
    return bad


def test_every_collective_is_right_in_and_out_of_place_and_with_torch(ranks: RankPool) -> None:
    assert ranks.run(3, run_every_collective, timeout=110) == [[]] * 3


def run_with_fault(comm: Communicator, collective: str, wrong_rank: int) -> tuple[int, str]:
    """Return the exit code and the output when the last element of one rank is wrong."""
    original = getattr(Communicator, collective)

    def broken(self: Communicator, send: Any, recv: Any = None, *args: Any, **options: Any) -> Any:
        done = original(self, send, recv, *args, **options)
        if recv is not None and recv.dtype == torch.float32 and self.rank == wrong_rank:
            recv[-1] += 1
        return done

    setattr(Communicator, collective, broken)
    try:
        options = parse(collective, *SMALL, "-c", "1", ranks=comm.size)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            return perf.run_on(comm, options), output.getvalue()
    finally:
        setattr(Communicator, collective, original)


@pytest.mark.parametrize("collective", ["all_reduce", "all_to_all"])
def test_a_wrong_element_of_one_rank_fails_on_all(ranks: RankPool, collective: str) -> None:
    (code, text), other = ranks.run(2, run_with_fault, collective, 1)
    assert code == 1 and other == (1, "")  # only rank 0 prints
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(rows) >= 3 and all(line.endswith("  WRONG") for line in rows)
    places = 1 if collective in NEVER_IN_PLACE else 2
    assert f"# Out of bounds values : {places * len(rows)} FAILED" in text


def run_with_json(comm: Communicator, file: str) -> tuple[int, str]:
    options = parse("all_reduce", *SMALL, "--compare", "torch", "--json", file, "--min-busbw", "0", ranks=comm.size)
    with torch_store(comm), contextlib.redirect_stdout(io.StringIO()) as output:
        return perf.run_on(comm, options), output.getvalue()


def test_a_run_prints_a_table_and_writes_its_values_as_json(ranks: RankPool, tmp_path: Path) -> None:
    (code, text), other = ranks.run(2, run_with_json, str(tmp_path / "perf.json"))
    assert (code, other) == (0, (0, ""))
    side = r" +time +algbw +busbw +#wrong +torch +torch/"
    for line in (
        r"# pynccl perf all_reduce: 2 ranks on 1 node",
        r"# data        -c 1: compared with a local reference",
        r"# compare     torch.distributed with gloo, alternating",
        rf"# +size +count +type +redop +root{side}{side}",
        r"# Out of bounds values : 0 OK",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert [row[:2] for row in rows] == [[str(size), str(size // 4)] for size in (8, 64, 512, 4096)]
    found = json.loads((tmp_path / "perf.json").read_text())
    assert (len(found["ranks"]), found["nodes"], found["summary"]["wrong"]) == (2, 1, 0)
    busses = []
    for row in found["rows"]:
        for place in ("out_of_place", "in_place"):
            values = row[place]
            assert values["algbw_GBps"] == pytest.approx(row["size"] / values["time_s"] / 1e9)
            assert values["busbw_GBps"] == pytest.approx(values["algbw_GBps"])  # 2 (n-1) / n is 1 for two ranks
            assert len(values["iterations_s"]) == 4 and min(values["iterations_s"]) > 0
            assert (values["torch_time_s"] is None) == (place == "out_of_place")
            busses.append(values["busbw_GBps"])
    assert found["summary"]["avg_busbw_GBps"] == pytest.approx(sum(busses) / len(busses))


INVALID = {
    "allreduce": (2, "invalid choice: 'allreduce'; did you mean all_reduce?\n"),
    "all_gather -d flaot": (2, "invalid choice: 'flaot'; did you mean float?\n"),
    "nope": (2, "invalid choice: 'nope' (choose from "),
    "all_reduce -b 8X": (2, "'8X': expected bytes, 1 or more, such as 8, 4K, 128M or 1G"),
    "all_reduce -b 8 -e 4": (2, "error: -e 4 is less than -b 8; pass sizes"),
    "broadcast -o max": (2, "error: -o max: broadcast has no reduction operator; omit -o"),
    "broadcast -r 1": (2, "error: -r 1: expected a rank in 0..0"),
    "all_reduce -b 900000T -e 900000T": (1, "bytes of all_reduce: "),
}


@pytest.mark.parametrize("words", INVALID)
def test_invalid_options_print_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found: Any = main(["perf", *words.split()])
    except SystemExit as exit_error:  # argparse's
        found = exit_error.code
    code, message = INVALID[words]
    output = capsys.readouterr()
    assert found == code and len(output.err.splitlines()) == 1
    assert output.err.startswith("python -m pynccl perf: ") and message in output.err
    assert not output.out or code == 1
