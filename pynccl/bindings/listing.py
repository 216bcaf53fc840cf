"""The names that dir() and help() show for a package."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

_MAX_FRAMES = 5  # frames to look through from the caller of dir(): inspect's may lie between it and pydoc's


def public_names(names: Sequence[str], namespace: dict[str, Any]) -> list[str]:
    """Return the public names for a package's `__dir__`; without the classes if pydoc (that is, help()) asks.

    pydoc prints each class of a package in full with all inherited members: a thousand lines for each torch.nn.Module,
    before the first function. The package's docstring lists the classes, and help() of a single class is unchanged.
    """
    frame = sys._getframe(2)  # the caller of dir(), which has no frame of its own
    for _ in range(_MAX_FRAMES):
        if frame.f_globals.get("__name__") == "pydoc":
            return [name for name in names if not inspect.isclass(namespace[name])]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return [*names, "__version__"]
