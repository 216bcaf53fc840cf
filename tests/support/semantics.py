"""Every differentiable collective with a single-process reference in plain differentiable torch.

An `Operation` defines how to call the collective and how to compute all ranks' outputs from all ranks' inputs in one
process. The expected value of any property (gradients under either convention, second derivatives, tangents, vmap, ...)
is torch's derivative of the reference. test_semantics.py checks every property of every operation, and
scripts/semantics_table.py writes docs/semantics.md from the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pynccl_autograd as ad

ROWS = 2  # rows per rank along the dimension that is split
WIDTHS = (3, 2, 4)  # sizes of the other dimensions

Outputs = list[Tensor]


class Case(NamedTuple):
    """The options of one call."""

    n: int
    dim: int = 0
    grad: str = "sum"
    uneven: bool = False
    reduce_dtype: torch.dtype | None = None

    def splits(self) -> list[int]:
        """Return the rows of each rank's slice; if uneven, rank 1 has none."""
        return [(0 if r == 1 else r + 1) if self.uneven else ROWS for r in range(self.n)]

    def splits_or_none(self) -> list[int] | None:
        return self.splits() if self.uneven else None

    def shape(self, rows: int) -> tuple[int, ...]:
        shape = list(WIDTHS)
        shape[self.dim] = rows
        return tuple(shape)


class Operation(NamedTuple):
    """call(x, comm, case) on a rank; reference(xs, case) -> all ranks' outputs; shape(r, case) of rank r's input."""

    call: Callable[[Tensor, Any, Case], Tensor]
    reference: Callable[[Sequence[Tensor], Case], Outputs]
    shape: Callable[[int, Case], tuple[int, ...]]
    linear: bool = True
    replicated_input: bool = False  # the input is replicated; its gradient is summed over the ranks
    cannot: Mapping[str, str] = MappingProxyType({})  # property -> why it does not apply


NO_CONVENTIONS = {"replicated": "the output differs by rank, so both conventions are the same"}
ELEMENTWISE = {
    "any dim": "elementwise: no dimension to choose",
    "uneven": "elementwise: nothing is split",
}
NO_SUM = {"reduce_dtype": "neither the forward nor the backward pass sums"}
NO_ORDER = {"complex": "raises TypeError: complex numbers have no order"}


def slices(x: Tensor, case: Case) -> Outputs:
    return list(x.split(case.splits(), case.dim))


