"""Where the files of the flight recorders lie: a folder per job, private to the user; what goes when a job has ended.

All of it is of the user's own processes: a folder that others made, or may write to, is not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import stat
import time
from typing import NamedTuple

from . import layout
from .layout import SUFFIX, Header
from .settings import settings

_KEPT_SECONDS = 7 * 86400.0  # for the files of processes that went wrong
_KEPT_BYTES = 16 << 20  # of all of them together, but for the ranks of the job that ended last
_SILENT_SECONDS = 3600.0  # after which a process that is not of this machine counts as ended
_TRIES = 5


def base() -> str:
    """PYNCCL_WATCH_DIR, or the user's folder in the temporary folder."""
    return settings().folder or os.path.join(_temporary(), f"pynccl-watch-{os.geteuid()}")


def _temporary() -> str:
    """As tempfile.gettempdir(), whether it is full or not: so all processes of a job, and who looks for them, agree."""
    named = (os.path.abspath(os.environ[name]) for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name))
    return next(filter(os.path.isdir, named), "/tmp")


def jobs(folder: str) -> list[str]:
    """The folders of this user's jobs in this base folder, as paths."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    paths = sorted(os.path.join(folder, name) for name in names)
    return [path for path in paths if files(path) and _is_own(path)]


def _is_own(path: str) -> bool:
    with contextlib.suppress(OSError):  # it has gone meanwhile
        return os.stat(path).st_uid == os.geteuid()
    return False


def files(folder: str) -> list[str]:
    """The recorders' files in the folder of one job."""
    with contextlib.suppress(OSError):
        return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(SUFFIX))
    return []


def job() -> str:
    """A name that the processes of one job on this machine share, and others do not: of what started them.

    torchrun's run and restart, the job of SLURM or of an MPI, where rank 0 is met, else the process that started
    this one."""
    environ = os.environ
    if "TORCHELASTIC_RUN_ID" in environ:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        return _plain("torchrun-" + "-".join(environ.get(name, "0") for name in names))
    if "SLURM_JOB_ID" in environ:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return _plain("slurm-" + "-".join(environ[name] for name in names if environ.get(name)))
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"):
        if environ.get(name):
            return _plain(f"mpi-{environ[name]}")
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return _plain(f"{environ['MASTER_ADDR']}-{environ['MASTER_PORT']}")
    parent = os.getppid()
    return f"process-{parent}-{started(parent)}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:120].strip(".") or "job"


# Processes and machines


def words_of(pid: int | str) -> list[bytes]:
    """What /proc says of a process, from its state on; [] if it is gone. OSError where it cannot be told: no descriptor
    is left."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def started(pid: int | str = "self") -> int:
    """When a process was started, in ticks since the machine was; with its number it is the only one. 0: it is gone, or
    cannot be told."""
    with contextlib.suppress(OSError, IndexError):
        return int(words_of(pid)[19])
    return 0


def born() -> float:
    """When this process was started, by the wall clock; 0.0 if that cannot be told."""
    ticks = started()
    if not ticks or not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


@functools.cache
def machine() -> str:
    """What tells this machine, and this container on it, from others: numbers of processes are good within."""
    parts = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "/".join(parts) or os.uname().nodename


def alive(path: str) -> bool:
    """Whether the process of this file is still there, as far as this machine knows."""
    found = re.search(rf"-(\d+)-(\d+){re.escape(SUFFIX)}$", path)
    try:
        words = words_of(found[1]) if found else []
    except OSError:  # it cannot be told
        return True
    return found is None or (len(words) > 19 and int(words[19]) == int(found[2]))


# Files


def name_of_file(rank: int, pid: int, start: int) -> str:
    return f"rank{rank if rank >= 0 else ''}-{pid}-{start}{SUFFIX}"


def create(name: str) -> tuple[str, int]:
    """The path of this process's file, and a descriptor of it. OSError where it cannot be had.

    The last process of an earlier job may remove the folder between two steps: then again."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return _new_file(os.path.join(_private_folder(), name))
    return _new_file(os.path.join(_private_folder(), name))


def _private_folder() -> str:
    """The folder of this job, made where it is not there. PermissionError for one that others may write to."""
    above = base()
    os.makedirs(above, mode=0o700, exist_ok=True)
    if not settings().folder:
        _check_private(above, 0o077)
    mine = os.path.join(above, job())
    with contextlib.suppress(FileExistsError):
        os.mkdir(mine, 0o700)
    _check_private(mine, 0o022)
    return mine


def _check_private(path: str, others: int) -> None:
    """Others may have made a folder of this name before, to read or fake what is in it."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & others:
        raise PermissionError(1, "expected a folder of this user, no link, that others may not write to", path)


def _new_file(path: str) -> tuple[str, int]:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of an earlier recorder of this process
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        reserve(file, 0, layout.REGIONS_AT)
    except OSError:
        os.close(file)
        remove(path)
        raise
    return path, file


def reserve(file: int, at: int, nbytes: int) -> None:
    """Take room from the file system at once: memory that is mapped to a file which cannot have it ends the process by
    SIGBUS when it is written to. OSError where there is none; then the file is as long as it was."""
    try:
        os.posix_fallocate(file, at, nbytes)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, at)
        raise


def header(path: str) -> Header | None:
    """The header of this file; None where it is too short for one. OSError where it cannot be read."""
    with open(path, "rb") as file:
        data = file.read(ctypes.sizeof(Header))
    return Header.from_buffer_copy(data) if len(data) == ctypes.sizeof(Header) else None


def write_field(path: str, field: str, value: bytes) -> bool:
    """Write a field of the header of another process's file; False where that cannot be."""
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        place = getattr(Header, field)
        return os.pwrite(file.fileno(), value.ljust(place.size, b"\0"), place.offset) == place.size
    return False


def tell(path: str, text: str) -> None:
    """Leave a text for the process of this file, whose watchdog prints it: that others wait for it."""
    write_field(path, "told", layout.cut(text, Header.told.size))


class Left(NamedTuple):
    """The file of a process that has ended."""

    seen: float  # the last time that the process is known to have lived
    nbytes: int
    path: str


def left(path: str) -> Left | None:
    """None: its process lives, or its file has gone meanwhile."""
    try:
        head, found = header(path), os.stat(path)
    except OSError:
        return None
    seen = found.st_mtime  # the watchdog sees to that
    here = head is not None and layout.get(head.machine) == machine()
    lives = alive(path) if here else seen > time.time() - _SILENT_SECONDS
    return None if lives else Left(seen, found.st_blocks * 512, path)


def remove_old(above: str) -> None:
    """Of the processes that have left files in this base folder: remove those that are old, and the oldest where they
    take too much room, but for the newest of each rank of the job that ended last."""
    found = (left(path) for job in jobs(above) for path in files(job))
    ended = sorted(filter(None, found), reverse=True)
    room, now = _KEPT_BYTES, time.time()
    last: set[str] = set()
    for one in ended:
        room -= one.nbytes
        folder, name = os.path.split(one.path)
        rank = name.partition("-")[0]
        of_last = folder == os.path.dirname(ended[0].path) and rank not in last
        if of_last:
            last.add(rank)
        if one.seen < now - _KEPT_SECONDS or (room < 0 and not of_last):
            remove(one.path)


def remove(path: str) -> None:
    """Remove the file of a process, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))
