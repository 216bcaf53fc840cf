"""What can be explained: a row for each operation, with its words in both directions and how it is called.

N ranks; rank r holds x_r [elements] and gets y_r; g_r is the cotangent (gradient) of y_r.
s is a number of elements; root is rank 0.
"""

from __future__ import annotations

from typing import NamedTuple

SUM, REPLICATED = "sum", "replicated"


class Operation(NamedTuple):
    """does .. torch     in a sentence or two; shapes; formula; the call of each library
    note              what is easily overlooked
    gradient          formula of the adjoint
    adjoint           the method of Communicator that is the adjoint; "": sends and receives
    replicated        formula of the adjoint where all ranks go on alike with y; "": there is one gradient only
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
    adjoint: str = ""
    replicated: str = ""
    one_input: bool = False

    @property
    def grads(self) -> tuple[str, ...]:
        """Conventions of gradient, the default first; "" where there is one only."""
        return (SUM, REPLICATED) if self.replicated else ("",)

    def method(self, name: str) -> str:
        """The method of Communicator that is the operation; "": sends and receives, or nothing is sent."""
        return name if self.adjoint and not self.one_input else ""


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        does="All ranks' tensors are added element by element, and every rank gets the whole result.",
        shapes="x [s] -> y [s] on every rank",
        formula="y_r = sum over q of x_q",
        pynccl="comm.all_reduce(x, y)",
        autograd="ad.all_reduce(x, comm, grad={grad})",
        torch="dist.all_reduce(x)",
        note=(
            "torch.distributed writes over x; comm.all_reduce does so only if y is x, and ad.all_reduce never. The "
            "gradient of a mean is divided by N; that of a maximum goes to the ranks that have it, which share it if "
            "they tie."
        ),
        gradient="gradient of x_r = sum over q of g_q",
        adjoint="all_reduce",
        replicated="gradient of x_r = g",
    ),
    "reduce_scatter": Operation(
        does=(
            "Every rank has a full tensor of N blocks. The tensors are added element by element, and of the "
            "result rank r keeps block r alone."
        ),
        shapes="x [N*s] -> y [s]",
        formula="y_r = sum over q of x_q[block r]",
        pynccl="comm.reduce_scatter(x, y)",
        autograd="ad.reduce_scatter(x, comm)",
        torch="dist.reduce_scatter_tensor(y, x)",
        note="It is no all_reduce: no rank gets the whole result. It is no scatter: block r comes from every rank.",
        gradient="gradient of x_r = (g_0, g_1, .., g_N-1) on every rank",
        adjoint="all_gather",
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
        adjoint="reduce_scatter",
        replicated="gradient of x_r = g[block r]",
    ),
    "broadcast": Operation(
        does="Root's tensor is copied to every rank.",
        shapes="x [s] on root -> y [s] on every rank",
        formula="y_r = x_root",
        pynccl="comm.broadcast(x, y, root=0)",
        autograd="ad.broadcast(x, comm, 0, grad={grad})",
        torch="dist.broadcast(x, src=0)",
        note="What the others hold in x is not read; it gives shape and type.",
        gradient="gradient of x_root = sum over q of g_q;  others: 0",
        adjoint="reduce",
        replicated="gradient of x_root = g;  others: 0",
    ),
    "reduce": Operation(
        does="All ranks' tensors are added element by element; root alone gets the result.",
        shapes="x [s] -> y [s] on root",
        formula="y_root = sum over q of x_q;  others: zeros",
        pynccl="comm.reduce(x, y, root=0)",
        autograd="ad.reduce(x, comm, 0)",
        torch="dist.reduce(x, dst=0)",
        note="comm.reduce writes nothing on the other ranks; ad.reduce gives them zeros, as drawn here.",
        gradient="gradient of x_r = g_root on every rank",
        adjoint="broadcast",
    ),
    "scatter": Operation(
        does="Root's tensor is cut into N blocks, and rank r gets block r.",
        shapes="x [N*s] on root -> y [s]",
        formula="y_r = x_root[block r]",
        pynccl="comm.scatter(x, y, root=0)",
        autograd="ad.scatter(x, comm, 0)",
        torch="dist.scatter(y, blocks, src=0)",
        note="Nothing is added: all blocks come from root. reduce_scatter adds those of all ranks.",
        gradient="gradient of x_root = (g_0, g_1, .., g_N-1);  others: 0",
        adjoint="gather",
    ),
    "gather": Operation(
        does="Every rank's tensor is copied to root, where they lie one after the other in the order of the ranks.",
        shapes="x [s] -> y [N*s] on root",
        formula="y_root = (x_0, x_1, .., x_N-1);  others: nothing",
        pynccl="comm.gather(x, y, root=0)",
        autograd="ad.gather(x, comm, 0)",
        torch="dist.gather(x, blocks, dst=0)",
        note="all_gather does the same on every rank. Here the others get a tensor of 0 elements.",
        gradient="gradient of x_r = g_root[block r]",
        adjoint="scatter",
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
    ),
    "send_recv": Operation(
        does="One message: rank 0 sends, rank 1 receives, the others do nothing.",
        shapes="x [s] on rank 0 -> y [s] on rank 1",
        formula="y_1 = x_0;  others: zeros",
        pynccl="comm.send(x, 1) on rank 0, comm.recv(y, 0) on rank 1",
        autograd="ad.send_recv(x, comm, target=1) on rank 0, source=0 on rank 1",
        torch="dist.send(x, 1) on rank 0, dist.recv(y, 0) on rank 1",
        note="Both ranks have to go backwards, too: the receiver sends its cotangent to the sender.",
        gradient="gradient of x_0 = g_1;  others: 0",
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
        adjoint="all_reduce",
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
        adjoint="all_gather",
        one_input=True,
    ),
}


OTHER = {
    "": "",
    SUM: "This is grad='sum': each rank goes on with y in its own way. Do all ranks the same with y? Then "
    "grad='replicated', and nothing is sent backwards.",
    REPLICATED: "This is grad='replicated': all ranks do the same with y. Does each go on in its own way? Then "
    "grad='sum', and the cotangents are added.",
}


def words_of(name: str, grad: str) -> Operation:
    """The row of an operation with this gradient."""
    row = OPERATIONS[name]
    gradient = row.replicated if grad == REPLICATED else row.gradient
    return row._replace(gradient=gradient, autograd=row.autograd.format(grad=repr(grad)))


def backwards(name: str, grad: str) -> str:
    """What the adjoint does, in a sentence or two."""
    row = OPERATIONS[name]
    if grad == REPLICATED:
        return "Nothing is sent. Every rank goes on alike with y, so each has the whole cotangent already."
    article = "an" if row.adjoint[:1] == "a" else "a"
    made = f"{article} {row.adjoint}" if row.adjoint else "sends and receives the other way"
    return f"Each cotangent goes back to where its element came from; those of what was copied are added there: {made}."


def variants() -> list[tuple[str, str]]:
    """(operation, convention) of all that can be explained."""
    return [(name, grad) for name, row in OPERATIONS.items() for grad in row.grads]
