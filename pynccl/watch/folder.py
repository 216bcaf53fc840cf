"""The files of the flight recorders: one folder per user, one file per process; and which processes are alive."""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import re
import stat
import time
from typing import NamedTuple, TypeVar

from ..bindings.errors import NcclInvalidUsage
from . import layout
from .layout import SUFFIX, Header
from .records import DEAD, RUNNING, STOPPED, UNKNOWN

T = TypeVar("T")
_MAX_KEPT_BYTES = 64 << 20  # of failed processes, newest first
ENDED = ".ended"
_SILENT_SECONDS = 60.0  # a process on another node that has not touched its file for this long counts as ended
_LAUNCHERS = (  # their environment variables that identify a job
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
)


# The environment variables


class Settings(NamedTuple):
    """The values of the PYNCCL_WATCH* variables.

    on       PYNCCL_WATCH=off | on: whether calls are recorded
    folder   PYNCCL_WATCH_DIR: folder for the files; "": a private folder of the user in the temporary folder
    timeout  PYNCCL_WATCH_TIMEOUT: seconds after which a call that has not completed is reported; 0: never
    raises   PYNCCL_WATCH_ACTION=report | raise: whether the watchdog also aborts the communicator after reporting
    """

    on: bool
    folder: str
    timeout: float
    raises: bool

    @property
    def poll(self) -> float:
        """Polling interval of the watchdog, in seconds."""
        return min(max(self.timeout / 20, 0.05), 0.5) if self.timeout else 0.5


def settings() -> Settings:
    """Read the environment. Invalid values raise NcclInvalidUsage, which names the valid ones."""
    on = _one_of("PYNCCL_WATCH", {"": True, "on": True, "1": True, "off": False, "0": False}, "on, off")
    raises = _one_of("PYNCCL_WATCH_ACTION", {"": False, "report": False, "raise": True}, "report, raise")
    folder = _value("PYNCCL_WATCH_DIR")
    return Settings(on, os.path.abspath(os.path.expanduser(folder)) if folder else "", _timeout(), raises)


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()


def _one_of(name: str, values: dict[str, T], expected: str) -> T:
    text = _value(name)
    if text.lower() not in values:
        raise NcclInvalidUsage(f"{name}={text!r}: expected one of {expected}")
    return values[text.lower()]


def _timeout() -> float:
    text = _value("PYNCCL_WATCH_TIMEOUT")
    try:
        value = float(text or "60")
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise NcclInvalidUsage(f"PYNCCL_WATCH_TIMEOUT={text!r}: expected seconds, such as 60, or 0 to disable")
    return value


# The folder


def base() -> str:
    """Return PYNCCL_WATCH_DIR, or the user's folder in the temporary folder, even if full: so all processes agree."""
    named = (os.path.abspath(os.environ[name]) for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name))
    temporary = next(filter(os.path.isdir, named), "/tmp")
    return settings().folder or os.path.join(temporary, f"pynccl-watch-{os.geteuid()}")


def files(folder: str, suffix: str = SUFFIX) -> list[str]:
    """Return the recorder files in a folder that belong to this user or to the folder's owner.

    suffix  of their names; ENDED: the records of the last job that ended without an exception"""
    found = []
    with contextlib.suppress(OSError):
        owners = (os.geteuid(), os.stat(folder).st_uid)
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # removed meanwhile
                if entry.name.endswith(suffix) and entry.stat(follow_symlinks=False).st_uid in owners:
                    found.append(entry.path)
    return sorted(found)


def job() -> str:
    """Return a name that is unique to this job and shared by its processes on this node: from its launcher."""
    known = [value for name in _LAUNCHERS if (value := os.environ.get(name))]
    parent = os.getppid()
    return "-".join(known) or f"process-{parent}-{start_ticks(parent)}"


# Processes and nodes


