"""A communicator that outlives its ranks: survivors, commit, agree, sync_state, check_generation.

The ranks meet at a store of this process. A rank that is told to die sends itself SIGKILL."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from processes import HANG_SECONDS
from ranks import HOST, Outcome, Place, RankPool
from torch.distributed import FileStore, PrefixStore, TCPStore

import pynccl
from pynccl.bootstrap import survivors as meeting
from pynccl.bootstrap.generation import POLL_SECONDS, Generation

Kill = Callable[[], None]


@pytest.fixture(scope="module", params=["shared memory", "sockets", "PYNCCL_WATCH=off"])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    more = {"sockets": {"PYNCCL_HOST_TRANSPORT": "sockets"}, "PYNCCL_WATCH=off": {"PYNCCL_WATCH": "off"}}
    made = RankPool({**HOST, **more.get(request.param, {})}, communicators=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "GRACE_SECONDS", 60.0)  # the others go on after a death
        yield made
    made.close()


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def where(store: TCPStore, request: pytest.FixtureRequest) -> tuple[int, str]:
    return store.port, request.node.name


def elastic(place: Place, where: tuple[int, str], **options: Any) -> pynccl.Communicator:
    """Make an elastic communicator. Silent ranks are waited for less long than by default, not than busy ones take."""
    meeting.SILENT_SECONDS = 3.0
    store = TCPStore("127.0.0.1", where[0], is_master=False, wait_for_workers=False)
    return pynccl.from_store(PrefixStore(where[1], store), place.rank, place.size, elastic=True, **options)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def total(comm: pynccl.Communicator) -> float:
    return float(comm.all_reduce(torch.full((3,), 10.0**comm.rank))[0])


def values(outcomes: list[Outcome], *killed: int) -> list[Any]:
    """Return the values of the ranks that were not killed; the test fails for others without one."""
    reports = [outcome.report for outcome in outcomes]
    assert [rank for rank, report in enumerate(reports) if "died: SIGKILL" in report] == list(killed), reports
    failed = [report for rank, report in enumerate(reports) if report and rank not in killed]
    assert not failed, failed[0]
    return [outcome.value for outcome in outcomes if not outcome.report]


# A death


@pytest.mark.parametrize(("n", "dead"), [(2, [0]), (3, [1]), (4, [0, 3]), (4, [0, 1, 2])])
def test_those_who_are_left_go_on_in_the_old_order(
    pool: RankPool, where: tuple[int, str], n: int, dead: list[int]
) -> None:
    outcomes = pool.outcomes(n, lose, where, dead)
    left = [rank for rank in range(n) if rank not in dead]
    sums = [float("1" * n), float("1" * len(left))]
    for new, (generation, rank, size, found, verdict, again) in enumerate(values(outcomes, *dead)):
        assert (generation, rank, size, found, again) == (1, new, len(left), sums, True)
        assert [f"rank {one}'s process" in verdict for one in range(n)] == [one in dead for one in range(n)]
        assert verdict.count(" at test_survivors.py:") == (0 if pool._env.get("PYNCCL_WATCH") == "off" else len(dead))


def lose(place: Place, where: tuple[int, str], dead: list[int]) -> Any:
    comm, sums = elastic(place, where), []
    sums.append(total(comm))
    if place.rank in dead:
        die()
    with pytest.raises(pynccl.NcclRemoteError):
        comm.commit()
    made = comm.survivors()
    sums.append(total(made))
    made.commit()
    again = comm.survivors() is made
    return made.generation, made.rank, made.size, sums, made.verdict, again


def test_ranks_that_are_blocked_elsewhere_come_too(pool: RankPool, where: tuple[int, str]) -> None:
    """In another group, in a message, on a stream, or computing. What was made from the old communicator has ended."""
    found = values(pool.outcomes(4, block_elsewhere, where), 3)
    assert [text for text, _, _ in found] == ["generation 0 has ended"] * 3
    assert [size for _, size, _ in found] == [3, 3, 3]
    assert max(seconds for _, _, seconds in found) < 10.0  # a busy machine; the timeout is 30 s


def block_elsewhere(place: Place, where: tuple[int, str]) -> Any:
    comm = elastic(place, where)
    group = comm.split(int(place.rank == 2))
    plan = comm.plan.all_reduce(torch.ones(1), torch.ones(1))
    total(comm)
    if place.rank == 3:
        time.sleep(0.3)
        die()
    died = time.monotonic() + 0.3
    with pytest.raises(pynccl.NcclRemoteError):
        if place.rank == 0:
            group.recv(torch.ones(1), 1)  # which never sends
        elif place.rank == 1:
            stream = pynccl.create_stream()
            comm.all_reduce(torch.ones(1), stream=stream)
            stream.synchronize()
        else:
            while True:
                time.sleep(0.05)
                group.all_reduce(torch.ones(1))  # rank 2 is alone in it
    made = comm.survivors()
    seconds = time.monotonic() - died
    for call in (lambda: group.all_reduce(torch.ones(1)), plan, lambda: comm.split(0), comm.commit, comm.barrier):
        with pytest.raises(pynccl.NcclRemoteError, match=r"generation 0 has ended: .*rank 3"):
            call()
    with pytest.raises(pynccl.NcclRemoteError) as ended:
        total(comm)
    return (
        str(ended.value)[len("this communicator was aborted: ") :][: len("generation 0 has ended")],
        made.size,
        seconds,
    )


@pytest.mark.parametrize("point", ["before the list is closed", "before NCCL's init", "before the first sum"])
def test_a_rank_that_dies_while_they_meet(pool: RankPool, where: tuple[int, str], point: str) -> None:
    found = values(pool.outcomes(4, die_meeting, where, point), 1, 2)
    assert found == [(11.0, 2, True)] * 2


def die_meeting(place: Place, where: tuple[int, str], point: str) -> Any:
    comm = elastic(place, where)
    if place.rank == 1:
        die()
    if place.rank == 2:
        module, name = {
            "before the list is closed": (meeting, "_close"),
            "before NCCL's init": (meeting, "comm_init_rank"),
            "before the first sum": (pynccl.Communicator, "barrier"),
        }[point]
        setattr(module, name, lambda *args, **options: die())
        if point == "before the list is closed":
            setattr(meeting, "read", lambda *args: die())  # the others have closed it  # noqa: B010
    with pytest.raises(pynccl.NcclRemoteError):
        total(comm)
    made = comm.survivors()
    named = [f"rank {rank}'s process" in made.verdict for rank in range(4)]
    return total(made), made.size, named == [False, True, True, False]


def test_a_rank_whose_abort_takes_long_is_waited_for(pool: RankPool, where: tuple[int, str]) -> None:
    assert values(pool.outcomes(4, abort_slowly, where), 3) == [3, 3, 3]


def abort_slowly(place: Place, where: tuple[int, str]) -> int:
    comm, wait = elastic(place, where), Generation.wait_for_end
    if place.rank == 3:
        die()
    if place.rank == 1:
        Generation.wait_for_end = lambda *args: (time.sleep(1.5), wait(*args))  # type: ignore[assignment]
    try:
        with pytest.raises(pynccl.NcclRemoteError):
            total(comm)
        return comm.survivors().size
    finally:
        Generation.wait_for_end = wait  # type: ignore[method-assign]


def test_one_death_after_another(pool: RankPool, where: tuple[int, str]) -> None:
    assert values(pool.outcomes(4, die_in_turn, where), 0, 1, 2) == [([1111.0, 111.0, 11.0, 1.0], 3)]


def die_in_turn(place: Place, where: tuple[int, str]) -> Any:
    comm, sums = elastic(place, where), []
    for step in range(4):
        sums.append(total(comm))
        if place.rank == step:
            die() if step < 3 else None
            break
        with pytest.raises(pynccl.NcclRemoteError):
            comm.commit()
        comm = comm.survivors()
    return sums, comm.generation


# A rank that is stopped, late, or gone for good


def test_a_rank_that_was_stopped_is_out(pool: RankPool, where: tuple[int, str], tmp_path: Path) -> None:
    *went_on, woken = pool.run(3, stop_and_wake, where, tmp_path)
    assert went_on == [(11.0, True)] * 2
    assert "rank 2 is out of generation 1: ranks 0 and 1 went on without it" in woken
    assert "rank 2 has not come within" in woken


def stop_and_wake(place: Place, where: tuple[int, str], folder: Path) -> Any:
    comm, file = elastic(place, where), folder / "pid"
    total(comm)
    if place.rank == 2:
        file.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(pynccl.NcclRemoteError, match="generation 0 has ended"):
            comm.check_generation()
        with pytest.raises(pynccl.NcclRemoteError) as out:
            comm.survivors()
        return str(out.value)
    with pytest.raises(pynccl.NcclTimeout, match="commit: not all ranks came within 1 s"):
        comm.commit(timeout=1)
    made = comm.survivors(timeout=10)
    if place.rank == 0:
        os.kill(int(file.read_text()), signal.SIGCONT)
    made.check_generation()
    return total(made), "rank 2" in made.verdict


def test_a_stopped_rank_that_others_wait_for_in_a_call(store: TCPStore, tmp_path: Path) -> None:
    """The watchdog ends their wait."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, pynccl, torch\n"
        "from pynccl.bootstrap import survivors\n"
        "survivors.SILENT_SECONDS = 1\n"
        "comm = pynccl.init(elastic=True)\n"
        "group, pid = comm.split(0), comm.all_gather(torch.tensor([os.getpid()]))[2]\n"
        "if comm.rank == 2: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "try:\n"
        "    comm.all_reduce(torch.ones(1))\n"
        "    comm.commit()  # the woken rank may find the sum complete\n"
        "    sys.exit('not stopped')\n"
        "except pynccl.NcclError:\n"
        "    comm = comm.survivors()\n"
        "print(comm.size, comm.generation, group.alive)\n"
        "comm.barrier()\n"
        "os.kill(int(pid), signal.SIGCONT) if comm.rank == 0 else None\n"
    )
    limits = {"PYNCCL_WATCH_ACTION": "raise", "PYNCCL_WATCH_TIMEOUT": "1"}
    first, second, woken = launch(store, program, 3, **limits)
    assert [first[:2], second[:2]] == [(0, "2 1 False\n")] * 2, first[2]
    assert woken[0] == 1
    assert "rank 2 is out of generation 1" in woken[2]


