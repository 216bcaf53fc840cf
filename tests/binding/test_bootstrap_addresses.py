"""MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE that cannot be right are named; the store listens where it has to."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from meetings import AT_ONCE, End, end_of, free_port, set_environment, total
from ranks import Place, RankPool

import pynccl


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """Processes that have not met."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()


# What cannot be right


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MASTER_ADDR", "", "expected the name or address of rank 0's machine, the same on all ranks"),
        ("MASTER_PORT", "http", "expected a number in 1..65535, of a port that is free on rank 0's machine"),
        ("MASTER_PORT", "0", "expected a number in 1..65535"),
        ("MASTER_PORT", "65536", "expected a number in 1..65535"),
        ("MASTER_PORT", "", "expected a number in 1..65535"),
        ("LOCAL_RANK", "first", "expected this rank's number on its machine, 0 or more"),
    ],
)
def test_a_variable_that_cannot_be_right_is_quoted(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    for variable, good in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(variable, good)
    monkeypatch.setenv(name, value)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        pynccl.init()
    assert f"{name}={value!r}: {said}" in str(caught.value)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "60"])
def test_a_timeout_that_is_none_is_refused(timeout: object) -> None:
    with pytest.raises(ValueError, match=r"timeout is .*, expected a number of seconds > 0"):
        pynccl.from_file("/nowhere", 0, 1, timeout=timeout)


def comes_to(place: Place, rank: int, host: str, port: int, timeout: float) -> End:
    set_environment(rank, 2, port, MASTER_ADDR=host)
    return end_of(lambda: pynccl.init(timeout=timeout))


def test_a_name_that_does_not_resolve_is_named(bare: RankPool) -> None:
    [end] = bare.run(1, comes_to, 1, "no-such-host.invalid", free_port(), 1.0)
    assert end.error == "NcclTimeout"
    assert "rank 1 reached no store at no-such-host.invalid:" in end.message
    assert "MASTER_ADDR='no-such-host.invalid' does not resolve: " in end.message
    assert end.seconds < 2.0


def test_a_port_where_nobody_listens_is_refused_by_name(bare: RankPool) -> None:
    [end] = bare.run(1, comes_to, 1, "127.0.0.1", free_port(), 1.0)
    assert "within 1 s: has rank 0 started there? (Connection refused)" in end.message


@pytest.mark.parametrize("listening", [True, False])
def test_a_port_in_use_is_named_by_rank_0(bare: RankPool, listening: bool) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listening:
            other.listen()
        port = other.getsockname()[1]
        [end] = bare.run(1, comes_to, 0, "127.0.0.1", port, 60.0)
    assert end.error == "NcclSystemError"
    assert f"rank 0 could not serve the ranks' store at 127.0.0.1:{port} (Address already in use)" in end.message
    assert f"or another program, may have the port (ss -ltnp 'sport = :{port}' names it)" in end.message
    assert "or set another MASTER_PORT, or MASTER_ADDR, on all ranks" in end.message
    assert end.seconds < AT_ONCE


def speak(listener: socket.socket, words: bytes, hears_first: bool) -> None:
    """Say `words`, or goodbye, to everybody who connects, until the listener is closed."""
    clients = []
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            clients.append(client)
            if hears_first:
                client.recv(1)
            client.sendall(words)
            if not words:
                client.close()


@pytest.mark.parametrize(
    ("words", "hears_first", "error", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, "NcclSystemError", "is no torch.distributed store, so the ranks"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", False, "NcclSystemError", "is no torch.distributed store, so the ranks"),
        (b"", False, "NcclTimeout", "something listens there, but does not answer as a store, or closes"),
    ],
    ids=["web server", "ssh", "closes"],
)
def test_a_listener_that_is_no_store_is_named(
    bare: RankPool, words: bytes, hears_first: bool, error: str, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=speak, args=(listener, words, hears_first), daemon=True).start()
        port = listener.getsockname()[1]
        [end] = bare.run(1, comes_to, 1, "127.0.0.1", port, 3.0)
        listener.shutdown(socket.SHUT_RDWR)
    assert end.error == error
    assert said in end.message and f"127.0.0.1:{port}" in end.message
    assert "Exception raised from" not in end.message
    assert end.seconds < 4.0


# What goes wrong on the rank that serves


