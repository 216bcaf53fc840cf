"""DataParallelGradients: gradients averaged over the ranks while the backward pass goes on.

    data_parallel = ad.DataParallelGradients(model, mesh["dp"])
    model(x).sum().backward()        # when it returns, .grad is the average of all ranks'
    optimizer.step()

Gradients are gathered in buckets, in reverse order of the parameters; if they come in another one in the first pass, in
that of rank 0 from then on. A bucket travels on the communicator's side stream as soon as it and all before it are
full: so on every rank in one order, whatever the order of the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.resource import Shared
from pynccl.bindings.values import attribute, instance, shown

from ..agreement import difference
from ..arguments import check_comm, check_reduce_dtype, lost_its_memory
from ..streams import made_on, wait_for
from ..torch_internals import backward_pass, tensors_in
from ..wire import CARRIED, REAL_OF, Dtype
from .buckets import Bucket, Named, as_real, cut_into_buckets, wire_of
from .dtensors import is_dtensor
from .in_flight import EndOfPass, InFlight


class DataParallelGradients(Shared):
    """Averages the gradients of a model's parameters over `comm`, whose ranks have copies of it and other data.

    model  on the communicator's device, in its final types; what requires a gradient now is averaged. Parameters may be
           cut over another communicator of a Mesh: the ranks of `comm` have equal parts
    comm   N ranks. For gradients alone where ranks may use different parameters: their buckets then leave at different
           points of the backward pass, and would meet other calls
    bucket_bytes             of gradients that travel at once, with the parameter that fills them up; or an eighth of
                             all, if that is less
    reduce_dtype             type in which they are averaged; None: their own
    gradient_as_bucket_view  .grad are views of the buckets: no second memory for gradients. With `zero_grad()` of this
                             object instead of the optimizer's, they are not copied at all
    broadcast                parameters and buffers are taken from rank 0, now. Later, buffers are each rank's own

    The backward pass reduces by itself, and has done so when it returns. What ranks do not use alike is averaged with
    zeros; what no rank used keeps its gradient, None mostly. A rank whose loss uses no parameter at all must call
    `finish()` instead. Steps that only accumulate are run under `no_sync()`, which every rank must do alike.
    Layers with sequence parallelism want `ad.finish_gradients` besides, after the backward pass.

    Raises, on all ranks: ValueError for a model that differs from rank to rank, is elsewhere, or has no parameters that
    require gradients; TypeError for types that NCCL does not reduce. In a backward pass: RuntimeError for a parameter
    that has its gradient twice (which use_reentrant=True of checkpoints does), TypeError for sparse gradients.
    Deterministic where the communicator is. After a backward pass that raised on all ranks alike, gradients that were
    views of buckets under way are None; the next pass has nothing of it.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        bucket_bytes: float = 25e6,
        reduce_dtype: Dtype = None,
        *,
        gradient_as_bucket_view: bool = False,
        broadcast: bool = True,
    ) -> None:
        check_comm("DataParallelGradients", comm, model=model)
        instance(model, nn.Module, "DataParallelGradients: model", "a torch.nn.Module")
        comm.check_alive()
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, (int, float)) or not bucket_bytes > 0:
            raise ValueError(f"DataParallelGradients: bucket_bytes is {shown(bucket_bytes)}, expected bytes, above 0")
        named = _trained(model, comm)
        self._reduced_in = {parameter.dtype: _reduce_dtype(parameter, reduce_dtype) for _, parameter in named}
        _check_equal(model, named, comm, (broadcast, bucket_bytes, reduce_dtype))
        if broadcast:
            _broadcast([*model.parameters(), *model.buffers()], comm)
        self.comm, self.gradient_as_bucket_view = comm, gradient_as_bucket_view
        self._named, self._bucket_bytes = named, bucket_bytes
        self._cut(named)
        self._ordered = comm.size == 1
        self._sync = True
        self._reset()
        self._hooks = [model.register_forward_hook(self._note_outputs)]
        for name, parameter in named:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived, name)))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the block accumulate gradients of this rank; the next one after it averages their sums."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Take part in the average without a backward pass: for a rank whose loss uses no parameter, in place of it.

        The others' backward passes wait for that. Nothing happens within no_sync(). What this rank has accumulated
        counts, zeros do where it has nothing."""
        if self._sync:
            self._abandon()
            self._reduce()

    def zero_grad(self) -> None:
        """No gradients; with gradient_as_bucket_view zeros in the buckets, to which the next pass adds."""
        self._abandon()
        for bucket in self._buckets:
            if self.gradient_as_bucket_view:
                bucket.flat.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if self.gradient_as_bucket_view else None

    def remove(self) -> None:
        """Leave the model alone from now on; parameters and gradients stay what they are. Twice is harmless."""
        while self._hooks:
            self._hooks.pop().remove()

    def _cut(self, named: list[Named]) -> None:
        self._buckets = [Bucket(one) for one in cut_into_buckets(named, self._bucket_bytes)]
        self._index = {name: index for index, bucket in enumerate(self._buckets) for name in bucket.names}

    def _reset(self) -> None:
        self._pass: int | None = None  # the backward pass under way
        self._arrivals: dict[str, None] = {}  # whose gradient is there, in order
        self._missing = [len(bucket.names) for bucket in self._buckets]
        self._launched: list[tuple[InFlight, Tensor]] = []  # of the first buckets: what their average will be in
        self._streams: dict[Any, None] = {}  # on which gradients were made

    def _note_outputs(self, model: nn.Module, args: Any, output: Any) -> None:
        """Their cotangents come first, in the pass at whose end to finish: reentrant checkpoints have others within."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for one in tensors_in(output):
                if one.requires_grad:
                    one.register_hook(self._begin)

    def _begin(self, cotangent: Tensor | None = None) -> None:
        number = backward_pass()
        if not self._sync or number == self._pass:
            return
        self._abandon()
        self._pass = number
        EndOfPass(self._end, partial(self._raised, number))

    def _arrived(self, name: str, parameter: Tensor) -> None:
        if not self._sync:
            return
        grad = parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise TypeError(
                f"DataParallelGradients: the gradient of {name} is {grad.layout}, expected a dense one; pass "
                "sparse=False to its layer"
            )
        if self._pass is None:
            self._begin()
        if name in self._arrivals:
            self._abandon()
            raise RuntimeError(
                f"DataParallelGradients: {name} has its gradient twice in one backward pass, as of two checkpoints "
                "with use_reentrant=True; pass use_reentrant=False to them"
            )
        self._arrivals[name] = None
        self._missing[self._index[name]] -= 1
        self._streams[made_on(parameter)] = None
        while len(self._launched) < len(self._buckets) and not self._missing[len(self._launched)]:
            self._launch()

    def _end(self) -> None:
        if self._arrivals:
            self._reduce()
        else:  # of torch.autograd.grad, which leaves .grad alone
            self._reset()

    def _reduce(self) -> None:
        """What is not under way yet, to the end."""
        while len(self._launched) < len(self._buckets):
            self._launch()
        launched, arrivals = self._launched, self._arrivals
        self._reset()
        for index, (one, average) in enumerate(launched):
            self._take(index, one, average)
        if not self._ordered:
            self._order(list(arrivals))

    @torch.no_grad()
    def _order(self, arrivals: list[str]) -> None:
        """After the first pass: where buckets got full in another order than that in which they leave, the parameters
        are put in the order of their gradients on rank 0, what had none last, and the buckets made anew."""
        places = {name: place for place, (name, _) in enumerate(self._named)}
        row = [places[name] for name in arrivals] + [-1] * (len(places) - len(arrivals))
        of_rank_0 = torch.tensor(row, device=self.comm.device)
        self.comm.broadcast(of_rank_0, of_rank_0, 0)
        order = {self._named[place][0]: when for when, place in enumerate(of_rank_0.tolist()) if place >= 0}
        if not order:  # it used no parameter; so another pass shows it
            return
        self._ordered = True
        last = len(places)
        full = [max(order.get(name, last) for name in bucket.names) for bucket in self._buckets]
        if full != sorted(full):
            self._cut(sorted(self._named, key=lambda one: -order.get(one[0], last)))
            self._reset()

    def _raised(self, number: int) -> None:
        """The pass has: what it launched may still be written to."""
        if number == self._pass:
            self._pass = None
            for bucket, _ in zip(self._buckets, self._launched, strict=False):
                bucket.let_go()

    def _abandon(self) -> None:
        """A pass that has raised: what it launched comes to its end on the other ranks, too."""
        launched = self._launched
        self._reset()
        for one, _ in launched:
            one.wait()

    @torch.no_grad()
    def _launch(self) -> None:
        """The next bucket, on the side stream."""
        bucket, comm = self._buckets[len(self._launched)], self.comm
        wait_for(self._streams)
        bucket.fill()
        wire = wire_of(bucket.flat, self._reduced_in[bucket.flat.dtype])
        launched = InFlight(comm, lambda stream: comm.all_reduce(wire, wire, "avg", stream=stream))
        self._launched.append((launched, wire))

    @torch.no_grad()
    def _take(self, index: int, launched: InFlight, average: Tensor) -> None:
        """The average of a bucket, when it is there."""
        bucket = self._buckets[index]
        launched.wait()
        if self._reduced_in[bucket.flat.dtype] is not None:
            as_real(bucket.flat).copy_(average)
        bucket.spread(self.gradient_as_bucket_view)
        launched.release()


