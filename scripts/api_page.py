"""Make build/api.md from the docstrings: every public name of both packages, with what it takes, returns and raises.

examples:
  python scripts/api_page.py --out out/api.md
"""

from __future__ import annotations

import functools
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
    parts = [HEAD, *of_package(pynccl)]
    parts += of_package(pynccl_autograd)
    for name in SMALL:
        parts += of_module(getattr(pynccl_autograd, name))
    return "\n".join(parts).rstrip() + "\n"


def of_package(package: ModuleType) -> Iterator[str]:
    yield f"## {package.__name__}\n"
    yield text(package.__doc__)
    yield index(package.__name__, package.__all__)
    for name in sorted(package.__all__, key=str.lower):
        value = getattr(package, name)
        if not isinstance(value, ModuleType):
            yield from entry(f"{package.__name__}.{name}", value)


def index(place: str, names: list[str]) -> str:
    """Links to the entries, as GitHub and others name their anchors."""
    anchors = {name: f"{place}.{name}".lower().replace(".", "") for name in sorted(names, key=str.lower)}
    links = [f"[{name}](#{anchor})" for name, anchor in anchors.items() if name not in SMALL]
    return " · ".join(links) + "\n"


def of_module(module: ModuleType) -> Iterator[str]:
    yield f"## {module.__name__}\n"
    yield text(module.__doc__)
    made = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    made += [name for name, value in vars(module).items() if isinstance(value, dict)]
    for name in sorted(getattr(module, "__all__", made), key=str.lower):
        value = getattr(module, name)
        elsewhere = getattr(pynccl_autograd, name, None) is value
        if not name.startswith("_") and not elsewhere and not isinstance(value, ModuleType):
            yield from entry(f"{module.__name__}.{name}", value)


def entry(name: str, value: Any) -> Iterator[str]:
    """A heading, and what there is to say, as it stands in the docstring."""
    yield f"### {name}\n"
    if isinstance(value, type):
        yield from of_class(name, value)
    elif callable(value):
        yield text(f"{name.rpartition('.')[2]}{signature(value)}", inspect.getdoc(value))
    elif isinstance(value, dict):  # a plan: its patterns
        yield text(f"{name.rpartition('.')[2]}: {type(value).__name__}", "\n".join(map(str, value)))
    else:
        yield text(f"{name.rpartition('.')[2]}: {type(value).__name__}", inspect.getdoc(type(value)))


def of_class(name: str, kind: type) -> Iterator[str]:
    shown = [next(base for base in of.__mro__ if not base.__name__.startswith("_")) for of in kind.__bases__]
    bases = ", ".join(base.__name__ for base in shown if base is not object)
    head = f"class {name.rpartition('.')[2]}({bases})" if bases else f"class {name.rpartition('.')[2]}"
    if issubclass(kind, Enum):
        members = "  ".join(f"{member.name}={member.value}" for member in kind)
        yield text(head, kind.__doc__, members)
        return
    init: Any = vars(kind).get("__init__")
    made = f"{name.rpartition('.')[2]}{signature(init, bound=True)}" if own(init) else ""
    fields = ", ".join(getattr(kind, "_fields", ()))
    yield text(
        head,
        made,
        described(kind),
        init.__doc__ if made else None,
        textwrap.fill(fields and f"fields: {fields}", WIDTH),
    )
    lines = [line for member in members_of(kind) for line in of_member(kind, member)]
    if lines:
        yield text(*lines)


def own(value: Any) -> bool:
    """Whether one of the two packages has defined it."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("pynccl", "pynccl_autograd")


def described(kind: type) -> str:
    return inspect.cleandoc(kind.__doc__) if own(kind) and kind.__doc__ else ""


def members_of(kind: type) -> list[str]:
    """Public methods and properties that have a docstring, but for those of a base class with an entry of its own."""
    found = []
    for name in sorted(dir(kind)):
        defined = next((base for base in kind.__mro__ if name in vars(base)), kind)
        value = inspect.getattr_static(kind, name)
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        elsewhere = defined is not kind and defined in public()
        if not (name.startswith("_") or elsewhere) and callable(function) and own(function) and function.__doc__:
            found.append(name)
    return found


@functools.cache
def public() -> frozenset[type]:
    places = [pynccl, pynccl_autograd, *(getattr(pynccl_autograd, name) for name in SMALL)]
    values = [getattr(place, name) for place in places for name in getattr(place, "__all__", vars(place))]
    return frozenset(value for value in values if isinstance(value, type) and own(value))


def of_member(kind: type, name: str) -> Iterator[str]:
    value = inspect.getattr_static(kind, name)
    if isinstance(value, property):
        head, doc = f".{name}{'  (settable)' if value.fset else ''}", inspect.getdoc(value)
    else:
        static = isinstance(value, staticmethod)
        head = f".{name}{signature(getattr(value, '__func__', value), bound=not static)}"
        doc = inspect.getdoc(getattr(value, "__func__", value))
    yield "\n".join([head, *("    " + line if line else "" for line in (doc or "").splitlines())])


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
