"""What `python -m pynccl hang` prints of a job's records: the verdict first, equal ranks together, nothing unsafe.

The records are made by hand, the verdict by a stand-in that says which ranks have not entered what others are in."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pynccl.bindings.errors import NcclInvalidUsage
from pynccl.tools import command, hang
from pynccl.tools.hang import jobs, report, table
from pynccl.watch import folder, formatting, verdict as real
from pynccl.watch.records import (
    COMPLETED,
    DEAD,
    INSIDE,
    ISSUED,
    RUNNING,
    STOPPED,
    CallRecord,
    CommRecord,
    ProcessRecord,
    to_json,
)

NOW = 1_760_000_000.0
Printed = Callable[[], tuple[str, str]]
STACK = "/home/me/train.py:20 main\n/home/me/train.py:35 step\n{}"


def process(rank: int, number: int = 41, state: str = INSIDE, host: str = "node0", size: int = 4) -> ProcessRecord:
    """A rank whose newest call is all_reduce #number."""
    calls = [_call(one, COMPLETED) for one in range(number - 3, number)] + [_call(number, state)]
    completed = number if state == COMPLETED else number - 1
    comm = CommRecord("uid1", "tp", rank, size, made=NOW - 100, entered=number, completed=completed, calls=calls)
    where = "/home/me/model.py:88 forward" if state == INSIDE else "/home/me/data.py:41 next_batch"
    lived = {"started": NOW - 200, "now": NOW, "heartbeat": NOW - 0.2}
    at = {"where": where, "where_at": NOW - 0.3, "stack": STACK.format(where)}
    return ProcessRecord(4000 + rank, host, machine=host, job="train", rank=rank, comms=[comm], **lived, **at)


def _call(number: int, state: str) -> CallRecord:
    issued = NOW - 12.3 - (41 - number)
    done = 0.0 if state in (INSIDE, ISSUED) else issued + 0.002
    times = {"issued": issued, "returned": done, "completed": done}
    given = {"count": 33_554_432, "dtype": "BFLOAT16", "op": "SUM", "site": "/home/me/model.py:88"}
    return CallRecord(number, number, "all_reduce", state=state, **given, **times)  # type: ignore[arg-type]


def missing(size: int, behind: tuple[int, ...] | None = None, hosts: int = 1) -> list[ProcessRecord]:
    """A job in which some ranks, else the last one, have not come to all_reduce #41."""
    behind = (size - 1,) if behind is None else behind
    return [
        process(rank, 40, COMPLETED, f"node{rank * hosts // size}", size)
        if rank in behind
        else process(rank, 41, INSIDE, f"node{rank * hosts // size}", size)
        for rank in range(size)
    ]


@dataclasses.dataclass
class Said:
    """What the tool needs of a verdict."""

    sentence: str
    culprits: list[tuple[str, int]]

    @property
    def comms(self) -> list[str]:
        return [uid for uid, _ in self.culprits]

    @property
    def wrong(self) -> bool:
        return bool(self.culprits)

    def to_json(self) -> dict[str, Any]:
        return {"sentence": self.sentence, "culprits": self.culprits}


def judge(processes: list[ProcessRecord], patience: float = 0.0) -> Any:
    furthest = max((comm.entered for one in processes for comm in one.comms), default=0)
    behind = [one for one in processes if one.state == DEAD or any(comm.entered < furthest for comm in one.comms)]
    if not behind:
        return Said("nothing is wrong: all ranks are at the same call", [])
    names = formatting.numbers((one.rank for one in behind), 9)
    blamed = [(comm.uid, comm.rank) for one in behind for comm in one.comms]
    return Said(f"rank {names} never entered all_reduce #{furthest} (comm 'tp', model.py:88)", blamed)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "judge", judge)
    monkeypatch.setattr(report, "render", lambda verdict: verdict.sentence)


def of(processes: list[ProcessRecord], **more: Any) -> str:
    return report.text(jobs.Job("train", processes), judge(processes), **more)


