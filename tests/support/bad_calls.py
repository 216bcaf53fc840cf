"""Invalid calls with the errors they must raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pynccl import CollConfig, CommConfig, Communicator

F4 = "float32"
zeros = torch.zeros


class CudaArray:
    """A GPU array of another library; nothing here reads its memory."""

    def __init__(self, **changes: Any) -> None:
        plain = {"shape": (4, 3), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None}
        self.__cuda_array_interface__ = {**plain, **changes}


# An invalid call, and the expected error: "Type: part … part".
Bad = tuple[Callable[[Communicator], Any], str]


class Hostile:
    """An object that raises RuntimeError for every missing attribute."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} today")


READ_ONLY = np.zeros(4)
READ_ONLY.flags.writeable = False

REDUCE_OPS = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp(dist.ReduceOp.MAX), "max"),
]
MEANT = {"avg": "mean average AVG", "sum": "add SUM", "prod": "product mul", "max": "maximum amax", "min": "minimum"}
WORDS = [*REDUCE_OPS, *((word, op) for op, words in MEANT.items() for word in words.split())]
SWAPPED = "send and recv seem swapped"

# Called on one rank of a communicator of four.
BAD: list[Bad] = [
    (
        lambda c: c.all_reduce(zeros(4, 6).t()),
        "ValueError: all_reduce: send: … strides (1, 6) … is not contiguous … pass x.contiguous()",
    ),
    (lambda c: c.all_reduce(zeros(4), zeros(8)[::2]), "ValueError: all_reduce: recv: … is not contiguous"),
    (lambda c: c.send(zeros(4).to_sparse(), 0), "TypeError: send: buf: torch.sparse_coo tensor on cpu … x.to_dense()"),
    (
        lambda c: c.all_reduce(zeros(4), zeros(4, requires_grad=True)),
        "ValueError: all_reduce: recv: tensor of shape (4,) requires grad (a leaf) … torch.no_grad()",
    ),
    (
        lambda c: c.all_gather(zeros(3), zeros(11)),
        "ValueError: all_gather: recv has 11 elements, expected 12 for send of 3 on 4 ranks",
    ),
    (
        lambda c: c.all_reduce(zeros(3), zeros(3).double()),
        "ValueError: all_reduce: send is float32, recv is float64; convert one of them",
    ),
    (
        lambda c: c.reduce_scatter(zeros(6, 4)),
        "ValueError: reduce_scatter: dimension 0 has 6 rows, not divisible by 4 ranks; pad it or pass recv=",
    ),
    (lambda c: c.all_to_all(zeros(10)), "ValueError: all_to_all: send has 10 elements, not divisible by 4 ranks"),
    (lambda c: c.broadcast(zeros(4), root=4), "ValueError: broadcast: root is 4, expected a rank in 0..3"),
    (lambda c: c.reduce(zeros(4), root="0"), "ValueError: reduce: root is '0', expected a rank in 0..3"),
    (lambda c: c.scatter(None), "TypeError: scatter: rank 1 passed neither send nor recv; pass recv="),
    (lambda c: c.all_reduce(zeros(4), op="mean"), "ValueError: all_reduce: op is 'mean' … 'avg' … pre_mul_sum"),
    (lambda c: c.all_reduce(READ_ONLY, READ_ONLY), "ValueError: array of shape (4,) is read-only"),
    (lambda c: c.all_reduce((64, 4, F4), stream=0), "TypeError: cannot allocate the result like a tuple: pass recv="),
    (
        lambda c: c.all_reduce((4096, 8, F4), (4104, 8, F4), stream=0),
        "ValueError: all_reduce: send and recv overlap, 8 bytes apart … an in-place call requires exactly 0",
    ),
    (
        lambda c: c.all_gather((4096, 8, F4), (4096, 32, F4), stream=0),
        "ValueError: all_gather: send and recv overlap … an in-place call requires exactly 32",
    ),
    (lambda c: c.all_to_all((4096, 8, F4), (4096, 8, F4), stream=0), "ValueError: send and recv must not overlap"),
    (lambda c: c.all_reduce(zeros(4), config=5), "TypeError: all_reduce: config is 5, expected a pynccl.CollConfig"),
    (lambda c: c.split(-2), "ValueError: split: color is -2, expected an integer >= 0"),
    (lambda c: setattr(c, "timeout", "soon"), "ValueError: timeout is 'soon', expected a number of seconds"),
    (lambda c: c.all_reduce(Hostile()), "TypeError: all_reduce: send is a bad_calls.Hostile, expected a torch tensor"),
    (lambda c: c.all_reduce([1.0]), "TypeError: all_reduce: send is a list, expected a torch tensor"),
    (
        lambda c: c.all_reduce((64, 4, "floaty")),
        "TypeError: all_reduce: send: dtype is 'floaty', expected one of",
    ),
    (lambda c: c.all_reduce(zeros(4), stream="x"), "TypeError: all_reduce: send: stream is a str, expected a handle"),
    (
        lambda c: c.put_signal(zeros(4), 0, zeros(4)),
        "TypeError: put_signal: window is a torch.Tensor, expected a pynccl",
    ),
    (
        lambda c: c.all_reduce(zeros(4), config=CommConfig()),
        "TypeError: all_reduce: config is a pynccl.CommConfig, expec",
    ),
    (lambda c: CommConfig(maxCTAs=1), "TypeError: CommConfig has no field 'maxCTAs'; did you mean max_ctas?"),  # type: ignore[call-arg]
    (lambda c: CollConfig(x=1), "TypeError: CollConfig has no field 'x'; expected one of min_ctas"),  # type: ignore[call-arg]
    (lambda c: c.plan.allreduce, "AttributeError: comm.plan has no operation 'allreduce'; did you mean all_reduce?"),
    (
        lambda c: c.all_gather_v(zeros(3), counts=[3]),
        "ValueError: counts is [3], expected 1 count per rank (4 in all), got 1",
    ),
    *[(lambda c, word=word: c.all_reduce(zeros(4), op=word), f'ValueError: pass op="{op}"') for word, op in WORDS],
    *[(lambda c, word=word: c.all_reduce(zeros(4), word), f'TypeError: pass op="{op}"') for word, op in REDUCE_OPS],
    (lambda c: c.reduce(zeros(4), op=dist.ReduceOp.BAND), "ValueError: reduce: op … NCCL has no bitwise operators"),
    (
        lambda c: c.reduce_scatter(zeros(4), dist.ReduceOp.BXOR),
        "TypeError: reduce_scatter: recv … no bitwise operators",
    ),
    (
        lambda c: c.all_reduce(zeros(4), op=dist._make_nccl_premul_sum(2.0)),
        "ValueError: comm.pre_mul_sum(scalar, dtype)",
    ),
    (lambda c: c.plan.reduce_scatter_v(zeros(4), op="mean", counts=[1] * 4), 'ValueError: pass op="avg"'),
    *[
        (call, f"ValueError: {SWAPPED}")
        for call in (
            lambda c: c.all_gather(zeros(16), zeros(4)),
            lambda c: c.plan.all_gather(zeros(16), zeros(4)),
            lambda c: c.reduce_scatter(zeros(4), zeros(16)),
            lambda c: c.reduce_scatter(zeros(3), zeros(12)),
            lambda c: c.gather(zeros(16), zeros(4), root=1),
            lambda c: c.scatter(zeros(3), zeros(12), root=1),
            lambda c: c.all_to_all_v(zeros(10), zeros(4), send_counts=[1] * 4, recv_counts=[1, 2, 3, 4]),
            lambda c: c.all_gather_v(zeros(10), zeros(2), counts=[1, 2, 3, 4]),
            lambda c: c.reduce_scatter_v(zeros(2), zeros(10), counts=[1, 2, 3, 4]),
            lambda c: c.gather_v(zeros(10), zeros(2), root=1, counts=[1, 2, 3, 4]),
            lambda c: c.scatter_v(zeros(2), zeros(10), root=1, counts=[1, 2, 3, 4]),
        )
    ],
    *[
        (call, f"ValueError: not {SWAPPED}")
        for call in (
            lambda c: c.all_gather(zeros(16), zeros(5)),
            lambda c: c.reduce_scatter(zeros(3), zeros(13)),
            lambda c: c.reduce_scatter(zeros(3)),
            lambda c: c.all_to_all(zeros(3), zeros(12)),
            lambda c: c.all_reduce(zeros(4), zeros(16)),
            lambda c: c.all_gather_v(zeros(10), zeros(3), counts=[1, 2, 3, 4]),
        )
    ],
    *[
        (call, "TypeError: pass one tensor with the blocks of all ranks … docs/coming_from.md")
        for call in (
            lambda c: c.all_gather([zeros(4)] * 4, zeros(4)),
            lambda c: c.reduce_scatter(zeros(4), [zeros(4)] * 4),
            lambda c: c.all_to_all([zeros(4)] * 4, [zeros(4)] * 4),
            lambda c: c.gather(zeros(4), [zeros(4)] * 4, root=1),
            lambda c: c.scatter(zeros(4), [zeros(4)] * 4, root=1),
            lambda c: c.all_gather_v([zeros(4)] * 4, counts=[4] * 4),
        )
    ],
    *[
        (call, "TypeError: pass one tensor (torch.cat), or each in a `with pynccl.group():`; see docs/coming_from.md")
        for call in (
            lambda c: c.all_gather(zeros(16).chunk(4), zeros(4)),
            lambda c: c.all_reduce((zeros(4), zeros(4))),
        )
    ],
    (lambda c: c.all_gather_into_tensor, "AttributeError: use comm.all_gather(send, recv); see docs/coming_from.md"),  # type: ignore[attr-defined]
    (
        lambda c: c.isend,  # type: ignore[attr-defined]
        "AttributeError: use comm.send and comm.recv in a `with pynccl.group():`; see docs/coming_from.md",
    ),
    (lambda c: c.get_rank, "AttributeError: 'Communicator' object has no attribute 'get_rank'; use comm.rank; see"),  # type: ignore[attr-defined]
    (lambda c: c.no_such_name, "AttributeError: 'Communicator' object has no attribute 'no_such_name'"),  # type: ignore[attr-defined]
    (lambda c: c.plan.all_to_all_single, "AttributeError: did you mean all_to_all?"),
    (lambda c: c.pre_mul_sum(0.5), "TypeError: pre_mul_sum: a Python number needs dtype="),
    (lambda c: c.pre_mul_sum(0.5, "int32"), "ValueError: pre_mul_sum: scalar 0.5 would become 0 as int32"),
    (lambda c: c.pre_mul_sum(2.0, "foo"), "TypeError: pre_mul_sum: dtype is 'foo', expected one of bfloat16"),
]


def check_raises(comm: Communicator, bad: Bad) -> None:
    call, expected = bad
    with pytest.raises(Exception) as caught:
        call(comm)
    error, _, words = expected.partition(": ")
    assert error in [kind.__name__ for kind in caught.type.__mro__], expected
    for part in words.split(" … "):
        unwanted = part.removeprefix("not ")
        assert (unwanted in str(caught.value)) is (unwanted == part), f"{expected}: {caught.value}"
