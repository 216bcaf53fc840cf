"""Call sites and stacks: the innermost line of user code in a thread.

Python code here walks only the frames of its own thread. Walking another thread's frames in Python releases the GIL
between steps, so the frames change meanwhile and the process may crash. faulthandler walks all threads in C instead;
it runs only if a call is overdue or another rank requests the stacks, never in a healthy program.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = ("torch", "pynccl_autograd")  # their frames are internal, like ours: they are skipped
_MODULES = tuple(
    _LIBRARY + name
    for name in (
        "contextlib.py",
        "functools.py",
        "threading.py",
        "warnings.py",
        "_py_warnings.py",
        "concurrent" + os.sep,
    )
)
_TYPED_IN = (
    "<stdin>",
    "<string>",
    "<console>",
    "<ipython",
    "<doctest",
)  # user code; others are generated code
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
# The folder of console scripts, which only call an installed package. An embedded Python may have no executable.
_SCRIPTS = os.path.join(os.path.dirname(sys.executable or os.devnull), "")
_WRAPPERS = ("wrapper", "inner", "wrapped", "decorate_context")  # functions that decorators return
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class _InternalFiles(dict[str, bool]):
    """File name -> whether its frames are internal (this package, torch, ...), not user code. A cache: it is read for
    each frame of each call."""

    def __missing__(self, file: str) -> bool:
        self[file] = found = _is_internal(file)
        return found


internal_files = _InternalFiles()


def walk_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield this frame, its caller, and so on outwards: `walk_outwards(sys._getframe(1))` starts at the caller."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_site() -> str:
    """Return file:line of the innermost caller outside this package, pynccl_autograd, torch and generated code.

    If there is none, return the outermost caller."""
    site = user_site()
    if site:
        return site
    *_, outermost = walk_outwards(sys._getframe(1))
    return f"{outermost.f_code.co_filename}:{outermost.f_lineno}"


def user_site(depth: int = 2) -> str:
    """Return the same as `call_site`, but "" if there is none, as in callbacks from C (atexit, autograd hooks).

    depth  number of innermost frames, including this one, that are known to be internal: they are skipped for free"""
    if _call_sites and (found := _call_sites.get(threading.get_ident())):
        return found[0]
    try:
        frame: FrameType | None = sys._getframe(depth)
    except ValueError:  # the stack is not that deep
        return ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not internal_files[file]:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# Thread -> the line to which its calls are attributed, and the host stream for which the program waits if it waits for
# them (0: they are the program's own).
_call_sites: dict[int, tuple[str, int]] = {}


@contextlib.contextmanager
def called_from(site: str, stream: int = 0) -> Iterator[None]:
    """Context manager: attribute the calls of this thread to a line that is not on its stack.

    It is a line of code that torch.compile has replaced; or where the program posted the call to this thread, to wait
    for it later by waiting for the host stream `stream`."""
    thread = threading.get_ident()
    before = _call_sites.get(thread)
    _call_sites[thread] = (site, stream)
    try:
        yield
    finally:
        if before is None:
            del _call_sites[thread]
        else:
            _call_sites[thread] = before


def posting_stream() -> int:
    """Return the stream for which the program waits if it waits for the calls of this thread; 0: they are its own."""
    return _call_sites.get(threading.get_ident(), ("", 0))[1]


def _is_internal(file: str) -> bool:
    if file.startswith("<"):
        return not file.startswith(_TYPED_IN)
    folders = [_FOLDER, *_folders_of(_PACKAGES)]
    if generated := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):  # set by torch itself when it first writes code there
        folders.append(os.path.join(generated, ""))
    if (extensions := sys.modules.get("typing_extensions")) and file == extensions.__file__:
        return True  # torch's deprecated functions are wrapped there, or in warnings.py
    return file.startswith((*folders, *_MODULES))


def _folders_of(packages: Sequence[str]) -> Iterator[str]:
    """Yield the folders of the packages that are imported."""
    for name in packages:
        if init := getattr(sys.modules.get(name), "__file__", None):
            yield os.path.dirname(init) + os.sep


# The autograd function that is making the calls

# Thread -> (function, line of its forward call, what PYNCCL_CHECK=1 compares besides the call). It is almost always
# empty, and then costs a call nothing.
attributions: dict[int, tuple[str, str, str]] = {}


class attribute_calls:
    """Context manager that attributes this thread's calls to `function` ("AllReduce.backward") and its forward `site`.

    When nested, an outer attribution that has a site wins, because the adjoint of a collective is a collective too."""

    __slots__ = ("_before", "_note")

    def __init__(self, function: str, site: str = "", compared: str = "") -> None:
        self._note = (function, site, compared)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._before = before = attributions.get(thread)
        if before is None or not before[1]:
            attributions[thread] = self._note

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            attributions.pop(threading.get_ident(), None)
        else:
            attributions[threading.get_ident()] = self._before


os.register_at_fork(after_in_child=attributions.clear)


# The stacks of all threads


Stacks = Mapping[int, list[str]]  # thread -> its frames, innermost first: "file:line function"


def all_stacks() -> Stacks:
    """Return the current stacks of all threads; {} if that fails."""
    try:
        with open(os.memfd_create("pynccl stacks"), "w+b", buffering=0) as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return parsed(file.read().decode(errors="replace"))
    except (OSError, AttributeError):  # no descriptor is left, or the system has no memfd
        return {}


def parsed(text: str) -> Stacks:
    """Parse the output of faulthandler."""
    threads: dict[int, list[str]] = {}
    frames: list[str] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            frames = threads[int(found[1], 16)] = []
        elif found := _FRAME.fullmatch(line):
            frames.append(f"{_unescaped(found[1])}:{found[2]} {_unescaped(found[3])}")
    return threads


def _unescaped(text: str) -> str:
    """Decode non-ASCII characters, which faulthandler writes as \\xe4, \\u1234, \\U00012345."""
    return text.encode("ascii", "replace").decode("unicode_escape", "replace")


def main_stack(threads: Stacks) -> list[str]:
    """Return the stack of the main thread."""
    return threads.get(threading.main_thread().ident or 0, [])


def stack_of_call(threads: Stacks, thread: int) -> list[str]:
    """Return the stack of the thread that made a call, or the main thread's if it contains no user code: torch runs the
    backward pass in threads of its own."""
    frames = threads.get(thread, [])
    in_user_code = not all(internal_files[_file_of(frame)] for frame in frames)
    return frames if in_user_code else main_stack(threads)


def is_user_line(line: str) -> bool:
    """Return whether "file:line" is user code."""
    return not internal_files[_file_of(line)]


def place(frames: Sequence[str]) -> str:
    """Return where a thread is: the innermost line of the user's own code, and the function of a library that it
    called there: "train.py:88, in queue.get"; "train.py:88 step" if it called none, or this package.

    Own code is neither Python's nor installed. Without any, such as in a console script, return the innermost line of
    an installed package, else the outermost line."""
    files = [_file_of(frame) for frame in frames]
    own = innermost_own(files)
    if own <= 0 or files[own - 1].startswith((_FOLDER, *_folders_of(["pynccl_autograd"]))):
        return frames[own] if frames else ""
    called = frames[own - 1 :: -1]  # outermost first
    line = frames[own].rpartition(" ")[0]
    return f"{line}, in {_qualified(next(filter(_is_public_function, called), called[0]))}"


def innermost_own(files: Sequence[str]) -> int:
    """Return the index of the user's own file, given those of a stack, innermost first; see `place`."""
    outermost = len(files) - 1  # "<string>" further in is code that dataclasses or namedtuple generate
    own = (i for i, file in enumerate(files) if not _in_library(file) and (file != "<string>" or i == outermost))
    installed = (i for i, file in enumerate(files) if _INSTALLED.match(file) and not internal_files[file])
    return next(own, next(installed, outermost))