# ------------------------------------------------------------------------------------------------- what is printed


def test_the_verdict_comes_first_then_a_row_for_each_rank_then_stacks_of_who_is_missing_and_one_who_waits() -> None:
    lines = of(missing(4)).splitlines()
    assert lines[0] == "rank 3 never entered all_reduce #41 (comm 'tp', model.py:88)"
    head = next(number for number, line in enumerate(lines) if line.startswith("rank  pid"))
    assert [line.split()[0] for line in lines[head + 1 : head + 5]] == ["0", "1", "2", "3"]
    assert "inside all_reduce #41" in lines[head + 1] and "12.3 s" in lines[head + 1]
    assert lines[head + 4].split()[3:6] == ["40", "40", "done"] and lines[head + 4].endswith("data.py:41 next_batch")
    stacks = [line for line in lines if line.startswith("rank ") and line.endswith("ago:")]
    assert [line.split(",")[0] for line in stacks] == ["rank 3 (pid 4003 on node0)", "rank 0 (pid 4000 on node0)"]
    assert "waiting" in stacks[1]
    assert lines[lines.index(stacks[0]) + 3].strip() == "/home/me/data.py:41 next_batch"


def test_it_fits_a_screen_for_any_number_of_ranks_that_do_the_same() -> None:
    for size, hosts, behind in ((2, 1, (1,)), (16, 2, (3,)), (1024, 128, (77, 500, 501))):
        lines = of(missing(size, behind, hosts)).splitlines()
        assert len(lines) < 25
        assert max(map(len, lines)) <= 120
    found = table.rows(missing(1024, (77, 500, 501), 128))
    assert [formatting.numbers(row.ranks, 3) for row in found] == ["0-76, 78-499, 502-1023", "77, 500-501"]
    apart = table.rows(missing(1024, (77, 500, 501), 128), (), True)
    assert [row.ranks for row in apart] == [[rank] for rank in range(1024)]


def test_of_many_different_rows_the_largest_are_shown_and_the_others_counted() -> None:
    processes = [process(rank, 100 + rank if rank >= 100 else 41, size=300) for rank in range(300)]
    lines = table.text(table.rows(processes))
    assert lines[1].startswith("0-99 ")
    assert lines[-1] == "... 161 more rows, of 161 ranks: --all has a row for each rank"
    processes = missing(16, ())
    processes[4].comms[0].calls[-1].issued -= 1.5
    assert "13.8 s" in table.text(table.rows(processes))[1]  # the longest time


def test_a_process_that_has_ended_says_how_and_what_it_was_inside() -> None:
    processes = missing(4, ())
    processes[2].state, processes[2].end, processes[2].end_at = DEAD, "killed or crashed", NOW - 5
    processes[3].end, processes[3].end_site, processes[3].end_at = (
        "ValueError: no such file",
        "/a/train.py:31",
        NOW - 3.1,
    )
    processes[1].state, processes[1].where = STOPPED, ""
    rows = {row.ranks[0]: row for row in table.rows(processes)}
    text = "\n".join(table.text(list(rows.values())))
    assert (rows[2].state, rows[2].doing) == ("dead", "was inside all_reduce #41")
    assert rows[2].since == pytest.approx(7.3)  # when it ended
    assert "killed or crashed, 5.0 s ago" in text
    assert "ValueError: no such file at train.py:31, 3.1 s ago" in text
    assert (rows[1].state, rows[1].where) == ("stopped", "stopped by a signal or a debugger")


def test_a_rank_on_several_communicators_shows_the_call_that_is_open() -> None:
    one = missing(4, ())[0]
    done = CommRecord("uid0", "dp", 1, 2, made=NOW - 100, entered=9, completed=9)
    done.calls = [CallRecord(9, 9, "broadcast", issued=NOW - 1, returned=NOW - 0.9, completed=NOW - 0.9)]
    one.comms = [done, *one.comms]
    assert table.rows([one])[0].doing == "inside all_reduce #41 'tp'"


