"""What a Python object stands for in C: handles, which a copy shares, which a pickle cannot carry, which are closed."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

Self = TypeVar("Self", bound="Shared")
Open = TypeVar("Open", bound="Resource")


class Shared:
    """copy() and deepcopy() give the same object, so that a module that holds it can be copied; pickle says why not."""

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a pynccl.{type(self).__name__} cannot be pickled: it belongs to this process and to the ranks that it "
            "is connected with. Save module.state_dict() instead of the module, and make it anew where it is loaded"
        )


class Resource:
    """What has to be given back: by close(), or at the end of a with statement. Twice is harmless."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Open) -> Open:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
