"""Type checking of a user's program: inferred result types, and errors for misspelt string arguments.

mypy runs in another folder and uses the installed packages, so an editable install must be visible to it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("mypy")

CACHE = Path(__file__).parents[2] / ".mypy_cache" / "user"  # analyzing torch takes mypy half a minute

# mypy must report a message with these words for each line that ends in `#: words`, and none for other lines.
PROGRAM = """
import torch
from torch import nn

import pynccl
import pynccl_autograd as ad

comm = pynccl.init()
x = torch.ones(4)
memory = pynccl.mem_alloc((4,), "float32")

reveal_type(comm)  #: "pynccl.comm.communicator.Communicator"

# The binding: the result has the type of the buffer; rooted collectives return None on other ranks.
reveal_type(comm.all_reduce(x))  #: "torch._tensor.Tensor"
reveal_type(comm.all_reduce(memory))  #: "pynccl.comm.memory.Memory"
reveal_type(comm.reduce(x))  #: "torch._tensor.Tensor | None"
comm.all_reduce(x, op=pynccl.RedOp.MIN)
comm.all_reduce(x, op="summ")  #: Argument "op" has incompatible type "Literal['summ']"
reveal_type(comm.plan.all_reduce(x, x, "max"))  #: "pynccl.comm.plan.Plan"
reveal_type(comm.plan.group([comm.plan.send(x, 0), comm.plan.recv(x, 0)]))  #: "pynccl.comm.plan.Plan"

# Differentiable collectives
reveal_type(ad.all_reduce(x, comm, grad="sum"))  #: "torch._tensor.Tensor"
reveal_type(ad.all_reduce([x, x], comm, grad="sum"))  #: "list[torch._tensor.Tensor]"
reveal_type(ad.start(ad.all_gather, x, comm, grad="sum").wait())  #: "torch._tensor.Tensor"
reveal_type(ad.start(ad.reduce_scatter, x, comm, dim=1))  #: "pynccl_autograd.work.Work"
ad.reduce_scatter(x, comm, op="max")  #: No overload variant
ad.all_reduce(x, comm, grad="replicate")  #: No overload variant
ad.start(ad.broadcast, x, comm, 0, grad="summ")  #: incompatible type "Literal['summ']"

reveal_type(ad.ColumnParallelLinear(4, 4, comm)(x))  #: "torch._tensor.Tensor"
reveal_type(ad.RowParallelLinear.from_linear(nn.Linear(4, 4), comm)(x))  #: "torch._tensor.Tensor"
reveal_type(ad.nn.AllGather(comm, grad="sum")([x, x]))  #: "list[torch._tensor.Tensor]"
ad.nn.AllReduce(comm, "summ", grad="sum")  #: Argument 2 to "AllReduce" has incompatible type "Literal['summ']"

# Parameters of the user's own modules, as docs/models.md and docs/conventions.md declare them
weight = nn.Parameter(x.chunk(comm.size)[comm.rank].clone())
ad.set_shard(weight, ad.Shard(comm, 0, x.shape))
ad.set_shard(weight, None)
ad.set_shard(weight, 0)  #: Argument 2 to "set_shard" has incompatible type "int"
"""


def messages_of(program: str, folder: Path) -> dict[int, str]:
    """Return the messages of mypy --strict for each line of the program."""
    (folder / "user.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(CACHE), "--no-error-summary", "user.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    messages: dict[int, str] = {}
    for line in done.stdout.splitlines():
        found = re.match(r"user\.py:(\d+): (?:error|note): (.*)", line)
        assert found, line
        messages[int(found[1])] = messages.get(int(found[1]), "") + found[2] + "\n"
    return messages


def test_a_type_checker_infers_results_and_finds_misspelt_arguments(tmp_path: Path) -> None:
    got = messages_of(PROGRAM, tmp_path)
    expected = {at: line.split("#: ")[1] for at, line in enumerate(PROGRAM.splitlines(), 1) if "#: " in line}
    assert "\n".join(text for at, text in sorted(got.items()) if at not in expected) == ""
    missing = {at: (words, got.get(at, "nothing")) for at, words in expected.items() if words not in got.get(at, "")}
    assert missing == {}