@pytest.mark.parametrize("watch", ["on", "off"])
def test_a_rank_that_comes_to_the_end_of_its_program_has_not_died(store: TCPStore, tmp_path: Path, watch: str) -> None:
    """The others go on in a group without it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time, pynccl, torch\n"
        "comm = pynccl.init(elastic=True)\n"
        "group = comm.split(int(comm.rank == 2))\n"
        "for _ in range(1 if comm.rank == 2 else 12):\n"
        "    group.all_reduce(torch.ones(1)); time.sleep(0.1)\n"
        "print(comm.generation, comm.alive)\n"
    )
    assert launch(store, program, 3, PYNCCL_WATCH=watch) == [(0, "0 True\n", "")] * 3


def test_a_rank_that_raises_on_another_machine_says_so_as_it_exits(store: TCPStore, tmp_path: Path) -> None:
    """The others do not wait for its silence."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time, pynccl, torch\n"
        "from pynccl.bootstrap import generation, survivors\n"
        "from pynccl.watch import folder\n"
        "folder.machine = generation.machine = lambda: f'machine {os.environ[\"RANK\"]}'\n"
        "survivors.SILENT_SECONDS = 60\n"
        "comm = pynccl.init(elastic=True)\n"
        "comm.barrier()\n"
        "if comm.rank == 1: raise ValueError('no such batch')\n"
        "try:\n"
        "    comm.split(0).recv(torch.ones(1), 2 - comm.rank)  # which never sends\n"
        "except pynccl.NcclError:\n"
        "    comm = comm.survivors(timeout=100)\n"
        "print(comm.size, comm.verdict)\n"
    )
    first, raised, last = launch(store, program, 3)
    assert raised[0] == 1
    line = "2 rank 1 exited with ValueError: no such batch at program.py:8\n"
    assert (first[:2], last[:2]) == ((0, line), (0, line)), first[2] + last[2]