def test_a_rank_that_is_in_no_call_shows_the_communicator_that_the_others_wait_in() -> None:
    """Not the one of its last call, whose numbers would be compared with theirs."""
    one = process(3, 40, COMPLETED)
    newer = CallRecord(9, 9, "broadcast", issued=NOW - 1, returned=NOW - 0.9, completed=NOW - 0.9)
    one.comms.append(CommRecord("uid0", "dp", 1, 2, made=NOW - 100, entered=9, completed=9, calls=[newer]))
    row = table.rows([one], ["uid1"])[0]
    assert (row.entered, row.doing) == ("40", "done all_reduce #40 'tp'")
    assert table.rows([one])[0].doing == "done broadcast #9 'dp'"


def test_what_has_been_issued_longest_is_what_a_gpu_rank_waits_for() -> None:
    one = process(0, 41, ISSUED)
    one.comms[0].calls.append(CallRecord(42, 42, "all_gather", issued=NOW - 1, state=ISSUED))
    row = table.rows([one])[0]
    assert (row.doing, row.after) == ("issued all_reduce #41", " ago")
    assert row.since == pytest.approx(12.3)


def test_the_table_and_the_verdict_tell_the_same_call_where_a_stream_was_synchronized_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has noticed that calls 38 to 40 have completed; what rank 0 waits for is what rank 1 has not entered."""
    monkeypatch.setattr(report, "render", real.render)
    first, second = process(0, 41, ISSUED, size=2), process(1, 40, COMPLETED, size=2)
    for call in first.comms[0].calls:
        call.state = ISSUED
    first.comms[0].completed = 0
    barrier = CallRecord(1, 1, "barrier", issued=NOW - 20, state=ISSUED)
    later = CommRecord("uid2", "dp", 0, 2, entered=1, calls=[barrier])
    first.comms.append(later)
    second.comms.append(dataclasses.replace(later, rank=1, completed=1, calls=[]))
    verdict = real.judge([first, second])
    assert verdict.sentence.startswith("rank 1 never entered all_reduce #41 (comm 'tp'")
    text = report.text(jobs.Job("train", [first, second]), verdict)
    assert "issued all_reduce #41 'tp'" in text and "done all_reduce #40 'tp'" in text


def test_an_old_line_is_told_with_its_age_and_a_missing_one_by_the_call() -> None:
    one = process(0, 40, COMPLETED)
    one.where_at = NOW - 12
    assert "data.py:41 next_batch, seen 12.0 s ago" in table.text(table.rows([one]))[1]
    one.where = ""
    assert table.rows([one])[0].where == "after model.py:88"
    inside = process(0)
    inside.where = ""
    assert table.rows([inside])[0].where == "model.py:88"


def test_several_ranks_of_one_process_have_a_row_each_and_one_without_communicators_has_one() -> None:
    one = process(0)
    one.rank = -1
    one.comms.append(process(1, 40, COMPLETED).comms[0])
    assert [(row.ranks, row.entered) for row in table.rows([one])] == [([0], "41"), ([1], "40")]
    bare = ProcessRecord(1, "node0", rank=2)
    assert [(row.ranks, row.doing, row.where) for row in table.rows([bare])] == [([2], "no call yet", "?")]


def test_the_last_calls_are_listed_with_what_they_were_given() -> None:
    text = of(missing(2, (1,)), calls=2)
    rows = [line.split() for line in text.splitlines() if "BFLOAT16 x 33,554,432, SUM" in line]
    assert [row[-1] for row in rows] == ["model.py:88"] * 4
    assert [next(word for word in row if word[0] == "#") for row in rows] == ["#40", "#41", "#39", "#40"]
    assert "so far" in text and "2.00 ms" in text


def test_stacks_that_are_equal_are_printed_once_and_a_deep_one_keeps_its_inner_end() -> None:
    text = of(missing(1024, (3,)), stacks=True)
    assert text.count("/home/me/train.py:20 main") == 2
    assert "rank 0 (pid 4000 on node0), and the same on ranks 1-2, 4-1023" in text
    processes = missing(2, (1,))
    processes[1].stack = "\n".join(f"File a.py:{number} f" for number in range(500))
    text = of(processes)
    assert "... 476 outer frames" in text and "a.py:499 f" in text and "a.py:475 f" not in text


def test_unreadable_files_and_other_jobs_are_named() -> None:
    others = [jobs.Job("slurm-1", [process(0)]), jobs.Job("slurm-2", [process(0)])]
    others[1].processes[0].state = DEAD
    text = of(missing(2), problems=["/x/a.watch: not a record"], others=others)
    assert "1 file could not be read:\n    /x/a.watch: not a record" in text
    assert "2 other jobs: --job ID; --list says more\n    slurm-1\n    slurm-2" in text


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\x00e\u202ef\x1bP1;2\x1b\\g\nh\r\x08i\ud800"


def test_nothing_from_a_file_reaches_the_terminal_as_a_command(tmp_path: Path, printed: Printed) -> None:
    """The text of an exception may have colors, and a traceback anything."""
    for field in ("host", "job", "where", "stack", "end", "end_site", "command"):
        processes = missing(4)
        for one in processes:
            setattr(one, field, HOSTILE)
            for comm in one.comms:
                comm.name = HOSTILE
                words = dict.fromkeys(("operation", "dtype", "op", "site", "function", "error"), HOSTILE)
                comm.calls[-1] = dataclasses.replace(comm.calls[-1], **words)
        assert run(saved(tmp_path / "a.json", processes), "--calls", "5", "--stacks") == 1
        assert all(line.isprintable() for line in printed()[0].split("\n")), field


def test_words_for_times_and_ranks() -> None:
    assert [formatting.seconds(value) for value in (-1, 0.04, 12.34, 250, 11_100, 200_000)] == [
        "0.0 s", "0.0 s", "12.3 s", "4 min 10 s", "3 h 5 min", "2 days"]  # fmt: skip
    assert formatting.numbers([3, 1, 2, 7], 3) == "1-3, 7"
    assert formatting.numbers(range(0, 1000, 2), 3) == "0, 2, 4, ... (500)"


# -------------------------------------------------------------------------------------------- what is looked at


def saved(path: Path, processes: list[ProcessRecord]) -> str:
    """As `hang --json` writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"processes": [to_json(one) for one in processes]}))
    return str(path)


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    hang.configure(parser)
    arguments = parser.parse_args(options)
    return command.ended(lambda: hang.run(arguments), "hang")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def read() -> tuple[str, str]:
        out, err = capsys.readouterr()
        return out, err

    return read


