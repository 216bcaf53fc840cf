"""What can be explained: a row for each operation, with the way of its elements, its words, and how it is called.

N ranks; rank r holds x_r [elements] and gets y_r; g_r is the cotangent (gradient) of y_r. s is a number of elements.
{op}, {root}, {grad}, {counts} and their like stand for what a run has: `words.py` fills them in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .moves import Setup

SUM, REPLICATED = "sum", "replicated"
CONVENTIONS = (SUM, REPLICATED)
NONE: tuple[str, ...] = ("",)
COUNTS = (2, 1, 3, 0, 1, 1, 0, 1)  # elements per rank where they differ, unless the user names some


class Operation(NamedTuple):
    """way                row of moves.WAYS that the forward takes
    brief              what a rank gets, in a few words
    does .. torch      in a sentence or two; shapes; formula; the call of each library
    confused           what it is mistaken for
    ops                operators that it has a derivative with; the first is the default
    grads              conventions of gradient, where there are two
    rooted, by_counts  has root=; has a number of elements per rank
    elements           of a block, in the example
    replicated_input   x is equal on all ranks
    """

    way: str
    brief: str
    does: str
    shapes: str
    formula: str
    pynccl: str
    autograd: str
    torch: str
    confused: tuple[str, ...]
    ops: tuple[str, ...] = NONE
    grads: tuple[str, ...] = NONE
    rooted: bool = False
    by_counts: bool = False
    elements: int = 1
    replicated_input: bool = False


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        "all_reduce",
        "the sum, on every rank",
        does="All ranks' tensors are {combined} element by element, and every rank gets the whole result.",
        shapes="x [s] -> y [s] on every rank",
        formula="y_r = {reduced}",
        pynccl="comm.all_reduce(x, y, {op})",
        autograd="ad.all_reduce(x, comm, {ad_op}, grad={grad})",
        torch="dist.all_reduce(x, op=dist.ReduceOp.{torch_op})",
        confused=(
            "torch.distributed writes over x; comm.all_reduce does so only if y is x, and ad.all_reduce never.",
            "It is a reduce_scatter followed by an all_gather, and often made that way.",
        ),
        ops=("sum", "avg", "max", "min", "prod", "premul"),
        grads=CONVENTIONS,
        elements=3,
    ),
    "reduce_scatter": Operation(
        "reduce_scatter",
        "of the sum, each rank its own block",
        does=(
            "Every rank has a full tensor of N blocks. The tensors are {combined} element by element, and of the "
            "result rank r keeps block r alone."
        ),
        shapes="x [N*s] -> y [s]",
        formula="y_r = {reduced_block}",
        pynccl="comm.reduce_scatter(x, y, {op})",
        autograd="ad.reduce_scatter(x, comm{comma_op})",
        torch=(
            "dist.reduce_scatter_tensor(y, x, op=dist.ReduceOp.{torch_op}); dist.reduce_scatter takes the blocks as a"
            " list"
        ),
        confused=(
            "It is no all_reduce: no rank gets the whole result, only its own block of it.",
            "It is no scatter: block r comes from every rank, not from one root.",
            "A rank sends away all blocks but its own. The block that it keeps is named by its own number.",
        ),
        ops=("sum", "avg"),
    ),
    "all_gather": Operation(
        "all_gather",
        "all ranks' tensors, on every rank",
        does=(
            "Every rank's tensor is copied to every rank, where they lie one after the other in the order of the ranks."
        ),
        shapes="x [s] -> y [N*s] on every rank",
        formula="y_r = (x_0, x_1, .., x_N-1)",
        pynccl="comm.all_gather(x, y)",
        autograd="ad.all_gather(x, comm, grad={grad})",
        torch=(
            "dist.all_gather_into_tensor(y, x); dist.all_gather takes a list of N tensors. Neither gives x a gradient"
        ),
        confused=(
            "Nothing is added: y has N times the elements of x, in the order of the ranks.",
            "Along another dimension than the first it is a concatenation there: ad.all_gather(x, comm, dim, ..).",
        ),
        grads=CONVENTIONS,
    ),
    "broadcast": Operation(
        "broadcast",
        "root's tensor, on every rank",
        does="Root's tensor is copied to every rank.",
        shapes="x [s] on root -> y [s] on every rank",
        formula="y_r = x_root",
        pynccl="comm.broadcast(x, y, root={root})",
        autograd="ad.broadcast(x, comm, {root}, grad={grad})",
        torch="dist.broadcast(x, src={root})",
        confused=("What the others hold in x is not read; it gives shape and type.",),
        grads=CONVENTIONS,
        rooted=True,
        elements=2,
    ),
    "reduce": Operation(
        "reduce",
        "the sum, on root",
        does="All ranks' tensors are {combined} element by element; root alone gets the result.",
        shapes="x [s] -> y [s] on root",
        formula="y_root = {reduced};  others: zeros",
        pynccl="comm.reduce(x, y, {op}, root={root})",
        autograd="ad.reduce(x, comm, {root}{comma_op})",
        torch="dist.reduce(x, dst={root}, op=dist.ReduceOp.{torch_op})",
        confused=(
            "comm.reduce writes nothing on the other ranks; ad.reduce gives them zeros, as drawn here.",
            "After torch's dist.reduce, x on the other ranks may hold partial sums: do not read it.",
        ),
        ops=("sum", "avg"),
        rooted=True,
        elements=2,
    ),
    "scatter": Operation(
        "scatter",
        "of root's tensor, each rank its own block",
        does="Root's tensor is cut into N blocks, and rank r gets block r.",
        shapes="x [N*s] on root -> y [s]",
        formula="y_r = x_root[block r]",
        pynccl="comm.scatter(x, y, root={root})",
        autograd="ad.scatter(x, comm, {root})",
        torch="dist.scatter(y, blocks, src={root})",
        confused=(
            "Nothing is added: all blocks come from root. reduce_scatter adds those of all ranks.",
            "The other ranks need no x for comm.scatter; ad.scatter takes one of root's shape from them, and gives it"
            " zeros for a gradient.",
        ),
        rooted=True,
    ),
    "gather": Operation(
        "gather",
        "all ranks' tensors, on root",
        does="Every rank's tensor is copied to root, where they lie one after the other in the order of the ranks.",
        shapes="x [s] -> y [N*s] on root",
        formula="y_root = (x_0, x_1, .., x_N-1);  others: nothing",
        pynccl="comm.gather(x, y, root={root})",
        autograd="ad.gather(x, comm, {root})",
        torch="dist.gather(x, blocks, dst={root})",
        confused=("all_gather does the same on every rank. Here the others get a tensor of 0 elements.",),
        rooted=True,
    ),
    "all_to_all": Operation(
        "all_to_all",
        "a block from every rank to every rank",
        does=(
            "Every rank has a block for every rank: block q of rank r becomes block r of rank q. As a table of ranks "
            "and blocks, it is transposed."
        ),
        shapes="x [N*s] -> y [N*s]",
        formula="y_r = (x_0[block r], x_1[block r], .., x_N-1[block r])",
        pynccl="comm.all_to_all(x, y)",
        autograd="ad.all_to_all(x, comm)",
        torch="dist.all_to_all_single(y, x)",
        confused=(
            "Nothing is added, nothing is copied twice: every element has one place to go.",
            "all_gather sends one block to all; here each rank gets another one.",
        ),
    ),
    "permute": Operation(
        "permute",
        "tensors along edges: around a ring",
        does=(
            "Tensors travel along edges (source, target), here once around the ring: rank r sends to rank r+1 and "
            "receives from rank r-1."
        ),
        shapes="x [s] -> y [s]",
        formula="y_r = sum of x_q over the edges (q, r), here x_r-1;  0 without an edge",
        pynccl="with pynccl.group(): comm.send(x, next); comm.recv(y, previous)",
        autograd="ad.permute(x, comm, edges)",
        torch="dist.batch_isend_irecv of a dist.P2POp for each isend and each irecv",
        confused=(
            "Send and recv belong in one group: a ring of ranks that all send first may wait for each other for ever.",
            "The edges are global and equal on all ranks; ad.send_recv takes this rank's own partners.",
        ),
        elements=2,
    ),
    "send_recv": Operation(
        "send_recv",
        "one rank's tensor to another",
        does="One message: rank {root} sends, rank {target} receives, the others do nothing.",
        shapes="x [s] on rank {root} -> y [s] on rank {target}",
        formula="y_{target} = x_{root};  others: zeros",
        pynccl="comm.send(x, {target}) on rank {root}, comm.recv(y, {root}) on rank {target}",
        autograd="ad.send_recv(x, comm, target={target}) on rank {root}, source={root} on rank {target}",
        torch="dist.send(x, {target}) on rank {root}, dist.recv(y, {root}) on rank {target}",
        confused=(
            "Both calls have to be made: a send without its recv waits.",
            "Both ranks have to go backwards, too: the receiver sends its cotangent to the sender.",
        ),
        rooted=True,
        elements=2,
    ),
    "halo_exchange": Operation(
        "halo_exchange",
        "the neighbours' borders",
        does=(
            "Ranks in a line, each with an interior between two halos of one element. Each halo becomes a copy of the"
            " neighbour's border: its first or last element inside. The outer halos stay as they are."
        ),
        shapes="x [left + interior + right] -> y, the same",
        formula="y_r = (last of r-1's interior, own interior, first of r+1's interior)",
        pynccl="with pynccl.group(): comm.send and comm.recv of borders and halos, with ranks r-1 and r+1",
        autograd="ad.halo_exchange(x, comm, dim=0, halo=1)",
        torch="dist.batch_isend_irecv of borders and halos",
        confused=(
            "The halo is part of x and is written over: what it held has no effect, so its gradient is 0.",
            "Backwards a border gets its own cotangent and that of its copy next door. They are added.",
        ),
        elements=3,
    ),
    "copy": Operation(
        "copy",
        "nothing; backwards the sum",
        does=(
            "Forwards nothing happens: x, equal on all ranks, goes on as y. It marks the place where the ranks begin "
            "to do different work with it, so that the gradients are added there."
        ),
        shapes="x [s] -> y [s], in memory of its own",
        formula="y_r = x",
        pynccl="y = x: no call",
        autograd="ad.copy(x, comm)",
        torch="none; Megatron's copy_to_tensor_model_parallel_region is this",
        confused=(
            "It is no broadcast: x has to be equal on all ranks already.",
            "It is the opposite end of all_reduce with grad='replicated', whose backward is the one without a call.",
        ),
        elements=2,
        replicated_input=True,
    ),
    "split": Operation(
        "split",
        "each rank its own block, nothing sent",
        does="Each rank keeps its own block of an x that all ranks have. Nothing is sent.",
        shapes="x [N*s], equal on all ranks -> y [s]",
        formula="y_r = x[block r]",
        pynccl="y = x[rank * s : (rank + 1) * s]: no call",
        autograd="ad.split(x, comm)",
        torch="x.chunk(N)[rank], whose gradient lacks the other ranks' blocks",
        confused=("It is no scatter: every rank has x already. Backwards every rank gets the gradient of all blocks.",),
        replicated_input=True,
    ),
}
_COUNTS_ARE_EQUAL = "{counts} elements of ranks 0, 1, ..: counts is equal on all ranks, 0 is allowed."


def _counted(name: str, **words: Any) -> Operation:
    """The operation with a number of elements per rank."""
    row = {"brief": "blocks of different sizes", "confused": (_COUNTS_ARE_EQUAL,), "by_counts": True, **words}
    return OPERATIONS[name]._replace(**row)


OPERATIONS |= {
    "all_gather_v": _counted(
        "all_gather",
        does="all_gather with a number of elements per rank: rank r gives counts[r].",
        shapes="x [counts[r]] -> y [sum(counts)] on every rank",
        pynccl="comm.all_gather_v(x, y, counts={counts})",
        autograd="ad.all_gather(x, comm, grad={grad}, splits={counts})",
        torch="dist.all_gather with a list of tensors of such sizes",
    ),
    "reduce_scatter_v": _counted(
        "reduce_scatter",
        does=(
            "reduce_scatter with a number of elements per rank: of the result rank r keeps counts[r] elements, its "
            "own block."
        ),
        shapes="x [sum(counts)] -> y [counts[r]]",
        pynccl="comm.reduce_scatter_v(x, y, {op}, counts={counts})",
        autograd="ad.reduce_scatter(x, comm{comma_op}, splits={counts})",
        torch="dist.reduce_scatter with a list of blocks of such sizes",
    ),
    "scatter_v": _counted(
        "scatter",
        does="scatter with a number of elements per rank: rank r gets counts[r] of root's elements, its own block.",
        shapes="x [sum(counts)] on root -> y [counts[r]]",
        pynccl="comm.scatter_v(x, y, root={root}, counts={counts})",
        autograd="ad.scatter(x, comm, {root}, splits={counts})",
        torch="none that takes blocks of different sizes",
    ),
    "gather_v": _counted(
        "gather",
        does="gather with a number of elements per rank: rank r gives counts[r].",
        shapes="x [counts[r]] -> y [sum(counts)] on root",
        pynccl="comm.gather_v(x, y, root={root}, counts={counts})",
        autograd="ad.gather(x, comm, {root}, splits={counts})",
        torch="none that takes blocks of different sizes",
    ),
    "all_to_all_v": _counted(
        "all_to_all",
        does=(
            "all_to_all with a number of elements for each pair of ranks, as of tokens on their way to experts. Here "
            "rank r sends counts[k] elements to rank r+k, of counts {counts}."
        ),
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


def variants() -> list[tuple[str, str, str]]:
    """(operation, operator, convention) of all that can be explained."""
    return [(name, op, grad) for name, row in OPERATIONS.items() for op in row.ops for grad in row.grads]


def example(name: str, ranks: int, root: int = 0) -> Setup:
    """What an operation is shown with where nothing else is asked for."""
    row = OPERATIONS[name]
    return Setup(ranks, COUNTS[:ranks] if row.by_counts else (row.elements,) * ranks, root, row.by_counts)
