"""trace: what all ranks compute and communicate, and when, in one file for ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from pynccl import Communicator, chrome_trace as chrome
from pynccl.bindings.resource import Shared
from pynccl.bindings.values import instance, integer, shown
from pynccl.comm.observing import observing

from ..agreement import raise_alike
from ..arguments import check_comm
from ..torch_internals import profiler_enabled
from .meeting import TraceMeeting
from .merge import Merged
from .profiled import Timeline, read
from .recording import Recording, now
from .spans import RankPart

LIMIT = 200_000
_RAISED_SECONDS = 1.0  # for which a rank whose block has raised waits for the others, who may wait for it
_active: list[Tracing] = []
_changing = threading.Lock()
os.register_at_fork(after_in_child=_active.clear)


def trace(
    path: str | os.PathLike[str],
    comm: Communicator | None = None,
    *,
    model: nn.Module | None = None,
    limit: int = LIMIT,
    timeout: float = 30.0,
) -> Tracing:
    """Record what runs in the block, on all ranks, and write one trace for ui.perfetto.dev.

        with ad.trace("step.json.gz", comm, model=model) as trace:
            for number in range(3):
                with trace.span(f"step {number}"):
                    train_step(model, batch)

    path     rank 0 writes it, when all have left the block: Chrome's trace format (JSON), compressed if it ends in .gz
    comm     its ranks are in the trace, with all that they do on whatever communicators; every one of them must enter
             the block. None: this process alone; of a launch of several, each then writes a file of its own, with
             ".rank0" and so on before the suffix. Where all ranks are in one process (init_all), so are they in its one
             file
    model    whose modules have their names in the trace; without it, those that they have in the module that is called
    limit    of the layers and calls of a rank: what comes later is counted and left out, and the profiler stops
    timeout  seconds for which rank 0 waits for the others at the end, and they for it

    Each rank is a process there. Its lanes: `steps` (the spans of the caller's), `compute` (layers, forwards and
    backwards, torch's operators or the GPU's kernels, waits for communication), and one for each communicator and
    stream. docs/trace.md says what the slices tell. A torch.profiler runs in the block; the trace adds no
    synchronization to it. At its end work on streams is waited for, for `timeout` at most.

    If the block raises on a rank, that is raised; what was recorded up to then is written all the same. Where a rank
    does not come to the end in time, or is gone, rank 0 writes its own part to `path` and every other rank a file of
    its own, named as above, and each warns.

    Raises, before the block and on every rank: OSError (RuntimeError where it is another rank's) for a path that cannot
    be written, RuntimeError if a trace or a torch.profiler is under way already; TypeError and ValueError for other
    arguments. One trace at a time in a process.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise TypeError(f"trace: path is {shown(path)}, expected that of a file, such as 'trace.json.gz'")
    if comm is not None:
        check_comm("trace", comm, path=path)
    if model is not None:
        instance(model, nn.Module, "trace: model", "a torch.nn.Module")
    limit = integer(limit, "trace: limit", 1, 10**9)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise ValueError(f"trace: timeout is {shown(timeout)}, expected seconds, above 0")
    return Tracing(Path(os.fspath(path)), comm, model, limit, float(timeout))


class Tracing(Shared):
    """A trace that is being recorded, or was: see `trace`.

    path     where this rank has written a file; None before, and where rank 0 has written that of all
    summary  on the rank that has written: of each rank, milliseconds of the block, of communication, and of that what
             was exposed
    missing  there: rank -> why it is not in the file
    """

    def __init__(
        self, path: Path, comm: Communicator | None, model: nn.Module | None, limit: int, timeout: float
    ) -> None:
        self.path: Path | None = None
        self.summary: dict[str, dict[str, float]] = {}
        self.missing: dict[int, str] = {}
        self._asked, self._comm, self._model, self._timeout = path, comm, model, timeout
        self._limit = limit
        self._open = contextlib.ExitStack()
        self._meeting: TraceMeeting | None = None
        self._entered = False
        self._pid = os.getpid()

    def __enter__(self) -> Tracing:
        comm, again = self._comm, self._entered
        problem: Exception | None = None
        try:
            self._begin_alone()
            self._device = _device(comm)
            self._recording = Recording(self._device, self._model, self._limit)
            self._open.enter_context(self._recording.running())
        except (OSError, RuntimeError) as error:
            problem = error
        try:
            raise_alike(comm, problem)
            if comm is not None and comm.size > 1:
                self._meeting = TraceMeeting(comm)
                comm.barrier()
            self._open.enter_context(observing(self._recording))
        except BaseException:
            if again:  # which is still under way, or has ended
                raise
            self._open.close()
            if hasattr(self, "_recording"):
                self._recording.abandon()
            self._end_alone()
            if self._meeting is not None:
                self._meeting.close()
            raise
        self._begin = now()
        return self

    def _begin_alone(self) -> None:
        if self._entered:
            raise RuntimeError("trace: this one was entered before; make another with ad.trace(...)")
        with _changing:
            if _active:
                raise RuntimeError(
                    "trace: one is under way in this process already, and records this, too; end it before another. "
                    "Where all ranks are in one process, ad.trace(path) without a communicator records them all"
                )
            _active.append(self)
        self._entered = True
        if profiler_enabled():
            raise RuntimeError("trace: a torch.profiler is under way, and a trace runs one of its own; end it before")
        if self._comm is None or self._comm.rank == 0:
            _check_writable(self._own_path() if self._comm is None else self._asked)

    def _end_alone(self) -> None:
        with _changing:
            if self in _active:
                _active.remove(self)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A slice of the lane `steps`, of this thread: a step, or whatever the caller wants to find again."""
        with self._recording.step(str(name)):
            yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = now()
        if self._pid != os.getpid():  # a forked child: the file is the parent's to write
            self._open.close()
            return
        try:
            self._open.close()
            raised = "" if kind is None else f"{kind.__name__}: {error}".strip().splitlines()[0][:300]
            seconds = min(_RAISED_SECONDS, self._timeout) if raised else self._timeout
            self._deliver(self._part(end, raised, seconds), seconds)
        except Exception as failed:  # of the trace: what the block has done, or raised, is more
            warnings.warn(f"trace: not written: {type(failed).__name__}: {failed}", RuntimeWarning, stacklevel=2)
        finally:
            self._end_alone()
            if self._meeting is not None:
                self._meeting.close()

    def _part(self, end: float, raised: str, seconds: float) -> RankPart:
        recording = self._recording
        recording.finish(seconds)
        return RankPart(
            rank=_rank_of_launch() if self._comm is None else self._comm.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=str(self._device),
            begin=self._begin,
            end=end,
            raised=raised,
            dropped=recording.dropped,
            captured=recording.captured,
            comms=recording.comms,
            pieces=Timeline(recording, read(recording, self._begin, end), end).pieces,
        )

    def _deliver(self, part: RankPart, seconds: float) -> None:
        """Rank 0 writes the parts of all; where they cannot be had, each rank writes its own."""
        comm, meeting = self._comm, self._meeting
        if comm is None or meeting is None:
            self._write(self._asked if comm is not None else self._own_path(), Merged([part], {}))
            return
        try:
            parts = meeting.gather(part, seconds)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            missing = {rank: why for rank in range(comm.size) if rank != comm.rank}
            path = with_rank(self._asked, comm.rank) if comm.rank else self._asked
            self._write(path, Merged([part], missing))
            first = with_rank(self._asked, 1).name
            others = f"rank 0's is {self._asked}" if comm.rank else f"{first} and the like"
            warnings.warn(
                f"trace: {path} has rank {comm.rank} alone; the others did not come to the end of the block together, "
                f"and each that lives writes a file of its own: {others} ({why})",
                RuntimeWarning,
                stacklevel=4,
            )
        else:
            if parts:
                self._write(self._asked, Merged(parts, {}))

    def _write(self, path: Path, merged: Merged) -> None:
        chrome.write(path, merged.events(), merged.metadata())
        self.path, self.summary, self.missing = path, merged.summary, merged.missing

    def _own_path(self) -> Path:
        """Of a process that is traced alone."""
        alone = os.environ.get("WORLD_SIZE", "1") in ("", "1")
        return self._asked if alone else with_rank(self._asked, _rank_of_launch())


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
    """Where computation is timed."""
    if comm is not None:
        return torch.device(comm.device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _rank_of_launch() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0
