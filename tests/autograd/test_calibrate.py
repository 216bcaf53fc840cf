"""The constants of a machine, measured, agreed on and kept; decisions that all ranks share; the command that plans."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool

from pynccl import Communicator, NcclInvalidUsage
from pynccl_autograd.__main__ import main
from pynccl_autograd.overlap.calibration import calibrate, known_machine, machine_of
from pynccl_autograd.overlap.config import OverlapConfig
from pynccl_autograd.overlap.decide import decide
from pynccl_autograd.overlap.machine import Machine
from pynccl_autograd.overlap.planner import Decision

calibration, decision = (sys.modules[function.__module__] for function in (calibrate, decide))

MODELLED = "latency=50us,bandwidth=60MB/s"
# What a file of two ranks may say.
TIMES = {
    "all_gather": 3e-4,
    "all_reduce": 5e-4,
    "wire": 1e-8,
    "overhead": 1e-5,
    "copy": 1e-10,
    "flop:float32": 1e-10,
    "gather": 10e-3,
    "matmul": 8e-3,
    "both": 12e-3,
}


def set_cache(folder: str) -> None:
    os.environ["PYNCCL_CACHE"] = folder


def put(comm: Communicator, times: dict[str, float]) -> Path:
    """A file with these times, as calibrate looks for it."""
    key = calibration._key(comm, socket.gethostname(), nodes=1)
    calibration._write(key, times)
    return calibration._path(key)


def as_launched(place: Communicator, port: int) -> None:
    """So that from_env makes a communicator: it has the modelled link, which the pool's has not."""
    launch = {"RANK": place.rank, "LOCAL_RANK": place.rank, "WORLD_SIZE": place.size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launch.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["PYNCCL_HOST_LINK"] = MODELLED


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


# ---------------------------------------------------------------------------------------------- calibrate


def measured_in_a_backward_pass(comm: Communicator, folder: str, port: int) -> tuple[Machine, Machine, list[str], bool]:
    """Under autocast and with gradients on, as a layer's backward pass may be; then once more, from the file."""
    set_cache(folder)
    as_launched(comm, port)
    state = torch.get_rng_state()
    found: list[Machine] = []
    x = torch.ones(3, requires_grad=True)
    with Communicator.from_env() as own, torch.autocast("cpu", dtype=torch.bfloat16):
        y = x * 2
        y.register_hook(lambda g: found.append(calibrate(own)))
        y.sum().backward()
        again = calibrate(own)
        kept = torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    return found[0], again, os.listdir(folder), kept and torch.equal(state, torch.get_rng_state())


def test_a_modelled_link_is_found_and_kept_for_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, measured_in_a_backward_pass, str(tmp_path), free_port())
    assert len({str(one[:2]) for one in found}) == 1  # to the bit: repr of a float is exact
    machine, again, files, untouched = found[0]
    assert again == machine
    assert len(files) == 1 and files[0].endswith(".json")
    assert untouched
    link, device = machine.link, machine.device
    # The link is a lower bound of the time; the rest is that of a busy machine. One step on two ranks.
    assert 0.3e8 < link.bandwidth < 0.63e8
    assert 50e-6 <= link.seconds("all_gather", 0, 2) < 5e-3
    assert list(device.flops) == ["float32"] and 1e8 < device.flops["float32"] < 1e13
    assert 0 < device.overhead < 0.1 and 1e8 < device.memory_bandwidth < 1e13
    assert (device.min_rows, device.compute_streams) == (32, 1)
    assert 0 <= device.beside <= 1


def from_files(comm: Communicator, folder: str, factors: Sequence[float]) -> Machine:
    set_cache(f"{folder}/{comm.rank}")
    put(comm, {name: value * factors[comm.rank] for name, value in TIMES.items()})
    return calibrate(comm)


def test_of_all_files_the_shortest_times_count(ranks: RankPool, tmp_path: Path) -> None:
    for machine in ranks.run(2, from_files, str(tmp_path), (1.0, 3.0)):
        # One step takes 5e-4 - 3e-4 = 200 us, which leaves 100.
        assert machine.link.hop == pytest.approx(200e-6) and machine.link.latency == pytest.approx(100e-6)
        assert machine.link.bandwidth == pytest.approx(1e8)
        assert machine.device.flops["float32"] == pytest.approx(1e10)
        assert machine.device.overhead == pytest.approx(1e-5)
        assert machine.device.memory_bandwidth == pytest.approx(1e10)
        assert machine.device.beside == pytest.approx(0.75)  # of 8 ms that could be hidden, 10 + 8 - 12 were


