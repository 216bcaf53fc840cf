"""Messages through shared memory: whoever waits moves all messages of the group, and nobody has to."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from process_groups import numbers, process_group
from ranks import HOST, Place, RankPool
from rendezvous_servers import AT_ONCE

from pynccl import NcclInvalidUsage, NcclRemoteError, NcclTimeout

LARGE = 2 << 20  # elements: 8 MB, more than a channel holds
SECONDS = 40.0


def isend(x: torch.Tensor, to: int, **options: Any) -> dist.Work:
    work = dist.isend(x, to, **options)
    assert work is not None
    return work


def irecv(x: torch.Tensor, source: int, **options: Any) -> dist.Work:
    work = dist.irecv(x, source, **options)
    assert work is not None
    return work


def every_order(place: Place, path: str, count: int) -> None:
    """All ranks post two sends and two recvs in every order, and wait in every order."""
    r, n = place.rank, place.size
    with process_group("pynccl", place, path):
        for number, order in enumerate(itertools.permutations(range(4))):
            sent = [numbers(10 * number + 2 * r + i, count) for i in range(2)]
            found = [torch.empty(count) for _ in range(2)]
            posts = [
                lambda sent=sent: isend(sent[0], (r + 1) % n),
                lambda sent=sent: isend(sent[1], (r + 1) % n, tag=7),
                lambda found=found: irecv(found[0], (r - 1) % n),
                lambda found=found: irecv(found[1], (r - 1) % n, tag=7),
            ]
            works = {i: posts[i]() for i in order}
            for i in (range(4), order[::-1])[number % 2]:
                works[i].wait()
            for i in range(2):
                assert torch.equal(found[i], numbers(10 * number + 2 * ((r - 1) % n) + i, count)), (order, i)


@pytest.mark.parametrize("n", (2, 3))
@pytest.mark.parametrize("count", (3, 200_000))
def test_all_ranks_post_and_wait_in_every_order(processes: RankPool, tmp_path: Path, n: int, count: int) -> None:
    processes.run(n, every_order, str(tmp_path / "store"), count)


def unawaited(place: Place, path: str) -> None:
    """Rank 0 posts and then waits for other things, while rank 1's messages end."""
    store = dist.FileStore(f"{path}-done", 2)
    with process_group("pynccl", place, path):
        x, y = numbers(place.rank, LARGE), torch.empty(LARGE)
        if place.rank == 0:
            works, done = [irecv(y, 1), isend(x, 1)], threading.Event()
            isend(x[:1], 1, tag=1).get_future().then(lambda _: done.set())
            store.wait(["sent"])
            assert done.wait(SECONDS)
            dist.barrier()
            for work in works:
                work.wait()
        else:
            dist.send(x, 0)
            dist.recv(y, 0)
            dist.recv(torch.empty(1), 0, tag=1)
            store.set("sent", "")
            dist.barrier()
        assert torch.equal(y, numbers(1 - place.rank, LARGE))


def test_messages_pass_while_nobody_waits_for_them(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, unawaited, str(tmp_path / "store"))


def by_threads(place: Place, path: str) -> None:
    """Eight threads exchange messages at once, each with its own tag, while another makes collectives."""
    r, n, errors = place.rank, place.size, []

    def exchange(tag: int) -> None:
        try:
            for i in range(20):
                count = 50_000 if i % 10 == tag else 5
                y, work = torch.empty(count), isend(numbers(100 * r + tag + i, count), (r + 1) % n, tag=tag)
                dist.recv(y, (r - 1) % n, tag=tag)
                work.wait()
                assert torch.equal(y, numbers(100 * ((r - 1) % n) + tag + i, count))
        except BaseException as error:
            errors.append(error)

    with process_group("pynccl", place, path):
        threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            x = torch.ones(10)
            dist.all_reduce(x)
            assert x.tolist() == [n] * 10
        for thread in threads:
            thread.join()
        assert not errors, errors


@pytest.mark.parametrize("n", (2, 3))
def test_threads_wait_at_once(processes: RankPool, tmp_path: Path, n: int) -> None:
    processes.run(n, by_threads, str(tmp_path / "store"))


