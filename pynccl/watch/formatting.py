"""Formatting for verdicts: ranks, seconds, lines of code, calls."""

from __future__ import annotations

from collections.abc import Iterable

from .records import CallRecord, ProcessRecord

_SHOWN_RANGES = 6  # of ranks in one sentence
_LONGEST = 160  # characters of one name, path or text that came from a record


class Paths:
    """Lines of code, shortened to their file's name where no other file has the same."""

    def __init__(self, sites: Iterable[str]) -> None:
        self._folders: dict[str, set[str]] = {}
        for site in set(sites):
            folder, _, name = site.partition(":")[0].rpartition("/")
            self._folders.setdefault(name, set()).add(folder)

    def short(self, site: str) -> str:
        """ "/home/me/model.py:88" -> "model.py:88"; all of it where another file has this name."""
        folder, _, name = site.partition(":")[0].rpartition("/")
        alone = len(self._folders.get(name, ())) < 2
        return clean(site[len(folder) :].lstrip("/") if alone else site)


def clean(text: str, limit: int = _LONGEST) -> str:
    """On one line, printable, and not too long."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 4 * limit]).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 3, 5 and 7-12", "ranks 0, 2, 4, 6, 8, 10 and 900 more"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [word for run in runs for word in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(words) <= 1:
        return f"rank {words[0]}" if words and len(runs[0]) == 1 else f"ranks {''.join(words) or 'none'}"
    if len(words) > _SHOWN_RANGES + 1:
        words = [str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in runs]
        shown = sum(len(one) for one in runs[:_SHOWN_RANGES])
        words = [*words[:_SHOWN_RANGES], f"{sum(map(len, runs)) - shown:,} more"]
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def seconds(value: float) -> str:
    """ "12.3 s"; never less than 0.0 s."""
    return f"{value:,.1f} s" if value >= 0.05 else "0.0 s"


def call_name(call: CallRecord) -> str:
    """ "all_reduce #41", "send to rank 2", "finalize"."""
    operation = clean(call.operation, 60) or "a call"
    if operation in ("send", "recv", "wait_signal"):
        return f"{operation} {'to' if operation == 'send' else 'from'} rank {call.peer}"
    return f"{operation} #{call.number:,}" if call.number > 0 and operation != "init" else operation


def call_text(call: CallRecord) -> str:
    """ "reduce(count=4, FLOAT32, SUM, root=0)": what the ranks must agree on."""
    if call.detail and call.count < 0:
        return clean(call.detail if call.detail.startswith(call.operation) else f"{call.operation}({call.detail})")
    words = [f"count={call.count:,}"] if call.count >= 0 else []
    words += [word for word in (call.dtype, call.op) if word]
    words += [f"root={call.root}"] if call.root >= 0 else []
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
