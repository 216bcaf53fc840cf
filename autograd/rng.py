"""Random numbers of tensor-parallel models: equal on all ranks where activations are, different where they are cut.

    ad.rng.seed(1234, comm)          # once; with data parallelism, 1234 + this rank's place along that axis
    y = F.dropout(x, 0.1)            # x is equal on all ranks: so is y
    with ad.rng.cut(comm):
        y = F.dropout(x, 0.1)        # x is this rank's part: its numbers are its own

torch's default generators stay equal on all ranks. A cut block takes one number from that of the CPU, and seeds with it
and the rank the generators that are used within. So nothing has to be kept but the default generators: what saves and
restores them, as torch.utils.checkpoint does, has the cut blocks draw the same numbers again. And they stay equal where
ranks draw more or fewer numbers in the block than others.

One rank a process: torch has one default generator. A block is refused by torch while a CUDA graph is captured.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from .agreement import difference, gathered
from .arguments import as_int, check_comm

_seeded: weakref.WeakSet[Communicator] = weakref.WeakSet()
_blocks = threading.local()
_LARGEST = 2**63 - 1
_STEP = 0x9E3779B9  # odd: its multiples by less than 2**32 differ in the 32 bits that torch's CPU generator looks at


def seed(seed: int, comm: Communicator) -> None:
    """Seed torch's default generators equally on all ranks of `comm`, the ranks that activations are cut over.

    Replicas of the model, which see other data, should pass another seed. Every rank must call it. For several
    communicators, call it for each, with the same seed. ValueError, on all ranks, if they passed different seeds.
    """
    check_comm("rng.seed", comm, seed=seed)
    number = as_int(seed)
    if number is None or not 0 <= number <= _LARGEST:
        raise ValueError(f"rng.seed: seed is {shown(seed)}, expected an integer from 0 to 2**63 - 1")
    comm.check_alive()
    seeds = [row[0] for row in gathered(comm, [number])]
    if len(set(seeds)) > 1:
        raise ValueError(f"rng.seed: the ranks passed the seeds {shown(seeds)}, expected the same one from all of them")
    torch.manual_seed(number)
    _seeded.add(comm)


@contextlib.contextmanager
def cut(comm: Communicator) -> Iterator[None]:
    """Within the block this rank draws its own numbers, on the CPU and on the communicator's GPU.

    Every rank must enter it. Blocks may be nested, over other communicators. RuntimeError before `seed(.., comm)`.
    """
    check_comm("rng.cut", comm)
    if comm not in _seeded:
        raise RuntimeError(
            "rng.cut: the generators are not known to be equal on all ranks; call ad.rng.seed(seed, comm)"
        )
    number = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    block, stack = _Block(comm, _generators(comm)), _stack()
    try:
        for generator in block.generators:
            generator.manual_seed((number + comm.rank * _STEP) % 2**63)
        _blocks.stack = [*stack, block]
        yield
    finally:
        _blocks.stack = stack
        block.leave()


@contextlib.contextmanager
def equal(comm: Communicator) -> Iterator[None]:
    """Within a cut block of `comm`: what is drawn here is equal on all its ranks, as outside of that block.

    So a layer whose input is equal on all ranks draws, wherever it is called. Elsewhere it does nothing."""
    check_comm("rng.equal", comm)
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


def agree(name: str, comm: Communicator) -> None:
    """See to it that the generators are known to be equal on all ranks: without seed(.., comm) their states are
    compared, once. RuntimeError, on all ranks, where they differ. Every rank must call it."""
    if comm in _seeded:
        return
    if difference(comm, {"states": [bytes(one.get_state().tolist()) for one in _generators(comm)]}) is not None:
        raise RuntimeError(
            f"{name}: torch's generators have other states on other ranks, and what all ranks draw has to be equal; "
            "call ad.rng.seed(seed, comm)"
        )
    _seeded.add(comm)


def _generators(comm: Communicator) -> list[torch.Generator]:
    """torch's default ones, of the CPU and of the communicator's GPU."""
    return [torch.default_generator, *([] if comm.library.is_host else [torch.cuda.default_generators[comm.ordinal]])]


class _Block:
    """What generators are to go on with after a block."""

    def __init__(self, comm: Communicator, generators: list[torch.Generator]) -> None:
        self.comm, self.generators = comm, generators
        self.states = [generator.get_state() for generator in generators]

    def leave(self) -> None:
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)


def get_state() -> dict[str, Tensor]:
    """The state of the generators, for a checkpoint: equal on all ranks of the communicators that were seeded.

    {"cpu": uint8 [..], "cuda": uint8 [..] of the current GPU, where there is one}, of tensors on the CPU. So one rank's
    serves all of them, also another number of ranks. RuntimeError before `seed`, and within a cut block.
    """
    _check_outside("get_state")
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_state(state: Mapping[str, Tensor]) -> None:
    """Go on from a state of `get_state`. Call `seed` first, which tells over which ranks. Errors: see there."""
    instance(state, Mapping, "rng.set_state: state", "what ad.rng.get_state() returned")
    for device, like in get_state().items():
        found = state.get(device)
        if found is None and device == "cuda":  # it was saved where there was no GPU
            continue
        if not isinstance(found, Tensor) or found.dtype != torch.uint8 or found.shape != like.shape:
            raise ValueError(
                f"rng.set_state: state[{device!r}] is {shown(found)}, expected a tensor of uint8 {list(like.shape)}"
            )
        (torch.cuda if device == "cuda" else torch).set_rng_state(found.cpu())


def _stack() -> list[_Block]:
    """The blocks around, the innermost last."""
    stack: list[_Block] = getattr(_blocks, "stack", [])
    return stack


def _check_outside(name: str) -> None:
    if not len(_seeded):
        raise RuntimeError(f"rng.{name}: no generator was seeded; call ad.rng.seed(seed, comm)")
    if _stack():
        raise RuntimeError(f"rng.{name}: within `with ad.rng.cut(comm)` the state is this rank's own; call it outside")
