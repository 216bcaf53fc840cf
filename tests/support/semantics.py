"""Every differentiable collective beside a single-process reference that is plain differentiable torch.

An `Operation` says how to call the collective and how to compute all ranks' outputs from all ranks' inputs in one
process. From that, any property (gradients under either convention, second derivatives, tangents, vmap, ...) has an
independent expectation: torch's own derivative of the reference. test_semantics.py checks every operation in every
property, and scripts/semantics_table.py makes docs/semantics.md of what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pynccl_autograd as ad

ROWS = 2  # rows per rank along the dimension that is cut
WIDTHS = (3, 2, 4)  # of the others

Outputs = list[Tensor]


class Case(NamedTuple):
    """How an operation is called."""

    n: int
    dim: int = 0
    grad: str = "sum"
    uneven: bool = False
    reduce_dtype: torch.dtype | None = None

    def splits(self) -> list[int]:
        """Rows of each rank's slice; uneven ones with an empty one in between."""
        return [(0 if r == 1 else r + 1) if self.uneven else ROWS for r in range(self.n)]

    def given(self) -> list[int] | None:
        return self.splits() if self.uneven else None

    def shape(self, rows: int) -> tuple[int, ...]:
        shape = list(WIDTHS)
        shape[self.dim] = rows
        return tuple(shape)


class Operation(NamedTuple):
    """call(x, comm, case) on a rank; reference(xs, case) -> ys of all ranks; shape(r, case) of rank r's input."""

    call: Callable[[Tensor, Any, Case], Tensor]
    reference: Callable[[Sequence[Tensor], Case], Outputs]
    shape: Callable[[int, Case], tuple[int, ...]]
    linear: bool = True
    input_is_one: bool = False  # the input is one logical value held by all ranks; its gradient is summed over them
    cannot: Mapping[str, str] = MappingProxyType({})  # property -> why there is no such thing


NO_CONVENTIONS = {"replicated": "both conventions are one: the output differs by rank"}
ELEMENTWISE = {
    "any dim": "elementwise: there is no dimension to choose",
    "uneven": "elementwise: nothing is cut",
}
NO_SUM = {"reduce_dtype": "nothing is summed, forwards or backwards"}
NO_ORDER = {"complex": "complex numbers are not ordered; TypeError"}


def slices(x: Tensor, case: Case) -> Outputs:
    return list(x.split(case.splits(), case.dim))


