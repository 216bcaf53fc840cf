"""`python -m pynccl <command>`: the tools of this package."""

from __future__ import annotations

import sys

from .tools import command, doctor, explain, hang, perf

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
            "python -m pynccl <command> --help has the options, and examples.",
        ]
    )


def main(argv: list[str]) -> int:
    """Run the command that `argv` names. Returns the exit code; 2 is wrong usage, as elsewhere in Python."""
    name, *options = argv or [""]
    if name in ("-h", "--help"):
        if command.rank() == 0:
            print(usage())
        return command.GOOD
    if name not in COMMANDS:
        names = ", ".join(COMMANDS)
        command.say(f"python -m pynccl: error: unknown command {name!r}; expected one of {names}" if name else usage())
        return command.USAGE
    module, purpose = COMMANDS[name]
    prog = f"python -m pynccl {name}"
    doc = f"{purpose[0].upper()}{purpose[1:]}.\n{getattr(module, 'EXAMPLES', '')}"
    parser = command.Parser(doc, prog=prog, failed=getattr(module, "FAILED", "it failed"))
    module.configure(parser)
    arguments = parser.parse_args(options)
    return command.ended(lambda: module.run(arguments), prog)


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]), "python -m pynccl")
