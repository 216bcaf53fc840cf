"""`python -m pynccl <command>`: the tools of this package."""

from __future__ import annotations

import sys
import textwrap

try:
    from . import __version__
except ImportError as error:  # another project has replaced or deleted __init__.py
    from .bindings.installed import sentence

    sys.exit(f"python -m pynccl: error: {sentence() or error}")
from .bindings.library import load
from .bindings.values import did_you_mean
from .tools import command, doctor, explain, hang, perf

COMMANDS = {
    "doctor": (doctor, "report which libnccl is used here, its problems, and how to fix them"),
    "explain": (explain, "draw how a collective and its adjoint move data between ranks, from a real run"),
    "hang": (hang, "show which rank is missing in a job that hangs or has ended, and where each rank is"),
    "perf": (perf, "measure time and bandwidth of a collective over sizes, in the format of nccl-tests"),
}


def usage() -> str:
    wrapped = textwrap.TextWrapper(80, subsequent_indent=" " * 12, break_on_hyphens=False)
    rows = [wrapped.fill(f"  {name:<10}{purpose}") for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m pynccl <command> [options]",
            "",
            *rows,
            "",
            "python -m pynccl --version prints the versions of this package and of NCCL.",
            "Run python -m pynccl <command> --help for options and examples.",
        ]
    )


def versions() -> str:
    """Return one line with the version of this package and of the NCCL library that it uses here, if there is one."""
    try:
        library = load()
    except Exception:  # `doctor` reports why
        return f"pynccl-autograd {__version__}, no usable NCCL library (python -m pynccl doctor)"
    version = ".".join(map(str, library.version))
    return f"pynccl-autograd {__version__}, NCCL {version} ({'host library' if library.is_host else library.path})"


def main(argv: list[str]) -> int:
    """Run the command named in `argv` and return its exit code; 2 means wrong usage."""
    name, *options = argv or [""]
    if name in ("-h", "--help"):
        if command.rank() == 0:
            print(usage())
        return command.SUCCESS
    if name == "--version":
        if command.rank() == 0:
            print(versions())
        return command.SUCCESS
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"expected one of {', '.join(COMMANDS)}"
        command.print_error(f"python -m pynccl: error: unknown command {name!r}; {hint}" if name else usage())
        return command.USAGE
    module, purpose = COMMANDS[name]
    prog = f"python -m pynccl {name}"
    doc = f"{purpose[0].upper()}{purpose[1:]}.\n{getattr(module, 'EXAMPLES', '')}"
    texts = {name.lower(): getattr(module, name) for name in ("FAILED", "UNUSABLE") if hasattr(module, name)}
    parser = command.Parser(doc, prog=prog, **texts)
    module.configure(parser)
    arguments = parser.parse_args(options)
    return command.exit_code_of(lambda: module.run(arguments), prog)


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]), "python -m pynccl")
