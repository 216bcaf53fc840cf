"""`python -m pynccl hang` on dumps of torch's flight recorder: of gloo, in the format of NCCL, and damaged ones."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hung_jobs import Printed, missing, printed, run, save_records
from processes import wait_for
from ranks import HOST, Place, RankPool

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults.torch_dumps import FAULTS, PREFIX, Entry, Rank, dump, make

from pynccl.tools.hang import jobs
from pynccl.watch.records import COMPLETED, ISSUED, CallRecord, ProcessRecord

__all__ = ["printed"]
SIZE = 3


def verdict(printed: Printed, *places: Path) -> tuple[int, str]:
    """Return the exit code and the first sentence."""
    code = run("--json", *map(str, places))
    return code, json.loads(printed()[0])["verdict"]["sentence"]


def read(*places: Path) -> list[ProcessRecord]:
    found, problems = jobs.read([str(place) for place in places])
    assert problems == [] and len(found) == 1
    return sorted(found[0].processes, key=lambda process: process.rank)


def written(folder: Path, ranks: list[Rank], version: str = "2.10") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        (folder / f"{PREFIX}{rank.rank}").write_bytes(pickle.dumps(dump(rank.entries, version), 2))
    return folder


def four() -> list[Rank]:
    return [Rank(number) for number in range(4)]


# ---------------------------------------------------------------------------------------------- real jobs on gloo


def gloo_job(place: Place, folder: Path) -> None:
    """Dump a job twice: when all calls are done, and while all ranks but 1 wait in a call."""
    import torch
    from torch import distributed as dist

    c10d: Any = torch._C._distributed_c10d

    def save(when: str) -> None:
        for name, data in (("", c10d._dump_fr_trace()), (".json", c10d._dump_fr_trace_json())):
            path = folder / f"{when}{name}" / f"trace_{place.rank}{name}"
            path.with_suffix(".new").write_bytes(data)
            path.with_suffix(".new").rename(path)

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=place.rank, world_size=place.size)
    tp = dist.new_group([0, 2], group_desc="tp")
    tensor, output = torch.ones(8), torch.empty(8 * SIZE)
    dist.all_reduce(tensor)
    dist.all_gather(list(output.chunk(SIZE)), tensor)
    if place.rank != 1:
        dist.broadcast(tensor, 0, group=tp)
    dist.barrier()
    # The thread that ran the call marks it as retired a moment later.
    wait_for(lambda: all(entry["retired"] for entry in json.loads(c10d._dump_fr_trace_json())["entries"]))
    save("ended")
    work = dist.all_reduce(tensor, async_op=True) if place.rank != 1 else None  # the call that rank 1 leaves out
    save("waits")
    wait_for(lambda: len(list((folder / "waits").glob("*_?"))) == SIZE)
    work = work or dist.all_reduce(tensor, async_op=True)
    work.wait()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("gloo")
    for name in ("ended", "ended.json", "waits", "waits.json"):
        (folder / name).mkdir()
    pool = RankPool({**HOST, "TORCH_FR_BUFFER_SIZE": "2000"}, communicators=False)
    try:
        pool.run(SIZE, gloo_job, folder)
    finally:
        pool.close()
    yield folder


def later(folder: Path, seconds: float) -> Path:
    """Set the time of the dumps in a folder: so long after they were written."""
    for path in folder.iterdir():
        os.utime(path, (time.time() + seconds,) * 2)
    return folder


def test_the_calls_of_gloo_are_read_from_pickle_and_json(gloo: Path) -> None:
    for name in ("ended", "ended.json"):
        processes = read(gloo / name)
        assert [process.rank for process in processes] == [0, 1, 2]
        default = next(comm for comm in processes[1].comms if comm.name == "default_pg")
        expected = [("all_reduce", 8, "FLOAT32"), ("all_gather", 8, "FLOAT32"), ("barrier", -1, "")]
        assert [(call.operation, call.count, call.dtype) for call in default.calls] == expected
        assert [call.number for call in default.calls] == [1, 2, 3]
        assert (default.entered, default.completed) == (3, 3)
        tp = [[comm.ranks for comm in process.comms if comm.name == "tp"] for process in processes]
        assert tp == [[[0, 2]], [], [[0, 2]]]
    line = read(gloo / "ended")[1].comms[0].calls[0].site
    text = Path(__file__).read_text().splitlines()[int(line.rpartition(":")[2]) - 1]
    assert line.startswith(__file__) and text.strip() == "dist.all_reduce(tensor)"


def test_a_rank_that_did_not_make_a_call_of_gloo_is_named(gloo: Path, printed: Printed) -> None:
    for name in ("waits", "waits.json"):
        code, sentence = verdict(printed, later(gloo / name, 60))
        assert code == 1 and sentence.startswith("rank 1 never entered all_reduce #4 (comm 'default_pg', 3 ranks, ")
        assert sentence.endswith("s there.") and "; 2 ranks have waited 6" in sentence  # 60 s, and what passed before
    assert run("--json", str(gloo / "waits")) == 1
    assert len(json.loads(printed()[0])["verdict"]["processes"]) == 1
    assert run("--calls", "9", str(gloo / "waits")) == 1
    text = printed()[0]
    assert "\n\ntrace: 3 dumps, the last of " in text and re.search(
        r"^1 +- +unknown +3 +3 +done barrier #3", text, re.M
    )
    assert "rank 0, waiting, as of 6" in text and "\n\nrank 1, as of 6" in text
    assert "rank 1: last completed #3; its last call was barrier #3 at test_torch_dumps.py:" in text
    assert (
        "pid -" not in text and "test_torch_dumps.py" in text and "distributed_c10d.py" not in text.split("rank 0")[0]
    )


def test_a_running_or_finished_job_is_no_alarm(gloo: Path, printed: Printed) -> None:
    for place in (later(gloo / "ended", 60), later(gloo / "ended.json", 60), later(gloo / "waits", 3)):
        assert verdict(printed, place)[0] == 0, place


def test_a_missing_dump_is_named_and_a_folder_may_have_our_records_too(
    gloo: Path, printed: Printed, tmp_path: Path
) -> None:
    later(gloo / "waits", 60)
    dumps = [gloo / "waits" / f"trace_{rank}" for rank in (0, 2)]
    code, sentence = verdict(printed, *dumps)
    assert code == 1 and sentence.startswith("no dump of rank 1 was given (")
    for path in dumps:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_records(tmp_path / "train.json", missing(4))
    found, problems = jobs.read([str(tmp_path)])
    assert sorted((job.name, len(job.processes)) for job in found) == [("trace", 2), ("train", 4)] and not problems


# ---------------------------------------------------------------------------------------------- NCCL's format


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.gloo])
def test_the_verdict_on_a_fault(name: str, tmp_path: Path, printed: Printed) -> None:
    make(name, tmp_path / name)
    assert FAULTS[name].expected in verdict(printed, tmp_path / name)[1]


@pytest.mark.parametrize("version", [f"2.{minor}" for minor in range(4, 11)])
def test_each_version_of_the_format_is_read(version: str, tmp_path: Path, printed: Printed) -> None:
    ranks = four()
    for rank in ranks:
        rank.call("all_reduce")
        if rank.rank < 2:
            rank.batch("send 0->1" if rank.rank == 0 else "recv 1<-0")
            for entry in rank.entries[1:] if version == "2.4" else ():
                entry["collective_seq_id"] += 1
                rank._counts["0"]["collective_seq_id"] = 2
        rank.call("_all_gather_base")
        if rank.rank != 3:
            rank.call("all_reduce_barrier", hangs=True)
    code, sentence = verdict(printed, written(tmp_path, ranks, version))
    assert code == 1 and sentence.startswith("rank 3 never entered barrier #3 (comm 'default_pg', 4 ranks, test_torch")
    assert sentence.endswith("3 ranks have waited 30.0 s there.")


CALLS = {
    "nccl:_all_gather_base": ("all_gather", 8),
    "nccl:all_gather_into_tensor_coalesced": ("all_gather", 8),
    "nccl:ALLGATHER": ("all_gather", 8),
    "nccl:all_gather_v": ("all_gather", -1),
    "nccl:_reduce_scatter_base": ("reduce_scatter", 4),
    "nccl:reduce_scatter_tensor_coalesced": ("reduce_scatter", 4),
    "nccl:reduce_scatter_single": ("reduce_scatter", 4),
    "nccl:allreduce_coalesced": ("all_reduce", 8),
    "nccl:all_reduce_barrier": ("barrier", -1),
    "nccl:ALLTOALL_BASE": ("all_to_all", -1),
    "nccl:all_to_all_v_single": ("all_to_all", -1),
    "nccl:_broadcast_oop": ("broadcast", 4),
    "nccl:_reduce_oop": ("reduce", 8),
    "nccl:scatter": ("scatter", 4),
    "gloo:gather": ("gather", 8),
    "": ("call", 8),
}


def entry(name: str = "nccl:all_reduce", **changes: Any) -> Entry:
    rank = Rank(0)
    rank.call("all_reduce", hangs=True)
    return {**rank.entries[0], "profiling_name": name, **changes}


def read_call(folder: Path, *entries: Entry) -> list[CallRecord]:
    (folder / "trace_0").write_bytes(pickle.dumps(dump(list(entries)), 2))
    return read(folder)[0].comms[0].calls


@pytest.mark.parametrize("name", CALLS)
def test_operations_have_our_names_and_counts(name: str, tmp_path: Path) -> None:
    (call,) = read_call(tmp_path, entry(name, input_sizes=[[4], [2, 2]], output_sizes=[[4]]))
    assert (call.operation, call.count) == CALLS[name]
    assert call.dtype == ("FLOAT32" if call.count >= 0 else "")


def test_messages_have_a_peer_and_no_number(tmp_path: Path) -> None:
    for name, text in (("send", "nccl:send 0->3"), ("recv", "nccl:recv 0<-3")):
        (call,) = read_call(tmp_path, entry(text, is_p2p=True, p2p_seq_id=1, input_dtypes=["BFloat16"]))
        assert (call.operation, call.peer, call.number, call.count) == (name, 3, 0, 8)
        assert call.dtype == ("BFLOAT16" if name == "send" else "FLOAT32")


def test_the_state_of_nccl_is_in_its_entry_and_that_of_gloo_is_whether_it_is_retired(tmp_path: Path) -> None:
    for name, state, retired, expected in (
        ("nccl:all_reduce", "scheduled", True, ISSUED),  # it has timed out
        ("nccl:all_reduce", "started", False, ISSUED),
        ("nccl:all_reduce", "completed", False, COMPLETED),
        ("gloo:all_reduce", "scheduled", True, COMPLETED),
        ("gloo:all_reduce", "scheduled", False, ISSUED),
    ):
        (call,) = read_call(tmp_path, entry(name, state=state, retired=retired))
        assert call.state == expected


def test_the_line_of_a_call_is_the_users(tmp_path: Path) -> None:
    def frame(file: str) -> dict[str, Any]:
        return {"filename": file, "line": 7, "name": "f"}

    for file in (
        "/env/lib/python3.12/site-packages/torch/optim/optimizer.py",
        "/home/me/pytorch/torch/distributed/distributed_c10d.py",
        "/env/lib/python3.12/site-packages/typing_extensions.py",
        "/pytorch/torch/csrc/distributed/c10d/init.cpp",
        "<frozen runpy>",
        "??",
    ):
        frames = [frame(file), frame("/env/lib/python3.12/site-packages/megatron/tp.py"), frame("/home/me/train.py")]
        (call,) = read_call(tmp_path, entry(frames=frames))
        assert call.site == "/env/lib/python3.12/site-packages/megatron/tp.py:7", file
    assert read(tmp_path)[0].stack.splitlines() == [
        "/home/me/train.py:7 f",
        "/env/lib/python3.12/site-packages/megatron/tp.py:7 f",
        "??:7 f",
    ]


def test_a_batch_has_the_state_of_its_last_entry(tmp_path: Path, printed: Printed) -> None:
    ranks = four()
    for rank in ranks:
        rank.call("all_reduce")
        if rank.rank < 2:
            peer = 1 - rank.rank
            rank.batch(f"send {rank.rank}->{peer}", f"recv {rank.rank}<-{peer}")
        rank.batch("all_reduce", "all_gather")
    assert verdict(printed, written(tmp_path, ranks))[0] == 0
    calls = read(tmp_path)[0].comms[0].calls
    assert [(call.operation, call.number, call.state) for call in calls] == [
        ("all_reduce", 1, COMPLETED),
        ("send", 0, COMPLETED),
        ("recv", 0, COMPLETED),
        ("coalesced all_reduce + all_gather", 2, COMPLETED),
    ]
    assert calls[1].group == calls[2].group > 0 and calls[3].count == 16
    for rank in ranks:  # the name of a batch that torch makes for one call
        rank.entries[-1]["profiling_name"] = "nccl:ALLGATHER_coalesced"
    assert read(written(tmp_path, ranks))[0].comms[0].calls[3].operation == "all_gather"
    for rank in ranks[:2]:
        rank.batch(f"recv {rank.rank}<-{1 - rank.rank}", hangs=True)
    assert verdict(printed, written(tmp_path, ranks))[1].startswith("ranks wait for each other: rank 0 in recv from")


def test_a_batch_whose_first_or_last_entry_is_missing_is_left_out(tmp_path: Path, printed: Printed) -> None:
    ranks = four()
    for rank in ranks:
        rank.call("all_reduce")
        rank.batch("all_reduce", "all_gather", "all_reduce")
        rank.batch("all_gather", "all_gather")
    del ranks[0].entries[:2]  # overwritten
    del ranks[1].entries[-1:]  # being made
    assert verdict(printed, written(tmp_path, ranks)) == (0, "no rank is stuck in the records of 4 ranks.")
    numbers = [[call.number for call in process.comms[0].calls] for process in read(tmp_path)]
    assert numbers == [[3], [1, 2], [1, 2, 3], [1, 2, 3]]


def test_a_group_that_was_destroyed_is_not_mixed_with_the_next_of_its_name(tmp_path: Path) -> None:
    old, new = entry(pg_id=0, input_sizes=[[1]]), entry(pg_id=2)
    assert [call.count for call in read_call(tmp_path, old, new)] == [8]


# ---------------------------------------------------------------------------------------------- files


def test_the_rank_is_in_the_files_name_else_in_a_message(tmp_path: Path, printed: Printed) -> None:
    rank = Rank(2)
    rank.message("send", 3, hangs=True)
    data = pickle.dumps(dump(rank.entries), 2)
    for name, expected in (("rank_1.pkl", 1), ("trace", 2)):
        (tmp_path / name).write_bytes(data)
        assert [process.rank for process in read(tmp_path / name)] == [expected]
    (tmp_path / "no_message").write_bytes(pickle.dumps(dump([entry()]), 2))
    assert run(str(tmp_path / "no_message")) == 2
    assert "no_message: of which rank? the file's name must end with it" in printed()[1]
    (tmp_path / "trace_9").write_bytes(data)
    assert run(str(tmp_path / "trace_9")) == 2
    assert "process group '0' does not contain rank 9: was the file renamed?" in printed()[1]


def test_a_folder_may_have_other_files_and_json_any_name(tmp_path: Path, printed: Printed) -> None:
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(1, 2))
    (tmp_path / "log_1").write_text("step 1")
    written(tmp_path, [Rank(0)])
    assert len(read(tmp_path)) == 1
    (tmp_path / "json_3").write_text(json.dumps(dump([])))
    assert read(tmp_path / "json_3")[0].rank == 3
    os.utime(tmp_path / "json_3", (time.time() - 60,) * 2)
    assert run("--list", str(tmp_path / "json_3")) == 0
    assert re.search(r"^json +seen (1 min|6\d\.\d s) ", printed()[0], re.M)


def test_a_message_to_the_rank_itself_waits_for_no_other(tmp_path: Path, printed: Printed) -> None:
    rank = Rank(0)
    rank.message("send", 0, hangs=True)
    rank.message("recv", 0)
    assert verdict(printed, written(tmp_path, [rank]))[0] == 0


def test_groups_of_one_name_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    ranks = four()
    for rank in ranks:
        rank.call("all_reduce", group="1")
        members = [0, 1] if rank.rank < 2 else [2, 3]
        content = dump(rank.entries)
        content["pg_config"]["1"] = {"name": "1", "desc": "undefined", "ranks": str(members)}
        (tmp_path / f"{PREFIX}{rank.rank}").write_bytes(pickle.dumps(content, 2))
    comms = [comm for process in read(tmp_path) for comm in process.comms if comm.calls]
    assert [comm.ranks for comm in comms] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert len({comm.uid for comm in comms}) == 2 and {comm.name for comm in comms} == {"1"}


def test_the_folders_of_two_nodes_are_one_job_and_those_of_two_runs_are_two(tmp_path: Path, printed: Printed) -> None:
    ranks, others = four(), four()
    for rank in [*ranks, *others]:
        rank.call("all_reduce")
        if rank.rank != 3:
            rank.call("all_reduce", hangs=True)
    one, two = written(tmp_path / "node0", ranks[:2]), written(tmp_path / "node1", ranks[2:])
    assert verdict(printed, one, two)[1].startswith("rank 3 never entered all_reduce #2")
    again = written(tmp_path / "run2", others)
    found, _ = jobs.read([str(one), str(two), str(again)])
    assert sorted(len(job.processes) for job in found) == [2, 2, 4]


GOOD = dump([entry()])
HOSTILE = {
    "empty": b"\x80",
    "no dump": pickle.dumps([1, 2], 2),
    "no entries' group": pickle.dumps({**GOOD, "entries": [7]}, 2),
    "a class": pickle.dumps({**GOOD, "extra": Path("/")}, 2),
    "a call": b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00trueq\x00\x85R.",
    "an object of elsewhere": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "much memory": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a long text": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f",
    "version": pickle.dumps({**GOOD, "version": "3.0"}, 2),
    "version's type": pickle.dumps({**GOOD, "version": 2}, 2),
    "ranks": pickle.dumps({**GOOD, "pg_config": {"0": {"ranks": "[0, 99999999999]"}}}, 2),
    "ranks' type": pickle.dumps({**GOOD, "pg_config": {"0": 5}}, 2),
    "json": json.dumps(dump([entry(input_sizes="x")])).encode(),
    "deep json": b'{"version": "2.4", "pg_config": ' + b"[" * 100_000,
    "elements": pickle.dumps(dump([entry(input_sizes=[[1 << 40, 1 << 40]])]), 2),
    "dimensions": pickle.dumps(dump([entry(input_sizes=[[1] * 1000])]), 2),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_damaged_dump_is_one_line_and_the_others_are_read(kind: str, tmp_path: Path, printed: Printed) -> None:
    (tmp_path / "bad_0").write_bytes(HOSTILE[kind])
    assert run(str(tmp_path / "bad_0")) == 2
    out, err = printed()
    assert out == "" and "Traceback" not in err
    assert [line.count("bad_0: ") for line in err.splitlines()[1:]] == [1]
    ranks = four()
    for rank in ranks[:3]:
        rank.call("all_reduce", hangs=True)
    written(tmp_path, ranks)
    assert run(str(tmp_path), str(tmp_path / "bad_0")) == 1
    text = printed()[0]
    assert text.startswith("rank 3 never entered all_reduce #1") and "bad_0: " in text


def test_any_value_anywhere_and_any_damage_is_read_or_reported(tmp_path: Path) -> None:
    path = tmp_path / "bad_0"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            found, _ = jobs.read([str(path)])
        except jobs.NothingFoundError as error:
            assert str(path) in str(error)
        else:
            assert all(job.processes for job in found)

    values: tuple[Any, ...] = (
        None,
        True,
        -1,
        1 << 70,
        10**5000,
        1.5,
        float("nan"),
        "x",
        "9" * 5000,
        [],
        [[]],
        [[-1]],
        {},
        {"a": 1},
    )
    for value in values:
        for key in entry():
            check(pickle.dumps(dump([entry(), entry(**{key: value})]), 2))
        for key in GOOD:
            check(pickle.dumps({**GOOD, key: value}, 2))
        for key in ("name", "desc", "ranks"):
            check(pickle.dumps({**GOOD, "pg_config": {"0": {"desc": "", "ranks": "[0]", key: value}}}, 2))
    data = pickle.dumps(GOOD, 2)
    dice = random.Random(7)
    for _ in range(1000):
        damaged = bytearray(data[: dice.randrange(1, len(data) + 1)])
        for _ in range(dice.randrange(3)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        check(bytes(damaged))