def with_one_file_only(comm: Communicator, folder: str) -> tuple[Machine, list[str]]:
    """Rank 0 has one that says nonsense, rank 1 cannot even make a folder."""
    set_cache(f"{folder}/{comm.rank}")
    if comm.rank == 0:
        put(comm, {name: value * 1e3 for name, value in TIMES.items()})
    else:
        Path(folder, "1").write_text("a file where the folder should be")
    machine = calibrate(comm)
    return machine, [json.loads(file.read_text())["times"] for file in Path(folder, "0").iterdir()]


def test_where_one_rank_has_no_file_all_measure(ranks: RankPool, tmp_path: Path) -> None:
    (machine, [times]), (other, _) = ranks.run(2, with_one_file_only, str(tmp_path))
    assert machine == other
    assert machine.device.flops["float32"] > 1e8  # the file said 1e7
    assert times["flop:float32"] == pytest.approx(
        1 / machine.device.flops["float32"], rel=1e-12
    )  # and was written anew


def read_of(comm: Communicator, folder: str, text: str) -> tuple[Any, Any]:
    """The file's times, and those after they were written over it."""
    set_cache(folder)
    path = put(comm, TIMES)
    path.write_text(text or path.read_text().replace('"flop:float32": 1e-10', '"flop:float32": -1.0'))
    key = calibration._key(comm, socket.gethostname(), nodes=1)
    before = calibration._read(key, ["float32"])
    calibration._write(key, TIMES)
    return before, calibration._read(key, ["float32"])


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"key": 1, "times": {}}', "\udcff", ""])
def test_a_file_that_makes_no_sense_is_as_good_as_none(ranks: RankPool, tmp_path: Path, text: str) -> None:
    for before, after in ranks.run(1, read_of, str(tmp_path), text.encode(errors="replace").decode()):
        assert before is None
        assert after == TIMES


def rate_of_more(comm: Communicator, folder: str) -> tuple[Machine, Machine, bool]:
    set_cache(folder)
    if comm.rank == 0:
        put(comm, TIMES)
        put(comm, {**TIMES, "flop:float64": 4e-10})
    comm.barrier()
    with comm.split(0, comm.rank) as own:  # nothing is known of it yet
        assert known_machine(own, "float32") is None
        first = machine_of(own)
        return first, machine_of(own, torch.float64), machine_of(own) is machine_of(own, "float64")


def test_a_communicator_is_calibrated_once_and_rates_are_added(ranks: RankPool, tmp_path: Path) -> None:
    for first, second, same in ranks.run(2, rate_of_more, str(tmp_path)):
        assert (first.device.flops, second.device.flops) == (
            {"float32": pytest.approx(1e10)},
            {"float32": pytest.approx(1e10), "float64": pytest.approx(2.5e9)},
        )
        assert first.link == second.link and same


def with_other_types(comm: Communicator, folder: str) -> None:
    set_cache(folder)
    with pytest.raises(NcclInvalidUsage, match="the ranks' dtypes differ; rank"):
        calibrate(comm, dtypes=["float32" if comm.rank else "float64"])
    with pytest.raises(ValueError, match="dtype is 'int8', expected one of float64, "):
        calibrate(comm, dtypes=["int8"])


def test_types_that_differ_are_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, with_other_types, str(tmp_path))


def on_one_rank(comm: Communicator, folder: str) -> Machine:
    set_cache(folder)
    return calibrate(comm, use_cache=False)


def test_one_rank_has_no_link(ranks: RankPool, tmp_path: Path) -> None:
    (machine,) = ranks.run(1, on_one_rank, str(tmp_path))
    assert machine.link.seconds("all_reduce", 1e9, 1) == 0.0
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- decide

AUTO = OverlapConfig()
LARGE = ("matmul_reduce_scatter", 4096, 512, 512, "float32")


