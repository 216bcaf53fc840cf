"""Where the files of the flight recorders lie: a folder a job, private to the user; what goes when a job has ended."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time

from ..bindings.errors import NcclSystemError
from .layout import END, END_AT, HEADER_BYTES, SUFFIX
from .settings import settings

_KEPT_SECONDS = 7 * 86400.0  # for the files of jobs that went wrong
_KEPT_JOBS = 64
_TOLD = ".told"
_MOST_TOLD = 1 << 14


def base() -> str:
    """PYNCCL_WATCH_DIR, or the user's folder in the temporary folder."""
    import tempfile  # which takes longer than all of this package's own import

    return settings().folder or os.path.join(tempfile.gettempdir(), f"pynccl-watch-{os.getuid()}")


def jobs(folder: str) -> list[str]:
    """The jobs that have left files in this base folder, the newest first, as paths."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    found.append((max(map(os.path.getmtime, files(entry.path)), default=0.0), entry.path))
    return [path for newest, path in sorted(found, reverse=True) if newest]


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
    """When a process was started, in ticks since the machine was; with its number it is the only one. 0: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def machine() -> str:
    """What tells this machine, and this container on it, from others: numbers of processes are good within."""
    parts = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "/".join(parts) or os.uname().nodename


def prepare() -> str:
    """The folder for this process's file, made where it is not there. NcclSystemError where that cannot be."""
    folder = base()
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not settings().folder:
            _check_private(folder)
        mine = os.path.join(folder, job())
        os.makedirs(mine, mode=0o700, exist_ok=True)
    except OSError as error:
        raise NcclSystemError(
            f"the flight recorder cannot write into {folder}: {error.strerror or error}\n"
            "  set PYNCCL_WATCH_DIR to a folder that this user may write to, or PYNCCL_WATCH=off"
        ) from error
    return mine


def remove_old(folder: str, keep: str) -> None:
    """Of the jobs in this base folder, remove those that are old or too many, and have no process any more."""
    for number, path in enumerate(jobs(folder)):
        with contextlib.suppress(OSError):
            old = time.time() - os.path.getmtime(path) > _KEPT_SECONDS
            if path != keep and (old or number >= _KEPT_JOBS) and not any(map(alive, files(path))):
                remove(path, files(path))


def remove(folder: str, paths: list[str]) -> None:
    """Remove these files, and the folder if nothing else is in it."""
    for path in paths:
        for one in (path, path + _TOLD):
            with contextlib.suppress(OSError):
                os.unlink(one)
    with contextlib.suppress(OSError):
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
    with contextlib.suppress(OSError):
        mine = f"{path}.{os.getpid()}"
        with open(mine, "x") as file:
            file.write(text)
        os.replace(mine, path + _TOLD)


def told(path: str) -> str:
    """What was left for the process of this file, once."""
    with contextlib.suppress(OSError):
        with open(path + _TOLD, errors="replace") as file:
            text = file.read(_MOST_TOLD)
        os.unlink(path + _TOLD)
        return text
    return ""


def alive(path: str) -> bool:
    """Whether the process of this file is still there, as far as this machine knows."""
    found = re.search(r"-(\d+)-(\d+)\.watch$", path)
    return found is None or started(int(found[1])) == int(found[2])


def _check_private(folder: str) -> None:
    """Others may have made a folder of this name before, to read what is written into it."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(1, "it is not a private folder of this user (mode 0700)")


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:120].strip(".") or "job"
