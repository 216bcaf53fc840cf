"""Base classes of objects that wrap a C handle: copies share the handle, pickling raises, close() releases it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

Self = TypeVar("Self", bound="Shared")
Open = TypeVar("Open", bound="Resource")


def destructor(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorator of every `__del__`: do nothing while the interpreter shuts down. The memory goes with the process, and
    the globals that a method uses, such as `sys` and `contextlib`, may be None by then. So it looks nothing up."""
    shutting_down = sys.is_finalizing

    def run(self: Any) -> None:
        if not shutting_down():
            method(self)

    return run


class Shared:
    """copy() and deepcopy() return the same object, so that modules that hold it can be copied. Pickling raises."""

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a pynccl.{type(self).__name__} cannot be pickled: it belongs to this process and its connected "
            "ranks. Save module.state_dict() instead of the module, and create a new one after loading"
        )


class Resource:
    """A resource to release: by close() or at the end of a with statement. Closing twice is harmless."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Open) -> Open:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