def launch(store: TCPStore, program: Path, n: int, **more: str) -> list[tuple[int, str, str]]:
    """Run a program on n ranks; return exit code, stdout and stderr of each."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(n)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**os.environ, **shared, **more, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n)
    ]
    texts = [rank.communicate(timeout=HANG_SECONDS) for rank in ranks]
    return [(rank.returncode, *text) for rank, text in zip(ranks, texts, strict=True)]


def test_the_store_is_gone(pool: RankPool) -> None:
    """Its process is killed."""
    code = (
        "from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True); input()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as server:
        for text in pool.run(2, lose_store, int(server.stdout.readline()), server.pid):  # type: ignore[union-attr]
            assert "the rendezvous store" in text
            assert "start the job anew from a checkpoint" in text


def lose_store(place: Place, port: int, server: int) -> str:
    comm = elastic(place, (port, ""))
    comm.barrier()
    if place.rank == 0:
        os.kill(server, signal.SIGKILL)
    comm.barrier()
    with pytest.raises(pynccl.NcclError) as lost:
        comm.survivors(timeout=30)
    comm.check_generation()  # a checkpoint can still be saved
    return str(lost.value)


# Commit, agree, sync_state


def test_commit_waits_for_all_streams_of_all_ranks(pool: RankPool, where: tuple[int, str]) -> None:
    assert pool.run(3, commit_streams, where) == [True] * 3


def commit_streams(place: Place, where: tuple[int, str]) -> bool:
    comm, stream, ran = elastic(place, where), pynccl.create_stream(), []
    if place.rank == 1:
        stream.submit(lambda: (time.sleep(0.4), ran.append(1)))  # type: ignore[attr-defined]
    began = time.monotonic()
    comm.commit()
    return time.monotonic() - began > 0.35 and len(ran) == int(place.rank == 1)


def test_commit_raises_if_a_call_has_failed(pool: RankPool, where: tuple[int, str]) -> None:
    """Also if the program has caught that error: rank 0's of its split group."""
    assert values(pool.outcomes(3, commit_after_failure, where), 2) == [True, True]


