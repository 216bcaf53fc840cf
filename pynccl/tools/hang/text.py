"""Times, ranks, places and tables as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

INDENT = "    "


def cut(text: str, most: int) -> str:
    """The text in one line of at most `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def place(site: str) -> str:
    """ "/home/me/data.py:41 next_batch" -> "data.py:41 next_batch"."""
    path, colon, rest = cut(site, 300).rpartition(":")
    return path.rpartition("/")[2] + colon + rest


def seconds(value: float) -> str:
    """ "0.4 s", "12.3 s", "4 min 10 s", "3 h 5 min", "2 days"."""
    value = max(value, 0.0)
    if value < 99.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return plural(whole // 86400, "day")


def ranks(numbers: Iterable[int], most: int = 0) -> str:
    """ "0-6, 8-15"; with `most`, cut to so many characters, and counted: "0, 2, 4, ... (512)"."""
    ordered = sorted(set(numbers))
    spans: list[list[int]] = []
    for number in ordered:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    if not most or len(text) <= most:
        return text
    end = f", ... ({len(ordered):,})"
    return text[: most - len(end)].rpartition(",")[0] + end


def plural(count: int, noun: str) -> str:
    """ "1 process", "1,021 files"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows with their cells aligned, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def at_most(most: int, found: Sequence[str]) -> list[str]:
    """The first `most` of some lines, indented, and how many are left out."""
    more = [f"{INDENT}... {len(found) - most:,} more"] if len(found) > most else []
    return [*(INDENT + one for one in found[:most]), *more]