def total(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def same(y: Tensor, n: int) -> Outputs:
    return [y] * n


def at(rank: int, y: Tensor, n: int) -> Outputs:
    return [y if r == rank else torch.zeros_like(y) for r in range(n)]


def anywhere(r: int, case: Case) -> tuple[int, ...]:
    return case.shape(ROWS)


def whole(r: int, case: Case) -> tuple[int, ...]:
    return case.shape(sum(case.splits()))


def own(r: int, case: Case) -> tuple[int, ...]:
    return case.shape(case.splits()[r])


def reduction(op: Any, reference: Callable[[Sequence[Tensor]], Tensor], **options: Any) -> Operation:
    def call(x: Tensor, comm: Any, case: Case) -> Tensor:
        operator = op(comm.rank) if callable(op) else op
        return ad.all_reduce(x, comm, operator, grad=case.grad, reduce_dtype=case.reduce_dtype)

    cannot = {**ELEMENTWISE, **options.pop("cannot", {})}
    return Operation(call, lambda xs, case: same(reference(xs), case.n), anywhere, cannot=cannot, **options)


def scale(rank: int) -> float:
    return rank - 0.5


def edges(n: int) -> list[tuple[int, int]]:
    """A ring, with a fan-out from rank 0, a fan-in at rank 1, an edge to itself, and a rank without a target."""
    return [(r, r + 1) for r in range(n - 1)] + [(0, 0), (0, n - 1)]


def permuted(xs: Sequence[Tensor], case: Case) -> Outputs:
    return [sum((xs[s] for s, t in edges(case.n) if t == r), torch.zeros_like(xs[r])) for r in range(case.n)]


def transposed(xs: Sequence[Tensor], case: Case) -> Outputs:
    """All-to-all: rank r gets part r of every rank, along the next dimension."""
    other = (case.dim + 1) % 3
    return [torch.cat([slices(x, case)[r] for x in xs], other) for r in range(case.n)]


def transpose(x: Tensor, comm: Any, case: Case) -> Tensor:
    other = (case.dim + 1) % 3
    recv = [x.shape[other]] * case.n if case.uneven else None
    return ad.all_to_all(x, comm, case.dim, other, send_splits=case.given(), recv_splits=recv)


LEFT, RIGHT = 1, 2
INTERIOR = 3


def widths(case: Case) -> list[tuple[int, int]]:
    """(left, right) of every rank's halos."""
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


def rest_is_empty(y: Tensor, case: Case) -> Outputs:
    return [y if r == case.n - 1 else y.narrow(case.dim, 0, 0) for r in range(case.n)]


ONE_INPUT = "the input is the replicated value, and what is made of the output differs by rank"
BORDERS = "one addition per border, in the tensor's own type"
EDGES = "where edges meet, they are summed here in the tensor's own type"


def scattered(x: Tensor, comm: Any, case: Case, op: str = "sum") -> Tensor:
    return ad.reduce_scatter(x, comm, case.dim, op, splits=case.given(), reduce_dtype=case.reduce_dtype)


def gathered(x: Tensor, comm: Any, case: Case) -> Tensor:
    return ad.all_gather(x, comm, case.dim, grad=case.grad, splits=case.given(), reduce_dtype=case.reduce_dtype)


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
        anywhere,
        input_is_one=True,
        cannot={**ELEMENTWISE, "replicated": ONE_INPUT},
    ),
    "reduce_scatter": Operation(scattered, lambda xs, case: slices(total(xs), case), whole, cannot=NO_CONVENTIONS),
    "reduce_scatter avg": Operation(
        lambda x, comm, case: scattered(x, comm, case, "avg"),
        lambda xs, case: slices(total(xs) / case.n, case),
        whole,
        cannot=NO_CONVENTIONS,
    ),
    "all_gather": Operation(gathered, lambda xs, case: same(torch.cat(list(xs), case.dim), case.n), own),
    "split": Operation(
        lambda x, comm, case: ad.split(x, comm, case.dim, splits=case.given()),
        lambda xs, case: [slices(x, case)[r] for r, x in enumerate(xs)],
        whole,
        input_is_one=True,
        cannot={**NO_CONVENTIONS, **NO_SUM},
    ),
    "broadcast": Operation(
        lambda x, comm, case: ad.broadcast(x, comm, case.n - 1, grad=case.grad, reduce_dtype=case.reduce_dtype),
        lambda xs, case: same(xs[-1], case.n),
        anywhere,
        cannot=ELEMENTWISE,
    ),
    "reduce": Operation(
        lambda x, comm, case: ad.reduce(x, comm, case.n - 1, reduce_dtype=case.reduce_dtype),
        lambda xs, case: at(case.n - 1, total(xs), case.n),
        anywhere,
        cannot={**ELEMENTWISE, **NO_CONVENTIONS},
    ),
    "scatter": Operation(
        lambda x, comm, case: ad.scatter(x, comm, case.n - 1, case.dim, splits=case.given()),
        lambda xs, case: slices(xs[-1], case),
        whole,
        cannot={**NO_CONVENTIONS, **NO_SUM},
    ),
    "gather": Operation(
        lambda x, comm, case: ad.gather(x, comm, case.n - 1, case.dim, splits=case.given()),
        lambda xs, case: rest_is_empty(torch.cat(list(xs), case.dim), case),
        own,
        cannot={**NO_CONVENTIONS, **NO_SUM},
    ),
    "all_to_all": Operation(transpose, transposed, whole, cannot={**NO_CONVENTIONS, **NO_SUM}),
    "permute": Operation(
        lambda x, comm, case: ad.permute(x, comm, edges(case.n)),
        permuted,
        anywhere,
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
    """All ranks' inputs, different on each; one logical value on all where the operation takes that."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    made = [torch.randn(operation.shape(r, case), generator=generator, dtype=wide).to(dtype) for r in range(case.n)]
    return [made[0].clone() for _ in made] if operation.input_is_one else made


def cotangents(ys: Sequence[Tensor], seed: int, equal: bool) -> Outputs:
    """One for each output; the same on all ranks if `equal`."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in ys]
    return [made[0].clone() for _ in made] if equal else made
