"""Inputs of `python -m pynccl hang`: files, folders and jobs, and errors for broken or missing ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hung_jobs import NOW, Printed, missing, printed, process, run, save_records

from pynccl.bindings.errors import NcclInvalidUsage
from pynccl.watch import folder
from pynccl.watch.records import COMPLETED, DEAD, RUNNING, CallRecord, CommRecord, ProcessRecord

__all__ = ["printed"]


def test_the_exit_code_reports_a_hang_and_json_can_be_read_back(tmp_path: Path, printed: Printed) -> None:
    assert run(save_records(tmp_path / "b.json", [process(rank, 41, COMPLETED) for rank in range(4)])) == 0
    assert "no rank is stuck" in printed()[0]
    assert run("--json", save_records(tmp_path / "a.json", missing(4))) == 1
    text = printed()[0]
    document = json.loads(text)
    assert (document["ok"], document["job"], document["verdict"]["culprits"]) == (False, "train", [["uid1", 3]])
    (tmp_path / "again.json").write_text(text)
    assert run("--json", str(tmp_path / "again.json")) == 1
    assert json.loads(printed()[0])["processes"] == document["processes"]


def test_files_of_several_nodes_form_one_job_with_the_newest_record_of_each_process(
    tmp_path: Path, printed: Printed
) -> None:
    processes = missing(8, (5,), hosts=2)
    for each in processes:  # launched manually: each node has another job name
        each.job = f"process-{each.host}"
    places = [
        save_records(tmp_path / f"{host}.json", [p for p in processes if p.host == host]) for host in ("node0", "node1")
    ]
    save_records(tmp_path / "later.json", [dataclasses.replace(processes[0], now=NOW + 60)])
    for options in ([*places, str(tmp_path / "later.json")], [str(tmp_path)]):  # a folder of files works, too
        assert run("--json", *options) == 1
        assert sorted(each["now"] for each in json.loads(printed()[0])["processes"]) == [NOW] * 7 + [NOW + 60]


BROKEN = {
    "no json": b"\x00\x01\xff\xfe",
    "cut": b'{"processes": [{"pid": 1, "ho',
    "other": b'{"a": 1}',
    "wrong types": b'{"processes": [{"pid": "x", "host": "y"}]}',
    "no object": b'{"processes": [7]}',
    "deep": b'{"processes": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long number": b'{"processes": [{"pid": ' + b"9" * 10_000 + b', "host": "y"}]}',
}


def test_a_broken_file_is_reported_and_the_others_are_read(tmp_path: Path, printed: Printed) -> None:
    good = save_records(tmp_path / "a.json", missing(2))
    for kind, data in BROKEN.items():
        (tmp_path / "broken.json").write_bytes(data)
        assert run(str(tmp_path / "broken.json")) == 2, kind
        assert "broken.json" in printed()[1], kind
        assert run(str(tmp_path / "broken.json"), good) == 1, kind
        text = printed()[0]
        assert "1 file could not be read:" in text and "broken.json: " in text, kind


def test_without_records_the_error_names_the_searched_folder_and_a_remedy(
    tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invalid() -> str:
        raise NcclInvalidUsage("PYNCCL_WATCH='maybe': expected one of on, off")

    place = save_records(tmp_path / "records" / "a.json", missing(2))
    for base, options, words in (
        (lambda: tmp_path, [], [str(tmp_path), "PYNCCL_WATCH=off", "hang DIR"]),
        (lambda: tmp_path, [str(tmp_path / "nowhere")], ["nowhere: no such file or folder"]),
        (invalid, [], ["PYNCCL_WATCH='maybe': expected"]),
        (invalid, [place, "--timeline", str(tmp_path / "no" / "t.json")], ["t.json: No such file"]),
        (invalid, [place, "--list", "--job", "a"], []),
        (invalid, [place, "--job", "gone"], ["--job gone: no such job"]),
    ):
        monkeypatch.setattr(folder, "base", base)
        assert run(*options) == 2, options
        error = printed()[1]
        assert all(word in error for word in words), error
    with pytest.raises(SystemExit) as raised:
        run("--calls", "0")
    assert raised.value.code == 2 and "expected" in printed()[1]


def test_without_arguments_the_newest_running_job_is_chosen(
    tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {"newest": missing(2, ()), "alive": missing(4), "old": missing(2)}
    for age, (name, processes) in enumerate(jobs.items()):
        for each in processes:
            each.job, each.comms[0].uid, each.state = name, name, RUNNING if name == "alive" else DEAD
            each.heartbeat, each.pid = each.heartbeat - age, each.pid + 100 * age
    save_records(tmp_path / "a.json", [each for processes in jobs.values() for each in processes])
    monkeypatch.setattr(folder, "base", lambda: tmp_path)
    assert run() == 1
    text = printed()[0]
    assert "alive: 4 processes" in text
    assert "2 other jobs; --job newest shows the first:\n" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["newest", "old"]
    assert run("--job", "newest") == 1  # both have ended


HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\x00e\u202ef\x1bP1;2\x1b\\g\nh\r\x08i\ud800"


def test_control_characters_in_a_file_are_not_printed(tmp_path: Path, printed: Printed) -> None:
    """An exception text can contain color codes, and a traceback anything."""
    for field in ("host", "job", "where", "stack", "end", "end_site", "command"):
        processes = missing(4)
        for process_record in processes:
            setattr(process_record, field, HOSTILE)
            for comm in process_record.comms:
                comm.name = HOSTILE
                words = dict.fromkeys(("operation", "dtype", "op", "site", "function", "error"), HOSTILE)
                comm.calls[-1] = dataclasses.replace(comm.calls[-1], **words)
        assert run(save_records(tmp_path / "a.json", processes), "--calls", "5", "--stacks") == 1
        assert all(line.isprintable() for line in printed()[0].split("\n")), field


WRONG: list[Any] = [
    10**400,
    -(10**400),
    10**19,
    -1,
    1e308,
    float("nan"),
    True,
    None,
    "x" * 5000,
    [],
    [[]],
    {},
    "killed",
]
KINDS = {"process": ProcessRecord, "comm": CommRecord, "call": CallRecord}


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_in_any_field_is_used_or_reported(tmp_path: Path, printed: Printed, kind: str) -> None:
    """One that cannot be a field's is reported with file and field, and the other records are used."""
    good = save_records(tmp_path / "a.json", missing(2))
    reported = 0
    for field in dataclasses.fields(KINDS[kind]):
        for value in WRONG:
            document = json.loads(Path(good).read_text())
            changed = document["processes"][0]
            changed["pid"] = 77
            place = {"process": changed, "comm": changed["comms"][0], "call": changed["comms"][0]["calls"][-1]}[kind]
            place[field.name] = value
            (tmp_path / "bad.json").write_text(json.dumps(document))
            for options in ([], ["--json"], ["--list"], ["--timeline", str(tmp_path / "t.json"), "--calls", "3"]):
                assert run(good, str(tmp_path / "bad.json"), *options) in (0, 1), (field.name, value, options)
                out = printed()[0]
                if "bad.json: process" in out:
                    reported += 1
                    assert f".{field.name}" in out or "rank" in out, out
    assert reported > 4 * 4 * len(dataclasses.fields(KINDS[kind]))


def test_a_record_of_another_version_is_refused(tmp_path: Path, printed: Printed) -> None:
    """Also one whose fields would be valid: it says in other words how a call and a process ended."""
    text = Path(save_records(tmp_path / "a.json", missing(2))).read_text()
    for change, problem in {
        None: "old.json: process: format 'none', and this pynccl reads 8; use the pynccl of the job",
        7: "old.json: process: format 7, and this pynccl reads 8; use the pynccl of the job",
        8: "old.json: process has the fields ['weight']: not a record of this pynccl version",
    }.items():
        document = json.loads(text)
        for one in document["processes"]:
            del one["format"]
            one |= {"weight": 3} if change == 8 else {"state": "dead", "end": "ValueError: no such file"}
            one |= {} if change is None else {"format": change}
        (tmp_path / "old.json").write_text(json.dumps(document))
        assert run(str(tmp_path / "old.json")) == 2
        assert problem in printed()[1]
