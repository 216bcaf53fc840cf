"""The README's examples run as they stand there; its table of operations has their arguments and gradients."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import TORCHRUN, RankPool

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (0, r"rank 0 of 2 on cpu> \[1\.0, 1\.0, 1\.0, 1\.0, 1\.0, 1\.0, 1\.0, 1\.0\]"),
        (2, r"3\.3892\d* 4,293,376 bytes on this rank, 8,585,984 in the whole model"),
        (
            3,
            r"^layer +pass +chosen.*\nRowParallelLinear\(256, 64\) #1  forward   slices 4 .*\n.*backward  slices 4 +1",
        ),
        (1, r"^2676\.\d+ 25\.84\d+ (\d\.\d+e-1[5-9]|0\.0)\n$"),
    ],
)
def test_example_runs_under_torchrun_as_it_says(example: int, expected: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[example])
    assert len(EXAMPLES[example].strip().splitlines()) <= 12
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(expected, done.stdout), done.stdout


# ------------------------------------------------------------------------------------------- the table of operations

TEXT = README.read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in re.findall(r"^\| `\w+\(x, .*\|$", TEXT, re.MULTILINE)
]
NAMES = [re.sub(r"\W.*", "", row[0].strip("`")) for row in ROWS]


def bare(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    shown = inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in parameters])
    return f"{function.__name__}{shown}".replace("'", '"')


def test_the_table_has_every_collective_with_the_arguments_that_it_takes() -> None:
    modules = [kind for kind in vars(ad.nn).values() if isinstance(kind, type) and issubclass(kind, ad.nn.Operation)]
    functions = {kind.function.__name__ for kind in modules if kind is not ad.nn.Operation}
    assert set(NAMES) == functions | {"send_recv"}
    for name, row in zip(NAMES, ROWS, strict=True):
        assert row[0].strip("`") == bare(getattr(ad, name))


def block(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    return x.chunk(comm.size)[comm.rank]


def rooted(g: torch.Tensor, comm: Communicator, root: int) -> torch.Tensor:
    return g if comm.rank == root else torch.zeros_like(g)


def ring(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def halos_returned(g: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """What the row of halo_exchange says, with halos of one element and plain messages."""
    dx, left, right = g.clone(), comm.rank - 1, comm.rank + 1
    for peer, halo, border in ((left, 0, 1), (right, -1, -2)):
        if 0 <= peer < comm.size:
            came = torch.empty_like(g[:1])
            with pynccl.group():
                comm.send(g[halo:][:1].contiguous(), peer)
                comm.recv(came, peer)
            dx[halo] = 0
            dx[border] += came[0]
    return dx


def swapped(g: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """all_to_all from dimension 1 back to dimension 0, by the binding."""
    parts = torch.stack(list(g.chunk(comm.size, 1))).contiguous()
    return torch.cat(list(comm.all_to_all(parts)))


def shifted(g: torch.Tensor, comm: Communicator) -> torch.Tensor:
    to, source = ring(comm)
    came = torch.empty_like(g)
    with pynccl.group():
        comm.send(g.contiguous(), source)
        comm.recv(came, to)
    return came


def gathered(g: torch.Tensor, comm: Communicator, root: int) -> torch.Tensor:
    found = comm.gather(g, root=root)
    return torch.zeros(g.shape[0] * comm.size, *g.shape[1:], dtype=g.dtype) if found is None else found


def reduced(g: torch.Tensor, comm: Communicator, root: int) -> torch.Tensor:
    found = comm.reduce(g, root=root)
    return torch.zeros_like(g) if found is None else found


# What the last column says -> the same by the binding's collectives, of a root 1.
SAYS: dict[str, Any] = {
    '"sum": all_reduce(g)': lambda g, comm: comm.all_reduce(g),
    '"replicated": g': lambda g, comm: g,
    '"sum": reduce_scatter(g)': lambda g, comm: comm.reduce_scatter(g),
    '"replicated": split(g)': block,
    "all_gather(g)": lambda g, comm: comm.all_gather(g),
    'at root, "sum": reduce(g)': lambda g, comm: reduced(g, comm, 1),
    '"replicated": g; elsewhere 0': lambda g, comm: rooted(g, comm, 1),
    "broadcast(g)": lambda g, comm: comm.broadcast(g, root=1),
    "scatter(g)": lambda g, comm: comm.scatter(g if comm.rank == 1 else torch.empty(5 * comm.size, 4).double(), root=1),
    "gather(g); elsewhere 0": lambda g, comm: gathered(g, comm, 1),
    "all_to_all(g) with the two dimensions swapped": swapped,
    "permute(g) along the edges reversed": shifted,
    "sent from source back to target": shifted,
    "g of the interior, and that of the neighbours' halos added at its borders": halos_returned,
    "all_reduce(g)": lambda g, comm: comm.all_reduce(g),
}
ARGUMENTS: dict[str, Any] = {
    "broadcast": lambda comm: {"root": 1},
    "reduce": lambda comm: {"root": 1},
    "gather": lambda comm: {"root": 1},
    "scatter": lambda comm: {"root": 1},
    "all_to_all": lambda comm: {"split_dim": 0, "concat_dim": 1},
    "permute": lambda comm: {"edges": [(rank, (rank + 1) % comm.size) for rank in range(comm.size)]},
    "send_recv": lambda comm: dict(zip(("target", "source"), ring(comm), strict=True)),
    "halo_exchange": lambda comm: {"dim": 0, "halo": 1},
}
CUT = ("reduce_scatter", "scatter", "split", "all_to_all")


def gradients(comm: Communicator, name: str, says: list[str]) -> list[str]:
    """What the table says of the gradient and is not so."""
    wrong = []
    generator = torch.Generator().manual_seed(comm.rank)
    for text in says:
        shape = (2 * comm.size if name in CUT else 5, 4)
        x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        arguments = ARGUMENTS.get(name, lambda comm: {})(comm)
        if '"' in text:
            arguments["grad"] = text.partition('"')[2].partition('"')[0]
        y = getattr(ad, name)(x, comm, **arguments)
        own = torch.Generator().manual_seed(99 if "replicated" in text else 100 + comm.rank)
        g = torch.randn(y.shape, generator=own, dtype=torch.float64)
        (found,) = torch.autograd.grad(y, x, g)
        expected = SAYS[text](g, comm)
        if not torch.allclose(found, expected, rtol=1e-12, atol=1e-12):
            wrong.append(f"rank {comm.rank}: {name}: {text}")
    return wrong


@pytest.mark.parametrize("n", [2, 3])
def test_the_gradients_are_those_of_the_table(ranks: RankPool, n: int) -> None:
    for name, row in zip(NAMES, ROWS, strict=True):
        assert ranks.run(n, gradients, name, row[2].replace("`", "").split(" · ")) == [[]] * n
