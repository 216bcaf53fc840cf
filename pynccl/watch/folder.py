"""Where the files of the flight recorders lie: one folder of the user, a file a process; which processes live."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
import stat
import time

from . import layout
from .layout import SUFFIX, Header
from .records import DEAD, RUNNING, STOPPED, UNKNOWN
from .settings import settings

_KEPT_BYTES = 64 << 20  # of processes that went wrong, the newest
_SILENT_SECONDS = 60.0  # after which a process of another machine counts as ended: it touches its file every ten
_LAUNCHERS = (  # variables of theirs that name a job
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
)


def base() -> str:
    """PYNCCL_WATCH_DIR, or the user's folder in the temporary folder, be that full or not: so all processes agree."""
    named = (os.path.abspath(os.environ[name]) for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name))
    temporary = next(filter(os.path.isdir, named), "/tmp")
    return settings().folder or os.path.join(temporary, f"pynccl-watch-{os.geteuid()}")


def files(folder: str) -> list[str]:
    """The recorders' files of this user, or of the folder's owner, in it."""
    found = []
    with contextlib.suppress(OSError):
        owners = (os.geteuid(), os.stat(folder).st_uid)
        for one in os.scandir(folder):
            with contextlib.suppress(OSError):  # it has gone meanwhile
                if one.name.endswith(SUFFIX) and one.stat(follow_symlinks=False).st_uid in owners:
                    found.append(one.path)
    return sorted(found)


def job() -> str:
    """A name that the processes of one job on this machine share, and others do not: of what started them."""
    known = [value for name in _LAUNCHERS if (value := os.environ.get(name))]
    parent = os.getppid()
    return "-".join(known) or f"process-{parent}-{started(parent)}"


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


def state_of(pid: int, start: int) -> str:
    """What the process with this number, started at that tick, is doing on this machine."""
    try:
        words = words_of(pid)
    except OSError:  # no descriptor is left here, which says nothing of that process
        return UNKNOWN
    if len(words) < 20 or int(words[19]) != start or words[0] in (b"Z", b"X"):
        return DEAD
    return STOPPED if words[0] in (b"T", b"t") else RUNNING


def alive(path: str) -> bool:
    """Whether the process of this file is still there, as far as this machine knows."""
    found = re.search(rf"-(\d+)-(\d+){re.escape(SUFFIX)}$", path)
    return found is None or state_of(int(found[1]), int(found[2])) != DEAD


# Files


def create(rank: int) -> tuple[str, int, memoryview]:
    """This process's file: its path, a descriptor, and its part before the regions. OSError where it cannot be had."""
    folder = base()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not settings().folder:  # others may have made a folder of this name before
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(1, "expected a folder of this user, no link, that others may not enter", folder)
    path = os.path.join(folder, f"rank{rank if rank >= 0 else ''}-{os.getpid()}-{started()}{SUFFIX}")
    remove(path)  # of an earlier recorder of this process
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return path, file, grow(file, 0, layout.REGIONS_AT)
    except OSError:
        os.close(file)
        remove(path)
        raise


def grow(file: int, at: int, nbytes: int) -> memoryview:
    """So many bytes more of the file, mapped, or OSError. Their room is taken from the file system at once: memory that
    is mapped to a file which cannot have it ends the process by SIGBUS when it is written to."""
    os.posix_fallocate(file, at, nbytes)
    return memoryview(mmap.mmap(file, nbytes, offset=at))


def write_field(path: str, field: str, value: bytes) -> bool:
    """Write a field of the header of another process's file; False where that cannot be."""
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        place = getattr(Header, field)
        return os.pwrite(file.fileno(), value.ljust(place.size, b"\0"), place.offset) == place.size
    return False


def tell(path: str, text: str) -> None:
    """Leave a text for the process of this file, whose watchdog prints it: that others wait for it."""
    write_field(path, "told", layout.cut(text, Header.told.size))


def remove_old(folder: str) -> None:
    """Of the processes that have ended, keep the newest files; remove what exceeds 64 MiB."""
    ended = []
    for path in files(folder):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            found = os.stat(path)
            if found.st_mtime < time.time() - _SILENT_SECONDS and not alive(path):
                ended.append((found.st_mtime, found.st_blocks * 512, path))
    room = _KEPT_BYTES
    for _, nbytes, path in sorted(ended, reverse=True):
        room -= nbytes
        if room < 0:
            remove(path)


def remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
