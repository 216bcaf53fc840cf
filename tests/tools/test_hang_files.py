"""What `python -m pynccl hang` looks at: files, folders and jobs; what is broken or missing is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hung_jobs import NOW, Printed, missing, printed, process, run, saved

from pynccl.bindings.errors import NcclInvalidUsage
from pynccl.watch import folder
from pynccl.watch.records import COMPLETED, DEAD, RUNNING

__all__ = ["printed"]


def test_the_code_says_whether_something_is_wrong_and_json_can_be_read_again(tmp_path: Path, printed: Printed) -> None:
    assert run(saved(tmp_path / "b.json", [process(rank, 41, COMPLETED) for rank in range(4)])) == 0
    assert "no rank is stuck" in printed()[0]
    assert run("--json", saved(tmp_path / "a.json", missing(4))) == 1
    text = printed()[0]
    said = json.loads(text)
    assert (said["ok"], said["job"], said["verdict"]["culprits"]) == (False, "train", [["uid1", 3]])
    (tmp_path / "again.json").write_text(text)
    assert run("--json", str(tmp_path / "again.json")) == 1
    assert json.loads(printed()[0])["processes"] == said["processes"]


def test_what_several_machines_have_saved_is_one_job_and_the_newest_record_of_each_counts(
    tmp_path: Path, printed: Printed
) -> None:
    processes = missing(8, (5,), hosts=2)
    for one in processes:  # launched by hand: each machine calls the job otherwise
        one.job = f"process-{one.host}"
    places = [
        saved(tmp_path / f"{host}.json", [one for one in processes if one.host == host]) for host in ("node0", "node1")
    ]
    saved(tmp_path / "later.json", [dataclasses.replace(processes[0], now=NOW + 60)])
    for options in ([*places, str(tmp_path / "later.json")], [str(tmp_path)]):  # a folder in which they lie is as good
        assert run("--json", *options) == 1
        assert sorted(one["now"] for one in json.loads(printed()[0])["processes"]) == [NOW] * 7 + [NOW + 60]


BROKEN = {
    "no json": b"\x00\x01\xff\xfe",
    "cut": b'{"processes": [{"pid": 1, "ho',
    "other": b'{"a": 1}',
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
    with pytest.raises(SystemExit) as raised:
        run("--calls", "0")
    assert raised.value.code == 2 and "expected" in printed()[1]


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
