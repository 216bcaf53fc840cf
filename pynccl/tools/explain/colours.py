"""A colour for each rank, the same in every drawing."""

from __future__ import annotations

TERMINAL = (33, 208, 35, 169, 37, 178, 99, 160)  # of 256; to be read on black and on white
PLAIN = ("#2f7ed8", "#e07b2e", "#2b9a66", "#d4508c", "#1697a8", "#b98a12", "#8a62d4", "#cf4640")


def mixed(colour: str, other: str, part: float) -> str:
    """`part` of a colour and the rest of another, both as #rrggbb."""
    pairs = zip(_parts(colour), _parts(other), strict=True)
    return "#" + "".join(f"{round(one * part + two * (1 - part)):02x}" for one, two in pairs)


def _parts(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
