"""The differentiable collectives. Each file holds one family: the functions, and the autograd Functions behind them.

Notation: N ranks, this rank is r; x_q, y_q and g_q are the input, output and cotangent of rank q. "Slice r" of a
dimension is this rank's slice of it. Two conventions of gradient, chosen by `grad=`:

grad="sum"         The ranks do different computations on the output. Each rank's cotangent is one term of the full
                   cotangent, and the backward pass sums the terms over ranks. This is the exact adjoint.
grad="replicated"  Every rank does the same computation on the output. The cotangents are equal on all ranks, and each
                   is the full cotangent, so the backward pass does not sum.

`grad=` has no default because a wrong choice scales gradients by N or worse (docs/conventions.md).

Inputs and cotangents are never modified. They may be non-contiguous, expanded (stride 0), empty, or 0-dimensional.
Every output is a new tensor, also on one rank: it shares no memory with the input and may be modified in place.

Every rank must run the backward pass of every call, in the same order, because the adjoints communicate too. For this
reason an output has a grad_fn on every rank, even if the input does not require grad (use torch.no_grad() for data and
metrics). If a rank does not use an output, pass it to `anchor`. torch.autograd.grad(loss, inputs) runs only the nodes
that lead to `inputs`, so pass inputs behind the same calls on every rank. Under torch.compile no grad_fn is added:
there, requires_grad must be the same on all ranks.

torch.compile runs each call once, in the order of the program, also if its result is not used; in a checkpoint it saves
the results. To communicate again instead, put the checkpoint around the compiled function.

Arguments that several functions share:

splits        sizes of all ranks' slices along `dim`, the same list on every rank; None: equal sizes
reduce_dtype  dtype in which a sum is communicated and computed, e.g. torch.float32 for a bfloat16 tensor; the result
              has the dtype of the input. None: the dtype of the input. Collectives that only copy accept every dtype

Wrong arguments raise ValueError or TypeError before this rank launches anything. If only one rank's arguments are
wrong, the other ranks wait for it. Whether ranks pass different shapes or dtypes is checked only with PYNCCL_CHECK=1.

all_reduce, all_gather and reduce_scatter also take a list or tuple of tensors, of any shapes and dtypes, and return the
list of their outputs. The forward pass is one NCCL group, and so is the backward pass. The other arguments apply to
every tensor. All ranks pass lists of the same length. An output that is not used gets a cotangent of zeros. max, min
and prod run one tensor at a time, and so does everything under torch.compile.

`ad.AllReduce`, `ad.ReduceScatter`, ... are the autograd Functions. `ad.start` (work.py) runs these functions
asynchronously.
"""
