"""The words of a run: the row of its operation and of its adjoint, with what the run has filled in."""

from __future__ import annotations

from .adjoints import ADJOINTS, WHOLE, Adjoint
from .moves import Setup
from .operations import OPERATIONS, REPLICATED, SUM, Operation

_COMBINED = {
    "sum": "added",
    "avg": "averaged",
    "max": "compared",
    "min": "compared",
    "prod": "multiplied",
    "premul": "scaled, each rank's by a factor of its own, and added",
}
_REDUCED = {
    "sum": "sum over q of x_q",
    "avg": "1/N * sum over q of x_q",
    "max": "largest of x_0, .., x_N-1",
    "min": "smallest of x_0, .., x_N-1",
    "prod": "product over q of x_q",
    "premul": "sum over q of a_q * x_q, here a_q = q + 1",
}
_FILLED = ("does", "shapes", "formula", "pynccl", "autograd", "torch")
# For who looks at an autograd Function of all_gather, such as the one in OpenAI's CLIP.
SNIPPET = (
    ("", "With an autograd Function around dist.all_gather in front of you, such as the one in OpenAI's CLIP:"),
    (
        "forward",
        "dist.all_gather(output, tensor) and a concatenation are the first drawing: each rank then has a copy of every "
        "rank's tensor, and uses all of them.",
    ),
    (
        "backward",
        "is the second. grad_output is g; cut into N chunks it is input_list: chunk q says what this rank's copy of "
        "rank q's tensor wants. dist.reduce_scatter(grad_input, input_list) adds chunk r of all ranks, and gives the "
        "sum to rank r: it is the gradient of the tensor that rank r put in.",
    ),
    ("why at all", "dist.all_gather has no gradient of its own. ad.all_gather(x, comm, grad='sum') is all of it."),
)


def words_of(name: str, op: str, grad: str, setup: Setup) -> tuple[Operation, Adjoint]:
    """Both directions of an operation, with what the run has in place of {op} and its like."""
    row = OPERATIONS[name]
    blank = {
        "op": repr(op),
        "ad_op": "ad.PreMul(a)" if op == "premul" else repr(op),
        "comma_op": "" if op in ("", row.ops[0]) else f", op={op!r}",
        "torch_op": {"prod": "PRODUCT"}.get(op, op.upper()),
        "grad": repr(grad),
        "root": setup.root,
        "target": setup.edge[1],
        "counts": list(setup.counts),
        "combined": _COMBINED.get(op, ""),
        "reduced": _REDUCED.get(op, ""),
        "reduced_block": ("1/N * " if op == "avg" else "") + "sum over q of x_q[block r]",
    }
    if op == "premul":
        call = "with comm.pre_mul_sum(a, 'float64') as op: comm.all_reduce(x, y, op)"
        row = row._replace(pynccl=call, torch="dist.all_reduce(a * x)")
    filled = row._replace(
        **{field: getattr(row, field).format(**blank) for field in _FILLED},
        confused=tuple(text.format(**blank) for text in row.confused),
    )
    back = ADJOINTS[row.way, op, grad]
    does = WHOLE + back.does if grad == REPLICATED else back.does
    return filled, back._replace(formula=back.formula.format(**blank), does=does)


def other_convention(grad: str) -> str:
    """The other answer to who goes on with y how, in one line; "" where there is one answer."""
    if grad == SUM:
        return (
            "This is grad='sum': each rank goes on with y in its own way. Do all ranks the same with y? Then "
            "grad='replicated', and nothing is sent backwards"
        )
    if grad == REPLICATED:
        return (
            "This is grad='replicated': all ranks do the same with y. Does each go on in its own way? Then grad='sum', "
            "and the cotangents are added"
        )
    return ""