def decisions(comm: Communicator, folder: str) -> list[Decision]:
    set_cache(folder)
    if comm.rank == 0:
        put(comm, TIMES)
    comm.barrier()
    patterns = ("all_gather_matmul", "matmul_all_reduce", "column_backward", "row_backward", "copy_backward")
    with comm.split(0, comm.rank) as own:
        found = [decide(own, *LARGE, AUTO), *(decide(own, one, *LARGE[1:], AUTO) for one in patterns)]
        assert decide(own, LARGE[0], 4096, 512, 512, torch.float32, OverlapConfig()) is found[0]
    return found


def test_all_ranks_decide_alike(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, decisions, str(tmp_path))
    assert found[0] == found[1]
    # 100 + 200 us and half of 4096 * 512 * 4 bytes at 1e8; 2 * 4096 * 512 * 512 / 1e10
    assert found[0][0].t_comm == pytest.approx(300e-6 + 4096 * 512 * 2 / 1e8)
    assert found[0][0].t_mm == pytest.approx(0.2147483648)
    assert {one.method for one in found[0]} <= {"slices", "ring", "bulk"}
    assert all(one.t_overlap < one.t_seq for one in found[0])


def without_the_others(comm: Communicator) -> list[Decision]:
    """Of rank 0 alone: the others do not come."""
    if comm.rank:
        return []
    off, small = OverlapConfig("off"), ("all_gather_matmul", 64, 64, 64, "float32")
    return [decide(comm, *LARGE, off), decide(comm, *small, AUTO), decide(comm, *small, AUTO)]


def test_what_is_off_or_small_needs_no_other_rank(ranks: RankPool) -> None:
    found, _ = ranks.run(2, without_the_others, timeout=10)
    assert [one.method for one in found] == ["off"] * 3
    assert "asked for" in found[0].reason
    assert found[1].reason == "5.2e+05 FLOP are fewer than 2e+07: too few to overlap"


def as_asked(comm: Communicator) -> list[tuple[str, int, int]]:
    small = (8, 64, 64, "float32")
    with comm.split(0, comm.rank) as own:
        found = [
            decide(own, "all_gather_matmul", *small, OverlapConfig("ring")),
            decide(own, "all_gather_matmul", *small, OverlapConfig("slices", chunks=64, compute_streams=2)),
            decide(own, "matmul_all_reduce", *small, OverlapConfig("exchange", chunks=5)),
            decide(own, "row_backward", *small, OverlapConfig("exchange", chunks=3)),
            decide(own, "matmul_reduce_scatter", *small, OverlapConfig("bulk", chunks=3)),
            decide(own, "matmul_reduce_scatter", *small, OverlapConfig(deterministic=True)),
        ]
        assert known_machine(own, "float32") is None
    return [(one.method, one.chunks, one.compute_streams) for one in found]


def test_what_is_given_is_kept_to_without_measuring(ranks: RankPool) -> None:
    """8 rows on 2 ranks are cut into 4 slices at most."""
    expected = [("ring", 2, 1), ("slices", 4, 2), ("exchange", 5, 1), ("slices", 3, 1), ("bulk", 1, 1)]
    for found in ranks.run(2, as_asked):
        assert found == [*expected, ("exchange", 1, 1)]


DISAGREEMENTS = {
    "chunks": [(LARGE, OverlapConfig("slices", chunks=2)), (LARGE, OverlapConfig("slices", chunks=4))],
    "method": [(LARGE, OverlapConfig("ring")), (LARGE, OverlapConfig("exchange", chunks=2))],
    "a plan to be made": [(LARGE, AUTO), (LARGE, OverlapConfig("bulk"))],
    "plans": [(LARGE, AUTO), (LARGE, OverlapConfig(num_comm_ctas=4))],
    "rows": [(LARGE, AUTO), (("matmul_reduce_scatter", 8192, 512, 512, "float32"), AUTO)],
    "pattern": [(LARGE, AUTO), (("row_backward", *LARGE[1:]), AUTO)],
}


