"""A pool of rank processes that run functions of the tests. Starting ranks for every test would be too slow.

    def sums(comm, value):                      # at module level: it is pickled by name
        return comm.all_reduce(torch.full((3,), value)).tolist()

    @each_size
    def test_sum(ranks, n):
        assert ranks.run(n, sums, 2.0) == [[2.0 * n] * 3] * n

Ranks are forked from a server that has already loaded torch: the first use takes about 2 s, a restart 0.1 s.
Communicators are created once per size and reused: a function that ends one must first split off its own. The output of
a rank goes to its own log, which is shown if the call fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SIZES = (2, 3, 4)
each_size = pytest.mark.parametrize("n", SIZES)

HOST: Mapping[str, str | None] = {"PYNCCL_LIBRARY": "host"}
# torchrun on one node. By default it resolves the hostname, which may have no address.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
GRACE_SECONDS = 3.0  # for the other ranks after one has failed; most of them are waiting for it in a collective
INIT_SECONDS = 30.0
# Initial environment of the ranks. The fork server's may contain variables of the test that started it.
ENVIRONMENT: Mapping[str, str] = dict(os.environ)
_PRELOAD = ["torch", "torch.distributed", "pytest"]  # not the project: an error in it would end the fork server
_PR_SET_PDEATHSIG = 1


class Place(NamedTuple):
    """Rank and size; replaces the communicator in a pool without communicators."""

    rank: int
    size: int


class Outcome(NamedTuple):
    """Result of one rank. `report` is empty if the function returned."""

    rank: int
    value: Any
    error: BaseException | None  # None also if the rank died, hung, or raised an exception that cannot be pickled
    report: str


class RankError(AssertionError):
    """Some ranks did not return. The message has the traceback, cause of death or stacks of each."""

    def __init__(self, message: str, outcomes: Sequence[Outcome] = ()) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


# ---------------------------------------------------------------------------------------------- in a rank process


class _Rank:
    """The requests that a rank process handles, and its communicators by size."""

    def __init__(self, rank: int, communicators: bool, device: int | None) -> None:
        self.rank = rank
        self.communicators = communicators
        self.device = device
        self.joined: dict[int, Any] = {}

    def unique_id(self) -> bytes:
        import pynccl

        return bytes(pynccl.get_unique_id())

    def join(self, n: int, unique_id: bytes) -> None:
        import pynccl

        self.joined[n] = pynccl.Communicator.init(n, unique_id, self.rank, device=self.device, timeout=INIT_SECONDS)

    def call(self, n: int, path: list[str], body: bytes) -> Any:
        sys.path[:] = path  # so that test modules are importable as in pytest
        function, args = pickle.loads(body)
        comm = self.joined[n] if self.communicators else Place(self.rank, n)
        before = dict(os.environ)
        if "torch" in sys.modules:  # no test depends on the tests before it
            sys.modules["torch"].manual_seed(0)
        try:
            return function(comm, *args)
        finally:
            if os.environ != before:
                os.environ.clear()
                os.environ.update(before)

    def leave(self) -> None:
        for comm in self.joined.values():
            comm.destroy()


def _serve(
    rank: int, requests: connection.Connection, log: str, env: Mapping[str, str | None], options: tuple[Any, ...]
) -> None:
    """Handle requests until the pool sends an empty one or exits."""
    _prepare_process(rank, log, env)
    served = _Rank(rank, *options)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while message := requests.recv_bytes():
            method, args = pickle.loads(message)
            requests.send_bytes(_reply(getattr(served, method), args))
        served.leave()


def _prepare_process(rank: int, log: str, env: Mapping[str, str | None]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ranks die with a killed pytest
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable(2, all_threads=True)
    os.environ.clear()
    os.environ.update({name: value for name, value in env.items() if value is not None})
    import torch

    torch.set_num_threads(1)


def _reply(method: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return (value, exception, traceback), pickled. The exception is None if it cannot be pickled."""
    try:
        return pickle.dumps((method(*args), None, ""))
    except BaseException as error:  # pytest.fail raises a BaseException
        text = "".join(traceback.format_exception(error)) + _locals_of_assertion(error)
        try:
            reply = pickle.dumps((None, error, text))
            pickle.loads(reply)
        except Exception:
            return pickle.dumps((None, None, text))
        return reply
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _locals_of_assertion(error: BaseException) -> str:
    """Return the local variables around a bare assert, since pytest rewrites asserts only in its own process."""
    if not isinstance(error, AssertionError) or error.args or error.__traceback__ is None:
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "".join(f"    {name} = {_short_repr(value)}\n" for name, value in frame.f_locals.items())


def _short_repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<no repr: {error}>"
    return text if len(text) <= 300 else text[:300] + "..."


# ---------------------------------------------------------------------------------------------- in the test process


