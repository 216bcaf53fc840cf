"""Texts of the operations that `explain` draws: description, formulas of forward and adjoint, and the calls.

There are N ranks. Rank r holds x_r [elements] and gets y_r; g_r is the cotangent (gradient) of y_r.
s is a number of elements; root is rank 0.
"""

from __future__ import annotations

from typing import NamedTuple

SUM, REPLICATED = "sum", "replicated"


class Operation(NamedTuple):
    """Texts of one operation.

    does              what it does, in a sentence or two
    shapes, formula   of the forward pass
    pynccl .. torch   the call in each library
    note              a common mistake or a detail that is easily overlooked
    gradient          formula of the adjoint
    adjoint           method of Communicator that computes the adjoint; "": sends and receives
    replicated        formula of the adjoint with grad="replicated"; "": the operation has only one gradient
    replicated_input  x is equal on all ranks
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
    replicated_input: bool = False

    @property
    def grads(self) -> tuple[str, ...]:
        """Values of `grad`, the default first; ("",) if the operation has only one gradient."""
        return (SUM, REPLICATED) if self.replicated else ("",)

    def method(self, name: str) -> str:
        """Return the method of Communicator that runs the operation; "": sends and receives, or no communication."""
        return name if self.adjoint and not self.replicated_input else ""


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        does="Adds the tensors of all ranks element by element and gives every rank the full result.",
        shapes="x [s] -> y [s] on every rank",
        formula="y_r = sum over q of x_q",
        pynccl="comm.all_reduce(x, y)",
        autograd="ad.all_reduce(x, comm, grad={grad})",
        torch="dist.all_reduce(x)",
        note=(
            "torch.distributed overwrites x; comm.all_reduce does so only if y is x, ad.all_reduce never. The gradient "
            "of a mean is divided by N. The gradient of a maximum goes to the rank that holds it; ranks that tie "
            "share it."
        ),
        gradient="gradient of x_r = sum over q of g_q",
        adjoint="all_reduce",
        replicated="gradient of x_r = g",
    ),
    "reduce_scatter": Operation(
        does=(
            "Every rank holds a full tensor of N blocks. Adds the tensors element by element; rank r keeps only "
            "block r of the result."
        ),
        shapes="x [N*s] -> y [s]",
        formula="y_r = sum over q of x_q[block r]",
        pynccl="comm.reduce_scatter(x, y)",
        autograd="ad.reduce_scatter(x, comm)",
        torch="dist.reduce_scatter_tensor(y, x)",
        note="Unlike all_reduce, no rank gets the full result. Unlike scatter, block r is summed over all ranks.",
        gradient="gradient of x_r = (g_0, g_1, .., g_N-1) on every rank",
        adjoint="all_gather",
    ),
    "all_gather": Operation(
        does="Copies the tensor of every rank to every rank and concatenates them in rank order.",
        shapes="x [s] -> y [N*s] on every rank",
        formula="y_r = (x_0, x_1, .., x_N-1)",
        pynccl="comm.all_gather(x, y)",
        autograd="ad.all_gather(x, comm, grad={grad})",
        torch="dist.all_gather_into_tensor(y, x), which has no gradient",
        note=(
            "An autograd Function around dist.all_gather, such as the one in OpenAI's CLIP, implements the first "
            "drawing in forward and the second in backward: dist.reduce_scatter(grad_input, input_list) sums chunk r "
            "of all ranks' grad_output on rank r. ad.all_gather(x, comm, grad='sum') does both."
        ),
        gradient="gradient of x_r = sum over q of g_q[block r]",
        adjoint="reduce_scatter",
        replicated="gradient of x_r = g[block r]",
    ),
    "broadcast": Operation(
        does="Copies the root's tensor to every rank.",
        shapes="x [s] on root -> y [s] on every rank",
        formula="y_r = x_root",
        pynccl="comm.broadcast(x, y, root=0)",
        autograd="ad.broadcast(x, comm, 0, grad={grad})",
        torch="dist.broadcast(x, src=0)",
        note="On the other ranks x is not read; it only provides shape and data type.",
        gradient="gradient of x_root = sum over q of g_q;  others: 0",
        adjoint="reduce",
        replicated="gradient of x_root = g;  others: 0",
    ),
    "reduce": Operation(
        does="Adds the tensors of all ranks element by element and gives the result to the root only.",
        shapes="x [s] -> y [s] on root",
        formula="y_root = sum over q of x_q;  others: zeros",
        pynccl="comm.reduce(x, y, root=0)",
        autograd="ad.reduce(x, comm, 0)",
        torch="dist.reduce(x, dst=0)",
        note="On the other ranks comm.reduce writes nothing, and ad.reduce returns zeros, as drawn here.",
        gradient="gradient of x_r = g_root on every rank",
        adjoint="broadcast",
    ),
    "scatter": Operation(
        does="Splits the root's tensor into N blocks and sends block r to rank r.",
        shapes="x [N*s] on root -> y [s]",
        formula="y_r = x_root[block r]",
        pynccl="comm.scatter(x, y, root=0)",
        autograd="ad.scatter(x, comm, 0)",
        torch="dist.scatter(y, blocks, src=0)",
        note="Nothing is summed: all blocks come from the root. reduce_scatter sums the blocks of all ranks.",
        gradient="gradient of x_root = (g_0, g_1, .., g_N-1);  others: 0",
        adjoint="gather",
    ),
    "gather": Operation(
        does="Copies the tensor of every rank to the root and concatenates them in rank order.",
        shapes="x [s] -> y [N*s] on root",
        formula="y_root = (x_0, x_1, .., x_N-1);  others: nothing",
        pynccl="comm.gather(x, y, root=0)",
        autograd="ad.gather(x, comm, 0)",
        torch="dist.gather(x, blocks, dst=0)",
        note="all_gather does the same on every rank. Here the other ranks get an empty tensor.",
        gradient="gradient of x_r = g_root[block r]",
        adjoint="scatter",
    ),
    "all_to_all": Operation(
        does=(
            "Every rank holds one block for each rank: block q of rank r becomes block r of rank q. This transposes "
            "the table of ranks and blocks."
        ),
        shapes="x [N*s] -> y [N*s]",
        formula="y_r = (x_0[block r], x_1[block r], .., x_N-1[block r])",
        pynccl="comm.all_to_all(x, y)",
        autograd="ad.all_to_all(x, comm)",
        torch="dist.all_to_all_single(y, x)",
        note="Nothing is summed or duplicated: every element goes to exactly one place.",
        gradient="gradient of x_r = (g_0[block r], .., g_N-1[block r])",
        adjoint="all_to_all",
    ),
    "permute": Operation(
        does=(
            "Sends tensors along edges (source, target), here one step around a ring: rank r sends to rank r+1 and "
            "receives from rank r-1."
        ),
        shapes="x [s] -> y [s]",
        formula="y_r = sum of x_q over the edges (q, r), here x_r-1;  0 if there is none",
        pynccl="with pynccl.group(): comm.send(x, next); comm.recv(y, previous)",
        autograd="ad.permute(x, comm, edges)",
        torch="dist.batch_isend_irecv with a dist.P2POp for each isend and irecv",
        note="Put send and recv in one group: a ring of ranks that all send first can deadlock.",
        gradient="gradient of x_r = sum of g_q over the edges (r, q), here g_r+1",
    ),
    "send_recv": Operation(
        does="Sends one message: rank 0 sends, rank 1 receives, the other ranks do nothing.",
        shapes="x [s] on rank 0 -> y [s] on rank 1",
        formula="y_1 = x_0;  others: zeros",
        pynccl="comm.send(x, 1) on rank 0, comm.recv(y, 0) on rank 1",
        autograd="ad.send_recv(x, comm, target=1) on rank 0, source=0 on rank 1",
        torch="dist.send(x, 1) on rank 0, dist.recv(y, 0) on rank 1",
        note="Both ranks must run the backward pass: the receiver sends its cotangent to the sender.",
        gradient="gradient of x_0 = g_1;  others: 0",
    ),
    "halo_exchange": Operation(
        does=(
            "The ranks form a line; each holds an interior between two halos of one element. Fills each halo with a "
            "copy of the neighbour's border: the first or last element of its interior. The outer halos do not change."
        ),
        shapes="x [left + interior + right] -> y, the same",
        formula="y_r = (last of r-1's interior, r's interior, first of r+1's interior)",
        pynccl="with pynccl.group(): comm.send borders and comm.recv halos, with ranks r-1 and r+1",
        autograd="ad.halo_exchange(x, comm, dim=0, halo=1)",
        torch="dist.batch_isend_irecv of borders and halos",
        note="The halo is part of x and is overwritten: its old values have no effect, so their gradient is 0.",
        gradient="gradient of a border = its cotangent + the cotangent of its copy;  of an overwritten halo = 0",
    ),
    "copy": Operation(
        does=(
            "Returns x, which is equal on all ranks, without communication. It marks where the ranks begin to do "
            "different work with x, so that the backward pass sums the gradients there."
        ),
        shapes="x [s] -> y [s], in separate memory",
        formula="y_r = x",
        pynccl="y = x: no call",
        autograd="ad.copy(x, comm)",
        torch="none; Megatron calls it copy_to_tensor_model_parallel_region",
        note="This is not a broadcast: x must already be equal on all ranks.",
        gradient="gradient of x = sum over q of g_q, on every rank",
        adjoint="all_reduce",
        replicated_input=True,
    ),
    "split": Operation(
        does="Keeps block r of x on rank r. All ranks hold the same x, so nothing is sent.",
        shapes="x [N*s], equal on all ranks -> y [s]",
        formula="y_r = x[block r]",
        pynccl="y = x[rank * s : (rank + 1) * s]: no call",
        autograd="ad.split(x, comm)",
        torch="x.chunk(N)[rank], whose gradient is missing the other ranks' blocks",
        note="Unlike scatter, every rank already has x. The backward pass gives every rank the gradient of all blocks.",
        gradient="gradient of x = (g_0, g_1, .., g_N-1) on every rank",
        adjoint="all_gather",
        replicated_input=True,
    ),
}


GRAD_NOTES = {
    "": "",
    SUM: "This is grad='sum': each rank does different work with y. If all ranks do the same work with y, use "
    "grad='replicated': the backward pass then sends nothing.",
    REPLICATED: "This is grad='replicated': all ranks do the same work with y. If each rank does different work, use "
    "grad='sum': the backward pass then sums the cotangents.",
}


def texts_for(name: str, grad: str) -> Operation:
    """Return the texts of an operation for this value of `grad`."""
    row = OPERATIONS[name]
    gradient = row.replicated if grad == REPLICATED else row.gradient
    return row._replace(gradient=gradient, autograd=row.autograd.format(grad=repr(grad)))


def adjoint_text(name: str, grad: str) -> str:
    """Return what the adjoint does, in a sentence or two."""
    row = OPERATIONS[name]
    if grad == REPLICATED:
        return "Nothing is sent. All ranks do the same work with y, so each already has the full cotangent."
    article = "an" if row.adjoint[:1] == "a" else "a"
    calls = f"{article} {row.adjoint}" if row.adjoint else "sends and receives in reverse"
    return f"Each cotangent goes back to where its element came from; cotangents of copies are summed there: {calls}."


def variants() -> list[tuple[str, str]]:
    """Return all pairs (operation, grad) that can be explained."""
    return [(name, grad) for name, row in OPERATIONS.items() for grad in row.grads]
