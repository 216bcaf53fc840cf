"""Where the files of the flight recorders lie: a folder a job, private to the user; what goes when a job has ended."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import time
from typing import NamedTuple

from . import layout
from .layout import END, END_AT, HEADER_BYTES, SUFFIX
from .settings import settings

_KEPT_SECONDS = 7 * 86400.0  # for the files of processes that went wrong
_KEPT_BYTES = 16 << 20  # of all of them together, but for the ranks of the job that ended last
_TOGETHER_SECONDS = 60.0  # in which the ranks of a job end
_SILENT_SECONDS = 3600.0  # after which a process that is not of this machine counts as ended
_TOLD = ".told"
_MOST_TOLD = 1 << 14
_TRIES = 5  # at a folder that the last process of an earlier job removes in this very moment


def base() -> str:
    """PYNCCL_WATCH_DIR, or the user's folder in the temporary folder."""
    return settings().folder or os.path.join(_temporary(), f"pynccl-watch-{os.geteuid()}")


def _temporary() -> str:
    """As tempfile.gettempdir(), whether it is full or not: so all processes of a job, and who looks for them, agree."""
    named = (os.path.abspath(os.environ[name]) for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name))
    return next(filter(os.path.isdir, named), "/tmp")


def jobs(folder: str) -> list[str]:
    """The folders of this user's jobs in this base folder, as paths."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.geteuid() and files(entry.path):
                    found.append(entry.path)
    return sorted(found)


def files(folder: str) -> list[str]:
    """The recorders' files in the folder of one job."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.name.endswith(SUFFIX))
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


def started(pid: int | str = "self") -> int:
    """When a process was started, in ticks since the machine was; with its number it is the only one. 0: it is gone, or
    cannot be told."""
    with contextlib.suppress(OSError):
        return begun_at(pid)
    return 0


def begun_at(pid: int | str) -> int:
    """The same; OSError where it cannot be told: no descriptor is left."""
    words = words_of(pid)
    return int(words[19]) if words else 0


def words_of(pid: int | str) -> list[bytes]:
    """What /proc says of a process, from its state on; [] if it is gone. OSError where it cannot be told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return words if len(words) > 19 and words[19].isdigit() else []


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


def create(name: str) -> tuple[str, int]:
    """The path of this process's file, and a descriptor of it. OSError where it cannot be had."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return _create(name)
    return _create(name)


def _create(name: str) -> tuple[str, int]:
    where, folder = _open_folder()
    try:
        return os.path.join(where, name), _new_file(name, folder)
    finally:
        os.close(folder)


def _open_folder() -> tuple[str, int]:
    """The folder of this job, made where it is not there, and a descriptor of it.

    PermissionError for one that others made, or may write to: they would read, replace and fake what is in it."""
    above = base()
    os.makedirs(above, mode=0o700, exist_ok=True)
    if not settings().folder:
        _check_private(above, os.lstat(above), 0o077)
    mine = os.path.join(above, job())
    with contextlib.suppress(FileExistsError):
        os.mkdir(mine, 0o700)
    _check_private(mine, os.lstat(mine), 0o022)
    folder = os.open(mine, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _check_private(mine, os.fstat(folder), 0o022)  # others may have replaced it meanwhile
    except BaseException:
        os.close(folder)
        raise
    return mine, folder


def _new_file(name: str, folder: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)  # of an earlier recorder of this process
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        reserve(file, 0, layout.REGIONS_AT)
    except BaseException:
        os.close(file)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise
    return file


def reserve(file: int, at: int, nbytes: int) -> None:
    """Take room from the file system at once: memory that is mapped to a file which cannot have it ends the process by
    SIGBUS when it is written to. OSError where there is none; then the file is as long as it was."""
    try:
        os.posix_fallocate(file, at, nbytes)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, at)
        raise


class Left(NamedTuple):
    """The file of a process that has ended."""

    seen: float  # the last time that the process is known to have lived
    nbytes: int
    path: str


def remove_old(above: str) -> None:
    """Of the processes that have left files in this base folder: remove those that are old, and the oldest where they
    take too much room, but for the ranks of the job that ended last."""
    found = (left(path) for job in jobs(above) for path in files(job))
    ended = sorted(filter(None, found), reverse=True)
    room, now = _KEPT_BYTES, time.time()
    last: set[str] = set()
    for one in ended:
        room -= one.nbytes
        folder, name = os.path.split(one.path)
        together = folder == os.path.dirname(ended[0].path) and one.seen > ended[0].seen - _TOGETHER_SECONDS
        of_last = together and (rank := name.partition("-")[0]) not in last
        if of_last:
            last.add(rank)
        if one.seen < now - _KEPT_SECONDS or (room < 0 and not of_last):
            remove(one.path)


def left(path: str) -> Left | None:
    """None: its process lives, or its file has gone meanwhile."""
    try:
        with open(path, "rb") as file:
            head, found = file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), os.fstat(file.fileno())
    except OSError:
        return None
    *_, wall, clock = layout.IDENTITY.unpack_from(head, layout.IDENTITY_AT)[:6]
    looked, _, _ = layout.LOOK.unpack_from(head, layout.LOOK_AT)
    # A file's own time is that of its first page that was written to, where the file system is in memory.
    now, looked = time.time(), looked + wall - clock
    seen = max(found.st_mtime, looked if looked <= now else 0.0)
    here = layout.get(head, *layout.TEXTS["machine"]) == machine()
    lives = alive(path) if here else seen > now - _SILENT_SECONDS
    return None if lives else Left(seen, found.st_blocks * 512, path)


def remove(path: str) -> None:
    """Remove the file of a process and what lies beside it under its name, and the folder if nothing else is in it."""
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):
        for one in os.listdir(folder):
            if one.startswith(name):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, one))
        os.rmdir(folder)


def name_of_file(rank: int, pid: int, start: int) -> str:
    return f"rank{rank if rank >= 0 else ''}-{pid}-{start}{SUFFIX}"


def end_of(path: str) -> tuple[int, bool]:
    """How the process of this file has ended, 0 if it did not say, and whether it is still there."""
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)
    return (END.unpack_from(head, END_AT)[1] if len(head) == HEADER_BYTES else 0), alive(path)


def tell(path: str, text: str) -> None:
    """Leave a text for the process of this file, whose watchdog prints it: that others wait for it."""
    mine = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        try:
            with open(mine, "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
            os.replace(mine, path + _TOLD)
        except OSError:  # no room
            os.unlink(mine)


def told(path: str) -> str:
    """What was left for the process of this file, once."""
    with contextlib.suppress(OSError):
        file = os.open(path + _TOLD, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            text = os.read(file, _MOST_TOLD).decode(errors="replace")
        finally:
            os.close(file)
            os.unlink(path + _TOLD)
        return layout.printable(text, lines=True)
    return ""


def alive(path: str) -> bool:
    """Whether the process of this file is still there, as far as this machine knows."""
    found = re.search(r"-(\d+)-(\d+)\.watch$", path)
    try:
        return found is None or begun_at(found[1]) == int(found[2])
    except OSError:  # it cannot be told
        return True


def _check_private(path: str, found: os.stat_result, others: int) -> None:
    """Others may have made a folder of this name before, to read or fake what is in it."""
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & others:
        raise PermissionError(1, "expected a folder of this user, no link, that others may not write to", path)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:120].strip(".") or "job"