def commit_after_failure(place: Place, where: tuple[int, str]) -> bool:
    comm = elastic(place, where)
    group = comm.split(int(place.rank == 1))
    if place.rank == 2:
        die()
    if place.rank == 0:
        with pytest.raises(pynccl.NcclRemoteError):
            group.all_reduce(torch.ones(1))
    with pytest.raises(pynccl.NcclRemoteError):
        comm.commit()
    return True


def test_the_newest_state_goes_to_the_ranks_that_are_behind(pool: RankPool, where: tuple[int, str]) -> None:
    """Compared with a model that took as many steps in one process."""
    model, optimizer, scheduler = trained(2)
    for step, state in pool.run(3, sync, where):
        assert step == 2
        torch.testing.assert_close(state, [one.state_dict() for one in (model, optimizer, scheduler)], rtol=0, atol=0)


def trained(steps: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, dtype=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def sync(place: Place, where: tuple[int, str]) -> Any:
    comm = elastic(place, where)
    objects = trained([1, 2, 0][place.rank])
    flag = torch.full((2, 3), place.rank == 1)
    before = {name: value.data_ptr() for name, value in objects[0].state_dict().items()}
    step = comm.agree([1, 2, 0][place.rank])
    comm.sync_state(*objects, flag, torch.zeros(0))
    assert flag.all()
    assert before == {name: value.data_ptr() for name, value in objects[0].state_dict().items()}
    assert comm.agree(step) == 2
    comm.sync_state(*objects)  # none is behind
    return step, [one.state_dict() for one in objects]


def test_a_half_copied_state_has_no_step_and_a_mistake_is_raised(pool: RankPool, where: tuple[int, str]) -> None:
    assert pool.run(2, claim, where) == [(3, 0, 11.0)] * 2


def claim(place: Place, where: tuple[int, str]) -> Any:
    comm = elastic(place, where)
    if place.rank == 0:
        comm._generation.launch.behind = 5, meeting.TORN  # as a sync_state that was broken off leaves it
    step = comm.agree(4 - place.rank)
    mistake = pynccl.NcclInvalidUsage("of the program")
    with pytest.raises(pynccl.NcclInvalidUsage) as raised:
        try:
            raise mistake
        except pynccl.NcclError:
            comm.survivors()
    assert raised.value is mistake
    return step, comm.generation, total(comm)


BAD: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
    ("timeout", lambda comm: comm.survivors(timeout=-1), ValueError, "survivors: timeout"),
    ("timeout", lambda comm: comm.commit(timeout="soon"), ValueError, "commit: timeout"),
    ("step", lambda comm: comm.agree(1.5), ValueError, "agree: step"),
    ("no agree", lambda comm: comm.sync_state(torch.ones(1)), pynccl.NcclInvalidUsage, "call comm.agree"),
    ("split", lambda comm: comm.split(0).survivors(), pynccl.NcclInvalidUsage, "made from another communicator"),
    ("split", lambda comm: comm.split(0).commit(), pynccl.NcclInvalidUsage, "made from another communicator"),
    ("object", lambda comm: (comm.agree(comm.rank), comm.sync_state(3)), TypeError, "state_dict"),
    ("sparse", lambda comm: (comm.agree(comm.rank), comm.sync_state(torch.eye(2).to_sparse())), TypeError, "dense"),
]


