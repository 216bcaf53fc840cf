"""What a public module lists: `__dir__`, for dir(), completion, help() and Python's "Did you mean"."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_MAX_FRAMES = 7  # frames to look through from `__dir__`: inspect's may lie between it and pydoc's


def public_dir(namespace: dict[str, Any]) -> Callable[[], list[str]]:
    """Return `__dir__` of a public module: it lists `__all__`, and `__version__` if there is one.

    pydoc (that is, help()) does not get the classes of a package with a version, whose docstring lists them: it prints
    each in full with all inherited members, a thousand lines for each torch.nn.Module, before the first function.
    """

    def names() -> list[str]:
        if "__version__" not in namespace:
            return list(namespace["__all__"])
        if _pydoc_asks():
            return [name for name in namespace["__all__"] if not inspect.isclass(namespace[name])]
        return [*namespace["__all__"], "__version__"]

    return names


def _pydoc_asks() -> bool:
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        if frame is None:  # nothing above: Python prints an error that nobody caught, and looks for a suggestion
            return False
        if frame.f_globals.get("__name__") == "pydoc":
            return True
        frame = frame.f_back
    return False
