"""Formatting for verdicts: ranks as ranges, numbers, seconds, lines of code, calls."""

from __future__ import annotations

from collections.abc import Iterable

from .records import CallRecord, ProcessRecord

_SHOWN_RANGES = 6  # of ranks in one sentence
_LONGEST = 160  # characters of one name, path or text that came from a record

Range = tuple[int, int]  # first and last


class Paths:
    """Lines of code, shortened to their file's name where no other file has the same."""

    def __init__(self, sites: Iterable[str]) -> None:
        self._folders: dict[str, set[str]] = {}
        for site in set(sites):
            folder, name = _cut(site)
            self._folders.setdefault(name, set()).add(folder)

    def short(self, site: str) -> str:
        """ "/home/me/model.py:88" -> "model.py:88", "parts/model.py:88", or all of it."""
        folder, name = _cut(site)
        others = self._folders.get(name, set()) - {folder}
        last = folder.rpartition("/")[2]
        if not others or not folder:
            return clean(site[len(folder) :].lstrip("/") if folder else site)
        if any(other.rpartition("/")[2] == last for other in others):
            return clean(site)
        return clean(site[len(folder) - len(last) :])


def _cut(site: str) -> tuple[str, str]:
    """Folder and file name of "folder/file:line anything"."""
    path = site.partition(":")[0]
    folder, _, name = path.rpartition("/")
    return folder, name


def clean(text: str, limit: int = _LONGEST) -> str:
    """On one line, printable, and not too long: texts come from files that anyone may have written."""
    text = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * limit])
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def ranges_of(ranks: Iterable[int]) -> list[Range]:
    """Sorted runs of neighbours."""
    found: list[Range] = []
    for rank in sorted(set(ranks)):
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


def ranks_text(ranks: Iterable[int | Range]) -> str:
    """ "rank 3", "ranks 3, 5 and 7-12", "ranks 0, 2, 4, 6, 8, 10 and 900 more"."""
    given = list(ranks)
    runs = ranges_of(one for one in given if isinstance(one, int)) + [one for one in given if isinstance(one, tuple)]
    parts: list[Range] = []
    for first, last in runs:
        parts += [(first, first), (last, last)] if last == first + 1 else [(first, last)]
    words = [str(first) if first == last else f"{first}-{last}" for first, last in parts]
    if not parts:
        return "no rank"
    if len(parts) == 1:
        return f"rank {words[0]}" if parts[0][0] == parts[0][1] else f"ranks {words[0]}"
    if len(parts) > _SHOWN_RANGES + 1:
        left = sum(last - first + 1 for first, last in parts[_SHOWN_RANGES:])
        words = [*words[:_SHOWN_RANGES], f"{left:,} more"]
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def seconds(value: float) -> str:
    """ "12.3 s"; never less than 0.0 s."""
    return f"{value:,.1f} s" if value >= 0.05 else "0.0 s"


def have(count: int) -> str:
    return "has" if count == 1 else "have"


def call_name(call: CallRecord) -> str:
    """ "all_reduce #41", "send to rank 2", "finalize"."""
    operation = clean(call.operation, 60) or "a call"
    if call.operation == "send":
        return f"send to rank {call.peer}"
    if call.operation in ("recv", "wait_signal") and call.peer >= 0:
        return f"{operation} {'from' if operation == 'recv' else 'of'} rank {call.peer}"
    return f"{operation} #{call.number:,}" if call.number > 0 and operation != "init" else operation


def call_text(call: CallRecord) -> str:
    """ "reduce(count=4, FLOAT32, SUM, root=0)": what the ranks must agree on."""
    if call.detail and call.count < 0:
        return clean(call.detail if call.detail.startswith(call.operation) else f"{call.operation}({call.detail})")
    words = [f"count={call.count:,}"] if call.count >= 0 else []
    words += [word for word in (call.dtype, call.op) if word]
    words += [f"root={call.root}"] if call.root >= 0 else []
    words += [f"peer={call.peer}"] if call.peer >= 0 else []
    return clean(f"{call.operation}({', '.join(words)})")


def maker(call: CallRecord, paths: Paths) -> str:
    """Where a call was made: "model.py:88", "AllReduce.backward of the forward call at model.py:88"; "" if unknown."""
    if call.function and call.forward_site:
        return f"{clean(call.function)} of the forward call at {paths.short(call.forward_site)}"
    return ", ".join(word for word in (clean(call.function), paths.short(call.site)) if word)


def at(site: str, paths: Paths) -> str:
    """ " at model.py:88", or nothing."""
    return f" at {paths.short(site)}" if site else ""


def called(call: CallRecord, paths: Paths) -> str:
    """ " at model.py:88", " (AllReduce.backward of the forward call at model.py:88)", or nothing."""
    made = maker(call, paths)
    return f" ({made})" if call.function and made else at(call.site, paths)


def ago(process: ProcessRecord, when: float) -> str:
    """ " 3.1 s ago" by the clock of the process's machine, or nothing."""
    return f" {seconds(process.now - when)} ago" if 0 < when <= process.now else ""


def line_of(site: str) -> str:
    """ "/home/me/data.py:41 next_batch" -> "/home/me/data.py:41"."""
    path, colon, rest = site.partition(":")
    return f"{path}:{rest.split()[0]}" if colon and rest.split() else ""