def test_the_code_says_whether_something_is_wrong_and_json_can_be_read_again(tmp_path: Path, printed: Printed) -> None:
    assert run(saved(tmp_path / "b.json", missing(4, ()))) == 0
    assert "nothing is wrong" in printed()[0]
    assert run("--json", saved(tmp_path / "a.json", missing(4))) == 1
    text = printed()[0]
    said = json.loads(text)
    assert (said["ok"], said["job"]) == (False, "train")
    assert said["verdict"]["culprits"] == [["uid1", 3]]
    (tmp_path / "again.json").write_text(text)
    assert run("--json", str(tmp_path / "again.json")) == 1
    assert json.loads(printed()[0])["processes"] == said["processes"]


def test_what_several_machines_have_saved_is_one_job(tmp_path: Path, printed: Printed) -> None:
    processes = missing(8, (5,), hosts=2)
    for one in processes:  # launched by hand: each machine calls the job otherwise
        one.job = f"process-{one.host}"
    places = [
        saved(tmp_path / f"{host}.json", [one for one in processes if one.host == host]) for host in ("node0", "node1")
    ]
    assert run("--json", *places) == 1
    assert len(json.loads(printed()[0])["processes"]) == 8
    assert run("--json", str(tmp_path)) == 1  # the folder in which they lie is as good
    assert len(json.loads(printed()[0])["processes"]) == 8