def stat_fields(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; [] if the process is gone. OSError if the file cannot be
    opened because no descriptor is left."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start_ticks(pid: int | str = "self") -> int:
    """Return when a process started, in clock ticks since boot: pid and start are unique on a node. 0: it is gone, or
    unknown."""
    with contextlib.suppress(OSError, IndexError):
        return int(stat_fields(pid)[19])
    return 0


def process_start_time() -> float:
    """Return when this process had started, by the wall clock, to a tick of 10 ms; 0.0 if unknown."""
    ticks = start_ticks()
    if not ticks or not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + (ticks + 1) / os.sysconf("SC_CLK_TCK")


@functools.cache
def machine() -> str:
    """Return an id of this node, and of this container on it: the scope in which pids are unique."""
    parts = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "/".join(parts) or os.uname().nodename


def state_of(pid: int, start: int) -> str:
    """Return the state of the process with this pid and start tick on this node."""
    try:
        fields = stat_fields(pid)
    except OSError:  # no descriptor is left in this process: the other one may be alive
        return UNKNOWN
    if len(fields) < 20 or int(fields[19]) != start or fields[0] in (b"Z", b"X"):
        return DEAD
    return STOPPED if fields[0] in (b"T", b"t") else RUNNING


def alive(path: str) -> bool:
    """Return whether the process of this file may still be running, as far as this node knows."""
    found = re.search(rf"-(\d+)-(\d+){re.escape(SUFFIX)}$", path)
    return found is None or state_of(int(found[1]), int(found[2])) != DEAD


# Files


def create(rank: int) -> tuple[str, int, memoryview]:
    """Create this process's file. Return its path, a descriptor, and the part before the regions. Raises OSError."""
    folder = base()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not settings().folder:  # another user may have created a folder of this name
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(1, "expected a folder (not a link) of this user with mode 0700", folder)
    path = os.path.join(folder, f"rank{rank if rank >= 0 else ''}-{os.getpid()}-{start_ticks()}{SUFFIX}")
    remove(path)  # left by an earlier recorder of this process
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return path, file, grow(file, 0, layout.REGIONS_AT)
    except OSError:
        os.close(file)
        remove(path)
        raise


def grow(file: int, at: int, nbytes: int) -> memoryview:
    """Extend the file by `nbytes`, map them and return the memory; OSError if that fails. The disk space is allocated
    at once: writing to mapped memory without disk space would kill the process by SIGBUS."""
    os.posix_fallocate(file, at, nbytes)
    return memoryview(mmap.mmap(file, nbytes, offset=at))


def write_field(path: str, field: str, value: bytes) -> bool:
    """Write a field of the header of another process's file; return False if that fails."""
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        place = getattr(Header, field)
        return os.pwrite(file.fileno(), value.ljust(place.size, b"\0"), place.offset) == place.size
    return False


def leave_message(path: str, text: str) -> None:
    """Leave a message for the process of this file: its watchdog prints that other ranks wait for it."""
    write_field(path, "message", layout.cut(text, Header.message.size))


def remove_old(folder: str) -> None:
    """Of the files of ended processes, keep the newest 64 MiB and remove the others."""
    ended = []
    for path in files(folder):
        with contextlib.suppress(OSError):  # removed meanwhile
            found = os.stat(path)
            if found.st_mtime < time.time() - _SILENT_SECONDS and not alive(path):
                ended.append((found.st_mtime, found.st_blocks * 512, path))
    free_bytes = _MAX_KEPT_BYTES
    for _, nbytes, path in sorted(ended, reverse=True):
        free_bytes -= nbytes
        if free_bytes < 0:
            remove(path)


def write_ended(folder: str, text: str) -> None:
    """Replace the records, as JSON, of this user's last job that ended without an exception. `hang` needs them to say
    so after a good run, in place of showing the failure before it."""
    path = os.path.join(folder, f"{os.geteuid()}{ENDED}")
    part = f"{path}-{os.getpid()}-{start_ticks()}"
    try:
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(file, "w", encoding="utf-8") as opened:
            opened.write(text)
        os.replace(part, path)
    except OSError:  # a full disk, a folder that is gone
        remove(part)


def remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
