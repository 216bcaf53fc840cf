"""The rank side of fuzzed arguments: replace one argument of a valid call by nonsense and record the outcome.

The call may return, since some values are valid for some arguments. Otherwise it must raise TypeError, ValueError or an
NcclError that names the function and the argument, on all ranks alike.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import gc
import os
import random
import re
import socket
import tempfile
import time
import traceback
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

from .argument_calls import CALLS, names_of
from .call_ranks import KINDS, PACKAGES, SLOW_SECONDS, Environment, Record, check_usable


class Raises:
    """An object whose methods raise."""

    def _raise(self, *args: Any) -> Any:
        raise RuntimeError("not today")

    __bool__ = __eq__ = __len__ = __index__ = __iter__ = __int__ = __float__ = __getattr__ = _raise
    __repr__ = __str__ = __hash__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __contains__ = _raise


class Color(enum.Enum):
    RED = 1


VALUES = (
    *("None", "True", "-1", "2**70", "1.5", "nan", "inf", "'x'", "b'x'", "''", "[]", "[None]", "['x']", "[2**70]"),
    *("{}", "{0: 1}", "{'x': None}", "{1}", "()", "(1, 2, 3)", "lambda *args: args", "int", "object()", "Raises()"),
    *("np.array([1, 2])", "np.float64(1)", "torch.tensor([1, 2])", "torch.tensor([[1.5]])", "nn.Linear(4, 4)"),
    *("torch.ones(4, 4, device='meta')", "comm", "Color.RED", "torch.float32", "1j", "iter(())", "...", "range(2)"),
    *("'\\0'", "'\\ud800'", "np.array(['x'])", "pynccl.CollConfig()", "torch.device('cpu')", "nn.Linear"),
    *("torch.ones(4, 4).to_sparse()", "torch.Tensor", "stream", "line", "ad.Shard(comm, None, (2, 2))", "torch.nn"),
)


class Case(NamedTuple):
    """A call of CALLS, the position of the replaced keyword argument in it, the name of this one and its value."""

    call: str
    keyword: int
    name: str
    value: str

    def text(self) -> str:
        return ast.unparse(_replaced(self.call, self.keyword, ast.parse(self.value, mode="eval").body))


def _keywords(tree: ast.AST) -> list[ast.keyword]:
    return [one for node in ast.walk(tree) if isinstance(node, ast.Call) for one in node.keywords]


def _replaced(call: str, keyword: int, value: ast.expr) -> ast.Expression:
    tree = ast.parse(call, mode="eval")
    if keyword >= 0:
        _keywords(tree)[keyword].value = value
    return ast.fix_missing_locations(tree)


@functools.cache
def cases() -> list[Case]:
    """Return all cases in a random order that is always the same, so that the next seed is another function."""
    found = [
        Case(call, at, str(keyword.arg), value)
        for call in CALLS
        for at, keyword in enumerate(_keywords(ast.parse(call, mode="eval")))
        for value in VALUES
        if not (keyword.arg in CALLBACKS and value in CALLABLE)
        and not any(call.startswith(start) and keyword.arg == name and value in of for start, name, of in VALID)
    ]
    random.Random(0).shuffle(found)
    return found


VALID = [  # by themselves: these calls fail later, or in the user's function
    ("grouped(", "buf", ("np.array([1, 2])", "torch.tensor([1, 2])", "torch.tensor([[1.5]])", "np.float64(1)")),
    ("ad.testing.check_model(", "batch_dim", ("-1",)),
    ("ad.testing.check_gradients(", "step", ("1.5", "np.float64(1)")),
    ("ad.set_side_stream(", "comm", ("comm",)),
]
CALLABLE = {"lambda *args: args", "int", "nn.Linear(4, 4)", "nn.Linear", "torch.Tensor"}
SYNONYMS = {"w": "weight", "axes": "axis", "axes_reduce": "axes", "part": "x", "options": "keyword"} | {
    "send_counts": "counts"
}
ALSO = (
    "allreduce",
    "overlapconfig",
    "fromprocessgroup",
    "ncclparam",
)  # functions that others call with their arguments
PATHS = ("path", "state", "spec")
_OF_ANOTHER = re.compile(r"on rank \d+: (Type|Value|FileExists|IsADirectory)Error: ")
CALLBACKS = ("role", "init", "fn", "loss", "finish")  # what the user's function raises is not ours


def plain(text: str) -> str:
    return text.lower().replace("_", "")


def case(seed: int) -> Case:
    return cases()[seed % len(cases())]


def text_of(seed: int) -> str:
    return case(seed).text()


_environments: dict[int, Any] = {}


def load(comm: Communicator) -> None:
    """Make what the calls use, once for each communicator."""
    if id(comm) in _environments:
        return
    env: Any = Environment(comm)
    env.folder = tempfile.TemporaryDirectory(prefix="arguments-")
    env.alone_window = env.alone.window(env.memory)
    env.tracing = ad.trace(env.folder.name + "/spans", comm)
    env.decisions = env.folder.name + "/decisions"
    ad.overlap.save(env.decisions)
    ad.rng.seed(0, comm)
    env.userbuffers = ad.CommOverlap(ad.CommOverlapHelper(comm), (4, 4), torch.float32)
    _environments[id(comm)] = env


def run(comm: Communicator, seeds: list[int]) -> list[Record]:
    """Make the calls of the seeds, and after each a valid call, which must return the right result."""
    warnings.simplefilter("ignore")
    load(comm)
    env = _environments[id(comm)]
    comm.timeout = SLOW_SECONDS
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # each rank has a world of its own
    env.group, env.device_mesh = dist.group.WORLD, dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # pynccl.init
    found, before = [], os.getcwd()
    try:
        for seed in seeds:
            print(f"call {seed}: {text_of(seed)!r}", flush=True)
            # Some values are valid paths, and rank 0 alone writes some files: the next call must not find them.
            with tempfile.TemporaryDirectory(prefix="arguments-") as folder:
                os.chdir(folder)
                found.append(make(env, seed))
                check_usable(env, found[-1])
    finally:
        os.chdir(before)
        env.group = env.device_mesh = None
        gc.collect()  # releases references to the group
        dist.destroy_process_group()
    return found


def make(env: Any, seed: int) -> Record:
    one = case(seed)
    names = {**names_of(env, one.text()), "Raises": Raises, "Color": Color}
    code = compile(_replaced(one.call, one.keyword, ast.Name("replaced", ast.Load())), "call", "eval")
    value = eval(one.value, names)
    start = time.monotonic()
    try:
        result = eval(code, {**names, "replaced": value})
        if isinstance(result, contextlib.AbstractContextManager):
            with result:
                pass
        for method in ("close", "destroy", "free"):
            if isinstance(getattr(result, method, None), type(env.comm.destroy)):
                getattr(result, method)()
    except Exception as error:
        outcome, message = judge(one, error)
    else:
        outcome, message = "right", ""
    if time.monotonic() - start > SLOW_SECONDS:
        outcome, message = "slow", f"took {time.monotonic() - start:.1f} s"
    return Record(seed, one.text(), outcome, message)


def judge(one: Case, error: Exception) -> tuple[str, str]:
    """Return "clear" if the error has an expected type, comes from a check and names the function and the argument."""
    message = f"{type(error).__name__}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    line = place.line or ""
    functions = {plain(name) for name in re.findall(r"(\w+)[(.,]", one.call)} - {"pair", "ad", "pynccl", "comm", "x"}
    text = plain(str(error))
    words = set(re.findall(r"\w+", f"{error} {error}".lower()))
    why = ""
    if isinstance(error, OSError) and one.name in PATHS:
        pass
    elif isinstance(error, RuntimeError) and (_OF_ANOTHER.match(str(error)) or "loading state_dict" in str(error)):
        pass  # another rank's, which judges it; as torch's load_state_dict
    elif not isinstance(error, (*KINDS, KeyError, IndexError, AssertionError)) or isinstance(error, UnicodeError):
        why = "has another type"
    elif not (place.filename.startswith(PACKAGES) and line.startswith("raise")):
        why = "comes from Python or torch, not from a check"
    elif (
        not isinstance(error, pynccl.NcclError)
        and not {one.name.lower(), one.name.removesuffix("s"), SYNONYMS.get(one.name)} & words
    ):
        why = "does not name the argument"
    elif not any(name in text for name in functions | set(ALSO)):
        why = "does not name the function"
    if why:
        return "unclear", f"{message}\n      ({why}; raised at {place.filename}:{place.lineno}: {line[:100]})"
    return "clear", message
