"""What dir() of a package lists: its public names; and what help() of it prints."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

_NEAR = 5  # frames from the caller of dir(): pydoc's, inspect's between them


def public_names(names: Sequence[str], namespace: dict[str, Any]) -> list[str]:
    """The public names, for a package's `__dir__`. For pydoc, which is what help() is, without the classes.

    pydoc prints each class of a package in full, with all that it inherits: of torch.nn.Module a thousand lines each,
    before the first function. The package's docstring names them, and help() of one of them is as ever.
    """
    frame = sys._getframe(2)  # the caller of dir(), which itself has no frame
    for _ in range(_NEAR):
        if frame.f_globals.get("__name__") == "pydoc":
            return [name for name in names if not inspect.isclass(namespace[name])]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return [*names, "__version__"]
