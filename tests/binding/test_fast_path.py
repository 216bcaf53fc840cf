"""A call that was made before goes a shorter way, to the same C call or the same error, and keeps nothing alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from libraries import FAIL, Called, Stub

import pynccl
from pynccl import Communicator, NcclInvalidUsage, NcclUnhandledCudaError
from pynccl.comm import fast_path
from pynccl.host import HostStream
from pynccl.interop.streams import Handle

N, RANK = 4, 1  # of the stub's communicator
OPERATIONS: dict[str, Callable[[Communicator, Any, Any], Any]] = {
    "all_reduce": lambda comm, x, _: comm.all_reduce(x, x),
    "all_reduce max": lambda comm, x, _: comm.all_reduce(x, x, "max"),
    "all_reduce out of place": lambda comm, x, y: comm.all_reduce(x, y, pynccl.RedOp.SUM),
    "broadcast": lambda comm, x, _: comm.broadcast(x, x, 3),
    "broadcast out of place": lambda comm, x, y: comm.broadcast(x, y, RANK),
    "reduce": lambda comm, x, y: comm.reduce(x, y, "avg", RANK),
    "reduce in place": lambda comm, x, _: comm.reduce(x, x, root=RANK),
    "reduce elsewhere": lambda comm, x, y: comm.reduce(x, y, root=0),
    "all_gather": lambda comm, x, y: comm.all_gather(x[: len(x) // N], y),
    "reduce_scatter": lambda comm, x, y: comm.reduce_scatter(x, y[: len(y) // N], "min"),
    "all_to_all": lambda comm, x, y: comm.all_to_all(x, y),
    "gather": lambda comm, x, y: comm.gather(x[: len(x) // N], y, RANK),
    "gather elsewhere": lambda comm, x, y: comm.gather(x, y, 2),
    "scatter": lambda comm, x, y: comm.scatter(x, y[: len(y) // N], RANK),
    "scatter from elsewhere": lambda comm, x, y: comm.scatter(x, y, 2),
    "send": lambda comm, x, _: comm.send(x, 0),
    "recv": lambda comm, x, _: comm.recv(x, 3),
}
ALLOCATING: dict[str, tuple[Callable[[Communicator, Any], Any], tuple[int, ...]]] = {
    "all_reduce": (lambda comm, x: comm.all_reduce(x), (8, 3)),
    "broadcast": (lambda comm, x: comm.broadcast(x, root=2), (8, 3)),
    "reduce": (lambda comm, x: comm.reduce(x, root=RANK), (8, 3)),
    "all_gather": (lambda comm, x: comm.all_gather(x), (32, 3)),
    "reduce_scatter": (lambda comm, x: comm.reduce_scatter(x), (2, 3)),
    "all_to_all": (lambda comm, x: comm.all_to_all(x), (8, 3)),
    "gather": (lambda comm, x: comm.gather(x, root=RANK), (32, 3)),
    "scatter": (lambda comm, x: comm.scatter(x, root=RANK), (2, 3)),
}


def only_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, a call that is not kept is an error."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("the general way")

    for name in ("_check_buffer", "_check_buffers", "_enqueue"):
        monkeypatch.setattr(Communicator, name, refuse)


def plain(call: Called) -> tuple[str, dict[str, int]]:
    """Without the addresses, which differ from tensor to tensor."""
    return call.name, {key: value for key, value in call.args.items() if key not in ("send", "recv", "buf")}


def test_this_torch_has_the_guard_that_it_stands_on() -> None:
    assert fast_path.guard([torch.zeros(2)]) is not None, "torch._C._dynamo.guards.TensorGuards is gone or has changed"


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_third_call_goes_the_short_way_to_the_same_c_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    comm, call = stub.comm(N, RANK, cpu=True), OPERATIONS[name]
    x, y = torch.zeros(8), torch.zeros(8)
    results = [call(comm, x, y) for _ in range(2)]
    only_the_short_way(monkeypatch)
    results += [call(comm, x, y) for _ in range(2)]
    calls = stub.calls()
    assert len(calls) == 4
    assert all(call == calls[0] for call in calls)
    pointers = [None if result is None else result.data_ptr() for result in results]
    assert pointers == pointers[:1] * 4


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_tensors_of_the_kind_go_the_short_way_with_their_own_addresses(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, fresh = Stub(), Stub()
    comm, call = stub.comm(N, RANK, cpu=True), OPERATIONS[name]
    for _ in range(2):
        call(comm, torch.zeros(8), torch.zeros(8))
    tensors = [(torch.zeros(8), torch.zeros(8)) for _ in range(3)]
    tensors.append((torch.zeros(24)[16:], torch.zeros(24)[8:16]))  # of a larger storage
    expected = []
    for x, y in tensors:
        fresh.clear()
        call(fresh.comm(N, RANK, cpu=True), x, y)
        expected += fresh.calls()
    stub.clear()
    if name != "scatter from elsewhere":  # C takes no first address there: rare, and left to the general way
        only_the_short_way(monkeypatch)
    versions = [(x._version, y._version) for x, y in tensors]
    for x, y in tensors:
        call(comm, x, y)
    assert [(c.name, _without_comm(c)) for c in stub.calls()] == [(c.name, _without_comm(c)) for c in expected]
    written = [(x._version - a, y._version - b) for (x, y), (a, b) in zip(tensors, versions, strict=True)]
    assert written == [written[0]] * 4
    assert sum(written[0]) == (0 if name in ("reduce elsewhere", "gather elsewhere", "send") else 1)


def _without_comm(call: Called) -> dict[str, int]:
    return {key: value for key, value in call.args.items() if key != "comm"}


@pytest.mark.parametrize("name", ALLOCATING)
def test_what_is_allocated_the_short_way_is_as_ever(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    comm = stub.comm(N, RANK, cpu=True)
    call, shape = ALLOCATING[name]
    x = torch.zeros(8, 3, dtype=torch.bfloat16)
    first = [call(comm, x) for _ in range(2)]
    only_the_short_way(monkeypatch)
    for recv in [*first, call(comm, x), call(comm, torch.ones_like(x))]:
        assert (recv.shape, recv.dtype, recv._version) == (shape, torch.bfloat16, 1)
        assert recv.data_ptr() != x.data_ptr()
    assert len({plain(called)[0] for called in stub.calls()}) == 1
    assert [plain(called) for called in stub.calls()] == [plain(stub.calls()[0])] * 4


def variants(x: torch.Tensor) -> dict[str, Any]:
    """What has as many elements as x, and must not be taken for it, or may be."""
    flat, n = x.reshape(-1), x.numel()
    halves = torch.zeros(2 * n)
    lazy = torch.zeros(n, dtype=torch.complex64)
    return {
        "same": torch.zeros_like(x),
        "reshaped": flat.clone().reshape(2, n // 2),
        "transposed": torch.zeros(2, n // 2).t(),
        "strided": halves[::2],
        "expanded": torch.zeros(1).expand(n),
        "double": flat.double(),
        "complex": flat.to(torch.complex64),
        "bool": flat.bool(),
        "negative": torch._neg_view(flat),
        "imaginary": lazy.conj().imag,
        "requires grad": flat.clone().requires_grad_(),
        "result that requires grad": flat.clone().requires_grad_() * 2,
        "parameter": torch.nn.Parameter(flat.clone()),
        "frozen parameter": torch.nn.Parameter(flat.clone(), requires_grad=False),
        "subclass": flat.clone().as_subclass(Other),
        "sparse": flat.to_sparse(),
        "meta": flat.to("meta"),
        "zero": torch._efficientzerotensor(n),
        "freed": _freed(n),
        "quantized": torch.quantize_per_tensor(flat, 1.0, 0, torch.qint8),
        "numpy": np.zeros(n, "f4"),
        "numpy, swapped": np.zeros(n, ">f4"),
        "raw": (flat.data_ptr(), n, "float32"),
        "text": "x" * n,
        "none": None,
    }


class Other(torch.Tensor):
    """A subclass like any."""


def _freed(n: int) -> torch.Tensor:
    x = torch.zeros(n)
    x.untyped_storage().resize_(0)
    return x


def outcome(stub: Stub, call: Callable[[], Any]) -> Any:
    """The error's words, or what reached C."""
    stub.clear()
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return [plain(called) for called in stub.calls()]


MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", OPERATIONS)
def test_whatever_is_not_like_it_goes_the_general_way(name: str) -> None:
    stub = Stub()
    call, forgetful = OPERATIONS[name], stub.comm(N, RANK, cpu=True)
    compared = 0
    for primed_in in MODES.values():
        comm = stub.comm(N, RANK, cpu=True)
        with primed_in():
            for _ in range(3):
                call(comm, torch.zeros(8), torch.zeros(8))
        for mode in MODES.values():
            for kind, x in variants(torch.zeros(8)).items():
                for pair in ((x, torch.zeros(8)), (torch.zeros(8), x), (x, x)):
                    for path in forgetful._fast.values():
                        path._seen.clear()
                    with mode():
                        expected = outcome(stub, partial(call, forgetful, *pair))
                        found = outcome(stub, partial(call, comm, *pair))
                    assert found == expected, kind
                    compared += 1
    assert compared == 16 * 3 * 25


def test_ranks_and_operators_are_looked_at_in_every_call() -> None:
    comm = Stub().comm(N, RANK, cpu=True)
    x = torch.zeros(8)
    for _ in range(3):
        comm.broadcast(x, x, 1)
        comm.all_reduce(x, x, "sum")
        comm.send(x, 1)
    for root in (1.0, "1", None, 4):
        with pytest.raises(ValueError, match="broadcast: root is"):
            comm.broadcast(x, x, root)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="send: peer is"):
            comm.send(x, root)  # type: ignore[arg-type]
    for op in (True, 0.0, np.array(["sum", "sum"]), "summ", None, ["sum"]):
        with pytest.raises(ValueError, match="all_reduce: unknown operator"):
            comm.all_reduce(x, x, op)
    assert comm.all_reduce(x, x, "".join(["s", "u", "m"])) is x