def disagreed(comm: Communicator, asked: Sequence[tuple[Any, OverlapConfig]], checking: bool) -> str:
    """With checking, the ranks agree the first time and only then differ."""
    os.environ["PYNCCL_CHECK"] = str(int(checking))
    (sizes, config), with_config = asked[comm.rank], OverlapConfig("ring")
    with comm.split(0, comm.rank) as own:
        if checking:
            decide(own, *LARGE, with_config)
            if comm.rank:
                sizes, config = LARGE, with_config  # decided already; not so on rank 0
        with pytest.raises(NcclInvalidUsage) as caught:
            decide(own, *sizes, config)
        assert own.all_reduce(torch.ones(1)).item() == 2.0  # it can still be used
        assert decide(own, *LARGE, OverlapConfig("bulk")).method == "bulk"
    return str(caught.value)


@pytest.mark.parametrize("of", DISAGREEMENTS)
def test_ranks_that_would_cut_differently_are_an_error_on_all(ranks: RankPool, of: str) -> None:
    first, second = ranks.run(2, disagreed, DISAGREEMENTS[of], False)
    assert first == second
    assert "would not overlap alike" in first
    lines = first.splitlines()
    assert lines[1].startswith("  rank 0: ") and lines[2].startswith("  rank 1: ") and lines[1][10:] != lines[2][10:]
    if of == "chunks":
        assert "m=4096, n=512, k=512, float32: slices in 2," in lines[1] and ": slices in 4," in lines[2]


def test_with_pynccl_check_every_call_is_compared(ranks: RankPool) -> None:
    first, second = ranks.run(2, disagreed, DISAGREEMENTS["chunks"], True)
    assert first == second and "rank 1: matmul_reduce_scatter" in first and "a ring of 2 ranks" in first


def in_a_capture(comm: Communicator, folder: str) -> list[Decision]:
    """Rank 0 alone decides as in the capture of a CUDA graph, for which there has to be a GPU: before and after it has
    calibrated with the other."""
    set_cache(folder)
    if comm.rank == 0:
        put(comm, TIMES)
    comm.barrier()
    configs = [AUTO, OverlapConfig(deterministic=True), OverlapConfig("slices", chunks=3), OverlapConfig("slices")]
    found = []
    with comm.split(0, comm.rank) as own, pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            if comm.rank == 0:
                patch.setattr(decision, "_captures", lambda comm: True)
                found += [decide(own, *LARGE, config) for config in configs]
                patch.undo()
            machine_of(own)
        known = decide(own, *LARGE, AUTO)
        patch.setattr(decision, "_captures", lambda comm: True)
        assert decide(own, *LARGE, AUTO) is known
    return found


def test_in_a_capture_nothing_is_measured_or_compared(ranks: RankPool, tmp_path: Path) -> None:
    found, _ = ranks.run(2, in_a_capture, str(tmp_path), timeout=15)
    before, after = found[:4], found[4:]
    assert [(one.method, one.chunks) for one in before] == [("off", 1), ("exchange", 1), ("slices", 3), ("slices", 1)]
    assert before[0].reason == "not calibrated before the capture: run one step first"
    assert after[0].method != "off" and after[0].t_overlap < after[0].t_seq
    assert [one.method for one in after[1:]] == ["exchange", "slices", "slices"]
    assert after[3].chunks > 1


# ---------------------------------------------------------------------------------------------- the command

PLAN = ["plan", "--model", "llama-70b", "--tp", "8", "--tokens", "8192"]


