"""What all commands have in common above argparse: help, files, exit codes, and errors in one line.

    def main() -> int:
        parser = command.Parser(__doc__, failed="a bound is not met")
        parser.add_argument("--rounds", type=command.whole(1), default=9, help="repetitions (%(default)s)")
        ...

    if __name__ == "__main__":
        command.run(main)

Errors that a user can mend are one line and no traceback; python -X dev shows where they come from. Of equal lines of
the ranks of a launch one is printed on each machine, and torchrun's own summary has it, too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
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
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for what a rank has died of; it reads JSON
_NO_MEMORY = ("can't allocate memory", "out of memory")  # of torch, on a CPU and on a GPU
_SEE_HELP = ("the following arguments are required", "unrecognized arguments", "one of the arguments")


class FailedError(RuntimeError):
    """What a command was asked for came to a bad end: its text, and exit code 1."""


# ------------------------------------------------------------------------------------------------ options and help


class Parser(argparse.ArgumentParser):
    """Options of a command.

    doc       what it does; from a line "examples:" on, below the options. Paragraphs are wrapped to the terminal, but
              for those with an indented line
    failed    when the exit code is 1, in words

    An error is one line and exit code 2. Under a launcher rank 0 alone prints the help.
    """

    def __init__(self, doc: str | None = None, *, failed: str = "it failed", **options: Any) -> None:
        about, _, examples = (doc or "").partition("\nexamples:\n")
        epilog = (
            f"exit code: {GOOD} good; {FAILED} {failed}; {USAGE} options, files or settings that cannot work; "
            f"{INTERRUPTED} interrupted"
        )
        if examples:
            epilog += f"\n\nexamples:\n{textwrap.indent(textwrap.dedent(examples).strip(), '  ')}"
        options.setdefault("description", about.strip())
        super().__init__(**{"formatter_class": _Formatter, "epilog": epilog, **options})

    def error(self, message: str) -> NoReturn:
        hint = "; --help shows the options" if message.startswith(_SEE_HELP) else ""
        say(f"{self.prog}: error: {message}{hint}")
        raise SystemExit(USAGE)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if rank() == 0:
            super().print_help(file)


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [
            text if any(line[:1].isspace() for line in text.splitlines()) else textwrap.fill(text, width)
            for text in text.split("\n\n")
        ]
        return textwrap.indent("\n\n".join(paragraphs), indent)


def whole(least: int, most: int = (1 << 31) - 1) -> Callable[[str], int]:
    """The type of an option: a whole number from `least` to `most`."""
    upto = f", {least} or more" if most == (1 << 31) - 1 else f" from {least} to {most}"

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if text.isascii() and len(text) < 20 and least <= int(text) <= most:
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


def input_file(text: str) -> Path:
    """The type of an option: a file that can be read."""
    return _tried(text, "a file that can be read", lambda path: open(path, "rb").close())


def output_file(text: str) -> Path:
    """The type of an option: a file that rank 0 can write, tried at once. Folders on its way are made."""

    def make(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _append_nothing(path)

    return _tried(text, "a file that can be written", make) if rank() == 0 else Path(text)


def output_folder(text: str) -> Path:
    """The type of an option: a folder that can be written, made if it is not there."""

    def make(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        _append_nothing(path / f".pynccl-{os.getpid()}")

    return _tried(text, "a folder that can be written", make)


def unwritable(file: str) -> str:
    """Why the file cannot be written, and what to do; "" if it can. It is left as it is, or not there."""
    try:
        _tried(file, "a file that can be written", _append_nothing)
    except argparse.ArgumentTypeError as error:
        return str(error)
    return ""


def _tried(text: str, expected: str, attempt: Callable[[Path], None]) -> Path:
    try:
        attempt(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {reason(error)}; pass {expected}") from error
    return Path(text)


def _append_nothing(path: Path) -> None:
    existed = path.exists()
    open(path, "ab").close()
    if not existed:
        path.unlink()


def undrawable(option: str, file: str) -> str:
    """Why matplotlib cannot write such a picture, and what to do; "" if it can."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return f"{option} needs matplotlib: pip install matplotlib, or leave it away"
    known = FigureCanvasBase.get_supported_filetypes()
    ending = Path(file).suffix.lstrip(".").lower()
    if ending and ending not in known:
        return f"{option} {file}: matplotlib writes no .{ending}; pass a name that ends in one of {', '.join(known)}"
    return ""


def reason(error: BaseException) -> str:
    """Why, without the number and the file of an OSError."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def rank() -> int:
    """Of this process in its launch, by the environment; 0 outside a launch."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isascii() and text.isdigit() else 0


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

    An error of the user's making is one line, `prog` (the file's name) first: 2 where it lies in options, files,
    settings or missing packages (ValueError, OSError, ImportError, NcclInvalidUsage), 1 where a rank or the
    communication failed (FailedError, NcclError, torch's DistError, no memory). Ctrl-C is 130. A reader who has seen
    enough, as in `.. | head`, is 1 and no line. Any other exception is a fault of the program, with its traceback.
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
    except KeyboardInterrupt as error:
        code, text = INTERRUPTED, "interrupted"
        _left_by(error)
    except Exception as error:
        code, text = code_of(error), str(error).strip() or type(error).__name__
        if not code or sys.flags.dev_mode:
            raise
        if isinstance(error, OSError) and error.errno is not None:
            text = f"{error.filename}: {reason(error)}" if error.filename is not None else reason(error)
        _left_by(error)
    if text:
        _say_of_rank(prog, text)
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # what nobody reads, or no disk holds, is not written again at exit
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _left_by(error: BaseException) -> None:
    """As the interpreter notes an error that nobody catches: so the flight recorder can tell the other ranks of it."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def code_of(error: Exception) -> int:
    """The exit code of an error of the user's making; 0 for one that is none."""
    dist = sys.modules.get("torch.distributed")
    if isinstance(error, NcclError):
        return USAGE if isinstance(error, (ValueError, ImportError, NcclInvalidUsage, NcclVersionError)) else FAILED
    if isinstance(
        error, (FailedError, TimeoutError, ConnectionError, MemoryError, getattr(dist, "DistError", MemoryError))
    ):
        return FAILED
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return FAILED
    return USAGE if isinstance(error, (ValueError, OSError, ImportError)) else 0


def _say_of_rank(prog: str, text: str) -> None:
    place = f"rank {rank()}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    first, *more = text.splitlines()  # what to do may take lines of their own
    say("\n".join([f"{prog}: {place}{first}", *(f"  {line.strip()}" for line in more)]), same=text)


def say(text: str, same: str = "") -> None:
    """Print it on standard error: of all ranks of a launch that say the same, one on each machine does.

    same      what is compared, if not all of the text
    """
    file = os.environ.get(_ERROR_FILE)
    if file is None:  # not torchrun: equal options fail alike, and the first rank of a machine may say so
        if os.environ.get("LOCAL_RANK", "0") != "0" and ": error: " in text:
            return
    elif not _first_to_say(same or text, Path(file)):
        return
    else:  # torchrun shows it in its summary, in place of a hint how to get a traceback
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}))
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def _first_to_say(text: str, file: Path) -> bool:
    """Whether no other rank of this machine has said it. torchrun's folder, which it takes away, holds one a rank."""
    try:
        (file.parent.parent / f".said-{hashlib.sha256(text.encode()).hexdigest()[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True