def test_a_stream_that_is_given_is_the_one_that_is_used_and_keeps_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, Any]] = []
    monkeypatch.setattr(fast_path, "hold", lambda stream, library, keep: held.append((int(stream), keep)))
    stub = Stub()
    comm = stub.comm(N, RANK, cpu=True)
    x, y = torch.zeros(8), torch.zeros(8)
    for _ in range(2):
        comm.all_reduce(x, y)
    only_the_short_way(monkeypatch)
    stub.clear()
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 77))
    for given in (None, 5, stream, None, 5):
        comm.all_reduce(x, y, stream=given)
    assert [call.args["stream"] for call in stub.calls()] == [0, 5, 77, 0, 5]
    assert held == [(5, (x, y)), (77, (x, y)), (5, (x, y))]
    monkeypatch.undo()
    for wrong in ("side", -1, 2**64, 1.5):
        with pytest.raises((TypeError, ValueError), match=r"all_reduce: send: .*stream"):
            comm.all_reduce(x, y, stream=wrong)


def test_an_operator_of_its_own_is_never_kept() -> None:
    stub = Stub()
    comm = stub.comm(N, RANK, cpu=True)
    x = torch.zeros(8)
    with comm.pre_mul_sum(2.0, "float32") as op:
        for _ in range(4):
            comm.all_reduce(x, x, op)
    with pytest.raises(ValueError, match="op is a pre_mul_sum that was destroyed"):
        comm.all_reduce(x, x, op)


def test_buffers_that_come_to_overlap_are_refused() -> None:
    comm = Stub().comm(N, RANK, cpu=True)
    memory = torch.zeros(64)
    for start in (8, 32):
        comm.all_reduce(memory[:8], memory[start : start + 8])
        comm.all_gather(memory[:8], memory[32:64])
        comm.all_gather(memory[40:48], memory[32:64])
    for start in (1, 7):
        with pytest.raises(ValueError, match="all_reduce: send and recv overlap"):
            comm.all_reduce(memory[:8], memory[start : start + 8])
    with pytest.raises(ValueError, match="all_gather: send and recv overlap"):
        comm.all_gather(memory[32:40], memory[32:64])
    assert comm.all_gather(memory[40:48], memory[32:64]) is not None  # in place, as this rank does it