def in_two_groups(place: Place, path: str) -> None:
    """The same ranks and tags in three groups; the third has the ranks in another order."""
    r = place.rank
    with process_group("pynccl", place, path):
        groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([1, 0])]
        works = [isend(torch.full((2,), 10.0 * r + i), 1 - r, group=group) for i, group in enumerate(groups)]
        found = {i: torch.empty(2) for i in (2, 0, 1)}
        works += [irecv(x, 1 - r, group=groups[i]) for i, x in found.items()]
        for work in works[::-1]:
            work.wait()
        assert all(x.tolist() == [10.0 * (1 - r) + i] * 2 for i, x in found.items()), found


def test_groups_with_the_same_ranks_do_not_mix(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, in_two_groups, str(tmp_path / "store"))


def random_program(place: Place, path: str, backend: str, seed: int) -> list[torch.Tensor]:
    """Run random messages, in several rounds; the k-th with one tag of a pair are matched. Return what was received."""
    r, n, plan, mine = place.rank, place.size, random.Random(seed), random.Random(seed * 31 + place.rank)
    found = []
    with process_group(backend, place, path):
        for number in range(8):
            calls: dict[tuple[Any, ...], list[Any]] = {}  # in order only for equal tags of one direction
            for i in range(plan.randint(1, 20)):
                source, to = plan.sample(range(n), 2)
                tag, count = plan.randint(0, 3), plan.choice([0, 1, 7, 1000, 300_000])
                dtype = plan.choice([torch.float32, torch.int16, torch.float64])
                x = numbers(seed + 100 * number + i, count, 2, dtype=dtype)
                strided = plan.random() < 0.3 and backend == "pynccl"  # gloo refuses such tensors
                if r == source:
                    calls.setdefault((isend, to, tag), []).append(x.t().contiguous().t() if strided else x)
                if r == to:
                    found.append(torch.zeros(2, count, dtype=dtype).t() if strided else torch.zeros_like(x))
                    calls.setdefault((irecv, source, tag), []).append(found[-1])
            works = []
            while calls:
                call, peer, tag = key = mine.choice(list(calls))
                works.append(call(calls[key].pop(0), peer, tag=tag))
                if not calls[key]:
                    del calls[key]
            for work in mine.sample(works, len(works)):
                work.wait()
    return found


@pytest.mark.parametrize("n", (2, 3))
def test_random_programs_as_with_gloo(processes: RankPool, tmp_path: Path, n: int) -> None:
    for seed in random.sample(range(1 << 20), 4):
        print(f"{n} ranks, seed {seed}")
        results = [
            processes.run(n, random_program, str(tmp_path / f"{name}{seed}"), name, seed) for name in ("pynccl", "gloo")
        ]
        for ours, theirs in zip(*results, strict=True):
            assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)), seed


# Faults


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", AT_ONCE)  # the other ranks need time to report
    pool = RankPool(HOST, communicators=False)
    yield pool
    pool.close()


def interrupted(place: Place, path: str, sends: bool, kind: signal.Signals) -> str:
    """Rank 1 is killed or stopped in the middle of a large message, to or from rank 0. Return rank 0's error."""
    with process_group("pynccl", place, path):
        x = torch.ones(LARGE)
        if place.rank == 1:
            work = isend(x, 0) if sends else irecv(x, 0)  # it fills or empties the slots
            if not sends:
                dist.recv(x[:1], 0, tag=1)
            Path(f"{path}.posted").touch()
            os.kill(os.getpid(), kind)
            del work
            time.sleep(SECONDS)
        if kind == signal.SIGSTOP:
            dist.group.WORLD.set_timeout(timedelta(seconds=1.5))
        if not sends:
            dist.send(x[:1], 1, tag=1)
        while not Path(f"{path}.posted").exists():  # else the whole message may pass meanwhile
            time.sleep(0.05)
        started = time.monotonic()
        with pytest.raises(NcclRemoteError if kind == signal.SIGKILL else NcclTimeout) as raised:
            dist.recv(x, 1) if sends else dist.send(x, 1)
        assert time.monotonic() - started < 10
        with pytest.raises(type(raised.value)):
            dist.recv(x, 1) if sends else dist.send(x, 1)
        Path(f"{path}.done").touch()
    return str(raised.value)


