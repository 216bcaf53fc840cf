"""DataParallelGradients: average gradients over data-parallel ranks during the backward pass.

    data_parallel = ad.DataParallelGradients(model, mesh["dp"])
    model(x).sum().backward()        # when it returns, .grad is the average over all ranks
    optimizer.step()

Gradients are put into buckets in reverse order of the parameters. If the first pass computes them in another order, the
buckets are rebuilt in that of rank 0. The all_reduce of a bucket starts on the communicator's side stream as soon as
this bucket and all before it are full. So every rank launches them in the same order, whatever that of the gradients.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator, NcclError
from pynccl.bindings.resource import Shared
from pynccl.bindings.values import attribute, instance, shown

from ..agreement import difference
from ..arguments import check_comm, check_reduce_dtype, checked, storage_was_freed
from ..names import plain_name
from ..streams import producer_stream, wait_for
from ..torch_internals import backward_pass, tensors_in
from ..wire import NCCL_DTYPES, REAL_OF, Dtype
from .buckets import Bucket, Named, as_real, assign_buckets, wire_of
from .dtensors import is_dtensor
from .in_flight import EndOfPass, InFlight

_averaging: weakref.WeakSet[DataParallelGradients] = weakref.WeakSet()


def averages_later(parameter: Tensor) -> bool:
    """Return whether a DataParallelGradients averages the gradient at the end of this backward pass."""
    return any(one.averages(parameter) for one in _averaging)


class DataParallelGradients(Shared):
    """Data parallelism: average the gradients of a model over `comm` during the backward pass, as
    DistributedDataParallel does. Each rank has a replica of the model and different data.

        data_parallel = ad.DataParallelGradients(model, mesh["dp"])
        model(x).sum().backward()        # when it returns, .grad is the average over all ranks
        optimizer.step()

    model                    on the communicator's device, in its final dtypes. Parameters that require a gradient now
                             are averaged. They can be sharded over another communicator of the mesh
    comm                     communicator of the N replicas. Use it for nothing else if the ranks may use different
                             parameters, since their buckets are then launched at different points of the backward pass
    bucket_bytes             size at which a bucket of gradients is reduced. At most an eighth of all gradients is used
    reduce_dtype             data type in which gradients are averaged; None: their own
    gradient_as_bucket_view  True: each .grad is a view of a bucket, which saves the memory of a copy. Call
                             `zero_grad()` of this object instead of the optimizer's to avoid all copies
    broadcast                True: copy parameters and buffers from rank 0 now. Buffers are not synchronized later

    A parameter that only some ranks use is averaged with zeros from the others. One that no rank uses keeps its .grad,
    usually None. A rank whose loss uses no parameter must call `finish()` in place of backward(). Run backward passes
    that only accumulate under `no_sync()`, on all ranks. With sequence parallelism, also call `ad.finish_gradients`
    after the backward pass.

    Raises, on all ranks: ValueError if the model differs between ranks, is on another device, or has no parameter that
    requires a gradient; TypeError for dtypes that NCCL does not reduce. The backward pass raises RuntimeError for a
    parameter whose gradient is computed twice (by checkpoints with use_reentrant=True), and TypeError for a sparse
    gradient. Results are deterministic if the communicator is. If a backward pass raised on all ranks, gradients that
    were views of buckets in flight are None; the next pass does not depend on it.
    """

    @checked
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
        if not bucket_bytes > 0:
            raise ValueError(
                f"DataParallelGradients: bucket_bytes is {shown(bucket_bytes)}, expected a number of bytes above 0"
            )
        named = _trainable(model, comm)
        self._reduce_dtypes = {parameter.dtype: _reduce_dtype(parameter, reduce_dtype) for _, parameter in named}
        others = [*model.named_parameters(), *model.named_buffers()] if broadcast else []
        _check_same_options(comm, named, others, (broadcast, bucket_bytes, reduce_dtype))
        if broadcast:
            _broadcast([*model.parameters(), *model.buffers()], comm)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._named, self._options = named, (bucket_bytes, reduce_dtype)
        self._sync = True
        self._start(comm)
        self._hooks = [model.register_forward_hook(self._hook_outputs)]
        for name, parameter in named:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name)))
        _averaging.add(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: backward passes in the block accumulate this rank's gradients without communication. The
        next pass after it averages the accumulated sums. Use it on all ranks."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Take part in the average on a rank whose loss uses no parameter, in place of backward().

        The other ranks' backward passes wait for it. This rank contributes the gradients that it has accumulated, and
        zeros for the others. Does nothing within no_sync()."""
        if self._sync:
            self._abandon()
            self._reduce()

    def zero_grad(self) -> None:
        """Set the gradients to None; with gradient_as_bucket_view, to views of the buckets, filled with zeros."""
        self._abandon()
        for bucket in self._buckets:
            if self.gradient_as_bucket_view:
                bucket.flat.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if self.gradient_as_bucket_view else None

    @checked
    def use(self, comm: Communicator) -> None:
        """Average over another communicator from now on, such as that of the ranks that are left when one has died:

            mesh = mesh.survivors()
            data_parallel.use(mesh["dp"])

        Collective: every rank of `comm` must call it. The next pass is that of a new object with broadcast=False.
        Nothing is kept of a pass that raised: all gradients are set to None. Parameters are not copied; see
        `Communicator.sync_state`.

        comm  communicator of the replicas, on the device of the old one

        Raises ValueError, on all ranks, if their parameters or options differ. An error leaves everything as it was:
        call it again with the next communicator."""
        check_comm("DataParallelGradients.use", comm)
        comm.check_alive()
        if comm.ordinal != self.comm.ordinal:
            raise ValueError(
                f"DataParallelGradients.use: comm is on {comm.device}, the model on {self.comm.device}; make the "
                "communicator on that device"
            )
        _check_same_options(comm, self._named, [], (False, *self._options))
        with contextlib.suppress(NcclError):  # of the old communicator, if it has ended
            self._abandon()
        self._buckets.clear()  # freed before the new ones are made
        for _, parameter in self._named:
            parameter.grad = None
        self._start(comm)

    def averages(self, parameter: Tensor) -> bool:
        """Return whether backward passes average the gradient of this parameter now."""
        return self._sync and bool(self._hooks) and any(one is parameter for _, one in self._named)

    def remove(self) -> None:
        """Remove the hooks from the model. Parameters and gradients do not change. Can be called twice."""
        while self._hooks:
            self._hooks.pop().remove()

    def _start(self, comm: Communicator) -> None:
        self.comm = comm
        self._make_buckets(self._named)  # in the same order on all ranks, whatever they were before
        self._rebuilt = comm.size == 1
        self._reset()

    def _make_buckets(self, named: list[Named]) -> None:
        self._buckets = [Bucket(one) for one in assign_buckets(named, self._options[0])]
        self._index = {name: index for index, bucket in enumerate(self._buckets) for name in bucket.names}

    def _reset(self) -> None:
        self._pass: int | None = None  # the current backward pass
        self._ready: dict[str, None] = {}  # names of parameters whose gradient is ready, in order
        self._pending = [len(bucket.names) for bucket in self._buckets]  # number of gradients that are not ready
        self._launched: list[tuple[InFlight, Tensor]] = []  # collective and buffer of the first buckets
        self._streams: dict[Any, None] = {}  # streams on which gradients were computed

    def _hook_outputs(self, model: nn.Module, args: Any, output: Any) -> None:
        """Hook the outputs, to learn the number of the outermost pass: reentrant checkpoints run passes within it."""
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
        EndOfPass(self._on_end, partial(self._on_error, number))

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
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
        if name in self._ready:
            self._abandon()
            raise RuntimeError(
                f"DataParallelGradients: the gradient of {name} was computed twice in one backward pass, for example "
                "by two checkpoints with use_reentrant=True; pass use_reentrant=False to them"
            )
        self._ready[name] = None
        self._pending[self._index[name]] -= 1
        self._streams[producer_stream(parameter)] = None
        while len(self._launched) < len(self._buckets) and not self._pending[len(self._launched)]:
            self._launch()

    def _on_end(self) -> None:
        if self._ready:
            self._reduce()
        else:  # torch.autograd.grad, which does not accumulate into .grad
            self._reset()

    def _reduce(self) -> None:
        """Launch the remaining buckets, and finish all."""
        while len(self._launched) < len(self._buckets):
            self._launch()
        launched, ready = self._launched, self._ready
        self._reset()
        for index, (one, average) in enumerate(launched):
            self._finish_bucket(index, one, average)
        if not self._rebuilt:
            self._rebuild_buckets(list(ready))

    @torch.no_grad()
    def _rebuild_buckets(self, ready: list[str]) -> None:
        """Rebuild the buckets after the first pass, if they did not get full in order: by the order of the gradients on
        rank 0, with parameters without a gradient last."""
        places = {name: place for place, (name, _) in enumerate(self._named)}
        row = [places[name] for name in ready] + [-1] * (len(places) - len(ready))
        of_rank_0 = torch.tensor(row, device=self.comm.device)
        self.comm.broadcast(of_rank_0, of_rank_0, 0)
        order = {self._named[place][0]: when for when, place in enumerate(of_rank_0.tolist()) if place >= 0}
        if not order:  # rank 0 used no parameter: try again after the next pass
            return
        self._rebuilt = True
        last = len(places)
        full = [max(order.get(name, last) for name in bucket.names) for bucket in self._buckets]
        if full != sorted(full):
            self._make_buckets(sorted(self._named, key=lambda one: -order.get(one[0], last)))
            self._reset()

    def _on_error(self, number: int) -> None:
        """Handle a backward pass that raised: its collectives may still write to the buckets."""
        if number == self._pass:
            self._pass = None
            for bucket, _ in zip(self._buckets, self._launched, strict=False):
                bucket.detach_views()

    def _abandon(self) -> None:
        """Wait for the collectives of a pass that raised; the other ranks complete them too."""
        launched = self._launched
        self._reset()
        for one, _ in launched:
            one.wait()

    @torch.no_grad()
    def _launch(self) -> None:
        """Launch the all_reduce of the next bucket on the side stream."""
        bucket, comm = self._buckets[len(self._launched)], self.comm
        wait_for(self._streams)
        bucket.pack()
        wire = wire_of(bucket.flat, self._reduce_dtypes[bucket.flat.dtype])
        launched = InFlight(comm, lambda stream: comm.all_reduce(wire, wire, "avg", stream=stream))
        self._launched.append((launched, wire))

    @torch.no_grad()
    def _finish_bucket(self, index: int, launched: InFlight, average: Tensor) -> None:
        """Wait for the average of a bucket, and copy it into the gradients."""
        bucket = self._buckets[index]
        launched.wait()
        if self._reduce_dtypes[bucket.flat.dtype] is not None:
            as_real(bucket.flat).copy_(average)
        bucket.unpack(self.gradient_as_bucket_view)
        launched.release()


