"""Each operation in words: what it does, shapes, formula, how it is called, what it is mistaken for.

N ranks; rank r holds x_r [elements] and gets y_r; g_r is the cotangent (gradient) of y_r. s is a number of elements.
{op}, {root}, {grad}, {counts} stand for what the run has.
"""

from __future__ import annotations

from typing import NamedTuple

from .adjoint_words import ADJOINT_WORDS, AdjointWords
from .moves import Setup
from .operations import OPERATIONS, SUM


class Words(NamedTuple):
    does: str
    shapes: str
    formula: str
    pynccl: str
    autograd: str
    torch: str
    confused: tuple[str, ...]


BRIEF = {
    "all_reduce": "the sum, on every rank",
    "reduce_scatter": "of the sum, each rank its own block",
    "all_gather": "all ranks' tensors, on every rank",
    "broadcast": "root's tensor, on every rank",
    "reduce": "the sum, on root",
    "scatter": "of root's tensor, each rank its own block",
    "gather": "all ranks' tensors, on root",
    "all_to_all": "a block from every rank to every rank",
    "permute": "tensors along edges: around a ring",
    "send_recv": "one rank's tensor to another",
    "halo_exchange": "the neighbours' borders",
    "copy": "nothing; backwards the sum",
    "split": "each rank its own block, nothing sent",
    "all_gather_v": "blocks of different sizes",
    "reduce_scatter_v": "blocks of different sizes",
    "scatter_v": "blocks of different sizes",
    "gather_v": "blocks of different sizes",
    "all_to_all_v": "blocks of different sizes",
}
WORDS: dict[str, Words] = {
    "all_reduce": Words(
        "All ranks' tensors are {combined} element by element, and every rank gets the whole result.",
        "x [s] -> y [s] on every rank",
        "y_r = {reduced}",
        "comm.all_reduce(x, y, {op})",
        "ad.all_reduce(x, comm, {ad_op}, grad={grad})",
        "dist.all_reduce(x, op=dist.ReduceOp.{torch_op})",
        (
            "torch.distributed writes over x; comm.all_reduce does so only if y is x, and ad.all_reduce never.",
            "It is a reduce_scatter followed by an all_gather, and often made that way.",
        ),
    ),
    "reduce_scatter": Words(
        "Every rank has a full tensor of N blocks. The tensors are {combined} element by element, and of the result "
        "rank r keeps block r alone.",
        "x [N*s] -> y [s]",
        "y_r = {reduced_block}",
        "comm.reduce_scatter(x, y, {op})",
        "ad.reduce_scatter(x, comm{comma_op})",
        "dist.reduce_scatter_tensor(y, x, op=dist.ReduceOp.{torch_op}); dist.reduce_scatter takes the blocks as a list",
        (
            "It is no all_reduce: no rank gets the whole result, only its own block of it.",
            "It is no scatter: block r comes from every rank, not from one root.",
            "A rank sends away all blocks but its own. The block that it keeps is named by its own number.",
        ),
    ),
    "all_gather": Words(
        "Every rank's tensor is copied to every rank, where they lie one after the other in the order of the ranks.",
        "x [s] -> y [N*s] on every rank",
        "y_r = (x_0, x_1, .., x_N-1)",
        "comm.all_gather(x, y)",
        "ad.all_gather(x, comm, grad={grad})",
        "dist.all_gather_into_tensor(y, x); dist.all_gather takes a list of N tensors. Neither gives x a gradient",
        (
            "Nothing is added: y has N times the elements of x, in the order of the ranks.",
            "Along another dimension than the first it is a concatenation there: ad.all_gather(x, comm, dim, ..).",
        ),
    ),
    "broadcast": Words(
        "Root's tensor is copied to every rank.",
        "x [s] on root -> y [s] on every rank",
        "y_r = x_root",
        "comm.broadcast(x, y, root={root})",
        "ad.broadcast(x, comm, {root}, grad={grad})",
        "dist.broadcast(x, src={root})",
        ("What the others hold in x is not read; it gives shape and type.",),
    ),
    "reduce": Words(
        "All ranks' tensors are {combined} element by element; root alone gets the result.",
        "x [s] -> y [s] on root",
        "y_root = {reduced};  others: zeros",
        "comm.reduce(x, y, {op}, root={root})",
        "ad.reduce(x, comm, {root}{comma_op})",
        "dist.reduce(x, dst={root}, op=dist.ReduceOp.{torch_op})",
        (
            "comm.reduce writes nothing on the other ranks; ad.reduce gives them zeros, as drawn here.",
            "After torch's dist.reduce, x on the other ranks may hold partial sums: do not read it.",
        ),
    ),
    "scatter": Words(
        "Root's tensor is cut into N blocks, and rank r gets block r.",
        "x [N*s] on root -> y [s]",
        "y_r = x_root[block r]",
        "comm.scatter(x, y, root={root})",
        "ad.scatter(x, comm, {root})",
        "dist.scatter(y, blocks, src={root})",
        (
            "Nothing is added: all blocks come from root. reduce_scatter adds those of all ranks.",
            "The other ranks need no x for comm.scatter; ad.scatter takes one of root's shape from them, and gives it "
            "zeros for a gradient.",
        ),
    ),
    "gather": Words(
        "Every rank's tensor is copied to root, where they lie one after the other in the order of the ranks.",
        "x [s] -> y [N*s] on root",
        "y_root = (x_0, x_1, .., x_N-1);  others: nothing",
        "comm.gather(x, y, root={root})",
        "ad.gather(x, comm, {root})",
        "dist.gather(x, blocks, dst={root})",
        ("all_gather does the same on every rank. Here the others get a tensor of 0 elements.",),
    ),
    "all_to_all": Words(
        "Every rank has a block for every rank: block q of rank r becomes block r of rank q. As a table of ranks and "
        "blocks, it is transposed.",
        "x [N*s] -> y [N*s]",
        "y_r = (x_0[block r], x_1[block r], .., x_N-1[block r])",
        "comm.all_to_all(x, y)",
        "ad.all_to_all(x, comm)",
        "dist.all_to_all_single(y, x)",
        (
            "Nothing is added, nothing is copied twice: every element has one place to go.",
            "all_gather sends one block to all; here each rank gets another one.",
        ),
    ),
    "permute": Words(
        "Tensors travel along edges (source, target), here once around the ring: rank r sends to rank r+1 and "
        "receives from rank r-1.",
        "x [s] -> y [s]",
        "y_r = sum of x_q over the edges (q, r), here x_r-1;  0 without an edge",
        "with pynccl.group(): comm.send(x, next); comm.recv(y, previous)",
        "ad.permute(x, comm, edges)",
        "dist.batch_isend_irecv of a dist.P2POp for each isend and each irecv",
        (
            "Send and recv belong in one group: a ring of ranks that all send first may wait for each other for ever.",
            "The edges are global and equal on all ranks; ad.send_recv takes this rank's own partners.",
        ),
    ),
    "send_recv": Words(
        "One message: rank {root} sends, rank {target} receives, the others do nothing.",
        "x [s] on rank {root} -> y [s] on rank {target}",
        "y_{target} = x_{root};  others: zeros",
        "comm.send(x, {target}) on rank {root}, comm.recv(y, {root}) on rank {target}",
        "ad.send_recv(x, comm, target={target}) on rank {root}, source={root} on rank {target}",
        "dist.send(x, {target}) on rank {root}, dist.recv(y, {root}) on rank {target}",
        (
            "Both calls have to be made: a send without its recv waits.",
            "Both ranks have to go backwards, too: the receiver sends its cotangent to the sender.",
        ),
    ),
    "halo_exchange": Words(
        "Ranks in a line, each with an interior between two halos of one element. Each halo becomes a copy of the "
        "neighbour's border: its first or last element inside. The outer halos stay as they are.",
        "x [left + interior + right] -> y, the same",
        "y_r = (last of r-1's interior, own interior, first of r+1's interior)",
        "with pynccl.group(): comm.send and comm.recv of borders and halos, with ranks r-1 and r+1",
        "ad.halo_exchange(x, comm, dim=0, halo=1)",
        "dist.batch_isend_irecv of borders and halos",
        (
            "The halo is part of x and is written over: what it held has no effect, so its gradient is 0.",
            "Backwards a border gets its own cotangent and that of its copy next door. They are added.",
        ),
    ),
    "copy": Words(
        "Forwards nothing happens: x, equal on all ranks, goes on as y. It marks the place where the ranks begin "
        "to do different work with it, so that the gradients are added there.",
        "x [s] -> y [s], in memory of its own",
        "y_r = x",
        "y = x: no call",
        "ad.copy(x, comm)",
        "none; Megatron's copy_to_tensor_model_parallel_region is this",
        (
            "It is no broadcast: x has to be equal on all ranks already.",
            "It is the opposite end of all_reduce with grad='replicated', whose backward is the one without a call.",
        ),
    ),
    "split": Words(
        "Each rank keeps its own block of an x that all ranks have. Nothing is sent.",
        "x [N*s], equal on all ranks -> y [s]",
        "y_r = x[block r]",
        "y = x[rank * s : (rank + 1) * s]: no call",
        "ad.split(x, comm)",
        "x.chunk(N)[rank], whose gradient lacks the other ranks' blocks",
        ("It is no scatter: every rank has x already. Backwards every rank gets the gradient of all blocks.",),
    ),
}
_V = "{counts} elements of ranks 0, 1, ..: counts is equal on all ranks, 0 is allowed."
_COUNTED: dict[str, Words] = {
    "all_gather_v": WORDS["all_gather"]._replace(
        does="all_gather with a number of elements per rank: rank r gives counts[r].",
        shapes="x [counts[r]] -> y [sum(counts)] on every rank",
        pynccl="comm.all_gather_v(x, y, counts={counts})",
        autograd="ad.all_gather(x, comm, grad={grad}, splits={counts})",
        torch="dist.all_gather with a list of tensors of such sizes",
        confused=(_V,),
    ),
    "reduce_scatter_v": WORDS["reduce_scatter"]._replace(
        does="reduce_scatter with a number of elements per rank: of the result rank r keeps counts[r] "
        "elements, its own block.",
        shapes="x [sum(counts)] -> y [counts[r]]",
        pynccl="comm.reduce_scatter_v(x, y, {op}, counts={counts})",
        autograd="ad.reduce_scatter(x, comm{comma_op}, splits={counts})",
        torch="dist.reduce_scatter with a list of blocks of such sizes",
        confused=(_V,),
    ),
    "scatter_v": WORDS["scatter"]._replace(
        does="scatter with a number of elements per rank: rank r gets counts[r] of root's elements, its own block.",
        shapes="x [sum(counts)] on root -> y [counts[r]]",
        pynccl="comm.scatter_v(x, y, root={root}, counts={counts})",
        autograd="ad.scatter(x, comm, {root}, splits={counts})",
        torch="none that takes blocks of different sizes",
        confused=(_V,),
    ),
    "gather_v": WORDS["gather"]._replace(
        does="gather with a number of elements per rank: rank r gives counts[r].",
        shapes="x [counts[r]] -> y [sum(counts)] on root",
        pynccl="comm.gather_v(x, y, root={root}, counts={counts})",
        autograd="ad.gather(x, comm, {root}, splits={counts})",
        torch="none that takes blocks of different sizes",
        confused=(_V,),
    ),
    "all_to_all_v": WORDS["all_to_all"]._replace(
        does="all_to_all with a number of elements for each pair of ranks, as of tokens on their way to experts. Here "
        "rank r sends counts[k] elements to rank r+k, of counts {counts}.",
        shapes="x [sum(send_counts)] -> y [sum(recv_counts)]",
        pynccl="comm.all_to_all_v(x, y, send_counts=.., recv_counts=..)",
        autograd="ad.all_to_all(x, comm, send_splits=.., recv_splits=..)",
        torch="dist.all_to_all_single(y, x, output_split_sizes=.., input_split_sizes=..)",
        confused=(
            "recv_counts[q] of rank r is send_counts[r] of rank q: who does not know it has to ask first.",
            "Backwards the two lists change places.",
        ),
    ),
}
WORDS.update(_COUNTED)

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