def test_a_record_that_was_collected_twice_counts_once(tmp_path: Path, printed: Printed) -> None:
    earlier, later = missing(2, ()), missing(2, ())
    for one in later:
        one.now += 60
    run("--json", saved(tmp_path / "later.json", later), saved(tmp_path / "z.json", earlier))
    assert [one["now"] for one in json.loads(printed()[0])["processes"]] == [NOW + 60] * 2


BROKEN = {
    "empty": b"",
    "no json": b"\x00\x01\xff\xfe",
    "cut": b'{"processes": [{"pid": 1, "ho',
    "other": b'{"a": 1}',
    "a list": b"[]",
    "wrong types": b'{"processes": [{"pid": "x", "host": "y"}]}',
    "no object": b'{"processes": [7]}',
    "deep": b'{"processes": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long number": b'{"processes": [{"pid": ' + b"9" * 10_000 + b', "host": "y"}]}',
}


def test_a_file_that_is_broken_is_named_and_the_others_are_read(tmp_path: Path, printed: Printed) -> None:
    good = saved(tmp_path / "a.json", missing(2))
    for kind, data in BROKEN.items():
        (tmp_path / "broken.json").write_bytes(data)
        assert run(str(tmp_path / "broken.json")) == 2, kind
        assert "broken.json" in printed()[1], kind
        assert run(str(tmp_path / "broken.json"), good) == 1, kind
        text = printed()[0]
        assert "1 file could not be read:" in text and "broken.json: " in text, kind


def test_where_nothing_is_found_it_says_where_it_looked_and_what_to_do(
    tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invalid() -> str:
        raise NcclInvalidUsage("PYNCCL_WATCH='maybe': expected one of on, off")

    place = saved(tmp_path / "records" / "a.json", missing(2))
    for base, options, words in (
        (lambda: tmp_path, [], [str(tmp_path), "PYNCCL_WATCH=off", "hang DIR"]),
        (lambda: tmp_path, [str(tmp_path / "nowhere")], ["nowhere: no such file or folder"]),
        (invalid, [], ["PYNCCL_WATCH='maybe': expected"]),
        (invalid, [place, "--timeline", str(tmp_path / "no" / "t.json")], ["t.json: No such file"]),
        (invalid, [place, "--list", "--job", "a"], []),
        (invalid, [place, "--job", "gone"], ["--job gone: no job of that name"]),
    ):
        monkeypatch.setattr(folder, "base", base)
        assert run(*options) == 2, options
        said = printed()[1]
        assert all(word in said for word in words), said
    for wrong in (["--calls", "0"], ["--calls", "x"]):
        with pytest.raises(SystemExit) as raised:
            run(*wrong)
        assert raised.value.code == 2
        assert "expected" in printed()[1]


def test_without_arguments_it_takes_the_newest_job_that_lives(
    tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = {"newest": missing(2, ()), "alive": missing(4), "old": missing(2)}
    for age, (name, processes) in enumerate(everything.items()):
        for one in processes:
            one.job, one.comms[0].uid, one.state = name, name, RUNNING if name == "alive" else DEAD
            one.heartbeat, one.pid = one.heartbeat - age, one.pid + 100 * age
    saved(tmp_path / "a.json", [one for processes in everything.values() for one in processes])
    monkeypatch.setattr(folder, "base", lambda: tmp_path)
    assert run() == 1
    text = printed()[0]
    assert "alive: 4 processes" in text
    assert "2 other jobs: --job ID; --list says more\n    newest\n    old" in text
    assert run("--job", "newest") == 1  # both have ended


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "render", real.render)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        processes = missing(4)
        text = report.text(jobs.Job("train", processes), real.judge(processes))
    finally:
        monkeypatch.undo()
        time.tzset()
    page = (Path(__file__).resolve().parents[2] / "docs" / "hang.md").read_text()
    assert "\n".join("    " + line if line else "" for line in text.splitlines()) in page
