"""All ranks of a parallel model need the same inputs: the first forward pass in which they differ raises on each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
from ranks import RankPool
from small_transformers import MAKE
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.agreement import DeferredCheck


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def parallel(comm: Communicator) -> Any:
    torch.manual_seed(0)
    return ad.parallelize(Net(), comm, {"up": "column", "down": "row"}, sequence_parallel=False)


X = torch.arange(10_004.0).view(1, 2_501, 4)


def changed(x: Tensor, index: int) -> Tensor:
    x = x.clone()
    x.view(-1)[index] += 1
    return x


DIFFERENT: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [  # arguments of rank 0, of rank 1
    ("values", lambda: (X,), lambda: (changed(X, -1),)),
    ("values", lambda: (X[:, :9],), lambda: (changed(X[:, :9], 20),)),
    ("values", lambda: (X[:, :9],), lambda: (X[:, :9].flip(1),)),
    ("values", lambda: (X, X + 1), lambda: (X, X + 2)),
    ("values", lambda: (X, {"ids": [torch.tensor([3, 4])]}), lambda: (X, {"ids": [torch.tensor([4, 3])]})),
    ("values", lambda: (X, torch.tensor([True, False])), lambda: (X, torch.tensor([False, True]))),
    ("values", lambda: (X, torch.tensor(1j)), lambda: (X, torch.tensor(-1j))),
    ("shapes or dtypes", lambda: (X,), lambda: (X[:, 1:],)),
    ("shapes or dtypes", lambda: (X,), lambda: (X, X)),
    ("shapes or dtypes", lambda: (X, torch.ones(2)), lambda: (X, torch.ones(2, dtype=torch.float64))),
    ("shapes or dtypes", lambda: (X, torch.ones(2)), lambda: (X, torch.ones(2).to_sparse())),
]
EQUAL: list[Callable[[int], Any]] = [  # arguments of a rank
    lambda rank: (X,),
    lambda rank: (X, {"mask": X.clone().view(2_501, 4).t() if rank else X.view(2_501, 4).t().contiguous()}),
    lambda rank: (X, torch.ones(1, 3).expand(2, 3) if rank else torch.ones(2, 3), torch.ones(0), torch.tensor(2.0)),
    lambda rank: (X, X.bfloat16(), X.to(torch.complex128), X.to(torch.complex64).conj(), X.to(torch.float8_e5m2)),
    lambda rank: (X, torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
]


def compare_later_inputs(comm: Communicator) -> None:
    model = parallel(comm)
    model(X)  # the first inputs are compared whole
    for what, *of_rank in DIFFERENT:
        with pytest.raises(
            ValueError, match=rf"Net: the batch on rank 1 has other {what} than on rank 0; all 2 .*seed"
        ):
            model(*of_rank[comm.rank]())
        for inputs in EQUAL:
            model(*inputs(comm.rank))
    assert float(comm.all_reduce(torch.ones(1))) == comm.size


def test_inputs_of_each_forward_pass_are_compared(ranks: RankPool) -> None:
    ranks.run(2, compare_later_inputs)


def sample(comm: Communicator) -> tuple[int, list[int]]:
    torch.manual_seed(0)
    model: Any = ad.parallelize(MAKE["llama"]().eval(), comm, ad.plans.llama)
    passes: list[Any] = []
    model.register_forward_pre_hook(lambda *inputs: passes.append(inputs))  # after the check
    options = {"inputs": torch.ones(1, 3, dtype=torch.int64), "do_sample": True, "max_new_tokens": 6}
    torch.manual_seed(comm.rank)
    with pytest.raises(ValueError, match=r"on rank 1 has other values .* call ad\.rng\.seed\(seed, comm\)"):
        model.generate(**options)
    before = len(passes)
    ad.rng.seed(1, comm)
    return before, model.generate(**options)[0].tolist()


def test_ranks_that_sample_different_tokens_raise_at_the_first_one(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    (passes, tokens), other = ranks.run(2, sample)
    assert passes == 1 and other == (passes, tokens) and len(tokens) == 9


def run_without_values(comm: Communicator) -> None:
    """Different inputs on each rank: nothing is compared."""
    model, on_meta, x = parallel(comm), parallel(comm).to("meta"), torch.full((1, 2, 4), float(comm.rank))
    issued = mock.Mock(wraps=comm.all_gather)
    with mock.patch.object(Communicator, "all_gather", issued):
        assert on_meta(x.to("meta")).shape == x.shape
        torch.compile(model, backend="eager")(x)
        torch.func.grad(lambda x: model(x).sum())(x)
        torch.func.vmap(model)(x)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(1, 2 + comm.rank, 4))
        issued.assert_not_called()


def test_nothing_is_compared_while_tensors_have_no_values(ranks: RankPool) -> None:
    ranks.run(2, run_without_values)


def test_copies_of_a_model_compare_their_inputs(ranks: RankPool) -> None:
    ranks.run(2, compare_in_copies)


def compare_in_copies(comm: Communicator) -> None:
    model = parallel(comm)
    model(X)
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="other values"):
        twin(X + comm.rank)


class OnGpu:
    """Stands for a tensor on a GPU, its device, stream and event: it is on the CPU once the event is waited for."""

    is_cuda = True

    def __init__(self, number: int) -> None:
        self.number, self.is_complete = number, False
        self.device = self

    def to(self, device: str, non_blocking: bool) -> OnGpu:
        assert device == "cpu" and non_blocking
        return self

    def record_event(self) -> OnGpu:
        return self

    def synchronize(self) -> None:
        self.is_complete = True

    def tolist(self) -> int:
        assert self.is_complete
        return self.number


def test_numbers_of_a_gpu_are_checked_in_the_next_call() -> None:
    checked: list[Any] = []
    compare, numbers = DeferredCheck(), [OnGpu(number) for number in range(3)]
    with mock.patch("torch.cuda.current_stream", side_effect=lambda device: device):
        for one in numbers:
            compare(cast(Tensor, one), checked.append)
    assert checked == [0, 1] and not numbers[-1].is_complete
    compare(torch.tensor([7]), checked.append)
    assert checked == [0, 1, [7]]
