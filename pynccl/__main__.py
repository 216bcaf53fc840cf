"""`python -m pynccl <command>`: the tools of this package."""

from __future__ import annotations

import argparse
import os
import sys

from .tools import doctor, explain, hang, perf

COMMANDS = {
    "doctor": (doctor, "which libnccl is used here, what is wrong with it, and how to mend that"),
    "explain": (explain, "how a collective and its adjoint move numbers between ranks: drawn from a real run"),
    "hang": (hang, "which rank is missing, what each one does and where, of a job that hangs or has ended"),
    "perf": (perf, "time and bandwidth of a collective over sizes, in the columns of nccl-tests"),
}


def usage() -> str:
    rows = [f"  {name:<10}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m pynccl <command> [options]",
            "",
            *rows,
            "",
            "python -m pynccl <command> --help has the options.",
        ]
    )


def main(argv: list[str]) -> int:
    """Run the command that `argv` names. Returns the exit code; 2 is wrong usage, as elsewhere in Python."""
    name, *options = argv or [""]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"unknown command {name!r}\n\n{usage()}" if name else usage(), file=sys.stderr)
        return 2
    module, purpose = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"python -m pynccl {name}", description=purpose)
    module.configure(parser)
    return module.run(parser.parse_args(options))


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `... doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at exit
        code = 1
    sys.exit(code)