@pytest.mark.parametrize("sends", (True, False))
def test_kill_in_the_middle_of_a_message(faulty: RankPool, tmp_path: Path, sends: bool) -> None:
    outcomes = faulty.outcomes(2, interrupted, str(tmp_path / "store"), sends, signal.SIGKILL)
    assert not outcomes[0].report, outcomes[0].report
    assert re.search(r"rank 1's process \d+ was killed", outcomes[0].value), outcomes[0].value


@pytest.mark.parametrize("sends", (True, False))
def test_stop_in_the_middle_of_a_message(faulty: RankPool, tmp_path: Path, sends: bool) -> None:
    def resume() -> None:
        while not (tmp_path / "store.done").exists() and not over.wait(0.05):
            pass
        os.kill(faulty._workers[1].process.pid or 0, signal.SIGKILL)

    over = threading.Event()
    thread = threading.Thread(target=resume)
    thread.start()
    try:
        outcomes = faulty.outcomes(2, interrupted, str(tmp_path / "store"), sends, signal.SIGSTOP)
    finally:
        over.set()
        thread.join()
    assert not outcomes[0].report, outcomes[0].report
    assert re.search(r"rank 1's process \d+ is stopped \(SIGSTOP", outcomes[0].value), outcomes[0].value


def gives_up(place: Place, path: str) -> None:
    """Rank 0's recv times out in one group; rank 1's later send there fails, and other groups go on."""
    store = dist.FileStore(f"{path}-late", 2)
    with process_group("pynccl", place, path):
        group = dist.new_group([0, 1])
        if place.rank == 0:
            group.set_timeout(timedelta(seconds=0.5))
            with pytest.raises(NcclTimeout, match="recv: rank 1 never called send"):
                dist.recv(torch.ones(3), 1, group=group)
            store.set("late", "")
        else:
            store.wait(["late"])
            with pytest.raises(NcclRemoteError, match="lost rank 0: it gave up"):
                dist.send(torch.ones(3), 0, group=group)
        x = torch.full((3,), float(place.rank))
        works = [isend(x.clone(), 1 - place.rank), irecv(x, 1 - place.rank)]
        for work in works:
            work.wait()
        assert x.tolist() == [1 - place.rank] * 3


def test_a_message_that_comes_after_the_timeout(faulty: RankPool, tmp_path: Path) -> None:
    faulty.run(2, gives_up, str(tmp_path / "store"))


def ended(place: Place, path: str, how: str) -> None:
    """The group ends while messages are pending: those that can pass do, the others fail and end a wait."""
    with process_group("pynccl", place, path):
        group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=3))
        x, y, errors = torch.full((LARGE,), float(place.rank)), torch.empty(LARGE), []
        dist.barrier(group)
        posted = [isend(x, 1 - place.rank, group=group), irecv(y, 1 - place.rank, group=group)]
        never = irecv(torch.empty(1), 1 - place.rank, group=group, tag=5)

        def wait() -> None:
            try:
                never.wait()
            except (
                NcclInvalidUsage,
                NcclRemoteError,
                NcclTimeout,
            ) as error:  # the other rank, or its timeout, may be earlier
                errors.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        if how == "destroy":
            dist.destroy_process_group(group)
            for work in posted:
                work.wait()
            assert y[-1].item() == 1 - place.rank
        else:
            backend = group._get_backend(torch.device("cpu"))
            backend.abort()
        thread.join(SECONDS)
        assert len(errors) == 1
        assert re.search(
            rf"the process group was {how}ed|rank {1 - place.rank}: it has left|recv: rank {1 - place.rank} never",
            errors[0],
        ), errors


@pytest.mark.parametrize("how", ("destroy", "abort"))
def test_the_end_of_the_group_ends_pending_messages(faulty: RankPool, tmp_path: Path, how: str) -> None:
    faulty.run(2, ended, str(tmp_path / "store"), how)


def a_thread_for_each_peer(place: Place, path: str) -> None:
    """The first messages of new groups, by one thread for each peer."""
    r, n = place.rank, place.size
    with process_group("pynccl", place, path):
        for turn in range(6):
            group, errors = dist.new_group(), list[BaseException]()
            found = [torch.zeros(4) for _ in range(n)]

            def talk(peer: int, group: Any = group, errors: Any = errors, found: Any = found) -> None:
                try:
                    works = [irecv(found[peer], peer, group=group), isend(torch.full((4,), r + 1.0), peer, group=group)]
                    for work in works:
                        work.wait(timedelta(seconds=SECONDS))
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=talk, args=(peer,)) for peer in range(n) if peer != r]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors, (turn, errors)
            assert [x[0].item() for x in found] == [0 if peer == r else peer + 1 for peer in range(n)]


