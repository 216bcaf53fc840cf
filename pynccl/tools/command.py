"""Shared by all commands, on top of argparse: help, option types, exit codes, and one-line errors.

    def main() -> int:
        parser = command.Parser(__doc__, failed="a bound is not met")
        parser.add_argument("--rounds", type=command.integer(1), default=9, help="repetitions (%(default)s)")
        ...

    if __name__ == "__main__":
        command.run(main)

Errors that a user can fix are printed as one line without a traceback; python -X dev shows the traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import textwrap
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any, NoReturn

from ..bindings.errors import NcclError, NcclInvalidUsage, NcclVersionError
from ..bindings.values import did_you_mean
from ..bootstrap import from_env
from ..progress import shown

SUCCESS, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
UNUSABLE = "options, files or settings that cannot work"
_NO_MEMORY = ("can't allocate memory", "out of memory")  # torch's errors on a CPU and on a GPU
_SILENT_SECONDS = 3.0


class FailedError(RuntimeError):
    """The command ran but failed: prints this text and exits with code 1."""


# ------------------------------------------------------------------------------------------------ options and help


class Parser(argparse.ArgumentParser):
    """Parser of a command's options.

    doc       description; the text after a line "examples:" is printed below the options
    failed    what exit code 1 means, in words
    unusable  what exit code 2 means

    Errors are one line with exit code 2. Under a launcher only rank 0 prints the help.
    """

    def __init__(
        self, doc: str | None = None, *, failed: str = "it failed", unusable: str = UNUSABLE, **options: Any
    ) -> None:
        about, _, examples = (doc or "").partition("\nexamples:\n")
        codes = f"{SUCCESS} good; {FAILED} {failed}; {USAGE} {unusable}"
        epilog = textwrap.fill(f"exit code: {codes}; {INTERRUPTED} interrupted", 80)
        if examples:
            epilog += f"\n\nexamples:\n{textwrap.indent(textwrap.dedent(examples).strip(), '  ')}"
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": kind, "epilog": epilog, "description": _wrapped(about), **options})

    def error(self, message: str) -> NoReturn:
        print_error(f"{self.prog}: error: {message}" + ("" if message.endswith("?") else "; --help shows the options"))
        raise SystemExit(USAGE)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if rank() == 0:
            super().print_help(file)


def _wrapped(text: str) -> str:
    """Return text for a terminal of 80 columns; paragraphs with indented lines stay as they are."""
    parts = text.strip().split("\n\n")
    plain = ["\n " not in part and part[:1] != " " for part in parts]
    filled = [textwrap.fill(part, 80, break_on_hyphens=False) for part in parts]
    return "\n\n".join(new if fills else old for old, new, fills in zip(parts, filled, plain, strict=True))


def integer(min_: int, max_: int = (1 << 31) - 1) -> Callable[[str], int]:
    """Return an option type: an integer from `min_` to `max_`."""
    bounds = f", {min_} or more" if max_ == (1 << 31) - 1 else f" from {min_} to {max_}"

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if min_ <= int(text) <= max_:
                return int(text)
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer{bounds}")

    return parse


def number(min_: float, unit: str = "a number") -> Callable[[str], float]:
    """Return an option type: a finite number, `min_` or more."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if min_ <= float(text) < float("inf"):
                return float(text)
        raise argparse.ArgumentTypeError(f"{text!r}: expected {unit}, {min_:g} or more")

    return parse


def name_in(names: Collection[str]) -> Callable[[str], str]:
    """Return an option type to use with `choices=names`: a misspelt name raises with the closest name."""

    def parse(text: str) -> str:
        suggestion = "" if text in names else did_you_mean(text, names)
        if suggestion:
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r}; {suggestion}")
        return text  # argparse rejects other unknown names and lists the choices

    return parse


def output_file(text: str) -> Path:
    """Option type: a file that rank 0 can write. Creates missing parent folders immediately."""
    path = Path(text)
    try:
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {reason(error)}; pass a writable file") from error
    return path


def reason(error: BaseException) -> str:
    """Return the error's message, without the errno and file name of an OSError."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def rank() -> int:
    """Return this process's rank, from the environment variable RANK; 0 outside a launch."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


# ------------------------------------------------------------------------------------------------ how a command ends


def on_ranks(main: Callable[[Any], str], doc: str | None) -> NoReturn:
    """Run a command that takes no options: call `main` with the launch's communicator, print its result on rank 0."""

    def call() -> None:
        Parser(doc, failed="a rank failed, or the result differs from one process's").parse_args()
        with from_env() as comm:
            text = main(comm)
            if comm.rank == 0:
                print(text)

    run(call)


def run(main: Callable[[], int | None], prog: str | None = None) -> NoReturn:
    """Call `main` and exit with the code that it returns (None is 0).

    A user error prints one line, starting with `prog` (default: the file name); `code_of` gives the exit code.
    A closed stdout, as with `.. | head`, exits with 1 silently. Any other exception keeps its traceback.
    """
    raise SystemExit(exit_code_of(main, prog or Path(sys.argv[0]).name))


def exit_code_of(main: Callable[[], int | None], prog: str) -> int:
    """Call `main`, report its error as `run` describes, and return the exit code."""
    try:
        with shown():
            code = main() or SUCCESS
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        code, text = FAILED, ""
    except (Exception, KeyboardInterrupt) as error:
        code, text = code_of(error), _text_of(error)
        if not code or (sys.flags.dev_mode and code != INTERRUPTED):
            raise
        # The interpreter sets these for uncaught errors; the flight recorder reads them to notify the other ranks.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if text:
        place = f"rank {rank()}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        print_error(f"{prog}: {place}" + "\n  ".join(line.strip() for line in text.splitlines()))
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # stdout is closed or the disk is full: do not flush again at exit
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
    """Return the exit code of an error.

    2: wrong options, files or settings, or missing packages. 1: a rank, communication or memory allocation failed.
    130: Ctrl-C. 0: not a user error, so it keeps its traceback.
    """
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


def print_error(text: str) -> None:
    """Print to standard error. For wrong options, which all ranks share, only local rank 0 of each node prints.

    The other ranks sleep first: torchrun ends all ranks when one exits, and rank 0 must have printed by then.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and ": error: " in text:
        time.sleep(_SILENT_SECONDS)
    elif sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
