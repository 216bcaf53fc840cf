"""The adjoint of each operation: of which collectives it is made, and in words.

The table says what docs/conventions.md and autograd/ops say; the tests hold it against the gradients that
pynccl_autograd gives, which this package does not import. Notation: operations.py; G is the cotangent of y as the ranks
have it together.
"""

from __future__ import annotations

from typing import NamedTuple

from .operations import REPLICATED, SUM


class Step(NamedTuple):
    """One collective, or what each rank does alone.

    way  row of moves.WAYS, or "scale"
    op   operator of a collective that reduces; of a scale, what the factor is: execute._SCALES
    """

    way: str
    op: str = ""


class Adjoint(NamedTuple):
    """steps, in their order; formula; what happens, in a sentence or two"""

    steps: tuple[Step, ...]
    formula: str
    does: str


WHOLE = "Nothing is sent. Every rank goes on alike with y, so each has the whole cotangent already. "
PARTS = "Each rank goes on with work of its own, and has a part of the cotangent: the parts are added. "

# (way, operator, convention) -> the adjoint. WHOLE stands before what is said of REPLICATED.
ADJOINTS: dict[tuple[str, str, str], Adjoint] = {
    ("all_reduce", "sum", SUM): Adjoint(
        (Step("all_reduce", "sum"),),
        "gradient of x_r = sum over q of g_q",
        PARTS + "The adjoint of this all_reduce is an all_reduce.",
    ),
    ("all_reduce", "avg", SUM): Adjoint(
        (Step("all_reduce", "avg"),),
        "gradient of x_r = 1/N * sum over q of g_q",
        PARTS + "Each x_r has 1/N of the effect on y.",
    ),
    ("all_reduce", "sum", REPLICATED): Adjoint(
        (Step("copy"),),
        "gradient of x_r = g",
        "x_r moves y as much as y moves.",
    ),
    ("all_reduce", "avg", REPLICATED): Adjoint(
        (Step("scale", "1/N"),),
        "gradient of x_r = g / N",
        "Each x_r has 1/N of the effect on y.",
    ),
    ("reduce_scatter", "sum", ""): Adjoint(
        (Step("all_gather"),),
        "gradient of x_r = (g_0, g_1, .., g_N-1) on every rank",
        "Every rank's block q went into rank q's sum, so it gets rank q's cotangent: an all_gather.",
    ),
    ("reduce_scatter", "avg", ""): Adjoint(
        (
            Step("scale", "1/N"),
            Step("all_gather"),
        ),
        "gradient of x_r = (g_0, g_1, .., g_N-1) / N on every rank",
        "Every rank's block q is 1/N of rank q's mean: the cotangents, divided by N, in an all_gather.",
    ),
    ("all_gather", "", SUM): Adjoint(
        (Step("reduce_scatter", "sum"),),
        "gradient of x_r = sum over q of g_q[block r]",
        "Every rank has a copy of x_r, and a cotangent for it in block r: these N are added, and the sum goes to rank"
        " r. That is a reduce_scatter.",
    ),
    ("all_gather", "", REPLICATED): Adjoint(
        (Step("split"),),
        "gradient of x_r = g[block r]",
        "Rank r takes the block that is about its own x.",
    ),
    ("broadcast", "", SUM): Adjoint(
        (Step("reduce", "sum"),),
        "gradient of x_root = sum over q of g_q;  others: 0",
        "Each rank has a copy and a cotangent for it: these are added on root. That is a reduce.",
    ),
    ("broadcast", "", REPLICATED): Adjoint(
        (Step("at_root"),),
        "gradient of x_root = g;  others: 0",
        "What the others held was not read.",
    ),
    ("reduce", "sum", ""): Adjoint(
        (Step("broadcast"),),
        "gradient of x_r = g_root on every rank",
        "Each rank's x went into root's sum: each gets root's cotangent, by a broadcast. The others' cotangents "
        "belong to zeros and are not read.",
    ),
    ("reduce", "avg", ""): Adjoint(
        (
            Step("scale", "1/N"),
            Step("broadcast"),
        ),
        "gradient of x_r = g_root / N on every rank",
        "Each rank's x is 1/N of root's mean: each gets root's cotangent, divided by N, by a broadcast.",
    ),
    ("scatter", "", ""): Adjoint(
        (Step("gather"),),
        "gradient of x_root = (g_0, g_1, .., g_N-1);  others: 0",
        "Each block goes back to where it came from: a gather to root.",
    ),
    ("gather", "", ""): Adjoint(
        (Step("scatter"),),
        "gradient of x_r = g_root[block r]",
        "Each block goes back to where it came from: a scatter from root.",
    ),
    ("all_to_all", "", ""): Adjoint(
        (Step("all_to_all_back"),),
        "gradient of x_r = (g_0[block r], .., g_N-1[block r])",
        "Each block goes back to where it came from: again an all_to_all.",
    ),
    ("permute", "", ""): Adjoint(
        (Step("permute_back"),),
        "gradient of x_r = sum of g_q over the edges (r, q), here g_r+1",
        "The edges are reversed. A rank that sent to nobody gets 0; one that sent to several adds what comes back.",
    ),
    ("send_recv", "", ""): Adjoint(
        (Step("send_recv_back"),),
        "gradient of x_{root} = g_{target};  others: 0",
        "The message goes back: the receiver sends, the sender receives.",
    ),
    ("halo_exchange", "", ""): Adjoint(
        (Step("halo_reduce"),),
        "gradient of a border = its own cotangent + that of its copy;  of a halo that was written over = 0",
        "What came to a halo goes back to the border that it is a copy of, and is added there.",
    ),
    ("copy", "", ""): Adjoint(
        (Step("all_reduce", "sum"),),
        "gradient of x = sum over q of g_q, on every rank",
        PARTS + "That is an all_reduce.",
    ),
    ("split", "", ""): Adjoint(
        (Step("all_gather"),),
        "gradient of x = (g_0, g_1, .., g_N-1) on every rank",
        "Each rank has the cotangent of its own block only: an all_gather puts them together.",
    ),
}
for _op, _formula, _does in (
    (
        "max",
        "gradient of x_r = G where x_r is the largest, over the number of ranks that tie; 0 elsewhere",
        "Only the ranks that have the largest element get its cotangent, and share it if they tie.",
    ),
    (
        "min",
        "gradient of x_r = G where x_r is the smallest, over the number of ranks that tie; 0 elsewhere",
        "Only the ranks that have the smallest element get its cotangent, and share it if they tie.",
    ),
    (
        "prod",
        "gradient of x_r = G * product of the other ranks' x",
        "Zeros are counted, so that nothing is divided by zero: with one zero its rank alone gets a gradient, with "
        "two nobody does.",
    ),
    (
        "premul",
        "gradient of x_r = a_r * G",
        "Rank r's x went in times a_r, and so does its gradient come back.",
    ),
):
    _scale = Step("scale", _op)
    ADJOINTS["all_reduce", _op, SUM] = Adjoint(
        (Step("all_reduce", "sum"), _scale), f"{_formula};  G = sum over q of g_q", PARTS + _does
    )
    ADJOINTS["all_reduce", _op, REPLICATED] = Adjoint((_scale,), f"{_formula};  G = g", _does)
