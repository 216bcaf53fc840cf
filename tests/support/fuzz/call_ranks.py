"""The rank side of fuzzed calls: make the calls of the seeds and record their outcomes. See call_kinds.py."""

from __future__ import annotations

import os
import random
import re
import time
import traceback
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

from .call_kinds import BUFFER_KINDS, VALID, Arguments, Target, values_of_kind
from .call_targets import BINDING
from .call_targets_autograd import AUTOGRAD
from .call_values import BUFFERS, SCALARS, Hostile, logical, numbers

TARGETS = [*BINDING, *AUTOGRAD]
PACKAGES = tuple(f"{os.path.dirname(str(package.__file__))}{os.sep}" for package in (pynccl, ad))
GOOD = ("right", "clear")
BAD = ("unclear", "accepted", "wrong", "differs", "slow", "broken", "crash", "hang")
SLOW_SECONDS = 5.0


class Record(NamedTuple):
    """The outcome of one call on this rank."""

    seed: int
    text: str
    outcome: str
    message: str = ""


class Environment:
    """The communicators, streams, memory etc. of this rank that values refer to."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.alone = self._relative(comm.rank)
        self.destroyed = self._relative(0)
        self.destroyed.destroy()
        self.aborted = self._relative(0)
        self.aborted.abort()
        other = self._relative(0)
        self.other = other
        self.foreign_operator = other.pre_mul_sum(2.0, "float32")
        self.operator = comm.pre_mul_sum(2.0, "float32")
        self.operator64 = comm.pre_mul_sum(2.0, "float64")
        self.destroyed_operator = comm.pre_mul_sum(2.0, "float32")
        self.destroyed_operator.destroy()
        self.stream: Any = pynccl.create_stream()
        closing: Any = pynccl.create_stream()
        closing.close()
        self.closed_stream = closing
        self.event = self.stream.record()
        self.memory = pynccl.mem_alloc(4, "float32")
        self.freed_memory = pynccl.mem_alloc(4, "float32")
        self.freed_memory.free()
        self.window = comm.window(self.memory)
        self.closed_window = comm.window(self.memory)
        self.closed_window.close()
        self.partition = ad.CartesianPartition(comm, (comm.size,))
        self.kept: list[Any] = []

    def _relative(self, color: int) -> Communicator:
        made = self.comm.split(color)
        assert made is not None
        made.timeout = SLOW_SECONDS
        return made

    def raw(self, rank: int) -> tuple[int, int, str]:
        self.kept = [*self.kept[-50:], numbers(rank)]
        return self.kept[-1].data_ptr(), 4, "float32"

    def fresh_memory(self, rank: int) -> Any:
        memory = pynccl.mem_alloc(4, "float32")
        torch.from_dlpack(memory).copy_(numbers(rank))
        return memory


def value(env: Environment, name: Any, rank: int) -> Any:
    """Return the value that `rank` passes for a name; anything other than a known name is its own value."""
    if not isinstance(name, str):
        return list(name) if isinstance(name, list) else name
    if name == "partner":
        return env.size - 1 - rank
    if name == "aborted comm":
        return env.aborted
    if name == "partition":
        return env.partition
    if name.startswith("buffer "):
        return BUFFERS[name.removeprefix("buffer ")].make(env, rank)
    return SCALARS[name](env, rank) if name in SCALARS else name


class Plan(NamedTuple):
    """The call of a seed: the target, and the name of each argument's value."""

    target: Target
    names: dict[str, Any]
    changed: tuple[str, ...]


def plan(seed: int) -> Plan:
    """Draw a target and replace zero to two of its arguments."""
    rng = random.Random(seed)
    target = rng.choice(TARGETS)
    names = {
        role: f"buffer {good}" if kind in BUFFER_KINDS and good in BUFFERS else good
        for role, (kind, good) in target.good.items()
    }
    count = rng.choices([0, 1, 2], [1, 16, 4])[0]
    roles = rng.sample(sorted(target.good), min(count, len(target.good)))
    for role in roles:
        kind = target.good[role][0]
        if kind != "partner":
            names[role] = rng.choice(values_of_kind(kind))
    changed = tuple(role for role in roles if target.good[role][0] != "partner")
    return Plan(target, names, changed)


def text_of(seed: int) -> str:
    drawn = plan(seed)
    args = ", ".join(f"{role}={name}" for role, name in drawn.names.items())
    return f"{drawn.target.name}({args})"


def load(comm: Communicator) -> None:
    """Make what the calls use, once for each communicator."""
    if id(comm) not in _environments:
        _environments[id(comm)] = Environment(comm)


def run(comm: Communicator, seeds: list[int]) -> list[Record]:
    """Make the calls of the seeds, and after each a valid call, which must return the right result."""
    warnings.simplefilter("ignore")
    load(comm)
    env = _environments[id(comm)]
    comm.timeout = SLOW_SECONDS
    found = []
    for seed in seeds:
        print(f"call {seed}: {text_of(seed)}", flush=True)
        start = time.monotonic()
        record = make(env, seed)
        if time.monotonic() - start > SLOW_SECONDS and record.outcome in GOOD:
            record = record._replace(outcome="slow", message=f"took {time.monotonic() - start:.1f} s")
        found.append(record)
        check_usable(env, record)
    return found


_environments: dict[int, Environment] = {}