def words_of(name: str, op: str, grad: str, setup: Setup) -> tuple[Words, AdjointWords]:
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
    forward = WORDS[name]
    if op == "premul":
        forward = forward._replace(
            pynccl="with comm.pre_mul_sum(a, 'float64') as op: comm.all_reduce(x, y, op)",
            torch="dist.all_reduce(a * x)",
        )
    filled = forward._replace(
        **{name: getattr(forward, name).format(**blank) for name in forward._fields if name != "confused"},
        confused=tuple(text.format(**blank) for text in forward.confused),
    )
    back = ADJOINT_WORDS[row.way, op, grad]
    return filled, AdjointWords(back.formula.format(**blank), back.does.format(**blank))


def other_convention(name: str, grad: str) -> str:
    """The other answer to who goes on with y how, in one line; "" where there is one answer."""
    if not grad:
        return ""
    if grad == SUM:
        return (
            "This is grad='sum': each rank goes on with y in its own way. Do all ranks the same with y? Then "
            "grad='replicated', and nothing is sent backwards: --grad replicated"
        )
    return (
        "This is grad='replicated': all ranks do the same with y. Does each go on in its own way? Then grad='sum', "
        "and the cotangents are added: --grad sum"
    )


_STEPS = {
    "all_to_all_back": "all_to_all",
    "permute_back": "sends and receives, edges reversed",
    "permute": "sends and receives",
    "send_recv": "send and recv",
    "send_recv_back": "send and recv, the other way",
    "halo_exchange": "borders sent to the neighbours",
    "halo_reduce": "halos sent back and added",
    "copy": "nothing is sent",
    "split": "nothing is sent: each rank takes its own block",
    "at_root": "nothing is sent: root keeps its own, the others have 0",
}
_SCALES = {
    "1/N": "on each rank: divided by N",
    "premul": "on each rank: times a_r",
    "max": "on each rank: times 1 / ties where x is the largest, else 0",
    "min": "on each rank: times 1 / ties where x is the smallest, else 0",
    "prod": "on each rank: times the product of the others' x",
}


def step_words(way: str, op: str, by_counts: bool) -> str:
    """What happens in a stage, in a few words."""
    if way.startswith("scale"):
        return _SCALES[op]
    counted = "_v" if (by_counts and way not in _STEPS) or (way == "all_to_all_back" and by_counts) else ""
    text = _STEPS.get(way, way) + counted
    return f"{text}, {op}" if op else text
