"""A store that counts what is asked of it."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Counted:
    """Another store's operations, each counted by its name; `turns`: keys whose checks are counted as "turn"."""

    def __init__(self, store: Any, turns: tuple[str, ...] = ()) -> None:
        self.store, self.turns = store, turns
        self.operations: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)

        def counted(*arguments: Any) -> Any:
            self.operations["turn" if name == "check" and arguments[0][0] in self.turns else name] += 1
            return found(*arguments)

        return counted if name in ("add", "get", "set", "check", "append") else found

    def clone(self) -> Counted:
        return self

    def total(self) -> int:
        """But for turns."""
        return self.operations.total() - self.operations["turn"]