def check_usable(env: Environment, last: Record) -> None:
    """Check with a valid call that the last one launched nothing and left no group open."""
    y = env.comm.all_reduce(torch.full((3,), env.rank + 1.0, dtype=torch.float64))
    wanted = env.size * (env.size + 1) / 2
    if y.tolist() != [wanted] * 3:
        raise AssertionError(f"all_reduce gives {y.tolist()}, expected {wanted}, after {last}")


def make(env: Environment, seed: int) -> Record:
    drawn, text = plan(seed), text_of(seed)
    target = drawn.target
    try:
        rows = [{role: value(env, name, r) for role, name in drawn.names.items()} for r in range(env.size)]
        args = rows[env.rank]
        before = [dict(row) for row in rows]
    except Exception as error:
        return Record(seed, text, "broken", f"the arguments could not be made: {error!r}")
    expected = expectation(target, before, env)
    try:
        result = target.call(env, args)
        complete(env, args)
    except Exception as error:
        return Record(seed, text, *judge(drawn, args, error))
    if reason := must_raise(drawn, args, env.size):
        return Record(seed, text, "accepted", f"{reason}; returned {short(result)}")
    return Record(seed, text, *compare(expected, result))


def complete(env: Environment, args: Arguments) -> None:
    stream = args.get("stream")
    if stream is env.stream or (isinstance(stream, int) and stream == env.stream.handle):
        env.stream.synchronize()


def must_raise(drawn: Plan, args: Arguments, ranks: int) -> str:
    """Return why this call should have raised; "" if it may succeed."""
    for role in drawn.changed:
        kind = drawn.target.good[role][0]
        name = drawn.names[role]
        if isinstance(name, str) and name.startswith("buffer "):
            if BUFFERS[name.removeprefix("buffer ")].invalid and kind != "tensor":
                return f"{role} is {name}, which NCCL cannot take"
        elif kind in BUFFER_KINDS:
            tensor = isinstance(name, str) and name.startswith(("torch.tensor", "np.array", "memory"))
            tensors = kind == "tensor" and isinstance(args[role], (list, tuple))  # a list of tensors, also of none
            tensor = tensor or (tensors and all(isinstance(one, Tensor) for one in args[role]))
            if not tensor and not (name == "None" and kind == "recv"):
                return f"{role} is {name}, which is not a buffer"
        elif name in ("destroyed comm", "aborted comm") and kind in ("self", "ad comm"):
            return f"{role} is a {name}"
        elif kind == "ad comm" and name != "comm":
            return f"{role} is {name}, which is not a communicator"
        elif kind in VALID and drawn.names[role] != drawn.target.good[role][1] and not VALID[kind](args[role], ranks):
            return f"{role} is {name}, which is not a valid {kind}"
    return ""


def expectation(target: Target, rows: list[Arguments], env: Environment) -> Tensor | None:
    """Return the result that the call must have if it returns; None if unknown."""
    if target.right is None:
        return None
    try:
        right: Tensor | None = target.right(rows, env.rank, env.size)
    except Exception:
        return None
    return right


def compare(expected: Tensor | None, result: Any) -> tuple[str, str]:
    got = logical(result) if expected is not None else None
    if expected is None or got is None:
        return "right", ""
    got = got.reshape(-1)
    if got.shape == expected.shape and torch.allclose(got, expected.reshape(-1), rtol=0.1, atol=1e-3, equal_nan=True):
        return "right", ""
    return "wrong", f"gave {short(got.tolist())}, expected {short(expected.tolist())}"


def short(x: Any) -> str:
    if isinstance(x, Tensor):  # torch's repr reads memory that a tensor may not have
        return f"tensor of {x.dtype} {x.layout}"
    try:
        text = repr(x)
    except Exception as error:
        text = f"<no repr: {error!r}>"
    return text if len(text) < 200 else text[:200] + "..."


# ------------------------------------------------------------------------------------------------------ judging errors

REMEDY = re.compile(
    r"expected|\bbut\b|got |\bpass\b|must|\bneeds?\b|make |create |\buse\b|convert|view it|move|\bset\b|pad it|call "
    r"|leave it|give|install|run with|not divisible|is no |after|belongs|counts say",
)
KINDS = (TypeError, ValueError, NotImplementedError, pynccl.NcclError)


def judge(drawn: Plan, args: Arguments, error: Exception) -> tuple[str, str]:
    """Return "clear" if the error has an expected type, comes from a check and names the argument and the remedy."""
    message = f"{type(error).__name__}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    line = place.line or ""
    why = ""
    if not isinstance(error, KINDS) or isinstance(error, (UnicodeError,)):
        why = "has another type"
    elif not (place.filename.startswith(PACKAGES) and line.startswith("raise")):
        why = "comes from Python or torch, not from a check"
    elif not names_argument(drawn, args, str(error)):
        why = "does not name the argument, its value or the operation"
    elif not REMEDY.search(str(error)):
        why = "does not say what was expected or what to do"
    if why:
        return "unclear", f"{message}\n      ({why}; raised at {place.filename}:{place.lineno}: {line[:100]})"
    return "clear", message


def names_argument(drawn: Plan, args: Arguments, message: str) -> bool:
    """Return whether the message contains the name of an argument, the value of a replaced one, or the operation."""
    words = [*drawn.target.name.split("."), *drawn.target.words, *drawn.target.good]
    for role in drawn.changed:
        words += [type(args[role]).__name__, short(args[role])[:40]]
        words += [] if isinstance(args[role], (Tensor, Hostile)) else [str(args[role])[:40]]
    return any(word and word in message for word in words)
