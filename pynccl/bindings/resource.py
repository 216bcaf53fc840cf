"""Handles of this process, which a copy shares and a pickle cannot carry."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

Self = TypeVar("Self", bound="Shared")


class Shared:
    """copy() and deepcopy() give the same object, so that a module that holds it can be copied; pickle says why not."""

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a pynccl.{type(self).__name__} cannot be pickled: it belongs to this process and to the ranks that it "
            "is connected with. Save module.state_dict() instead of the module, and make the communicator anew where "
            "it is loaded"
        )
