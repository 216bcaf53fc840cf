"""trace: record the computation and communication of all ranks in one file for ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch
from torch import nn

from pynccl import Communicator, NcclTimeout, chrome_trace as chrome
from pynccl.bindings.resource import Shared
from pynccl.bindings.values import instance, path_of, shown
from pynccl.bindings.workers import Clock, Wait
from pynccl.comm.observers import observing

from ..agreement import check_not_in_group, gathered, raise_on_all_ranks
from ..arguments import check_comm
from ..torch_internals import profiler_enabled
from . import merge
from .merge import RankTrace
from .recording import Recording, now

_RAISED_SECONDS = 1.0  # a rank whose block has raised waits for the others, which may be blocked by it
_END_SECONDS = 5.0  # timeout for destroying the communicator of the traces
_ROUNDS = 20  # of clock measurements
_active: list[Tracing] = []
_changing = threading.Lock()
os.register_at_fork(after_in_child=_active.clear)


def trace(
    path: str | os.PathLike[str],
    comm: Communicator | None = None,
    *,
    model: nn.Module | None = None,
    timeout: float = 30.0,
) -> Tracing:
    """Record what runs in the block on all ranks, and write one trace for ui.perfetto.dev.

        with ad.trace("step.json.gz", comm, model=model) as trace:
            for number in range(3):
                with trace.span(f"step {number}"):
                    train_step(model, batch)

    path     output file, written by rank 0 after all ranks have left the block: Chrome's trace format (JSON),
             compressed if the name ends in .gz
    comm     records the ranks of this communicator, with their calls on all communicators; every rank must enter the
             block. None: record this process only; each process of a launch then writes its own file, with ".rank0"
             and so on before the suffix. Use None if all ranks are in one process (init_all)
    model    names the modules; without it, names start at the module that is called
    timeout  seconds that the ranks wait for each other at the end of the block

    Each rank is a process in the trace, with the lanes `steps` (spans), `cpu` (layers, torch's operators, waits for
    communication), one for each stream of a GPU (kernels), and one for each communicator and stream. docs/trace.md
    explains the slices. A torch.profiler runs in the block. The trace does not synchronize within the block; the end of
    the block waits up to `timeout` seconds for work on streams.

    If the block raises on a rank, the exception propagates, and the trace is still written. If a rank does not reach
    the end of the block in time, rank 0 writes its own trace to `path`, and every other live rank writes its own file,
    named as above; each of them warns.

    Raises before the block, on every rank: OSError (RuntimeError on the other ranks) if the path cannot be written;
    RuntimeError if a trace or a torch.profiler is active in the process; TypeError or ValueError for invalid arguments.
    """
    path = path_of(path, "trace: path")
    if comm is not None:
        check_comm("trace", comm, path=path)
    if model is not None:
        instance(model, nn.Module, "trace: model", "a torch.nn.Module")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"trace: timeout is {shown(timeout)}, expected seconds > 0")
    return Tracing(Path(path), comm, model, float(timeout))


class Tracing(Shared):
    """A trace; see `trace`.

    path     the file that this rank has written; None before the end, and on ranks whose trace rank 0 has written
    summary  on the rank that has written the file: per rank, milliseconds of the block, of communication, and of
             exposed communication
    missing  on the rank that has written the file: rank -> why it is not in the file
    """

    def __init__(self, path: Path, comm: Communicator | None, model: nn.Module | None, timeout: float) -> None:
        self.path: Path | None = None
        self.summary: dict[str, dict[str, float]] = {}
        self.missing: dict[int, str] = {}
        self._target, self._comm, self._timeout = path, comm, timeout
        self._recording = Recording(_device(comm), model)
        self._gathering: Gathering | None = None
        self._recorded = contextlib.ExitStack()  # closed at the end of the block
        self._entered = False
        self._pid = os.getpid()

    def __enter__(self) -> Tracing:
        comm, recorded = self._comm, contextlib.ExitStack()
        if comm is not None:
            check_not_in_group("trace")
        problem: Exception | None = None
        claimed = False
        try:
            self._claim()
            claimed = True
            recorded.enter_context(self._recording.running())
        except (OSError, RuntimeError) as error:
            problem = error
        try:
            raise_on_all_ranks(comm, problem)
            if comm is not None and comm.size > 1:
                self._gathering = Gathering(comm)
                comm.barrier()
            recorded.enter_context(observing(self._recording))
        except BaseException:
            recorded.close()
            if claimed:
                self._recording.stop()
                self._release()
            raise
        self._recorded, self._begin = recorded, now()
        return self

    def _claim(self) -> None:
        """Become the one trace of this process, or raise."""
        if self._entered:
            raise RuntimeError("trace: this trace was entered before; create a new one with ad.trace(...)")
        if profiler_enabled() and not _active:
            raise RuntimeError("trace: a torch.profiler is active, and a trace runs its own profiler; stop yours first")
        if self._comm is None or self._comm.rank == 0:
            _check_writable(self._own_path() if self._comm is None else self._target)
        with _changing:
            if _active:
                raise RuntimeError(
                    "trace: a trace is already active in this process; end it first. If all ranks are in one process, "
                    "one ad.trace(path) without a communicator records all of them"
                )
            _active.append(self)
        self._entered = True

    def _release(self) -> None:
        with _changing:
            if self in _active:  # not in a forked child
                _active.remove(self)
        if self._gathering is not None:
            self._gathering.close()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add a slice to the lane `steps`, for example for a training step."""
        with self._recording.step(shown(name, str)):
            yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = now()
        self._recorded.close()
        if self._pid != os.getpid():  # a forked child: the parent writes the file
            return
        try:
            raised = "" if kind is None else f"{kind.__name__}: {error}".strip().splitlines()[0][:300]
            seconds = min(_RAISED_SECONDS, self._timeout) if raised else self._timeout
            rank = _rank_of_launch() if self._comm is None else self._comm.rank
            self._deliver(RankTrace.of(rank, self._recording, self._begin, end, raised, seconds), seconds)
        except Exception as failed:  # a failing trace must not hide the result or the exception of the block
            warnings.warn(f"trace: not written: {type(failed).__name__}: {failed}", RuntimeWarning, stacklevel=2)
        finally:
            self._release()

    def _deliver(self, own: RankTrace, seconds: float) -> None:
        """Write the traces of all ranks on rank 0. If gathering them fails, each rank writes its own."""
        comm = self._comm
        if comm is None or self._gathering is None:
            self._write(self._target if comm is not None else self._own_path(), [own])
            return
        try:
            traces = self._gathering.gather(own, seconds)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            missing = {rank: why for rank in range(comm.size) if rank != comm.rank}
            path = with_rank(self._target, comm.rank) if comm.rank else self._target
            self._write(path, [own], missing)
            others = f"rank 0's is {self._target}" if comm.rank else f"{with_rank(self._target, 1).name} and the like"
            warnings.warn(
                f"trace: {path} has only rank {comm.rank}, since gathering the traces of all ranks failed; "
                f"every other live rank writes its own file: {others} ({why})",
                RuntimeWarning,
                stacklevel=4,
            )
        else:
            if traces:
                self._write(self._target, traces)

    def _write(self, path: Path, traces: list[RankTrace], missing: Mapping[int, str] = MappingProxyType({})) -> None:
        metadata = merge.metadata(traces, missing)
        chrome.write(path, merge.events(traces), metadata)
        self.path, self.summary, self.missing = path, metadata["summary"], dict(missing)

    def _own_path(self) -> Path:
        """Return the path for a trace of this process only."""
        alone = os.environ.get("WORLD_SIZE", "1") in ("", "1")
        return self._target if alone else with_rank(self._target, _rank_of_launch())


