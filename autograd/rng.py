"""Random numbers in tensor-parallel models: equal on all ranks for replicated activations, different for sharded ones.

    ad.rng.seed(1234, comm)          # once; with data parallelism, 1234 + the data-parallel rank
    y = F.dropout(x, 0.1)            # x is replicated, and so is y
    with ad.rng.sharded(comm):
        y = F.dropout(x, 0.1)        # x is this rank's shard: each rank draws different numbers

torch's default generators stay equal on all ranks. A `sharded` block draws one number from the CPU generator and seeds
the generators with this number and the rank within the block. The default generators are therefore the only state: if
you save and restore them, as torch.utils.checkpoint does, these blocks draw the same numbers again. They also stay
equal if ranks draw different amounts of numbers in the block.

Use one process per rank, because torch has one set of default generators per process. torch does not allow a `sharded`
block while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.listing import public_dir
from pynccl.bindings.values import instance, shown

from .agreement import check_not_in_group, difference, gathered
from .arguments import as_int, check_comm

__all__ = ["check_equal_states", "get_state", "replicated", "seed", "set_state", "sharded"]
__dir__ = public_dir(globals())

_seeded: weakref.WeakSet[Communicator] = weakref.WeakSet()
_blocks = threading.local()
_MAX_SEED = 2**63 - 1
_SEED_STRIDE = 0x9E3779B9  # odd: rank * stride differs in the low 32 bits, all that torch's CPU generator uses


def seed(seed: int, comm: Communicator) -> None:
    """Seed torch's default generators equally on all ranks of `comm`, the ranks that activations are sharded over.

    Every rank must call it. Use a different seed for each data-parallel replica. If there are several communicators,
    call it for each with the same seed. ValueError on all ranks if they passed different seeds.
    """
    check_comm("rng.seed", comm, seed=seed)
    number = as_int(seed)
    if number is None or not 0 <= number <= _MAX_SEED:
        raise ValueError(f"rng.seed: seed is {shown(seed)}, expected an integer from 0 to 2**63 - 1")
    comm.check_alive()
    check_not_in_group("rng.seed")
    seeds = [row[0] for row in gathered(comm, [number])]
    if len(set(seeds)) > 1:
        raise ValueError(f"rng.seed: the ranks passed the seeds {shown(seeds)}, expected the same seed on all ranks")
    torch.manual_seed(number)
    _seeded.add(comm)


@contextlib.contextmanager
def sharded(comm: Communicator) -> Iterator[None]:
    """Within the block, each rank draws different random numbers, on the CPU and on the communicator's GPU.

    Every rank must enter it. Blocks of different communicators may be nested. RuntimeError before `seed(.., comm)`.
    """
    check_comm("rng.sharded", comm)
    if comm not in _seeded:
        raise RuntimeError("rng.sharded: the generators may differ between ranks; call ad.rng.seed(seed, comm) first")
    number = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    block, stack = _Block(comm, _generators(comm)), _stack()
    try:
        for generator in block.generators:
            generator.manual_seed((number + comm.rank * _SEED_STRIDE) % 2**63)
        _blocks.stack = [*stack, block]
        yield
    finally:
        _blocks.stack = stack
        block.leave()


@contextlib.contextmanager
def replicated(comm: Communicator) -> Iterator[None]:
    """Within the block, all ranks of `comm` draw equal numbers again. Use it in a `sharded` block of `comm`.

    A layer whose input is replicated can use it wherever it is called. Outside of a `sharded` block it does nothing."""
    check_comm("rng.replicated", comm)
    blocks = [block for block in _stack() if block.comm is comm]
    if not blocks:
        yield
        return
    block, within = blocks[0], _Block(comm, blocks[0].generators)
    block.leave()
    stack, _blocks.stack = _stack(), []
    try:
        yield
    finally:
        _blocks.stack = stack
        block.states = [generator.get_state() for generator in block.generators]
        within.leave()


def check_equal_states(name: str, comm: Communicator) -> None:
    """Check that the generators are equal on all ranks. After seed(.., comm) they are; else compare their states, once.

    Every rank must call it. RuntimeError on all ranks if the states differ."""
    if comm in _seeded:
        return
    check_not_in_group(name)
    if (
        difference(comm, {"states": [bytes(generator.get_state().tolist()) for generator in _generators(comm)]})
        is not None
    ):
        raise RuntimeError(
            f"{name}: the states of torch's generators differ between ranks, but all ranks must draw equal numbers; "
            "call ad.rng.seed(seed, comm)"
        )
    _seeded.add(comm)


def _generators(comm: Communicator) -> list[torch.Generator]:
    """Return torch's default generators of the CPU and of the communicator's GPU."""
    return [torch.default_generator, *([] if comm.library.is_host else [torch.cuda.default_generators[comm.ordinal]])]


class _Block:
    """The states that generators return to after a block."""

    def __init__(self, comm: Communicator, generators: list[torch.Generator]) -> None:
        self.comm, self.generators = comm, generators
        self.states = [generator.get_state() for generator in generators]

    def leave(self) -> None:
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)


def get_state() -> dict[str, Tensor]:
    """Return the state of the generators, for a checkpoint.

    {"cpu": uint8 [..], "cuda": uint8 [..]}, tensors on the CPU; "cuda" is that of the current GPU, if there is one. The
    state is equal on all ranks of the seeded communicators, so saving it on one rank is enough, and you can restore it
    on a different number of ranks. RuntimeError before `seed`, and within a `sharded` block.
    """
    _check_outside("get_state")
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_state(state: Mapping[str, Tensor]) -> None:
    """Restore a state that `get_state` returned. Call `seed` first, to set the communicators.

    RuntimeError before `seed`, and within a `sharded` block. TypeError or ValueError for a wrong state."""
    instance(state, Mapping, "rng.set_state: state", "what ad.rng.get_state() returned")
    _check_outside("set_state")
    for device, like in get_state().items():
        found = state.get(device)
        if found is None and device == "cuda":  # saved without a GPU
            continue
        if not isinstance(found, Tensor) or found.dtype != torch.uint8 or found.shape != like.shape:
            raise ValueError(
                f"rng.set_state: state[{device!r}] is {shown(found)}, expected a tensor of uint8 {list(like.shape)}"
            )
        (torch.cuda if device == "cuda" else torch).set_rng_state(found.cpu())


def _stack() -> list[_Block]:
    """Return the enclosing blocks, innermost last."""
    stack: list[_Block] = getattr(_blocks, "stack", [])
    return stack


def _check_outside(name: str) -> None:
    if not len(_seeded):
        raise RuntimeError(f"rng.{name}: no generator was seeded; call ad.rng.seed(seed, comm)")
    if _stack():
        raise RuntimeError(
            f"rng.{name}: the state differs between ranks within `with ad.rng.sharded(comm)`; call it outside"
        )
