"""The API pages of the site from the docstrings: a page for each module, a heading for each public name and member."""

from __future__ import annotations

import importlib
import inspect
import pprint
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any

NOTATION = """\
From the docstrings, which `help()` also shows. `r` is this rank, `N` the number of ranks; shapes are written
`[.., s, ..]`, with an arrow from input to output."""
WIDTH = 110
MODULES = (
    *("pynccl", "pynccl.torch_backend", "pynccl.progress", "pynccl.compat.vllm", "pynccl.compat.sglang"),
    "pynccl_autograd",
    *(f"pynccl_autograd.{name}" for name in ("nn", "overlap", "partition", "plans", "rng", "operators", "testing")),
)


def pages() -> dict[str, str]:
    """Return the Markdown of each module's page."""
    return {name: "\n".join(page(importlib.import_module(name))) for name in MODULES}


def page(module: ModuleType) -> Iterator[str]:
    if "compat" in module.__name__:  # the search shows other libraries' names last
        yield "---\nsearch: {boost: 0.5}\n---\n"
    yield f"# {module.__name__}\n\n{NOTATION}\n"
    yield text(module.__doc__)
    for name in sorted(names_of(module), key=str.lower):
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        yield heading(2, full, name, full)
        if f"{module.__name__}.{name}" in MODULES:
            yield f"The module [{full}]({full}.md).\n"
        elif place := module_with(value, name, module.__name__):
            yield f"The same as [{place}.{name}]({place}.md#{place}.{name}).\n"
        elif isinstance(value, type):
            yield from class_entry(full, value)
        else:
            yield from value_entry(name, value)


def names_of(module: ModuleType) -> list[str]:
    """Return `__all__`, or the functions and classes that the module defines."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name for name in getattr(module, "__all__", own) if not name.startswith("_")]


def module_with(value: Any, name: str, module: str) -> str | None:
    """Return the package above `module` that has this class or function too, and its entry."""
    above = module.rpartition(".")[0]
    same = above in MODULES and getattr(importlib.import_module(above), name, None) is value
    return above if same else None


def value_entry(name: str, value: Any) -> Iterator[str]:
    if callable(value):
        yield code(name + signature(value))
        yield text(inspect.getdoc(value))
    else:
        shown = pprint.pformat(value, width=WIDTH, sort_dicts=False)
        yield code(f"{name} = " + shown.replace("\n", "\n" + " " * len(f"{name} = ")))


def class_entry(full: str, kind: type) -> Iterator[str]:
    name = full.rpartition(".")[2]
    if not is_ours(kind):
        yield code(f"{name} = {kind.__module__}.{kind.__name__}")
        return
    bases = ", ".join(base.__name__ for base in kind.__bases__ if is_public(base))
    init = vars(kind).get("__init__")
    constructor = init if init and is_ours(init) else None
    yield code(
        f"class {name}({bases})" if bases else f"class {name}", constructor and name + signature(constructor, True)
    )
    if issubclass(kind, Enum):
        yield text(kind.__doc__, "\n".join(f"{member.name} = {member.value}" for member in kind))
        return
    yield text(inspect.getdoc(kind), constructor and constructor.__doc__)
    for member, head, doc in members_of(kind):
        yield heading(3, f"{name}.{member}", member, f"{full}.{member}")
        yield code(head)
        yield text(doc)


def members_of(kind: type) -> Iterator[tuple[str, str, str | None]]:
    """Yield (name, signature, docstring) of the methods and properties that have one, without those of public bases."""
    bases = [base for base in kind.__mro__[1:] if is_public(base)]
    for name in sorted(dir(kind)):
        value = inspect.getattr_static(kind, name)
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if name.startswith("_") or not callable(function) or not is_ours(function) or not function.__doc__:
            continue
        if "." not in function.__qualname__:  # a function or class elsewhere, which has its own entry
            continue
        if all(inspect.getattr_static(base, name, None) is not value for base in bases):
            head = signature(function, not isinstance(value, staticmethod))
            if isinstance(value, property):
                head = head.replace("() -> ", ": ") + "  # property"
            yield name, name + head, inspect.getdoc(function)


def is_public(kind: type) -> bool:
    """Return whether a user can name the class: it is not ours, or it has an entry."""
    if not is_ours(kind):
        return kind is not object
    modules = [importlib.import_module(name) for name in MODULES]
    return any(kind.__name__ in names_of(module) and getattr(module, kind.__name__) is kind for module in modules)


def is_ours(value: Any) -> bool:
    """Return whether one of the two packages defines the value."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("pynccl", "pynccl_autograd")


def signature(function: Callable[..., Any], bound: bool = False) -> str:
    """Return a text such as "(x: Tensor, comm: Communicator, *, grad: Grad) -> Tensor"."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(..)"
    without_self = found.replace(parameters=list(found.parameters.values())[bound:])
    line = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(without_self))
    kept = re.sub(r"(?<!,) ", "\0", line)  # lines break between parameters only
    return textwrap.fill(kept, WIDTH, subsequent_indent="    ", break_on_hyphens=False).replace("\0", " ")


def heading(level: int, title: str, label: str, anchor: str) -> str:
    return f'<h{level} markdown="span" id="{anchor}" data-toc-label="{label}">{title}</h{level}>\n'


def code(*lines: str | None) -> str:
    return "\n".join(["```python", *(line for line in lines if line), "```\n"])


def text(*parts: str | None) -> str:
    body = "\n\n".join(inspect.cleandoc(part) for part in parts if part)
    return f"```{{ .text .docstring }}\n{body}\n```\n" if body else ""