def with_rank(path: Path, rank: int) -> Path:
    """trace.json.gz -> trace.rank1.json.gz"""
    suffixes = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])
    return path.with_name(f"{path.name.removesuffix(suffixes)}.rank{rank}{suffixes}")


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(
            f"trace: {path} is a folder, expected the path of a file, such as {path / 'trace.json'}"
        )
    if path.exists() and not path.is_file():
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise type(error)(f"trace: {path} cannot be written: {path.parent}: {error.strerror}") from None


def _device(comm: Communicator | None) -> torch.device:
    """Return the device whose computation is recorded."""
    if comm is not None:
        return torch.device(comm.device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _rank_of_launch() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


class Gathering:
    """Gathers the traces of all ranks on rank 0. Collective: every rank constructs one at the begin of the block.

    It uses a communicator split from the user's, so that a timeout aborts only the split one."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.split(0, comm.rank)
        self._offset = clock_offset(self._comm)

    def gather(self, trace: RankTrace, seconds: float) -> list[RankTrace]:
        """Return the traces of all ranks on rank 0, [] on the others. Raises if that fails or takes over `seconds`."""

        def late() -> NcclTimeout:
            return NcclTimeout(f"the other ranks did not reach the end of the block within {seconds:g} s")

        found = Wait(Clock(seconds)).run_in_worker(lambda: self._gather(trace._replace(offset=self._offset)), late)
        self._comm.timeout = _END_SECONDS
        with contextlib.suppress(Exception):
            self._comm.destroy()
        return found

    def _gather(self, trace: RankTrace) -> list[RankTrace]:
        comm = self._comm
        if comm.device.startswith("cuda"):
            torch.cuda.set_device(comm.device)  # per thread
        data = trace.to_bytes()
        counts = [row[0] for row in gathered(comm, [len(data)])]
        send = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
        received = send.new_empty(sum(counts)) if comm.rank == 0 else None
        comm.gather_v(send, received, 0, counts=counts)
        found = [] if received is None else [part.numpy().tobytes() for part in received.cpu().split(counts)]
        gathered(comm, [0])  # wait until rank 0 has received everything
        return [RankTrace.from_bytes(part) for part in found]

    def close(self) -> None:
        if self._comm.alive:
            self._comm.abort()


def clock_offset(comm: Communicator) -> float:
    """Return the seconds that this rank's clock is ahead of rank 0's; 0.0 if both may share one clock.

    An all_gather ends on no rank before all ranks have begun it, so each one bounds the difference from both sides."""
    lower, upper, begun, ended = float("-inf"), float("inf"), 0, 0
    for number in range(_ROUNDS + 1):
        rows = gathered(comm, [round(now() * 1e9), ended])
        ended = round(now() * 1e9)
        if number:  # rows[0][1]: rank 0's time at the end of the previous all_gather
            lower = max(lower, begun - rows[0][1])
        begun = rows[comm.rank][0]
        upper = min(upper, ended - rows[0][0])
    return 0.0 if lower <= 0 <= upper else (lower + upper) / 2e9