def total(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def on_all_ranks(y: Tensor, n: int) -> Outputs:
    return [y] * n


def on_one_rank(rank: int, y: Tensor, n: int) -> Outputs:
    return [y if r == rank else torch.zeros_like(y) for r in range(n)]


def row_shape(r: int, case: Case) -> tuple[int, ...]:
    return case.shape(ROWS)


def full_shape(r: int, case: Case) -> tuple[int, ...]:
    return case.shape(sum(case.splits()))


def shard_shape(r: int, case: Case) -> tuple[int, ...]:
    return case.shape(case.splits()[r])


def reduction(op: Any, reference: Callable[[Sequence[Tensor]], Tensor], **options: Any) -> Operation:
    def call(x: Tensor, comm: Any, case: Case) -> Tensor:
        operator = op(comm.rank) if callable(op) else op
        return ad.all_reduce(x, comm, operator, grad=case.grad, reduce_dtype=case.reduce_dtype)

    cannot = {**ELEMENTWISE, **options.pop("cannot", {})}
    return Operation(call, lambda xs, case: on_all_ranks(reference(xs), case.n), row_shape, cannot=cannot, **options)


def scale(rank: int) -> float:
    return rank - 0.5


def edges(n: int) -> list[tuple[int, int]]:
    """Return a chain plus edges from rank 0 to itself and to the last rank, which has no target."""
    return [(r, r + 1) for r in range(n - 1)] + [(0, 0), (0, n - 1)]


def permuted(xs: Sequence[Tensor], case: Case) -> Outputs:
    return [sum((xs[s] for s, t in edges(case.n) if t == r), torch.zeros_like(xs[r])) for r in range(case.n)]


def transposed(xs: Sequence[Tensor], case: Case) -> Outputs:
    """All-to-all: rank r gets slice r of every rank, concatenated along the next dimension."""
    other = (case.dim + 1) % 3
    return [torch.cat([slices(x, case)[r] for x in xs], other) for r in range(case.n)]


def transpose(x: Tensor, comm: Any, case: Case) -> Tensor:
    other = (case.dim + 1) % 3
    recv = [x.shape[other]] * case.n if case.uneven else None
    return ad.all_to_all(x, comm, case.dim, other, send_splits=case.splits_or_none(), recv_splits=recv)


LEFT, RIGHT = 1, 2
INTERIOR = 3


def widths(case: Case) -> list[tuple[int, int]]:
    """Return the (left, right) halo widths of every rank."""
    return [(r, (r + 1) % 2) if case.uneven else (LEFT, RIGHT) for r in range(case.n)]


def halos(xs: Sequence[Tensor], case: Case) -> Outputs:
    def rows(x: Tensor, start: int, count: int) -> Tensor:
        return x.narrow(case.dim, start, count)

    ys = []
    for r, x in enumerate(xs):
        left, right = widths(case)[r]
        low, high = rows(x, 0, left), rows(x, left + INTERIOR, right)
        if r > 0:
            low = rows(xs[r - 1], widths(case)[r - 1][0] + INTERIOR - left, left)
        if r < case.n - 1:
            high = rows(xs[r + 1], widths(case)[r + 1][0], right)
        ys.append(torch.cat([low, rows(x, left, INTERIOR), high], case.dim))
    return ys


def on_last_rank(y: Tensor, case: Case) -> Outputs:
    return [y if r == case.n - 1 else y.narrow(case.dim, 0, 0) for r in range(case.n)]


REPLICATED_INPUT = "the replicated value is the input; each rank uses the output differently"
BORDERS = "one addition per border, in the tensor's dtype"
EDGES = "edges with the same target are summed in the tensor's dtype"


def scattered(x: Tensor, comm: Any, case: Case, op: str = "sum") -> Tensor:
    return ad.reduce_scatter(x, comm, case.dim, op, splits=case.splits_or_none(), reduce_dtype=case.reduce_dtype)


def gathered(x: Tensor, comm: Any, case: Case) -> Tensor:
    return ad.all_gather(
        x, comm, case.dim, grad=case.grad, splits=case.splits_or_none(), reduce_dtype=case.reduce_dtype
    )


# The root is the last rank.
OPERATIONS: dict[str, Operation] = {
    "all_reduce sum": reduction("sum", total),
    "all_reduce avg": reduction("avg", lambda xs: total(xs) / len(xs)),
    "all_reduce premul": reduction(
        lambda rank: ad.PreMul(scale(rank)), lambda xs: total([scale(r) * x for r, x in enumerate(xs)])
    ),
    "all_reduce max": reduction("max", lambda xs: torch.stack(list(xs)).amax(0), linear=False, cannot=NO_ORDER),
    "all_reduce min": reduction("min", lambda xs: torch.stack(list(xs)).amin(0), linear=False, cannot=NO_ORDER),
    "all_reduce prod": reduction("prod", lambda xs: torch.stack(list(xs)).prod(0), linear=False),
    "copy": Operation(
        lambda x, comm, case: ad.copy(x, comm, reduce_dtype=case.reduce_dtype),
        lambda xs, case: list(xs),
        row_shape,
        replicated_input=True,
        cannot={**ELEMENTWISE, "replicated": REPLICATED_INPUT},
    ),
    "reduce_scatter": Operation(scattered, lambda xs, case: slices(total(xs), case), full_shape, cannot=NO_CONVENTIONS),
    "reduce_scatter avg": Operation(
        lambda x, comm, case: scattered(x, comm, case, "avg"),
        lambda xs, case: slices(total(xs) / case.n, case),
        full_shape,
        cannot=NO_CONVENTIONS,
    ),
    "all_gather": Operation(
        gathered, lambda xs, case: on_all_ranks(torch.cat(list(xs), case.dim), case.n), shard_shape
    ),
    "split": Operation(
        lambda x, comm, case: ad.split(x, comm, case.dim, splits=case.splits_or_none()),
        lambda xs, case: [slices(x, case)[r] for r, x in enumerate(xs)],
        full_shape,
        replicated_input=True,
        cannot={**NO_CONVENTIONS, **NO_SUM},
    ),
    "broadcast": Operation(
        lambda x, comm, case: ad.broadcast(x, comm, case.n - 1, grad=case.grad, reduce_dtype=case.reduce_dtype),
        lambda xs, case: on_all_ranks(xs[-1], case.n),
        row_shape,
        cannot=ELEMENTWISE,
    ),
    "reduce": Operation(
        lambda x, comm, case: ad.reduce(x, comm, case.n - 1, reduce_dtype=case.reduce_dtype),
        lambda xs, case: on_one_rank(case.n - 1, total(xs), case.n),
        row_shape,
        cannot={**ELEMENTWISE, **NO_CONVENTIONS},
    ),
    "scatter": Operation(
        lambda x, comm, case: ad.scatter(x, comm, case.n - 1, case.dim, splits=case.splits_or_none()),
        lambda xs, case: slices(xs[-1], case),
        full_shape,
        cannot={**NO_CONVENTIONS, **NO_SUM},
    ),
    "gather": Operation(
        lambda x, comm, case: ad.gather(x, comm, case.n - 1, case.dim, splits=case.splits_or_none()),
        lambda xs, case: on_last_rank(torch.cat(list(xs), case.dim), case),
        shard_shape,
        cannot={**NO_CONVENTIONS, **NO_SUM},
    ),
    "all_to_all": Operation(transpose, transposed, full_shape, cannot={**NO_CONVENTIONS, **NO_SUM}),
    "permute": Operation(
        lambda x, comm, case: ad.permute(x, comm, edges(case.n)),
        permuted,
        row_shape,
        cannot={**ELEMENTWISE, **NO_CONVENTIONS, "reduce_dtype": EDGES},
    ),
    "halo_exchange": Operation(
        lambda x, comm, case: ad.halo_exchange(x, comm, case.dim, widths(case) if case.uneven else (LEFT, RIGHT)),
        halos,
        lambda r, case: case.shape(INTERIOR + sum(widths(case)[r])),
        cannot={**NO_CONVENTIONS, "reduce_dtype": BORDERS},
    ),
}


def tensors(operation: Operation, case: Case, seed: int, dtype: torch.dtype = torch.float64) -> Outputs:
    """Return all ranks' inputs; they differ by rank unless the operation takes a replicated input."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    xs = [torch.randn(operation.shape(r, case), generator=generator, dtype=wide).to(dtype) for r in range(case.n)]
    return [xs[0].clone() for _ in xs] if operation.replicated_input else xs


def cotangents(ys: Sequence[Tensor], seed: int, equal: bool) -> Outputs:
    """Return a cotangent for each rank's output; the same on all ranks if `equal`."""
    generator = torch.Generator().manual_seed(seed)
    gs = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in ys]
    return [gs[0].clone() for _ in gs] if equal else gs
