"""What can be explained: which way each operation's elements travel, and of which collectives its adjoint is made.

The table says what docs/conventions.md and autograd/ops say; the tests hold it against the gradients that
pynccl_autograd gives, which this package does not import.
"""

from __future__ import annotations

from typing import NamedTuple

SUM, REPLICATED = "sum", "replicated"
CONVENTIONS = (SUM, REPLICATED)
NONE: tuple[str, ...] = ("",)


class Step(NamedTuple):
    """One collective, or one thing that each rank does alone.

    way     row of moves.WAYS
    op      operator of a collective that reduces; of a scale, what the factor is: a row of execute.FACTORS
    """

    way: str
    op: str = ""


class Operation(NamedTuple):
    """way        row of moves.WAYS that the forward takes
    ops        operators that it has a derivative with; the first is the default
    grads      conventions of gradient, where there are two
    rooted     has root=
    by_counts  a number of elements per rank
    elements   of a block, in the example
    """

    way: str
    ops: tuple[str, ...] = NONE
    grads: tuple[str, ...] = NONE
    rooted: bool = False
    by_counts: bool = False
    elements: int = 1
    replicated_input: bool = False


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        "all_reduce", ("sum", "avg", "max", "min", "prod", "premul"), grads=CONVENTIONS, elements=3
    ),
    "reduce_scatter": Operation("reduce_scatter", ("sum", "avg")),
    "all_gather": Operation("all_gather", grads=CONVENTIONS),
    "broadcast": Operation("broadcast", grads=CONVENTIONS, rooted=True, elements=2),
    "reduce": Operation("reduce", ("sum", "avg"), rooted=True, elements=2),
    "scatter": Operation("scatter", rooted=True),
    "gather": Operation("gather", rooted=True),
    "all_to_all": Operation("all_to_all"),
    "permute": Operation("permute", elements=2),
    "send_recv": Operation("send_recv", rooted=True, elements=2),
    "halo_exchange": Operation("halo_exchange", elements=3),
    "copy": Operation("copy", elements=2, replicated_input=True),
    "split": Operation("split", replicated_input=True),
    "all_gather_v": Operation("all_gather", grads=CONVENTIONS, by_counts=True),
    "reduce_scatter_v": Operation("reduce_scatter", ("sum", "avg"), by_counts=True),
    "scatter_v": Operation("scatter", rooted=True, by_counts=True),
    "gather_v": Operation("gather", rooted=True, by_counts=True),
    "all_to_all_v": Operation("all_to_all", by_counts=True),
}
COUNTS = (2, 1, 3, 0, 1, 1, 0, 1)  # of the operations with a number of elements per rank, unless the user names some

# (way, operator, convention) -> the steps of the adjoint, in their order.
ADJOINTS: dict[tuple[str, str, str], tuple[Step, ...]] = {
    ("all_reduce", "sum", SUM): (Step("all_reduce", "sum"),),
    ("all_reduce", "avg", SUM): (Step("all_reduce", "avg"),),
    ("all_reduce", "sum", REPLICATED): (Step("copy"),),
    ("all_reduce", "avg", REPLICATED): (Step("scale", "1/N"),),
    ("reduce_scatter", "sum", ""): (Step("all_gather"),),
    ("reduce_scatter", "avg", ""): (Step("scale_own", "1/N"), Step("all_gather")),
    ("all_gather", "", SUM): (Step("reduce_scatter", "sum"),),
    ("all_gather", "", REPLICATED): (Step("split"),),
    ("broadcast", "", SUM): (Step("reduce", "sum"),),
    ("broadcast", "", REPLICATED): (Step("at_root"),),
    ("reduce", "sum", ""): (Step("broadcast"),),
    ("reduce", "avg", ""): (Step("scale", "1/N"), Step("broadcast")),
    ("scatter", "", ""): (Step("gather"),),
    ("gather", "", ""): (Step("scatter"),),
    ("all_to_all", "", ""): (Step("all_to_all_back"),),
    ("permute", "", ""): (Step("permute_back"),),
    ("send_recv", "", ""): (Step("send_recv_back"),),
    ("halo_exchange", "", ""): (Step("halo_reduce"),),
    ("copy", "", ""): (Step("all_reduce", "sum"),),
    ("split", "", ""): (Step("all_gather"),),
}
for _op in ("max", "min", "prod", "premul"):
    ADJOINTS["all_reduce", _op, SUM] = (Step("all_reduce", "sum"), Step("scale", _op))
    ADJOINTS["all_reduce", _op, REPLICATED] = (Step("scale", _op),)


def variants() -> list[tuple[str, str, str]]:
    """(operation, operator, convention) of all that can be explained."""
    return [(name, op, grad) for name, row in OPERATIONS.items() for op in row.ops for grad in row.grads]
