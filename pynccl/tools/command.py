"""What all commands have in common above argparse: help, types of options, exit codes, and errors in one line.

    def main() -> int:
        parser = command.Parser(__doc__, failed="a bound is not met")
        parser.add_argument("--rounds", type=command.whole(1), default=9, help="repetitions (%(default)s)")
        ...

    if __name__ == "__main__":
        command.run(main)

Errors that a user can mend are one line and no traceback; python -X dev shows where they come from.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

from ..bindings.errors import NcclError, NcclInvalidUsage, NcclVersionError
from ..bootstrap import from_env
from ..progress import shown

GOOD, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_NO_MEMORY = ("can't allocate memory", "out of memory")  # of torch, on a CPU and on a GPU
_SILENT_SECONDS = 3.0


class FailedError(RuntimeError):
    """What a command was asked for came to a bad end: its text, and exit code 1."""


# ------------------------------------------------------------------------------------------------ options and help


class Parser(argparse.ArgumentParser):
    """Options of a command.

    doc       what it does; from a line "examples:" on, below the options
    failed    when the exit code is 1, in words

    An error is one line and exit code 2. Under a launcher rank 0 alone prints the help.
    """

    def __init__(self, doc: str | None = None, *, failed: str = "it failed", **options: Any) -> None:
        about, _, examples = (doc or "").partition("\nexamples:\n")
        codes = f"{GOOD} good; {FAILED} {failed}; {USAGE} options, files or settings that cannot work"
        epilog = textwrap.fill(f"exit code: {codes}; {INTERRUPTED} interrupted", 80)
        if examples:
            epilog += f"\n\nexamples:\n{textwrap.indent(textwrap.dedent(examples).strip(), '  ')}"
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": kind, "epilog": epilog, "description": about.strip(), **options})

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: error: {message}; --help shows the options")
        raise SystemExit(USAGE)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if rank() == 0:
            super().print_help(file)


def whole(least: int, most: int = (1 << 31) - 1) -> Callable[[str], int]:
    """The type of an option: a whole number from `least` to `most`."""
    upto = f", {least} or more" if most == (1 << 31) - 1 else f" from {least} to {most}"

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if least <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number{upto}")

    return read


def number(least: float, unit: str = "a number") -> Callable[[str], float]:
    """The type of an option: a finite number, `least` or more."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= float(text) < float("inf"):
                return float(text)
        raise argparse.ArgumentTypeError(f"{text!r}: expected {unit}, {least:g} or more")

    return read


def output_file(text: str) -> Path:
    """The type of an option: a file that rank 0 can write. Folders on its way are made at once."""
    path = Path(text)
    try:
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {reason(error)}; pass a file that can be written") from error
    return path


def reason(error: BaseException) -> str:
    """Why, without the number and the file of an OSError."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def rank() -> int:
    """Of this process in its launch, by the environment; 0 outside a launch."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


# ------------------------------------------------------------------------------------------------ how a command ends


def on_ranks(main: Callable[[Any], str], doc: str | None) -> NoReturn:
    """A command without options: `main` gets the communicator of the launch; rank 0 prints what it returns."""

    def call() -> None:
        Parser(doc, failed="a rank failed, or the result differs from one process's").parse_args()
        with from_env() as comm:
            text = main(comm)
            if comm.rank == 0:
                print(text)

    run(call)


def run(main: Callable[[], int | None], prog: str | None = None) -> NoReturn:
    """End the process with what `main` returns, None being 0.

    An error of the user's making is one line, `prog` (the file's name) first, with the exit code of `code_of`.
    A reader who has seen enough, as in `.. | head`, is 1 and no line. Any other exception keeps its traceback.
    """
    raise SystemExit(ended(main, prog or Path(sys.argv[0]).name))


def ended(main: Callable[[], int | None], prog: str) -> int:
    """The exit code that `run` ends with."""
    try:
        with shown():
            code = main() or GOOD
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        code, text = FAILED, ""
    except (Exception, KeyboardInterrupt) as error:
        code, text = code_of(error), _text_of(error)
        if not code or (sys.flags.dev_mode and code != INTERRUPTED):
            raise
        # As the interpreter notes an error that nobody catches: so the flight recorder can tell the other ranks of it.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if text:
        place = f"rank {rank()}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        say(f"{prog}: {place}" + "\n  ".join(line.strip() for line in text.splitlines()))
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # what nobody reads, or no disk holds, is not written again at exit
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _text_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {reason(error)}"
    return reason(error).strip()


def code_of(error: BaseException) -> int:
    """The exit code of an error: 2 where options, files, settings or missing packages are wrong, 1 where a rank, the
    communication or memory failed, 130 for Ctrl-C; 0 for one that is not of the user's making."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, (NcclInvalidUsage, NcclVersionError)):
        return USAGE
    if isinstance(error, NcclError) and not isinstance(error, (ValueError, ImportError)):
        return FAILED
    dist_error = getattr(sys.modules.get("torch.distributed"), "DistError", MemoryError)
    if isinstance(error, (FailedError, TimeoutError, ConnectionError, MemoryError, dist_error)):
        return FAILED
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return FAILED
    return USAGE if isinstance(error, (ValueError, OSError, ImportError)) else 0


def say(text: str) -> None:
    """Print it on standard error; of wrong options, which all ranks have alike, one rank of a machine does.

    The others wait a while before they end: torchrun ends all ranks once one has, and rank 0 is to say it first."""
    if os.environ.get("LOCAL_RANK", "0") != "0" and ": error: " in text:
        time.sleep(_SILENT_SECONDS)
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