class _Worker:
    """One rank process as the pool sees it."""

    def __init__(self, rank: int, log: Path, env: Mapping[str, str | None], options: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.rank = rank
        self.log = log
        self.pipe, child_end = context.Pipe()
        # daemon: the interpreter ends it if the pool is never closed
        variables = {name: value and value.format(rank=rank) for name, value in env.items()}
        arguments = (rank, child_end, str(log), {**ENVIRONMENT, **variables}, options)
        self.process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
        self.process.start()
        child_end.close()  # so that the rank's death reads as end of file
        self._printed_before = 0

    def send(self, method: str, args: tuple[Any, ...]) -> None:
        self._printed_before = self.log.stat().st_size if self.log.exists() else 0
        with contextlib.suppress(BrokenPipeError):  # it has died; receive() reports this
            self.pipe.send_bytes(pickle.dumps((method, args)))

    def receive(self) -> Outcome:
        """Return the rank's answer; call it when the pipe is ready."""
        try:
            value, error, text = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join()
            return self._failed(f"died: {_cause_of_death(self.process.exitcode)}")
        return self._failed(f"raised\n{text}", error) if text else Outcome(self.rank, value, None, "")

    def interrupt(self) -> None:
        """End a rank that does not answer. On SIGABRT, faulthandler writes the stacks of all threads to the log."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGABRT)

    def interrupted(self, why: str) -> Outcome:
        self.process.join(10)
        self.kill()
        return self._failed(why)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def _failed(self, what: str, error: BaseException | None = None) -> Outcome:
        printed = self.log.read_bytes()[self._printed_before :].decode(errors="replace").strip()
        log = f"\n--- rank {self.rank} printed\n{printed}" if printed else ""
        return Outcome(self.rank, None, error, f"rank {self.rank} {what.strip()}{log}")


def _cause_of_death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"


@contextlib.contextmanager
def _single_threaded_environment() -> Iterator[None]:
    """Set one thread per library while the fork server starts: threads do not survive a fork."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class RankPool:
    """Rank processes that are kept between calls; as many as the largest size used so far.

    env: environment variables of the ranks, None to unset one; "{rank}" in a value becomes the rank.
    device: passed to Communicator.init. communicators=False: functions get a Place and no library is loaded.
    """

    def __init__(
        self, env: Mapping[str, str | None] = HOST, *, device: int | None = None, communicators: bool = True
    ) -> None:
        self._env = env
        self._options = (communicators, device)
        self._workers: list[_Worker] = []
        self._joined: set[int] = set()
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self._started = 0

    def run(self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Run function(comm, *args) on n ranks and return the results in rank order.

        Raises RankError if a rank raises, dies or takes longer than `timeout` seconds; its __cause__ is the first
        exception of a rank. The next call then starts new ranks, since the old ones may have diverged.
        """
        outcomes = self.outcomes(n, function, *args, timeout=timeout)
        _raise_failures(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
        """Like run(), but return an Outcome per rank instead of raising, for tests in which ranks fail."""
        try:
            body = pickle.dumps((function, args))
        except Exception as error:
            raise TypeError(
                f"cannot pickle {function!r} and its arguments to send them to the ranks: {error}; "
                "define the function at module level and pass what it needs as arguments"
            ) from error
        self._prepare(n)
        return self._ask(range(n), "call", (n, list(sys.path), body), timeout)

    def close(self) -> None:
        """End the ranks in order, destroying their communicators."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(b"")
        for worker in self._workers:
            worker.process.join(5)
        self._kill()
        self._logs.cleanup()

    def _prepare(self, n: int) -> None:
        with _single_threaded_environment():
            for rank in range(len(self._workers), n):
                self._started += 1
                log = Path(self._logs.name, f"{self._started}-rank{rank}.log")
                self._workers.append(_Worker(rank, log, self._env, self._options))
        communicators, _ = self._options
        if communicators and n not in self._joined:
            id_outcomes = self._ask([0], "unique_id", (), INIT_SECONDS)
            _raise_failures(id_outcomes)
            _raise_failures(self._ask(range(n), "join", (n, id_outcomes[0].value), 2 * INIT_SECONDS))
            self._joined.add(n)

    def _ask(self, ranks: Sequence[int], method: str, args: tuple[Any, ...], timeout: float) -> list[Outcome]:
        try:
            outcomes = self._exchange([self._workers[rank] for rank in ranks], method, args, timeout)
        except BaseException:  # pytest's timeout or Ctrl-C: pending answers would reach the next caller
            self._kill()
            raise
        if any(outcome.report for outcome in outcomes):
            self._kill()
        return outcomes

    def _exchange(self, workers: list[_Worker], method: str, args: tuple[Any, ...], timeout: float) -> list[Outcome]:
        for worker in workers:
            worker.send(method, args)
        waiting = {worker.pipe: worker for worker in workers}
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + timeout
        why = f"did not finish within {timeout:g} s; its stacks:"
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                outcome = waiting.pop(pipe).receive()  # type: ignore[call-overload]
                outcomes.append(outcome)
                if outcome.report and time.monotonic() + GRACE_SECONDS < deadline:
                    deadline = time.monotonic() + GRACE_SECONDS
                    why = f"was still running {GRACE_SECONDS:g} s after rank {outcome.rank} failed; its stacks:"
        for worker in waiting.values():  # interrupt all before waiting for any: the death of one would wake the others
            worker.interrupt()
        outcomes += [worker.interrupted(why) for worker in waiting.values()]
        return sorted(outcomes, key=lambda outcome: outcome.rank)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._joined.clear()


def _raise_failures(outcomes: Sequence[Outcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.report]
    if failed:
        errors = [outcome.error for outcome in failed if outcome.error is not None]
        report = "\n\n".join(outcome.report for outcome in failed)
        summary = f"{len(failed)} of {len(outcomes)} ranks failed\n\n{report}"
        raise RankError(summary, outcomes) from (errors[0] if errors else None)
