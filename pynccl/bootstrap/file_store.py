"""A store in a file, for ranks that share a file system: lines appended under a lock that is polled for.

torch's FileStore keeps the GIL while its constructor waits for a lock, for a folder, or for the rest of a file that is
no store, so that neither a deadline nor Ctrl-C would be heard.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import stat
import time
from collections.abc import Iterator

from ..bindings.errors import NcclInvalidUsage, NcclSystemError, NcclTimeout
from ..bindings.workers import Clock
from ..watch.layout import SUFFIX

_MAGIC = b"pynccl: ranks meet here\n"
_POLL_SECONDS = 0.002
_LEAST_SECONDS = 0.5
_QUIET_SECONDS = 1.5


class FileStore:
    """`set`, `get`, `add`, `append` and `check` as of torch's stores. Raises NcclTimeout past the clock's deadline."""

    def __init__(self, path: str, clock: Clock) -> None:
        self.path = os.fspath(path)
        self.clock = clock

    def set(self, key: str, value: str | bytes) -> None:
        with self._locked() as file:
            self._append(file, key, value)

    def get(self, key: str) -> bytes:
        with self._locked() as file:
            return self._entries(file)[key]

    def append(self, key: str, value: str) -> None:
        with self._locked() as file:
            self._append(file, key, value, "append")

    def check(self, keys: list[str]) -> bool:
        with self._locked() as file:
            return self._entries(file).keys() >= set(keys)

    def add(self, key: str, amount: int) -> int:
        with self._locked() as file:
            total = int(self._entries(file).get(key, b"0")) + amount
            self._append(file, key, str(total))
        return total

    def leave(self, nranks: int) -> None:
        """This rank needs the file no more; the last one removes it."""
        with contextlib.suppress(OSError, NcclSystemError):
            if self.add("left", 1) == nranks:
                os.unlink(self.path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, opened anew each time, so that over NFS it is seen as the last writer left it."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise NcclInvalidUsage(f"{self.path} is no file: pass the path of a file that does not exist yet")
            self._lock(file)
            yield file
        finally:
            os.close(file)

    def _lock(self, file: int) -> None:
        own = time.monotonic() + _LEAST_SECONDS  # others who wait hold it for moments, also past the deadline
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self.clock.left() <= 0 and time.monotonic() > own:
                    raise NcclTimeout(
                        f"the lock of {self.path}, where the ranks meet, was not free within {self.clock.seconds()}: "
                        "a process that holds it is stopped, or its machine is gone"
                    ) from None
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> NcclSystemError:
        return NcclSystemError(
            f"the ranks cannot meet in the file {self.path}: {error.strerror}\n"
            "  pass a path in a folder that exists, that all ranks share, and that they may write to"
        )

    def _append(self, file: int, key: str, value: str | bytes, *more: str) -> None:
        text = value if isinstance(value, str) else value.decode("latin-1")
        data = self._read(file)
        head = b"" if data.endswith(b"\n") else b"\n" if data else _MAGIC  # after a writer that was killed
        os.write(file, head + json.dumps([key, text, *more]).encode() + b"\n")  # behind what _read has read

    def _entries(self, file: int) -> dict[str, bytes]:
        entries: dict[str, bytes] = {}
        for line in self._read(file).splitlines()[1:]:
            # Of a writer that was killed; or of none of this package.
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                key, text, *more = json.loads(line)
                entries[key] = (entries.get(key, b"") if more else b"") + text.encode("latin-1")
        return entries

    def _read(self, file: int) -> bytes:
        os.lseek(file, 0, os.SEEK_SET)
        chunks = iter(lambda: os.read(file, 1 << 20), b"")
        first = next(chunks, b"")
        if first and not first.startswith(_MAGIC):
            raise NcclInvalidUsage(
                f"{self.path} is no meeting of ranks, but a file with something else in it: pass the path of a "
                "file that does not exist yet"
            )
        return first + b"".join(chunks)


class QuietFileStore:
    """A FileStore that is made once somebody has something to say: for the questions of ranks that are stuck.

    It lies beside the file at which the ranks met, which is gone then, and stays where a run goes wrong; the next run
    that meets there removes it. Each operation has a deadline of its own."""

    def __init__(self, meeting: str, uid: str) -> None:
        self.path = f"{os.path.abspath(meeting)}.{uid[:12]}{SUFFIX}"
        self._meeting = os.path.abspath(meeting)

    def remove_old(self) -> None:
        """What earlier runs have left."""
        for path in glob.glob(f"{glob.escape(self._meeting)}.*{SUFFIX}"):
            if path != self.path:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def check(self, keys: list[str]) -> bool:
        return self._there() and self._store().check(keys)

    def get(self, key: str) -> bytes:
        return self._store().get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store().add(key, amount) if amount or self._there() else 0

    def set(self, key: str, value: str | bytes) -> None:
        self._store().set(key, value)

    def append(self, key: str, value: str) -> None:
        self._store().append(key, value)

    def _there(self) -> bool:
        return os.path.exists(self.path)

    def _store(self) -> FileStore:
        return FileStore(self.path, Clock(_QUIET_SECONDS))
