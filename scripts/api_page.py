"""Make build/api.md from the docstrings: every public name of both packages, with what it takes, returns and raises.

examples:
  python scripts/api_page.py --out out/api.md
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pynccl
import pynccl_autograd
from pynccl.tools import command

PAGE = Path(__file__).resolve().parent.parent / "build" / "api.md"
HEAD = """\
# API

Made by `make api` from the docstrings, which `help()` shows, too; do not edit. `r` is this rank, `N` the number of
ranks, shapes are `[.., s, ..]`, and an arrow leads from what goes in to what comes out.
"""
WIDTH = 110
SMALL = ("nn", "overlap", "partition", "plans", "rng", "operators", "testing")  # modules of pynccl_autograd


def page() -> str:
    modules = [pynccl, pynccl_autograd, *(getattr(pynccl_autograd, name) for name in SMALL)]
    return "\n".join([HEAD, *(part for module in modules for part in of_module(module))])


def of_module(module: ModuleType) -> Iterator[str]:
    yield f"## {module.__name__}\n"
    yield text(module.__doc__)
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    for name in sorted(names, key=str.lower):
        value = getattr(module, name)
        again = module is not pynccl_autograd and getattr(pynccl_autograd, name, None) is value
        if not (name.startswith("_") or again or isinstance(value, ModuleType)):
            yield f"### {module.__name__}.{name}\n"
            yield of_class(name, value) if isinstance(value, type) else of_value(name, value)


def of_value(name: str, value: Any) -> str:
    if callable(value):
        return text(name + signature(value), inspect.getdoc(value))
    return text(f"{name}: {type(value).__name__}", inspect.getdoc(type(value)) if own(type(value)) else str(value))


def of_class(name: str, kind: type) -> str:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object and base.__name__[0] != "_")
    head = f"class {name}({bases})" if bases else f"class {name}"
    if issubclass(kind, Enum):
        return text(head, kind.__doc__, "  ".join(f"{member.name}={member.value}" for member in kind))
    init = vars(kind).get("__init__")
    made = [name + signature(init, bound=True), init.__doc__] if init and own(init) else []
    return text(head, *made, inspect.getdoc(kind) if own(kind) else "", *members_of(kind))


def members_of(kind: type) -> Iterator[str]:
    """Public methods and properties that have a docstring."""
    for name in sorted(dir(kind)):
        value = inspect.getattr_static(kind, name)
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if name.startswith("_") or not callable(function) or not own(function) or not function.__doc__:
            continue
        head = "" if isinstance(value, property) else signature(function, not isinstance(value, staticmethod))
        yield "\n".join([f".{name}{head}", textwrap.indent(inspect.getdoc(function) or "", "    ")])


def own(value: Any) -> bool:
    """Whether one of the two packages has defined it."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("pynccl", "pynccl_autograd")


def signature(function: Callable[..., Any], bound: bool = False) -> str:
    """(x: Tensor, comm: Communicator, *, grad: Grad) -> Tensor"""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(..)"
    without_self = found.replace(parameters=list(found.parameters.values())[bound:])
    return textwrap.fill(re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(without_self)), WIDTH, subsequent_indent="    ")


def text(*parts: str | None) -> str:
    body = "\n\n".join(inspect.cleandoc(part) if not part.startswith(".") else part for part in parts if part)
    return f"```text\n{body}\n```\n"


def main() -> int:
    parser = command.Parser(__doc__, failed="the page could not be made")
    parser.add_argument("--out", type=command.output_file, default=PAGE, help="the page (default: build/api.md)")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(made := page(), encoding="utf-8")
    print(f"{out}: {len(made.splitlines())} lines")
    return 0


if __name__ == "__main__":
    command.run(main)