def _in_library(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed package, or to a package that `internal_files` skips."""
    return internal_files[file] or file.startswith((_LIBRARY, _SCRIPTS)) or bool(_INSTALLED.match(file))


def _is_public_function(frame: str) -> bool:
    """Return whether a function's name says what it does: not a private one, nor one of a decorator."""
    name = frame.rpartition(" ")[2]
    return name.isidentifier() and (name[0] != "_" or name.startswith("__")) and name not in _WRAPPERS


def _qualified(frame: str) -> str:
    """ "/usr/lib/python3.12/queue.py:171 get" -> "queue.get"."""
    module = _INSTALLED.sub("", _file_of(frame))
    for folder in (_LIBRARY, *(os.path.dirname(os.path.dirname(folder)) + os.sep for folder in _folders_of(_PACKAGES))):
        module = module.removeprefix(folder)
    module = module.removesuffix(".py").removesuffix("/__init__")
    module = os.path.basename(module) if os.path.isabs(module) else module.replace(os.sep, ".")
    return f"{module}.{frame.rpartition(' ')[2]}"


def user_stack(frames: Sequence[str], max_chars: int = 2000) -> str:
    """Return one line per frame, outermost first, down to the call of this package that user code made. Longer texts
    keep the innermost `max_chars` characters."""
    inner = next((i for i, frame in enumerate(frames) if not internal_files[_file_of(frame)]), len(frames))
    text = "\n".join(reversed(frames[max(inner - 1, 0) :]))
    return text if len(text) <= max_chars else "...\n" + text[-max_chars:].partition("\n")[2]


def _file_of(frame: str) -> str:
    return frame.rpartition(":")[0]