def test_an_error_of_the_library_is_told_in_the_same_words() -> None:
    stub = Stub()
    comm = stub.comm(N, RANK, cpu=True)
    x, y = torch.zeros(8), torch.zeros(8)
    said = []
    for times in (0, 3):
        for _ in range(times):
            comm.all_reduce(x, y, "max")
            comm.recv(x, 0)
        for name, call in {
            "ncclAllReduce": lambda: comm.all_reduce(x, y, "max"),
            "ncclRecv": lambda: comm.recv(x, 0),
        }.items():
            stub.fail(name, 1)
            with pytest.raises(NcclUnhandledCudaError) as caught:
                call()
            stub.rule(FAIL, name, 0)
            said.append(str(caught.value))
    assert said[:2] == said[2:]
    assert "all_reduce(count=8, FLOAT32, MAX)" in said[0]


def test_an_ended_communicator_says_so() -> None:
    comm = Stub().comm(N, RANK, cpu=True)
    x = torch.zeros(8)
    for _ in range(3):
        comm.all_reduce(x, x)
    comm.destroy()
    with pytest.raises(NcclInvalidUsage, match="was destroyed"):
        comm.all_reduce(x, x)


def test_a_call_in_a_group_is_recorded_however_often_it_was_made() -> None:
    stub = Stub()
    comm = stub.comm(N, RANK, cpu=True)
    x = torch.zeros(8)
    for _ in range(3):
        comm.all_reduce(x, x)
        comm.send(x, 0)
    stub.clear()
    with pynccl.group():
        comm.all_reduce(x, x)
        comm.send(x, 0)
        assert stub.names() == []
    assert stub.names() == ["ncclGroupStart", "ncclAllReduce", "ncclSend", "ncclGroupEnd"]


def test_nothing_is_kept_alive_and_nothing_grows_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "MOST_SIZES", 16)
    stub = Stub()
    comm = stub.comm(N, RANK, cpu=True)
    path = comm._fast["all_reduce"]
    gone = []
    for size in range(1, 100):
        x, y = torch.zeros(size), torch.zeros(size)
        gone += [weakref.ref(x), weakref.ref(y)]
        for _ in range(3):
            comm.all_reduce(x, x)
            comm.all_reduce(x, y)
        stub.clear()
    del x, y
    for shape in [(64 // 2**i, 2**i) for i in range(7)] * 3 + [(4, 4, 4), (2, 2, 16), (8, 2, 4)] * 3:
        comm.all_reduce(torch.zeros(shape))
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    assert max(len(path._single), len(path._paired), len(path._sent), len(path._seen)) <= 16
    assert fast_path._length(path._paired[64]) == fast_path.MOST_ALIKE
    communicator = weakref.ref(comm)
    del comm, path
    assert communicator() is None  # at once: what it keeps does not refer to it


def test_a_kept_call_does_not_keep_what_its_stream_handle_keeps() -> None:
    class Owner:
        """The stream, or who keeps the buffers of a collective under way: on a GPU a layer's, or a bucket's."""

        def hold(self, keep: Any) -> None:
            self.kept = keep

    gone: list[Any] = []
    comm, stream = Stub().comm(N, RANK, cpu=True), HostStream()
    for _ in range(3):
        x = torch.zeros(8)
        handle = Handle(stream.handle)
        handle.owner = owner = Owner()
        comm.all_reduce(x, x, stream=handle)
        comm.all_reduce(x, torch.zeros(8), stream=handle)
        gone += [weakref.ref(owner), weakref.ref(x)]
    del x, handle, owner
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_without_the_guard_everything_goes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    stub = Stub()
    comm = stub.comm(N, RANK, cpu=True)
    x = torch.zeros(8)
    for _ in range(4):
        assert comm.all_reduce(x, x) is x
        assert comm.all_reduce(x).shape == x.shape
    assert stub.names() == ["ncclAllReduce"] * 8