def test_errors_of_arguments(pool: RankPool, where: tuple[int, str]) -> None:
    """They say what was expected, on every rank, and the communicator stays usable."""
    assert pool.run(2, bad_arguments, where) == [11.0] * 2


def bad_arguments(place: Place, where: tuple[int, str]) -> float:
    comm = elastic(place, where)
    for _, call, kind, text in BAD:
        with pytest.raises(kind, match=text):
            call(comm)
    return total(comm)


def test_without_elastic_nothing_changes(pool: RankPool, where: tuple[int, str]) -> None:
    """No thread, no key in the store; the methods say what is missing."""
    for ordinary, with_elastic in pool.run(2, count_threads, where):
        assert with_elastic - ordinary == Counter(["pynccl elastic"])


def count_threads(place: Place, where: tuple[int, str]) -> Any:
    store = PrefixStore("ordinary", TCPStore("127.0.0.1", where[0], is_master=False, wait_for_workers=False))
    gc.collect()
    time.sleep(4 * POLL_SECONDS)  # for the threads of other tests
    none = threads()
    comm = pynccl.from_store(PrefixStore(where[1], store), place.rank, place.size)
    one = threads()
    for call in (comm.survivors, comm.commit, lambda: comm.agree(1), comm.sync_state):
        with pytest.raises(pynccl.NcclInvalidUsage, match="elastic=True"):
            call()
    comm.check_generation()
    assert (comm.generation, comm.verdict) == (0, "")
    comm.destroy()
    made = elastic(place, where)
    wait_until(lambda: (threads() - none)["pynccl elastic"])  # it begins in a worker
    made.barrier()
    two = threads()
    made.destroy()
    wait_until(lambda: not (threads() - none)["pynccl elastic"])  # it ends with its communicator
    return one - none, two - none


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def threads() -> Counter[str]:
    named = Counter(thread.name for thread in threading.enumerate())
    return named - Counter(dict.fromkeys(("pynccl worker", "pynccl query"), 99))


def test_a_shared_file_is_a_store_too(pool: RankPool, tmp_path: Path) -> None:
    assert values(pool.outcomes(3, meet_at_file, str(tmp_path / "file")), 0) == [11.0, 11.0]


def meet_at_file(place: Place, path: str) -> float:
    meeting.SILENT_SECONDS = 0.5
    comm = pynccl.from_store(FileStore(path), place.rank, place.size, elastic=True)
    if place.rank == 0:
        die()
    with pytest.raises(pynccl.NcclRemoteError):
        total(comm)
    return total(comm.survivors())
