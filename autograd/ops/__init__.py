"""The differentiable collectives, a file a family: function, Function with its adjoint, and how it travels.

Notation: N ranks, this rank r; x_q, y_q, g_q are rank q's input, output and cotangent. Two conventions of gradient:

grad="sum"         each rank goes on with work of its own on the output: its cotangent is a part of the whole one, and
                   differs from the others'. The true adjoint.
grad="replicated"  every rank goes on alike with the output: the cotangents are equal on all ranks, each is the whole.

`grad=` has no default where it matters: the wrong one is a factor of N, or worse (docs/conventions.md). Inputs and
cotangents are never changed, and may be non-contiguous, of stride 0, of size 0, or 0-dimensional. Every output is a
tensor of its own, also on one rank: it is no view, shares no memory with the input, and may be changed in place.

Every rank must run the backward pass of every call, in the same order: the adjoints communicate too. Therefore an
output has a gradient function on every rank, also where the input needs no gradient (use torch.no_grad() for data and
metrics); pass outputs that a rank does not use to `anchor`. torch.autograd.grad(loss, inputs) enters only what leads to
those inputs, so ask on every rank for inputs behind the same calls. Under torch.compile no node is added: there,
requires_grad must be the same on all ranks.

`reduce_dtype` is the type in which a sum travels and is computed (torch.float32 for a bfloat16 tensor, say); the result
has the input's type. `splits` are the sizes of all ranks' slices along `dim`, the same list on every rank; None: equal.
Errors are ValueError / TypeError, raised before anything is launched.

all_reduce, all_gather and reduce_scatter also take a list or tuple of tensors, of any shapes and types, and return the
list of their outputs: as one NCCL group, backwards too. The other arguments hold for each of the tensors; all ranks
pass as many. An output that is not used has a cotangent of zeros. max, min and prod go one by one, as does everything
under torch.compile.

`ad.AllReduce`, `ad.ReduceScatter`, ... are the autograd Functions; `start` (work.py) takes these functions.
"""
