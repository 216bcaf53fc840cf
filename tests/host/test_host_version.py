"""The host library posing as each supported release: what works there, what is gated, and with which words."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool

import pynccl
from pynccl.bindings import abi
from pynccl.bindings.errors import NcclInvalidArgument, NcclVersionError
from pynccl.bindings.structs import CommConfig
from pynccl.host.version import posed_version

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from dump_nccl_abi import VERSIONS


@pytest.fixture(params=VERSIONS)
def posed(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """run(function) -> what function(version) returns in a process whose host library poses as that version."""
    pool = RankPool({"PYNCCL_LIBRARY": "host", "PYNCCL_HOST_VERSION": request.param}, communicators=False)
    yield lambda function: pool.run(1, function, request.param)[0]
    pool.close()


def number(version: str) -> abi.Version:
    return tuple(map(int, version.split(".")))


def everything(_: object, version: str) -> None:
    """One process per version is what costs, so all looks are taken in one."""
    warnings.simplefilter("error")
    library = pynccl.load()
    assert library.version == number(version)
    symbols(library, number(version))
    for config_check in (stamped, too_new):
        config_check(library, number(version))
    comms = pynccl.Communicator.init_all(2)
    collectives(comms)
    later_calls(comms, number(version))
    for comm in comms:
        comm.destroy()


def symbols(library: Any, version: abi.Version) -> None:
    missing = {name for name, row in abi.FUNCTIONS.items() if row.since > version}
    assert {name for name in abi.FUNCTIONS if not library.supports(name)} == missing
    for name in missing:
        needed = ".".join(map(str, abi.FUNCTIONS[name].since))
        with pytest.raises(NcclVersionError) as refused:
            getattr(library, name)
        dotted = ".".join(map(str, version))
        assert str(refused.value) == f"{name} needs NCCL >= {needed}; loaded {dotted} from host"


def stamped(library: Any, version: abi.Version) -> None:
    """A config is stamped for this version and accepted; a field that came later is named."""
    identity = pynccl.get_unique_id()
    fields = {"traffic_class": (2, 26), "comm_name": (2, 27), "max_p2p_peers": (2, 30), "nvls_host_mode": (2, 32)}
    with pynccl.Communicator.init(1, identity, 0, config=CommConfig(blocking=True, min_ctas=1)) as comm:
        assert comm.size == 1
    for name, since in fields.items():
        config = CommConfig(**{name: "x" if name == "comm_name" else 1})
        if version >= since:
            pynccl.Communicator.init(1, pynccl.get_unique_id(), 0, config=config).destroy()
        else:
            text = f"{name} needs NCCL >= {since[0]}.{since[1]}; loaded {'.'.join(map(str, version))} from host"
            with pytest.raises(NcclVersionError, match=text):
                pynccl.Communicator.init(1, identity, 0, config=config)


def too_new(library: Any, version: abi.Version) -> None:
    """The struct of a newer header, or a newer number in it, is refused as an old libnccl refuses it."""

    def join(struct: abi.Config) -> None:
        handle, identity = ctypes.c_void_p(), pynccl.get_unique_id()
        code = library.ncclCommInitRankConfig(ctypes.byref(handle), 1, identity, 0, ctypes.byref(struct))
        library.check(code, "ncclCommInitRankConfig")

    struct = CommConfig().to_struct(library)
    struct.size += 8
    with pytest.raises(NcclInvalidArgument, match=f"size {struct.size}; NCCL {'.'.join(map(str, version))} expects"):
        join(struct)
    struct = CommConfig().to_struct(library)
    struct.version = abi.version_code(version) + 100
    with pytest.raises(NcclInvalidArgument, match=f"config has version {struct.version}; .* or less"):
        join(struct)


def collectives(comms: list[Any]) -> None:
    """Those that came with 2.28 and are made of sends and receives before, and one that has always been there."""
    x = [torch.arange(4, dtype=torch.int32) + 10 * comm.rank for comm in comms]
    a, b = (one.tolist() for one in x)
    for name, arguments, expected in (
        ("all_reduce", (), [[10, 12, 14, 16]] * 2),
        ("all_to_all", (), [[0, 1, 10, 11], [2, 3, 12, 13]]),
        ("gather", (None, 1), [None, a + b]),
        ("scatter", (None, 0), [a[:2], a[2:]]),
    ):
        with pynccl.group():
            outs = [getattr(comm, name)(data, *arguments) for comm, data in zip(comms, x, strict=True)]
        assert [None if out is None else out.tolist() for out in outs] == expected, name


def later_calls(comms: list[Any], version: abi.Version) -> None:
    """What a user sees of functions that came later: the result, or one sentence."""
    calls: list[tuple[str, abi.Version, Callable[[], Any]]] = [
        ("ncclMemAlloc", (2, 19), lambda: pynccl.mem_alloc(8).free()),
        ("ncclParamGetAllParameterKeys", (2, 30), pynccl.params),
        ("ncclCommMemStats", (2, 29), comms[0].mem_stats),
    ]
    for name, since, call in calls:
        if version >= since:
            call()
        else:
            text = f"{name} needs NCCL >= {since[0]}.{since[1]}; loaded {'.'.join(map(str, version))} from host"
            with pytest.raises(NcclVersionError, match=text):
                call()


def test_every_release(posed: Callable[..., Any]) -> None:
    posed(everything)


def test_versions_that_can_be_posed_as_and_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_HOST_VERSION", "2.21")  # without a patch level
    assert posed_version() == (2, 21, 0)
    for text in ("2.17.1", "2.33.0", "3", "2.21.5rc1", "latest"):
        monkeypatch.setenv("PYNCCL_HOST_VERSION", text)
        with pytest.raises(NcclVersionError) as refused:
            posed_version()
        expected = f"PYNCCL_HOST_VERSION='{text}': expected the number of an NCCL release from 2.18 to 2.32.3"
        assert expected in str(refused.value)
