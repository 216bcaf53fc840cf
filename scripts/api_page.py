"""Make docs/api.md from the docstrings: every public name of both packages, with what it takes, returns and raises.

With --check nothing is written.

examples:
  python scripts/api_page.py --check
  python scripts/api_page.py --out out/api.md
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pynccl
import pynccl_autograd
from pynccl.tools import command

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
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
    """(x: Tensor, comm: Communicator, *, grad: Grad) -> Tensor; a line for each parameter if it is long."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(..)"
    parameters = list(found.parameters.values())[bound:]
    returned = "" if found.return_annotation in ("Any", inspect.Signature.empty) else f" -> {found.return_annotation}"
    shown: list[str] = []
    for index, one in enumerate(parameters):
        first = one.kind is one.KEYWORD_ONLY and (index == 0 or parameters[index - 1].kind is one.POSITIONAL_OR_KEYWORD)
        shown += ["*", of_parameter(one)] if first else [of_parameter(one)]
        last_positional = index + 1 == len(parameters) or parameters[index + 1].kind is not one.POSITIONAL_ONLY
        shown += ["/"] if one.kind is one.POSITIONAL_ONLY and last_positional else []
    line = f"({', '.join(shown)}){returned}"
    if len(line) <= WIDTH:
        return line
    return "(\n" + "".join(f"    {one},\n" for one in shown) + f"){returned}"


def of_parameter(one: inspect.Parameter) -> str:
    stars = "*" * (one.kind is one.VAR_POSITIONAL) + "**" * (one.kind is one.VAR_KEYWORD)
    kind = "" if one.annotation is one.empty else f": {one.annotation}"
    if one.default is one.empty:
        return f"{stars}{one.name}{kind}"
    default = ".." if " at 0x" in repr(one.default) else repr(one.default)  # an address differs from run to run
    return f"{one.name}{kind}{' = ' if kind else '='}{default}"


def text(*parts: str | None) -> str:
    body = "\n\n".join(inspect.cleandoc(part) if not part.startswith(".") else part for part in parts if part)
    return f"```text\n{body}\n```\n"


def main() -> int:
    parser = command.Parser(__doc__, failed="with --check, the page is not what it would be now")
    parser.add_argument("--out", type=command.output_file, default=PAGE, help="the page (default: docs/api.md)")
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    asked = parser.parse_args()
    made = page()
    if not asked.check:
        asked.out.write_text(made, encoding="utf-8")
        print(f"{asked.out}: {made.count(chr(10))} lines")
        return 0
    there = asked.out.read_text(encoding="utf-8") if asked.out.exists() else ""
    if there == made:
        print(f"{asked.out} is current")
        return 0
    names = (str(asked.out), "what the docstrings say")
    print("\n".join(difflib.unified_diff(there.splitlines(), made.splitlines(), *names, lineterm="", n=0)))
    print(f"api_page.py: {asked.out} is out of date: run `make api`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    command.run(main)