def _trained(model: nn.Module, comm: Communicator) -> list[Named]:
    """The parameters that require a gradient; ValueError for those that cannot be averaged."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError("DataParallelGradients: the model has no parameter that requires a gradient")
    for name, parameter in named:
        if is_dtensor(parameter):
            raise TypeError(
                f"DataParallelGradients: {name} is a DTensor, as of torch's fully_shard, which averages its gradients "
                "itself: use one of the two"
            )
        if parameter.get_device() != comm.ordinal or parameter.is_meta or lost_its_memory(parameter):
            raise ValueError(
                f"DataParallelGradients: {name} is on {parameter.device}, the communicator on {comm.device}; call "
                f"model.to({comm.device!r}) first (to_empty and a load, if it is on meta)"
            )
        if attribute(parameter, "main_grad") is not None:
            raise ValueError(
                f"DataParallelGradients: {name} has main_grad, where grad_accumulation_fusion leaves its gradient; "
                "switch that off"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise TypeError(f"DataParallelGradients: {name or 'model'} has sparse gradients; pass sparse=False to it")
    return named


def _reduce_dtype(parameter: Tensor, reduce_dtype: Any) -> Dtype:
    """In which it is averaged; None: as it is."""
    own = REAL_OF.get(parameter.dtype, parameter.dtype)
    if own not in CARRIED and reduce_dtype is None:
        raise TypeError(f"DataParallelGradients: NCCL does not reduce {own}; pass reduce_dtype=torch.float32")
    found = check_reduce_dtype("DataParallelGradients", parameter, reduce_dtype)
    return None if found == own else found


def _check_equal(model: nn.Module, named: list[Named], comm: Communicator, options: tuple[Any, ...]) -> None:
    """That all ranks have the same parameters and, where they are to be broadcast, buffers; and the same options."""
    tensors: list[tuple[str, Tensor]] = [*named]
    if options[0]:  # broadcast
        tensors += [*model.named_parameters(), *model.named_buffers()]
    found = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    values = {
        "bucket_bytes, reduce_dtype or broadcast": options,
        "names, shapes or types of the model's parameters and buffers, or in which require gradients": found,
    }
    other = difference(comm, values)
    if other is not None:
        raise ValueError(
            f"DataParallelGradients: {other}; all ranks must pass the same (this is rank {comm.rank}, with "
            f"{len(named)} parameters that require gradients)"
        )


@torch.no_grad()
def _broadcast(tensors: list[Tensor], comm: Communicator) -> None:
    """From rank 0, as bytes, which all types are."""
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            own = tensor.detach().to(comm.device, memory_format=torch.contiguous_format)
            as_bytes = as_real(own.reshape(-1)).view(torch.uint8)
            comm.broadcast(as_bytes, as_bytes, 0)
            tensor.copy_(own)