def fails_and_ends(place: Place, port: int) -> End:
    set_environment(place.rank, 2, port)
    if place.rank == 0:
        os.environ["PYNCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
        end_of(pynccl.init)
        atexit._run_exitfuncs()
        os._exit(0)
    while not answers("127.0.0.1", port):  # so that it comes when rank 0 is about to fail
        pass
    return end_of(pynccl.init)


def test_the_reason_outlives_the_rank_that_serves_the_store(bare: RankPool) -> None:
    first, second = bare.outcomes(2, fails_and_ends, free_port())
    assert "died: exit code 0" in first.report
    assert second.value.error == "NcclRemoteError"
    assert "rank 0 could not start: NcclLibraryNotFound: PYNCCL_LIBRARY=/nowhere" in second.value.message
    assert second.value.seconds < AT_ONCE


# Ranks that contradict each other


def claims(place: Place, port: int, said: list[tuple[int, int]]) -> End:
    set_environment(*said[place.rank], port)
    return end_of(lambda: pynccl.init(timeout=20))


def test_ranks_with_different_world_sizes_all_hear_of_it(bare: RankPool) -> None:
    ends = bare.run(2, claims, free_port(), [(0, 2), (1, 3)])
    for end in ends:
        assert end.error == "NcclInvalidUsage"
        assert ") says there are 2 ranks, rank 1 (process " in end.message
        assert ") says 3: WORLD_SIZE, or nranks, has to be the same on all ranks" in end.message
        assert end.seconds < AT_ONCE


def test_two_processes_with_the_same_rank_all_hear_of_it(bare: RankPool) -> None:
    ends = bare.run(3, claims, free_port(), [(0, 3), (1, 3), (1, 3)])
    for end in ends:
        assert end.error == "NcclInvalidUsage"
        assert "two processes say that they are rank 1: process " in end.message
        assert "every process needs a RANK of its own" in end.message
        assert end.seconds < AT_ONCE


def tries(place: Place, port: int, ranks: list[int], timeout: float) -> str:
    """How it ends for those of `ranks`."""
    if place.rank not in ranks:
        return ""
    set_environment(place.rank, place.size, port)
    end = end_of(lambda: total(pynccl.init(timeout=timeout)))
    return end.error or "met"


def test_ranks_that_missed_each_other_meet_at_the_next_call(bare: RankPool) -> None:
    port = free_port()
    assert bare.run(2, tries, port, [1], 0.3) == ["", "NcclTimeout"]
    assert bare.run(2, tries, port, [0], 0.3) == ["NcclTimeout", ""]
    assert bare.run(2, tries, port, [0, 1], 20.0) == ["met", "met"]


# Where the store listens


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def serves(place: Place, host: str, port: int) -> tuple[list[str], list[float]]:
    """(where somebody listens, sums that two communicators and a process group at this address come to)."""
    set_environment(place.rank, place.size, port, MASTER_ADDR=host)
    sums = [total(pynccl.init(timeout=20))]
    listening = [one for one in ("127.0.0.1", "127.0.0.2", "::1") if answers(one, port)] if place.rank == 0 else []
    torch.distributed.init_process_group("gloo")  # finds its own store at the same port
    x = torch.ones(1)
    torch.distributed.all_reduce(x)
    torch.distributed.destroy_process_group()
    return listening, [*sums, x.item(), total(pynccl.init(timeout=20))]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", ["127.0.0.1"]), ("localhost", ["127.0.0.1"]), ("127.0.0.2", ["127.0.0.2"]), ("::1", ["::1"])],
)
def test_a_job_on_one_machine_listens_on_the_loopback_alone(bare: RankPool, host: str, expected: list[str]) -> None:
    if ":" in host and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6")
    (listening, first), (_, second) = bare.run(2, serves, host, free_port())
    assert listening == expected
    assert first == second == [3.0, 2.0, 3.0]


def waits_for_a_flood(place: Place, port: int, over: int) -> float:
    set_environment(place.rank, place.size, port)
    if place.rank:  # comes when rank 0's port has been flooded
        socket.create_connection(("127.0.0.1", over)).recv(1)
    return total(pynccl.init(timeout=20))


def flood(port: int, over: socket.socket) -> None:
    while not answers("127.0.0.1", port):
        pass
    held = []
    for number in range(400):
        one = socket.create_connection(("127.0.0.1", port))
        if number % 4 == 0:
            one.sendall(os.urandom(1 + number))
        elif number % 4 == 1:
            one.sendall(b"\0\xce")  # the first bytes of a greeting
        elif number % 4 == 2:
            one.close()
        held.append(one)
    over.accept()[0].close()
    over.accept()[0].close()
    for one in held:
        one.close()


def test_garbage_at_the_port_does_not_keep_the_ranks_from_meeting(bare: RankPool) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as over:
        thread = threading.Thread(target=flood, args=(port, over), daemon=True)
        thread.start()
        assert bare.run(2, waits_for_a_flood, port, over.getsockname()[1]) == [3.0, 3.0]
        assert thread.is_alive()  # and holds its connections
        socket.create_connection(over.getsockname()).close()
        thread.join(10)


def shares(place: Place, port: int) -> list[float]:
    """The same with the process group first, whose store is used, and outlived."""
    set_environment(place.rank, place.size, port)
    torch.distributed.init_process_group("gloo")
    sums = [total(pynccl.init(timeout=20))]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return [*sums, total(pynccl.init(timeout=20))]


def test_the_store_of_a_process_group_is_shared_and_kept(bare: RankPool) -> None:
    assert bare.run(2, shares, free_port()) == [[3.0, 3.0]] * 2