def _trainable(model: nn.Module, comm: Communicator) -> list[Named]:
    """Return the parameters that require a gradient. ValueError or TypeError if one cannot be averaged."""
    named = [(plain_name(model, name), one) for name, one in model.named_parameters() if one.requires_grad]
    if not named:
        raise ValueError("DataParallelGradients: the model has no parameter that requires a gradient")
    for name, parameter in named:
        if is_dtensor(parameter):
            raise TypeError(
                f"DataParallelGradients: {name} is a DTensor; torch's fully_shard already averages its gradients: use "
                "one of the two"
            )
        if parameter.get_device() != comm.ordinal or parameter.is_meta or storage_was_freed(parameter):
            raise ValueError(
                f"DataParallelGradients: {name} is on {parameter.device}, the communicator on {comm.device}; call "
                f"model.to({comm.device!r}) first (from meta: to_empty(), then load a checkpoint)"
            )
        if attribute(parameter, "main_grad") is not None:
            raise ValueError(
                f"DataParallelGradients: {name} has main_grad, into which grad_accumulation_fusion accumulates instead "
                "of .grad; pass grad_accumulation_fusion=False"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise TypeError(f"DataParallelGradients: {name or 'model'} has sparse gradients; pass sparse=False to it")
    return named


def _reduce_dtype(parameter: Tensor, reduce_dtype: Any) -> Dtype:
    """Return the dtype in which the gradient is averaged; None: its own."""
    dtype = REAL_OF.get(parameter.dtype, parameter.dtype)
    if dtype not in NCCL_DTYPES and reduce_dtype is None:
        raise TypeError(f"DataParallelGradients: NCCL does not reduce {dtype}; pass reduce_dtype=torch.float32")
    found = check_reduce_dtype("DataParallelGradients", parameter, reduce_dtype)
    return None if found == dtype else found


def _check_same_options(
    comm: Communicator, named: list[Named], others: Sequence[tuple[str, Tensor]], options: tuple[Any, ...]
) -> None:
    """Check that all ranks have the same parameters and options, and the same other tensors, which are broadcast."""
    found = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in (*named, *others)]
    values = {
        "bucket_bytes, reduce_dtype or broadcast": options,
        "names, shapes, dtypes or requires_grad of the model's parameters and buffers": found,
    }
    other = difference(comm, values)
    if other is not None:
        raise ValueError(
            f"DataParallelGradients: {other}; pass the same on all ranks (this is rank {comm.rank}, with "
            f"{len(named)} parameters that require gradients)"
        )


@torch.no_grad()
def _broadcast(tensors: list[Tensor], comm: Communicator) -> None:
    """Copy the tensors from rank 0, as bytes, so that any dtype works."""
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            values = tensor.detach().to(comm.device, memory_format=torch.contiguous_format)
            as_bytes = as_real(values.reshape(-1)).view(torch.uint8)
            comm.broadcast(as_bytes, as_bytes, 0)
            tensor.copy_(values)