def test_the_table_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes of one rank of eight by hand: 64 heads of 128 and 2 * 8 of keys and values, an MLP of 28672."""
    assert main(PLAN) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    tables = text.split("\n\n")
    assert [one.partition(":")[0] for one in tables] == ["nvlink", "infiniband", "ethernet"]
    rows = [line.split() for line in tables[0].splitlines()[2:10]]
    assert [row[:3] for row in rows[:4]] == [
        ["qkv", "forward", "8192x1280x8192"],
        ["proj", "forward", "8192x8192x1024"],
        ["fc1", "forward", "8192x7168x8192"],
        ["fc2", "forward", "8192x8192x3584"],
    ]
    assert {row[1] for row in rows[4:]} == {"backward"}
    # 7/8 of 8192 * 8192 * 2 bytes at 370e9 and 8.4 + 7 * 3.4 us; 2 * 8192 * 1280 * 8192 / 7e14
    assert [float(cell) for cell in rows[0][3:6]] == pytest.approx([349.6, 245.4, 595.0], abs=0.06)
    block, step = (line.split() for line in tables[0].splitlines()[10:12])
    assert float(block[1]) == pytest.approx(8 * 349.6, rel=1e-3)
    assert float(step[3]) == pytest.approx(80 * 8 * 349.6, rel=1e-3)
    declined = [line for line in tables[2].splitlines() if line.startswith("  proj forward is off: ")]
    assert len(declined) == 1


def test_json_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--link", "infiniband", "--device", "h200", "--dtype", "float16", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["link"]["name"], found["device"]["name"], found["model"]["layers"]) == ("infiniband", "h200", 80)
    assert len(found["passes"]) == 8
    for name in ("t_comm", "t_mm", "t_seq", "t_overlap"):
        assert found["totals"][name] == pytest.approx(sum(one[name] for one in found["passes"]))
        assert found["totals"][f"step_{name}"] == pytest.approx(80 * found["totals"][name])
    assert all(one["exposed"] == one["t_overlap"] - one["t_mm"] for one in found["passes"])


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden", "1024", "--ffn", "4096", "--heads", "16", "--layers", "2"]
    assert main(["plan", *sizes, "--tp", "4", "--tokens", "4096", "--link", "nvlink"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:6]
    assert [row.split()[2] for row in rows] == ["4096x768x1024", "4096x1024x256", "4096x2048x1024", "4096x1024x1024"]
    assert main(["plan", "--model", "gpt-3-175b", "--tp", "8", "--tokens", "4096", "--link", "nvlink"]) == 0
    assert "4096x4608x12288" in capsys.readouterr().out  # its heads share no keys: 3 * 12288 / 8


WRONG_USAGE = {
    "heads is 64, not divisible by tp = 3": [*PLAN[:3], "--tp", "3", "--tokens", "9"],
    "kv_heads is 8, not divisible by tp = 16": [*PLAN[:3], "--tp", "16", "--tokens", "8192"],
    "--tokens is 8190, not divisible by tp = 8": [*PLAN[:6], "8190"],
    "argument --tp: '0': expected a whole number, 1 or more": [*PLAN[:3], "--tp", "0", "--tokens", "8192"],
    "argument --model: invalid choice: 'llama'": ["plan", "--model", "llama", "--tp", "8", "--tokens", "8192"],
    "--hidden, --ffn, --heads, --layers missing": ["plan", "--tp", "8", "--tokens", "8192"],
    "hidden is 8192, not divisible by 24 heads": [*PLAN, "--heads", "24"],
    "--tp missing": [*PLAN[:3], "--tokens", "8192"],
    "the rate of float64 is not known": [*PLAN, "--dtype", "float64"],
    "--calibrated is for torchrun": [*PLAN, "--calibrated"],
    "leave out --link and --device": [*PLAN, "--calibrated", "--device", "h100"],
    "invalid choice: 'plam'": ["plam"],
}


@pytest.mark.parametrize("message", WRONG_USAGE)
def test_wrong_usage_is_one_line(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(WRONG_USAGE[message])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert message in said.err
    assert said.err.count("\n") == 1


def planned_by(place: Communicator, port: int, folder: str, sizes: Sequence[str]) -> tuple[int, str]:
    """What the command prints where torchrun has started it."""
    as_launched(place, port)
    set_cache(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["plan", "--calibrated", *sizes])
    return code, printed.getvalue()


def test_a_launch_plans_by_its_own_machine(ranks: RankPool, tmp_path: Path) -> None:
    """One table, from rank 0; the host library's own estimate is that of the modelled link: 50 us and half of
    1024 * 512 * 4 bytes at 60 MB/s."""
    sizes = ["--hidden", "512", "--ffn", "1024", "--heads", "8", "--layers", "2", "--tokens", "1024"]
    (code, text), other = ranks.run(2, planned_by, free_port(), str(tmp_path), sizes)
    assert (code, other) == (0, (0, ""))
    head, names, *rows = text.splitlines()
    assert head.startswith("measured: ") and "cpu" in head
    assert " T_comm     NCCL     T_mm " in names
    assert [row.split()[2] for row in rows[:2]] == ["1024x768x512", "1024x512x256"]
    for row in rows[:8]:
        assert float(row.split()[4]) == pytest.approx(50 + 1024 * 512 * 4 / 2 / 60, rel=1e-3)
    assert len(list(tmp_path.iterdir())) == 1
