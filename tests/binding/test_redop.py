"""A pre-multiplied sum keeps its factor from the call to the launch, and works only with its own communicator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool

import pynccl
from pynccl import Communicator

CREATE, DESTROY = "ncclRedOpCreatePreMulSum", "ncclRedOpDestroy"
X, Y = torch.ones(4), torch.ones(2)


def test_group_keeps_operator_until_launched_or_dropped() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    op = comm.pre_mul_sum(2.0, "float32")
    number = op.code
    with pynccl.group():
        comm.reduce(Y, op=op)
        op.destroy()
        op.destroy()
        with pytest.raises(ValueError, match="op is a pre_mul_sum that was destroyed; make a new one"):
            comm.reduce(Y, op=op)
        comm.all_reduce(Y, op=comm.pre_mul_sum(2.0, "float32"))  # no other reference exists
        gc.collect()
        assert DESTROY not in stub.names()
    launched = ["ncclGroupStart", "ncclReduce", "ncclAllReduce", "ncclGroupEnd"]
    assert stub.names() == [CREATE, CREATE, *launched, DESTROY, DESTROY]
    assert stub.calls()[3].args["op"] == number
    stub.clear()
    op = comm.pre_mul_sum(2.0, "float32")
    with pytest.raises(KeyError), pynccl.group():
        comm.reduce(Y, op=op)
        op.destroy()
        raise KeyError
    gc.collect()
    comm.pre_mul_sum(3.0, "float32").destroy()
    assert stub.names().count(DESTROY) == 2 and "ncclReduce" not in stub.names()


USES: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda comm, op: comm.all_reduce(X, op=op),
    "all_reduce in place": lambda comm, op: comm.all_reduce(X, X, op),
    "reduce": lambda comm, op: comm.reduce(X, op=op),
    "reduce_scatter": lambda comm, op: comm.reduce_scatter(X, op=op),
    "reduce_scatter_v": lambda comm, op: comm.reduce_scatter_v(X, op=op, counts=[2, 2]),
    "plan": lambda comm, op: comm.plan.all_reduce(X, op=op),
}


def test_operator_of_other_communicator_or_dtype_raises() -> None:
    stub = Stub()
    ours, theirs = stub.comm(2, 0, cpu=True), stub.comm(2, 1, cpu=True)
    foreign, wide = theirs.pre_mul_sum(2.0, "float32"), ours.pre_mul_sum(2.0, "float64")
    stub.clear()
    for use, call in USES.items():
        with pytest.raises(ValueError) as caught:
            call(ours, foreign)
        assert str(caught.value).startswith(use.split()[0].replace("plan", "all_reduce") + ": op was made by ")
        assert repr(theirs) in str(caught.value) and repr(ours) in str(caught.value)
        with pytest.raises(ValueError, match="op was made for float64, the buffers are float32; make one"):
            call(ours, wide)
    for op in (True, None, "SUM"):
        with pytest.raises(ValueError, match="all_reduce: op is"):
            ours.all_reduce(X, op=op)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pre_mul_sum: scalar is float32, but dtype is float64"):
        ours.pre_mul_sum(torch.tensor(2.0), "float64")
    assert stub.names() == []


def launch_after_destroy(comm: Communicator) -> list[float]:
    """Launch calls after their operators were destroyed and NCCL may have reused the operators' numbers."""
    xs = [torch.ones(2) for _ in range(3)]
    twice, thrice = comm.pre_mul_sum(2.0, "float32"), comm.pre_mul_sum(3.0, "float32")
    plan = comm.plan.all_reduce(xs[0], xs[0], twice)
    with pynccl.group():
        comm.all_reduce(xs[1], xs[1], thrice)
        thrice.destroy()
    twice.destroy()
    with comm.pre_mul_sum(torch.tensor([7.0])) as other:  # gets the first free number
        comm.all_reduce(xs[2], xs[2], other)
        plan()
    return [x[0].item() for x in xs]


def test_each_call_uses_its_own_factor(ranks: RankPool) -> None:
    assert ranks.run(2, launch_after_destroy) == [[4.0, 6.0, 14.0]] * 2


RAW: dict[str, Callable[[Communicator, Any, str], Any]] = {
    "all_reduce": lambda comm, op, dtype: comm.all_reduce((4096, 4, dtype), (8192, 4, dtype), op, stream=0),
    "reduce": lambda comm, op, dtype: comm.reduce((4096, 4, dtype), (8192, 4, dtype), op=op, stream=0),
    "reduce_scatter": lambda comm, op, dtype: comm.reduce_scatter((4096, 4, dtype), (8192, 4, dtype), op, stream=0),
    "plan": lambda comm, op, dtype: comm.plan.all_reduce((4096, 4, dtype), (8192, 4, dtype), op, stream=0)(),
}


@pytest.mark.parametrize("op", ["avg", pynccl.RedOp.AVG, int(pynccl.RedOp.AVG)])
def test_avg_of_one_rank_is_a_sum_which_nccl_has_for_every_dtype(op: Any) -> None:
    stub = Stub()
    for name, call in RAW.items():
        stub.clear()
        call(stub.comm(nranks=1, rank=0), op, "float8_e4m3")
        assert stub.calls()[0].args["op"] == pynccl.RedOp.SUM, name
    stub.clear()
    stub.comm(nranks=2).all_reduce((4096, 4, "float8_e4m3"), (8192, 4, "float8_e4m3"), op, stream=0)
    assert stub.calls()[0].args["op"] == pynccl.RedOp.AVG


def test_pre_mul_sum_of_float8_on_one_rank_is_refused_where_nccl_lacks_it() -> None:
    stub = Stub()
    one = stub.comm(nranks=1, rank=0)
    for dtype in ("float8_e4m3", "float8_e5m2"):
        for name, call in RAW.items():
            stub.clear()
            with (
                one.pre_mul_sum(2.0, dtype) as op,
                pytest.raises(ValueError, match="which NCCL does not have; multiply"),
            ):
                call(one, op, dtype)
            assert stub.names() == [CREATE, DESTROY], name
    for comm, dtype in ((one, "float32"), (stub.comm(), "float8_e4m3")):
        stub.clear()
        with comm.pre_mul_sum(2.0, dtype) as op:
            RAW["all_reduce"](comm, op, dtype)
        assert stub.names() == [CREATE, "ncclAllReduce", DESTROY]


def scale_alone(comm: Communicator) -> None:
    x = torch.tensor([1.5, -3.0]).to(torch.float8_e4m3fn)
    with comm.pre_mul_sum(2.0, torch.float8_e4m3fn) as op:
        assert comm.all_reduce(x, op=op).float().tolist() == [3.0, -6.0]
    assert comm.all_reduce(x, op="avg").float().tolist() == [1.5, -3.0]


def test_the_host_library_scales_float8_on_one_rank(ranks: RankPool) -> None:
    ranks.run(1, scale_alone)
