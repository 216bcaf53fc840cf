"""Text for ranks, durations, lines of code and calls, used by the verdict and `python -m pynccl hang`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .records import CallRecord, ProcessRecord

_MAX_RANGES = 6  # ranges of ranks in one sentence
_MAX_CHARS = 160  # of one name, path or text read from a record


def clean(text: str, limit: int = _MAX_CHARS) -> str:
    """Return the text on one line, with printable characters only, and truncated to `limit`."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 4 * limit]).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def spans(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """[3, 1, 2, 7] -> [(1, 3), (7, 7)]."""
    found: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        follows = bool(found) and found[-1][1] == rank - 1
        first = found.pop()[0] if follows else rank
        found.append((first, rank))
    return found


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 3, 5 and 7-12", "ranks 0, 2, 4, 6, 8, 10 and 900 more"."""
    words: list[tuple[str, int]] = []  # text of a range, number of ranks in it
    for low, high in spans(ranks):
        short = high - low < 2
        words += [(str(rank), 1) for rank in range(low, high + 1)] if short else [(f"{low}-{high}", high - low + 1)]
    if len(words) > _MAX_RANGES + 1:
        more = sum(count for _, count in words[_MAX_RANGES:])
        words = [*words[:_MAX_RANGES], (f"{more:,} more", more)]
    texts = [text for text, _ in words] or ["none"]
    noun = "rank" if [count for _, count in words] == [1] else "ranks"
    return f"{noun} {', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else f"{noun} {texts[0]}"


def numbers(ranks: Iterable[int], max_ranges: int) -> str:
    """Return "0-6, 8-15"; with more than `max_ranges` ranges, the first ones and a count: "0, 2, 4, ... (512)"."""
    found = spans(ranks)
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in found[:max_ranges]]
    texts += [f"... ({sum(high - low + 1 for low, high in found):,})"] if len(found) > max_ranges else []
    return ", ".join(texts)


def seconds(value: float) -> str:
    """ "0.4 s", "12.3 s", "4 min 10 s", "3 h 5 min", "2 days"."""
    if not value >= 99.95:
        return f"{max(value, 0.0):.1f} s"
    whole = round(min(value, 1e10))
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} day{'s' if whole >= 2 * 86400 else ''}"


def ago(process: ProcessRecord, when: float) -> str:
    """ " 3.1 s ago" by the clock of the process's node, or ""."""
    return f" {seconds(process.now - when)} ago" if 0 < when <= process.now else ""


def place(site: str) -> str:
    """ "/home/me/data.py:41 next_batch" -> "data.py:41 next_batch"."""
    path, colon, rest = site.partition(":")
    return clean(path.rpartition("/")[2] + colon + rest)


def line_of(site: str) -> str:
    """ "/home/me/data.py:41 next_batch" -> "/home/me/data.py:41"."""
    path, colon, rest = site.partition(":")
    return f"{path}:{rest.split()[0].rstrip(',')}" if colon and rest.split() else ""


def at(site: str) -> str:
    """ " at model.py:88", or ""."""
    return f" at {place(site)}" if site else ""


def global_rank(rank: int, ranks: Sequence[int]) -> int:
    """Return the global rank of a rank of a communicator, for messages. ranks: of each of its ranks; (): unknown"""
    return ranks[rank] if 0 <= rank < len(ranks) else rank


def call_name(call: CallRecord, ranks: Sequence[int] = ()) -> str:
    """ "all_reduce #41", "send to rank 2", "finalize".   ranks: global rank of each rank of its communicator"""
    operation = clean(call.operation, 60) or "a call"
    if call.peer >= 0 and call.number <= 0:
        direction = "from" if operation in ("recv", "wait_signal") else "to"
        return f"{operation} {direction} rank {global_rank(call.peer, ranks)}"
    return f"{operation} #{call.number:,}" if call.number > 0 and operation != "init" else operation


def call_text(call: CallRecord) -> str:
    """ "reduce(count=4, FLOAT32, SUM, root=0)": the arguments that must match on all ranks."""
    if call.detail and call.count < 0:
        return clean(call.detail if call.detail.startswith(call.operation) else f"{call.operation}({call.detail})")
    words = [f"count={call.count:,}"] if call.count >= 0 else []
    words += [word for word in (call.dtype, call.op) if word]
    words += [f"root={call.root}"] if call.root >= 0 else []
    return clean(f"{call.operation}({', '.join(words)})")


def maker(call: CallRecord) -> str:
    """Return who made a call: "model.py:88", "AllReduce.backward of the forward call at model.py:88", "" if unknown."""
    if call.function and call.forward_site:
        return f"{clean(call.function)} of the forward call at {place(call.forward_site)}"
    return ", ".join(word for word in (clean(call.function), place(call.site)) if word)


def call_site(call: CallRecord) -> str:
    """ " at model.py:88", " (AllReduce.backward of the forward call at model.py:88)", or ""."""
    made = maker(call)
    return f" ({made})" if call.function and made else at(call.site)