def test_first_messages_by_many_threads(processes: RankPool, tmp_path: Path) -> None:
    processes.run(4, a_thread_for_each_peer, str(tmp_path / "store"))


def forks(place: Place, path: str) -> list[str]:
    """A forked child tries to use the group of its parent, whose messages must not notice."""
    with process_group("pynccl", place, path):
        x, texts = torch.zeros(3), list[str]()
        dist.send(torch.full((3,), 1.0), 1) if place.rank == 0 else dist.recv(x, 0)
        if place.rank == 0:
            read, write = os.pipe()
            pending = irecv(torch.empty(3), 1)
            child = os.fork()
            if child == 0:
                found = []
                for call in (lambda: isend(torch.full((3,), 666.0), 1), pending.wait, dist.destroy_process_group):
                    try:
                        call()
                    except NcclInvalidUsage as error:
                        found.append(str(error))
                os.write(write, "\n".join(found).encode())
                os._exit(0)
            os.waitpid(child, 0)
            texts = os.read(read, 10_000).decode().splitlines()
            dist.send(torch.full((3,), 2.0), 1)
            pending.wait()
        else:
            dist.recv(x, 0)
            assert x.tolist() == [2, 2, 2]
            dist.send(x, 0)
    return texts


def test_a_forked_child_leaves_the_messages_alone(processes: RankPool, tmp_path: Path) -> None:
    texts, _ = processes.run(2, forks, str(tmp_path / "store"))
    assert len(texts) >= 2 and all("inherited through a fork" in text for text in texts), texts


def short_waits(place: Place, path: str) -> str:
    with process_group("pynccl", place, path):
        dist.barrier()
        if place.rank == 0:
            os._exit(9)
        work, end = irecv(torch.empty(2), 0), time.monotonic() + SECONDS
        while time.monotonic() < end:
            try:
                work.wait(timedelta(seconds=0.05))
            except NcclRemoteError as error:
                return str(error)
            except NcclTimeout as error:
                assert "still in progress" in str(error)
        return "never"


def test_short_waits_notice_a_dead_peer(processes: RankPool, tmp_path: Path) -> None:
    outcome = processes.outcomes(2, short_waits, str(tmp_path / "store"))[1]
    assert not outcome.report and "rank 0" in outcome.value, outcome


def odd_tensors(place: Place, path: str) -> None:
    """What a message cannot do is an error of that message alone."""
    with process_group("pynccl", place, path):
        if place.rank == 0:
            time.sleep(0.3)
            for i in range(3):
                dist.send(torch.arange(16.0).view(4, 4) + i, 1)
            return
        with torch.inference_mode():
            x, y = torch.zeros(4, 4).t(), torch.zeros(4, 4)
            works = [irecv(x, 0), irecv(y, 0)]
        z = torch.zeros(1, 4).expand(4, 4)  # cannot be written
        works.append(irecv(z, 0))
        time.sleep(1)  # the group's thread receives them
        works[0].wait()
        works[1].wait()
        assert torch.equal(x, torch.arange(16.0).view(4, 4)) and torch.equal(y, x + 1)
        with pytest.raises(RuntimeError, match="single memory location"):
            works[2].wait()
        with pytest.raises(ValueError, match="is this rank itself"):
            irecv(torch.empty(1), 1)


def test_an_error_of_one_message(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, odd_tensors, str(tmp_path / "store"))


def late(place: Place, path: str) -> None:
    """Rank 0 destroys the groups with a send in flight, for which rank 1 calls recv later."""
    with process_group("pynccl", place, path):
        if place.rank == 0:
            isend(torch.ones(4), 1)
        else:
            time.sleep(1)
            x = torch.zeros(4)
            dist.recv(x, 0)
            assert x.tolist() == [1] * 4


def test_destroy_waits_for_messages_whose_ranks_have_not_met(processes: RankPool, tmp_path: Path) -> None:
    processes.run(2, late, str(tmp_path / "store"))
