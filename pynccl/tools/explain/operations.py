"""What can be explained: a row for each operation, with its words in both directions and how it is called.

N ranks; rank r holds x_r [elements] and gets y_r; g_r is the cotangent (gradient) of y_r, G that of y as the ranks have
it together. s is a number of elements. {op}, {root}, {counts} and their like stand for what a run has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .moves import Setup

SUM, REPLICATED = "sum", "replicated"
CONVENTIONS = (SUM, REPLICATED)
NONE: tuple[str, ...] = ("",)
COUNTED = ("reduce_scatter", "all_gather", "scatter", "gather", "all_to_all")  # may have a number for each rank


class Operation(NamedTuple):
    """does .. torch     in a sentence or two; shapes; formula; the call of each library
    note              what is easily overlooked
    gradient, back    formula of the adjoint, and what happens there
    adjoint           the method of Communicator that is the adjoint; "": sends and receives
    ops               operators that it has a derivative with; the first is the default
    grads             conventions of gradient, where there are two
    rooted            has root=
    elements          of a block, in the example
    one_input         x is equal on all ranks
    """

    does: str
    shapes: str
    formula: str
    pynccl: str
    autograd: str
    torch: str
    note: str
    gradient: str
    back: str
    adjoint: str = ""
    ops: tuple[str, ...] = NONE
    grads: tuple[str, ...] = NONE
    rooted: bool = False
    elements: int = 1
    one_input: bool = False

    def method(self, name: str) -> str:
        """The method of Communicator that is the operation; "": sends and receives, or nothing is sent."""
        return name if self.adjoint and not self.one_input else ""


_PARTS = "Each rank goes on with work of its own, and has a part of the cotangent: the parts are added. "
_BACK = "Each block goes back to where it came from: "

OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        does="All ranks' tensors are {combined} element by element, and every rank gets the whole result.",
        shapes="x [s] -> y [s] on every rank",
        formula="y_r = {mean}sum over q of x_q",
        pynccl="comm.all_reduce(x, y, {op})",
        autograd="ad.all_reduce(x, comm, {op}, grad={grad})",
        torch="dist.all_reduce(x, op=dist.ReduceOp.{torch_op})",
        note=(
            "torch.distributed writes over x; comm.all_reduce does so only if y is x, and ad.all_reduce never. The "
            "gradient of a maximum goes to the ranks that have it, and they share it if they tie."
        ),
        gradient="gradient of x_r = {mean}sum over q of g_q",
        back=_PARTS + "The adjoint of an all_reduce is an all_reduce.",
        adjoint="all_reduce",
        ops=("sum", "avg"),
        grads=CONVENTIONS,
        elements=3,
    ),
    "reduce_scatter": Operation(
        does=(
            "Every rank has a full tensor of N blocks. The tensors are {combined} element by element, and of the "
            "result rank r keeps block r alone."
        ),
        shapes="x [N*s] -> y [s]",
        formula="y_r = {mean}sum over q of x_q[block r]",
        pynccl="comm.reduce_scatter(x, y, {op})",
        autograd="ad.reduce_scatter(x, comm{other_op})",
        torch="dist.reduce_scatter_tensor(y, x, op=dist.ReduceOp.{torch_op})",
        note="It is no all_reduce: no rank gets the whole result. It is no scatter: block r comes from every rank.",
        gradient="gradient of x_r = (g_0, g_1, .., g_N-1){over_n} on every rank",
        back="Every rank's block q went into rank q's result, so it gets rank q's cotangent: an all_gather.",
        adjoint="all_gather",
        ops=("sum", "avg"),
    ),
    "all_gather": Operation(
        does=(
            "Every rank's tensor is copied to every rank, where they lie one after the other in the order of the ranks."
        ),
        shapes="x [s] -> y [N*s] on every rank",
        formula="y_r = (x_0, x_1, .., x_N-1)",
        pynccl="comm.all_gather(x, y)",
        autograd="ad.all_gather(x, comm, grad={grad})",
        torch="dist.all_gather_into_tensor(y, x), which gives x no gradient",
        note=(
            "An autograd Function around dist.all_gather, such as the one in OpenAI's CLIP, has the first drawing in "
            "forward and the second in backward: dist.reduce_scatter(grad_input, input_list) adds chunk r of all "
            "ranks' grad_output for rank r. ad.all_gather(x, comm, grad='sum') is all of it."
        ),
        gradient="gradient of x_r = sum over q of g_q[block r]",
        back=(
            "Every rank has a copy of x_r, and a cotangent for it in block r: these N are added, and the sum goes to "
            "rank r. That is a reduce_scatter."
        ),
        adjoint="reduce_scatter",
        grads=CONVENTIONS,
    ),
    "broadcast": Operation(
        does="Root's tensor is copied to every rank.",
        shapes="x [s] on root -> y [s] on every rank",
        formula="y_r = x_root",
        pynccl="comm.broadcast(x, y, root={root})",
        autograd="ad.broadcast(x, comm, {root}, grad={grad})",
        torch="dist.broadcast(x, src={root})",
        note="What the others hold in x is not read; it gives shape and type.",
        gradient="gradient of x_root = sum over q of g_q;  others: 0",
        back="Each rank has a copy and a cotangent for it: these are added on root. That is a reduce.",
        adjoint="reduce",
        grads=CONVENTIONS,
        rooted=True,
        elements=2,
    ),
    "reduce": Operation(
        does="All ranks' tensors are {combined} element by element; root alone gets the result.",
        shapes="x [s] -> y [s] on root",
        formula="y_root = {mean}sum over q of x_q;  others: zeros",
        pynccl="comm.reduce(x, y, {op}, root={root})",
        autograd="ad.reduce(x, comm, {root}{other_op})",
        torch="dist.reduce(x, dst={root}, op=dist.ReduceOp.{torch_op})",
        note="comm.reduce writes nothing on the other ranks; ad.reduce gives them zeros, as drawn here.",
        gradient="gradient of x_r = g_root{over_n} on every rank",
        back=(
            "Each rank's x went into root's result: each gets root's cotangent, by a broadcast. The others' cotangents "
            "belong to zeros and are not read."
        ),
        adjoint="broadcast",
        ops=("sum", "avg"),
        rooted=True,
        elements=2,
    ),
    "scatter": Operation(
        does="Root's tensor is cut into N blocks, and rank r gets block r.",
        shapes="x [N*s] on root -> y [s]",
        formula="y_r = x_root[block r]",
        pynccl="comm.scatter(x, y, root={root})",
        autograd="ad.scatter(x, comm, {root})",
        torch="dist.scatter(y, blocks, src={root})",
        note="Nothing is added: all blocks come from root. reduce_scatter adds those of all ranks.",
        gradient="gradient of x_root = (g_0, g_1, .., g_N-1);  others: 0",
        back=_BACK + "a gather to root.",
        adjoint="gather",
        rooted=True,
    ),
    "gather": Operation(
        does="Every rank's tensor is copied to root, where they lie one after the other in the order of the ranks.",
        shapes="x [s] -> y [N*s] on root",
        formula="y_root = (x_0, x_1, .., x_N-1);  others: nothing",
        pynccl="comm.gather(x, y, root={root})",
        autograd="ad.gather(x, comm, {root})",
        torch="dist.gather(x, blocks, dst={root})",
        note="all_gather does the same on every rank. Here the others get a tensor of 0 elements.",
        gradient="gradient of x_r = g_root[block r]",
        back=_BACK + "a scatter from root.",
        adjoint="scatter",
        rooted=True,
    ),
    "all_to_all": Operation(
        does=(
            "Every rank has a block for every rank: block q of rank r becomes block r of rank q. As a table of ranks "
            "and blocks, it is transposed."
        ),
        shapes="x [N*s] -> y [N*s]",
        formula="y_r = (x_0[block r], x_1[block r], .., x_N-1[block r])",
        pynccl="comm.all_to_all(x, y)",
        autograd="ad.all_to_all(x, comm)",
        torch="dist.all_to_all_single(y, x)",
        note="Nothing is added, nothing is copied twice: every element has one place to go.",
        gradient="gradient of x_r = (g_0[block r], .., g_N-1[block r])",
        back=_BACK + "again an all_to_all.",
        adjoint="all_to_all",
    ),
    "permute": Operation(
        does=(
            "Tensors travel along edges (source, target), here once around the ring: rank r sends to rank r+1 and "
            "receives from rank r-1."
        ),
        shapes="x [s] -> y [s]",
        formula="y_r = sum of x_q over the edges (q, r), here x_r-1;  0 without an edge",
        pynccl="with pynccl.group(): comm.send(x, next); comm.recv(y, previous)",
        autograd="ad.permute(x, comm, edges)",
        torch="dist.batch_isend_irecv of a dist.P2POp for each isend and each irecv",
        note="Send and recv belong in one group: a ring of ranks that all send first may wait for each other for ever.",
        gradient="gradient of x_r = sum of g_q over the edges (r, q), here g_r+1",
        back="The edges are reversed. A rank that sent to nobody gets 0, one that sent to several a sum.",
        elements=2,
    ),
    "send_recv": Operation(
        does="One message: rank {root} sends, rank {target} receives, the others do nothing.",
        shapes="x [s] on rank {root} -> y [s] on rank {target}",
        formula="y_{target} = x_{root};  others: zeros",
        pynccl="comm.send(x, {target}) on rank {root}, comm.recv(y, {root}) on rank {target}",
        autograd="ad.send_recv(x, comm, target={target}) on rank {root}, source={root} on rank {target}",
        torch="dist.send(x, {target}) on rank {root}, dist.recv(y, {root}) on rank {target}",
        note="Both ranks have to go backwards, too: the receiver sends its cotangent to the sender.",
        gradient="gradient of x_{root} = g_{target};  others: 0",
        back="The message goes back: the receiver sends, the sender receives.",
        rooted=True,
        elements=2,
    ),
    "halo_exchange": Operation(
        does=(
            "Ranks in a line, each with an interior between two halos of one element. Each halo becomes a copy of the"
            " neighbour's border: its first or last element inside. The outer halos stay as they are."
        ),
        shapes="x [left + interior + right] -> y, the same",
        formula="y_r = (last of r-1's interior, own interior, first of r+1's interior)",
        pynccl="with pynccl.group(): comm.send and comm.recv of borders and halos, with ranks r-1 and r+1",
        autograd="ad.halo_exchange(x, comm, dim=0, halo=1)",
        torch="dist.batch_isend_irecv of borders and halos",
        note="The halo is part of x and is written over: what it held has no effect, so its gradient is 0.",
        gradient="gradient of a border = its own cotangent + that of its copy;  of a halo that was written over = 0",
        back="What came to a halo goes back to the border that it is a copy of, and is added there.",
        elements=3,
    ),
    "copy": Operation(
        does=(
            "Forwards nothing happens: x, equal on all ranks, goes on as y. It marks the place where the ranks begin "
            "to do different work with it, so that the gradients are added there."
        ),
        shapes="x [s] -> y [s], in memory of its own",
        formula="y_r = x",
        pynccl="y = x: no call",
        autograd="ad.copy(x, comm)",
        torch="none; Megatron's copy_to_tensor_model_parallel_region is this",
        note="It is no broadcast: x has to be equal on all ranks already.",
        gradient="gradient of x = sum over q of g_q, on every rank",
        back=_PARTS + "That is an all_reduce.",
        adjoint="all_reduce",
        elements=2,
        one_input=True,
    ),
    "split": Operation(
        does="Each rank keeps its own block of an x that all ranks have. Nothing is sent.",
        shapes="x [N*s], equal on all ranks -> y [s]",
        formula="y_r = x[block r]",
        pynccl="y = x[rank * s : (rank + 1) * s]: no call",
        autograd="ad.split(x, comm)",
        torch="x.chunk(N)[rank], whose gradient lacks the other ranks' blocks",
        note="It is no scatter: every rank has x already. Backwards every rank gets the gradient of all blocks.",
        gradient="gradient of x = (g_0, g_1, .., g_N-1) on every rank",
        back="Each rank has the cotangent of its own block only: an all_gather puts them together.",
        adjoint="all_gather",
        one_input=True,
    ),
}

# Where all ranks go on alike with y.
_ALIKE = {
    "all_reduce": "gradient of x_r = g{over_n}",
    "all_gather": "gradient of x_r = g[block r]",
    "broadcast": "gradient of x_root = g;  others: 0",
}
_WHOLE = "Nothing is sent. Every rank goes on alike with y, so each has the whole cotangent already. "
OTHER = {
    SUM: "This is grad='sum': each rank goes on with y in its own way. Do all ranks the same with y? Then "
    "grad='replicated', and nothing is sent backwards.",
    REPLICATED: "This is grad='replicated': all ranks do the same with y. Does each go on in its own way? Then "
    "grad='sum', and the cotangents are added.",
}


def words_of(name: str, op: str, grad: str, setup: Setup) -> Operation:
    """The row of an operation, with what the run has in place of {op} and its like."""
    row = OPERATIONS[name]
    if setup.uneven:
        counts, splits = ("send_counts=.., recv_counts=..", "send_splits=.., recv_splits=..")
        if name != "all_to_all":
            counts, splits = "counts={counts}", "splits={counts}"
        pynccl = row.pynccl.replace(name, f"{name}_v").replace(")", f", {counts})")
        row = row._replace(pynccl=pynccl, autograd=row.autograd.replace(")", f", {splits})"))
    if grad == REPLICATED:
        row = row._replace(gradient=_ALIKE[name], back=_WHOLE)
    blank = {
        "op": repr(op),
        "other_op": "" if op in ("", row.ops[0]) else f", op={op!r}",
        "torch_op": op.upper(),
        "grad": repr(grad),
        "root": setup.root,
        "target": setup.target,
        "counts": list(setup.counts),
        "combined": "averaged" if op == "avg" else "added",
        "mean": "1/N * " if op == "avg" else "",
        "over_n": " / N" if op == "avg" else "",
    }
    texts: dict[str, Any] = {
        field: text.format(**blank) for field, text in row._asdict().items() if isinstance(text, str)
    }
    return row._replace(**texts)


def variants() -> list[tuple[str, str, str]]:
    """(operation, operator, convention) of all that can be explained."""
    return [(name, op, grad) for name, row in OPERATIONS.items() for op in row.ops for grad in row.grads]


def example(name: str, ranks: int, root: int = 0) -> Setup:
    """What an operation is shown with where nothing else is asked for."""
    return Setup(ranks, (OPERATIONS[name].elements,) * ranks, root)
